"""The sampler of a rank: on a GPU Triton's, if it draws what torch draws on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from ....kernels.gpu.trials import passes, triton_problem
from ..plan import RankSampling, SamplerSpec
from .sampler import HostDraws, Sampler

if TYPE_CHECKING:
    from .gpu_sampler import GpuSampler

# Together they launch every kernel, and take nearly every branch that rows can take.
_TRIED = (
    RankSampling(),
    RankSampling(temperature=0.0),
    RankSampling(temperature=0.7, top_p=0.9),
    RankSampling(top_k=20, logprobs=3),
    RankSampling(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1),
    RankSampling(top_p=0.5, presence_penalty=0.5, frequency_penalty=0.2),
    RankSampling(temperature=0.0, logit_bias={2: 90.0, 3: 80.0}, bad_words=((2,), (3, 3))),
    RankSampling(allowed_token_ids=(1, 5, 6), bad_words=((5,),), logprob_token_ids=(4,)),
)
# By how much a cumulative probability may be off: several times what fp32 sums are.
_ROUNDING = 1e-6


def sampler_for(vocab_size: int, last_tokens: torch.Tensor) -> Sampler | GpuSampler:
    """A sampler of logits on the device of the slots' last tokens."""
    device = last_tokens.device
    if device.type == "cpu" or not works(vocab_size, device):
        return Sampler(vocab_size, last_tokens)
    from .gpu_sampler import GpuSampler

    return GpuSampler(vocab_size, last_tokens)


@cache
def works(vocab_size: int, device: torch.device) -> bool:
    """True if Triton's draws compile and are right on this device; logs the reason if not."""
    return passes(
        lambda: triton_problem(device) or first_difference(vocab_size, device),
        "torch draws tokens, and steps wait for the GPU, because of Triton",
    )


def first_difference(vocab_size: int, device: torch.device) -> str:
    """The difference from the draws on a CPU; empty if there is none but by rounding."""
    from .gpu_sampler import GpuSampler

    specs = []
    slots_R = torch.arange(len(_TRIED), dtype=torch.int32, device=device)
    sampler = GpuSampler(vocab_size, torch.zeros_like(slots_R))
    for number, params in enumerate(_TRIED):
        spec = SamplerSpec(number, params, number)
        if number > 2:
            spec = SamplerSpec(number, params, number, [1, 7], [3], [0], 2)
        specs.append(spec)
        sampler.add(number, spec)
    random = torch.Generator().manual_seed(0)
    mask = bytes([0b10101010]) * -(-vocab_size // 8)
    # All rows, all again after what they drew, and those that need the fewest kernels.
    for step, (count, masks) in enumerate(((len(specs), {0: mask}), (len(specs), {}), (2, {}))):
        # Few tokens are likely, so that rounding seldom decides.
        logits = torch.randn(count, vocab_size, generator=random) * 6
        draws = sampler.draw(slots_R[:count], range(count), logits.clone().to(device), masks)
        if device.type == "meta":  # nothing is computed there
            continue
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        drawn = draws.collect()
        if drawn.failed:
            return f"step {step}: finite logits were reported as not finite"
        expected = _draws(specs[:count], logits, masks)
        for row in range(count):
            [token], [right] = drawn.sampled[row], expected.sampled[row]
            if token != right:
                only, mask_of_row = specs[row], {row: masks[row]} if row in masks else {}
                low, high = (
                    _draws([only], logits[row : row + 1], mask_of_row, nudge).sampled[row][0]
                    for nudge in (-_ROUNDING, _ROUNDING)
                )
                if not low <= token <= high:
                    rounded = f", nor from {low} to {high}" if low < high else ""
                    return f"step {step}: {only.params} drew {token}, not {right}{rounded}"
            elif _ranks(drawn, row) != _ranks(expected, row):
                return f"step {step}: {specs[row].params} has other logprobs"
            specs[row] = replace(specs[row], outputs=[*specs[row].outputs, token])
    return ""


def _draws(
    specs: list[SamplerSpec], logits: torch.Tensor, masks: Mapping[int, bytes], nudge: float = 0.0
) -> HostDraws:
    """Draws on a CPU."""
    slots_R = torch.arange(len(specs), dtype=torch.int32)
    sampler = Sampler(logits.shape[1], torch.zeros_like(slots_R), nudge=nudge)
    for slot, spec in enumerate(specs):
        sampler.add(slot, spec)
    return sampler.draw(slots_R, range(len(specs)), logits.clone(), masks)


def _ranks(draws: HostDraws, sequence_id: int) -> list[int]:
    return [one.rank for one in draws.logprobs.get(sequence_id, ())]

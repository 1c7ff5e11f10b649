"""The sampler of a rank: on a GPU Triton's, if it draws what torch draws on a CPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from ....kernels.gpu.trials import passes, triton_problem
from ..plan import RankSampling, SamplerSpec
from .sampler import Sampler

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


def sampler_for(vocab_size: int, last_tokens: torch.Tensor) -> Sampler | GpuSampler:
    """A sampler of logits on the device of the slots' last tokens."""
    device = last_tokens.device
    if device.type == "cpu" or not works(vocab_size, device):
        return Sampler(vocab_size, device)
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
    """The difference from the draws on a CPU; empty if there is none."""
    from .gpu_sampler import SequenceSampler

    expected, actual = Sampler(vocab_size), SequenceSampler(vocab_size, device)
    for number, params in enumerate(_TRIED):
        spec = SamplerSpec(number, params, number)
        if number > 2:
            spec = SamplerSpec(number, params, number, [1, 7], [3], [0], 2)
        expected.add(spec)
        actual.add(spec)
    random = torch.Generator().manual_seed(0)
    mask = bytes([0b10101010]) * -(-vocab_size // 8)
    # All rows, all again after what they drew, and those that need the fewest kernels.
    for rows, masks in ((range(len(_TRIED)), {0: mask}), (range(len(_TRIED)), {}), (range(2), {})):
        # Few tokens are likely, so that no draw is at the edge of one, where rounding decides.
        logits = torch.randn(len(rows), vocab_size, generator=random) * 6
        drawn = actual.sample(rows, logits.clone().to(device), masks)
        if device.type == "meta":  # nothing is computed there
            continue
        others = expected.sample(rows, logits, masks)
        for row, one, other in zip(rows, drawn[0], others[0], strict=True):
            if one.tokens != other.tokens:
                return f"{_TRIED[row]} drew {one.tokens[0]}, not {other.tokens[0]}"
            if [each.rank for each in one.logprobs] != [each.rank for each in other.logprobs]:
                return f"{_TRIED[row]} has other logprobs"
    return ""

"""Plans of the cache with estimates of steps: for all models they stay within the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tandem.kernels.attention_metadata import AttentionParams
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.config import EngineConfig
from tandem.shared.errors import StartupError
from tandem.shared.kv import step_estimate
from tandem.shared.kv.planning import (
    CUDA,
    NodeDevice,
    RankDevice,
    RankMemory,
    bytes_per_block,
    check_gpu_memory,
    library_bytes,
    resolve_engine,
)
from tandem.shared.kv.step_estimate import estimated_step_bytes
from tandem.shared.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    MLASpec,
    MoESpec,
    RouterSpec,
)
from tandem.shared.weights.source import read_spec

GIB = 1 << 30
LATENT = MLASpec(
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
    softmax_scale=1.0,
    norm_eps=1e-6,
    rope_interleaved=True,
)


def spec_of(
    vocab: int,
    hidden: int,
    layers: int,
    attention: tuple[int, int, int] | MLASpec,
    width: int,
    experts: tuple[int, int] = (0, 0),
) -> DecoderSpec:
    """``attention``: heads, KV heads and dimension; ``experts``: how many, and those of a token."""
    base = read_spec(builtin_model_path())
    dense = DenseSpec(intermediate=width)
    mlp: DenseSpec | MoESpec = dense
    if experts[0]:
        mlp = MoESpec(router=RouterSpec(experts=experts[0], top_k=experts[1]), expert=dense)
    if isinstance(attention, tuple):
        heads, kv_heads, dim = attention
        attends: AttentionSpec | MLASpec = AttentionSpec(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=dim
        )
    else:
        attends = attention
    layer = replace(base.layers[0], attention=attends, mlp=mlp)
    return replace(
        base,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=(layer,) * layers,
        max_position=131072,
    )


# GiB of weights in bfloat16, and the model.
SHAPES = {
    "0.6B": (1.2, spec_of(151936, 1024, 28, (16, 8, 128), 3072)),
    "1B": (2.5, spec_of(128256, 2048, 16, (32, 8, 64), 8192)),
    "8B": (16.4, spec_of(151936, 4096, 36, (32, 8, 128), 12288)),
    "27B": (54.0, spec_of(262144, 5376, 62, (32, 16, 128), 21504)),
    "32B": (65.0, spec_of(151936, 5120, 64, (64, 8, 128), 25600)),
    "one KV head": (5.0, spec_of(256000, 2048, 18, (8, 1, 256), 16384)),
    "30B-A3B": (61.0, spec_of(151936, 2048, 48, (32, 4, 128), 768, (128, 8))),
    "latents": (31.0, spec_of(102400, 2048, 27, LATENT, 1408, (64, 6))),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("options", [{}, {"gpu_memory_utilization": 0.95}, {"kv_fraction": 1.0}])
def test_weights_a_step_and_the_cache_fit_the_gpu(name: str, options: dict[str, float]) -> None:
    weights, spec = SHAPES[name]
    block = bytes_per_block(spec, 16, "bfloat16")
    for total in (24, 80):
        device = NodeDevice((RankDevice(CUDA, "a GPU", total * GIB, total * GIB - GIB // 2),))
        for sequences in (1, 64, 256, 1024):
            for tokens in (512, 8192, 32768):
                config = EngineConfig(
                    max_num_seqs=sequences,
                    max_num_batched_tokens=tokens,
                    **options,  # type: ignore[arg-type]
                )
                step = estimated_step_bytes(spec, tokens=tokens, sequences=sequences, itemsize=2)
                used = int(weights * GIB) + library_bytes(1)
                memory = [RankMemory(max(0, total * GIB - used), used, block, step)]
                try:
                    check_gpu_memory(config, device, memory)
                except StartupError:
                    assert used + step + block > total * GIB * device.gpu_share(config)
                    continue
                planned = resolve_engine(
                    config,
                    context=spec.max_position,
                    bytes_per_block=block,
                    free_bytes=device.cache_bytes(memory, device.gpu_share(config)),
                    device=device,
                )
                allowed = device.gpu_share(config) * total * GIB
                assert used + step + planned.num_blocks * block <= allowed
                assert planned.num_blocks >= 1


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_takes_more_with_more_tokens_or_sequences_and_less_on_more_ranks(name: str) -> None:
    spec = SHAPES[name][1]

    def step(tokens: int, sequences: int, ranks: int = 1) -> int:
        return estimated_step_bytes(
            spec, tokens=tokens, sequences=sequences, itemsize=2, ranks=ranks
        )

    usual = step(8192, 256)
    assert GIB // 2 < usual < 8 * GIB
    assert step(512, 256) < usual < step(32768, 256)
    assert step(8192, 1) < usual < step(8192, 1024)
    assert step(8192, 256, ranks=2) <= usual
    logits = 4 * 256 * spec.vocab_size
    assert usual > 2 * logits + 8192 * 2 * spec.hidden_size


def test_partial_results_over_latents_are_bounded_by_the_gpu() -> None:
    """And not by the sequences."""
    layer = SHAPES["latents"][1].layers[0]
    few, many, most = (step_estimate._partials(layer, sequences, 1) for sequences in (1, 256, 1024))
    assert few < many == most < 128 << 20


@pytest.mark.parametrize("heads", [16, 40, 128])
def test_the_estimate_has_room_for_partial_results_on_gpus_of_any_size(heads: int) -> None:
    """An RTX PRO 6000 has 188 processors, a B200 has 148."""
    pytest.importorskip("triton")
    from tandem.kernels.gpu import latent_decode, paged_decode, split_rule

    kinds = torch.bfloat16, torch.bfloat16
    shape = heads, LATENT.nope_dim, LATENT.rope_dim, LATENT.kv_lora_rank, 16
    grouped = AttentionSpec(num_heads=heads, num_kv_heads=8, head_dim=128)
    base = SHAPES["latents"][1].layers[0]
    over_latents = replace(base, attention=replace(LATENT, num_heads=heads))
    for processors in (132, 148, 160, 170, 188):
        latents = latent_decode.constants(*kinds, *shape, processors).list_splits
        bounds = latents["MAX_SPLITS"], latents["STEP_SPLITS"]
        partials = split_rule.num_partials(256, *bounds) * heads * LATENT.kv_lora_rank
        assert 4 * partials <= step_estimate._partials(over_latents, 256, 1)
        paged = paged_decode.constants(*kinds, heads, 8, 128, AttentionParams(1.0), 16, processors)
        partials = 256 * paged.attend["MAX_SPLITS"] * heads * 128
        assert 4 * partials <= step_estimate._partials(replace(base, attention=grouped), 256, 1)

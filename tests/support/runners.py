"""A rank's runner in the test's own process, without a head: it computes with what a rank would."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.kernels.operators import Operators
from tandem.shared.config.kv_dtypes import AUTO, SCALED_AS_A_WHOLE, kv_dtype_of
from tandem.shared.engine.device import operators_for, prepare
from tandem.shared.engine.plan import SlotLimits, StepColumns
from tandem.shared.engine.rank.runner import ModelRunner, runner_of
from tandem.shared.engine.rank.step_inputs import DrawingSlots, StaticInputs
from tandem.shared.kv.cache import KVCache
from tandem.shared.kv.layout import UNSCALED
from tandem.shared.models.decoder import Decoder
from tandem.shared.models.parallel import TensorParallel
from tandem.shared.weights.kv_scales import read_kv_scales
from tandem.shared.weights.load import load_model


def build_runner(
    model_path: str | Path,
    *,
    num_blocks: int,
    block_size: int = 16,
    dtype: str = "auto",
    kv_dtype: str = AUTO,
    device: torch.device | str = "cpu",
    tp: TensorParallel | None = None,
    load_format: str = "auto",
    seed: int = 0,
    isq: str | None = None,
    operators: Operators | None = None,
) -> ModelRunner:
    """A rank's part of a model with a cache, whose format is spelled as its flag is."""
    tp = tp or TensorParallel()
    device = torch.device(device)
    prepare(device)
    model = load_model(
        model_path,
        dtype=dtype,
        device=device,
        tp=tp,
        load_format=load_format,
        seed=seed,
        isq=isq,
        operators=operators or operators_for(device),
    )
    weights = str(model.place.dtype).removeprefix("torch.")
    cached = kv_dtype_of(kv_dtype, weights, model.spec.kv_dtype)
    scaled = cached in SCALED_AS_A_WHOLE and load_format != "dummy"
    cache = KVCache(
        model.spec,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=getattr(torch, cached),
        device=model.place.device,
        tp_rank=tp.rank,
        tp_size=tp.size,
        operators=model.place.operators,
        whole_scales=read_kv_scales(model_path, model.spec) if scaled else UNSCALED,
    )
    return runner_of(model, cache, tp, SlotLimits(512, 2 * num_blocks))


def embeddings(model: Decoder) -> torch.Tensor:
    """The model's own table of embeddings, dense."""
    return model.embed.weight_slots()["embed.weight"].target


def paddings_of(runner: ModelRunner) -> list[int]:
    """The rows of padding in each replay of a graph, from now on."""
    fill, paddings = runner.inputs.fill, list[int]()

    def noted(rows: StepColumns, static: StaticInputs, size: int) -> DrawingSlots:
        paddings.append(size - len(rows))
        return fill(rows, static, size)

    runner.inputs.fill = noted  # type: ignore[method-assign]
    return paddings


def written_slots(runner: ModelRunner) -> list[list[bool]]:
    """Of each component of the cache, the slots that are no longer empty."""
    components = [each for layer in runner.cache.layers for each in layer]
    return [each.view(torch.uint8).any(-1).any(0).tolist() for each in components]

"""The order of a step's accesses to memory on a GPU: an emulated one, whose work is only over for
those who have waited for it. Launches are three steps ahead of the collector."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from tandem.shared.engine.plan import (
    PooledRow,
    RankSampling,
    SequenceStep,
    StepColumns,
    StepPlan,
    StepResult,
)
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.step_plans import NUM_BLOCKS, Streams
from tandem.tests.support.step_rows import rows_of
from tandem.tests.support.stream_order import StreamOrder, spans_of

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from tandem.tests.support.emulated_gpu import emulated_runner, use_kernels

BLOCK, AHEAD = 4, 3
PARAMS = RankSampling(temperature=0.0, logprobs=2), RankSampling(frequency_penalty=0.5)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    use_kernels(monkeypatch.setattr)
    tiny_models.build("llama", tmp_path, num_hidden_layers=1)
    return emulated_runner(tmp_path, block_size=BLOCK, num_blocks=NUM_BLOCKS + 1)


@pytest.fixture
def order(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamOrder]:
    """Watches the host's accesses to tensors, and kernels, which may write to all that they get."""
    order = StreamOrder()
    runner.cache.mark = order.mark
    run, to = InterpretedFunction.run, torch.Tensor.to

    def watches() -> bool:
        """False in Triton's interpreter."""
        return _get_current_dispatch_mode() is order

    def watched_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        for each in tensors:
            order.keep(each.untyped_storage())
        spans = [span for each in tensors for span in spans_of(each)]
        order.launch(kernel.__name__, reads=spans, writes=spans)
        with _disable_current_modes():
            return run(kernel, *args, **kwargs)

    def copied(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Between host and device, which here are the same."""
        copies = watches() and isinstance(args[0], (str, torch.device))
        return x.clone() if copies else to(x, *args, **kwargs)

    def by_host(access: Callable[..., Any]) -> Callable[..., Any]:
        def watched(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if watches():
                order.keep(x.untyped_storage())
                order.host(access.__name__, reads=spans_of(x), writes=spans_of(x))
            return access(x, *args, **kwargs)

        return watched

    monkeypatch.setattr(InterpretedFunction, "run", watched_kernel)
    monkeypatch.setattr(torch.Tensor, "to", copied)
    for name in ("numpy", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, by_host(getattr(torch.Tensor, name)))
    yield order


def plans() -> list[StepPlan]:
    """With logprobs of draws and of prompts, and a sequence that is pooled."""
    planned = list(Streams(192, block_size=BLOCK, max_rows=1, params=PARAMS, chunk=5).plans(5))
    rows = [
        row._replace(prompt_logprobs=1, prompt_targets=tuple(row.tokens[1:]))
        if len(row.tokens) > 1
        else row
        for row in rows_of(planned[1])
    ]
    pooled = SequenceStep(99, [5, 6], 0, [NUM_BLOCKS], False, pool=PooledRow("sum"))
    planned[1] = replace(planned[1], columns=StepColumns.of([*rows, pooled]))
    return planned


def run(runner: ModelRunner, order: StreamOrder, *, waits: bool = True) -> list[StepResult]:
    steps, results = deque[Any](), list[StepResult]()

    def collect() -> None:
        step = steps.popleft()
        if not waits:
            step = replace(step, computed=None)
        with order.running("collector"):
            results.append(runner.collect(step))

    with order:
        for plan in plans():
            with order.running("launcher", "compute"):
                steps.append(runner.launch(plan))
            if len(steps) == AHEAD:
                collect()
        while steps:
            collect()
    return results


def test_every_access_of_a_step_is_ordered(runner: ModelRunner, order: StreamOrder) -> None:
    results = run(runner, order)
    assert order.races == []
    assert [len(each.sampled) for each in results] == [1, 2, 2, 1, 1]
    assert results[1].prompt_logprobs and results[1].hidden and results[1].logprobs


def test_results_that_are_read_before_they_are_there_are_found(
    runner: ModelRunner, order: StreamOrder
) -> None:
    run(runner, order, waits=False)
    for access in ("tolist", "numpy"):
        race = f"collector: {access} reads what compute: aten::clone writes"
        assert race in order.races


def test_a_pinned_buffer_that_is_used_again_at_once_is_found(
    runner: ModelRunner, order: StreamOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the step's inputs, and for changes of the sampler's table."""
    empty, buffers = torch.empty, dict[torch.dtype, torch.Tensor]()

    def one_buffer(*shape: Any, **options: Any) -> torch.Tensor:
        if options.pop("pin_memory", None) is None:
            return empty(*shape, **options)
        dtype = options["dtype"]
        if dtype not in buffers:
            buffers[dtype] = empty(1 << 16, dtype=dtype)
        return buffers[dtype][: shape[0]]

    monkeypatch.setattr(torch, "empty", one_buffer)
    run(runner, order)
    for upload in ("clone", "copy_"):
        assert f"launcher: numpy writes what compute: aten::{upload} reads" in order.races

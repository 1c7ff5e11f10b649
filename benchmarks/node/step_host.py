"""The host's work for a decode step on a GPU, with kernels that launch nothing.

    python -m tandem.benchmarks.node.step_host

A rank decodes the head's message, stages the step's inputs, replays a graph that is empty, launches
the head and the sampler, collects the draws, and encodes its reply; or it does the same without the
forward pass's kernels. Tensors are on torch's ``meta`` device, whose operators cost about as much
as a launch. The baseline is the message and the tables that a step needs if ranks keep no block
tables.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tandem.benchmarks.node.gpu_engine import SHAPES, write_shape
from tandem.benchmarks.support.gpu_predictions import QWEN
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.kernels.attention_metadata import SequenceMetadata, decode_metadata
from tandem.shared.engine.messages import CODEC, ExecuteStep, StepDone
from tandem.shared.engine.plan import (
    PLACEHOLDER,
    RankSampling,
    SamplerSpec,
    SequenceStep,
    SlotLimits,
    StepPlan,
)
from tandem.shared.engine.rank.graphs import MAX_ROWS, Capture, graph_sizes
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.engine.rank.slots import Slots
from tandem.shared.process.garbage import collect_rarely
from tandem.tests.kernels.launches import on_gpu
from tandem.tests.support.runners import build_runner

META = torch.device("meta")
BLOCK = 16
# Rows of a step, and the tokens before each.
LOADS = ((1, 128), (64, 32_768), (256, 600))


def steady_plan(rows: int, context: int) -> StepPlan:
    """A step in which one row in a block's length gets a new block."""
    blocks = -(-context // BLOCK)
    return StepPlan.of(
        2,
        [
            SequenceStep(
                row,
                [PLACEHOLDER],
                context,
                [row] if row % BLOCK == 0 else [],
                True,
                first_block=blocks if row % BLOCK == 0 else 0,
            )
            for row in range(rows)
        ],
        ahead=True,
    )


def prepared(runner: ModelRunner, rows: int, context: int) -> None:
    """Give each row its slot, as its prompt would have."""
    table = list(range(-(-context // BLOCK)))
    specs = [SamplerSpec(row, RankSampling(temperature=0.8, top_p=0.9), row) for row in range(rows)]
    prompts = [SequenceStep(row, [5], context - 1, table, True) for row in range(rows)]
    runner.launch(StepPlan.of(1, prompts, specs))


def empty_graphs(hidden: int) -> Capture:
    """Graphs that compute nothing."""

    def capture(
        forward: Callable[[], torch.Tensor],
    ) -> tuple[Callable[[], object], torch.Tensor]:
        return lambda: None, torch.empty(MAX_ROWS, hidden, dtype=torch.bfloat16, device=META)

    return capture


def milliseconds(work: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def with_whole_tables(plan: StepPlan, context: int) -> Callable[[], Any]:
    """What a step costs beside its launches if each message has all tables."""
    table = list(range(-(-(context + 1) // BLOCK)))
    rows = [SequenceStep(each, [5], context, table, True) for each in plan.columns.sequence_id]
    data = CODEC.encode(ExecuteStep(StepPlan.of(2, rows), []))

    def work() -> None:
        message = CODEC.decode(data)
        assert isinstance(message, ExecuteStep)
        columns = message.plan.columns
        sequences = [
            SequenceMetadata(slice(row, row + 1), start, columns.blocks[row].blocks, BLOCK)
            for row, start in enumerate(columns.start)
        ]
        decode_metadata(sequences, META)

    return work


def measure(runner: ModelRunner, rows: int, context: int, rounds: int) -> list[dict[str, Any]]:
    hidden = torch.empty(rows, runner.model.spec.hidden_size, dtype=torch.bfloat16, device=META)
    plan = steady_plan(rows, context)
    data = CODEC.encode(ExecuteStep(plan, []))

    def step() -> None:
        message = CODEC.decode(data)
        assert isinstance(message, ExecuteStep)
        result = runner.collect(runner.launch(message.plan))
        CODEC.encode(StepDone(result, None, 0, 0))

    baseline = milliseconds(with_whole_tables(plan, context), rounds)
    report = []
    graphs = runner.graphs
    runner.model.forward = lambda *_: hidden  # type: ignore[method-assign]
    for name, goal, each in (("with a graph", 0.3, graphs), ("with stubbed kernels", 0.5, None)):
        runner.graphs = each
        spent = milliseconds(step, rounds)
        report.append(
            {
                "metric": f"host's work for a step of {rows} x {context} tokens, {name}",
                "value": spent,
                "unit": "ms",
                "goal": f"<={goal}",
            }
        )
    report.append(
        {
            "metric": f"message of a step of {rows} x {context} tokens",
            "value": len(data) / 1e3,
            "unit": "kB",
            "goal": "<=8",
            "against": f"whole tables, whose message and staging take {baseline:.2f} ms",
        }
    )
    return report


def main() -> None:
    options = benchmark_parser(__doc__, rounds=200).parse_args()
    rows: list[dict[str, Any]] = []
    shape = SHAPES[QWEN]
    with (
        tempfile.TemporaryDirectory() as folder,
        on_gpu(90, lambda *_, **__: None),
        torch.inference_mode(),
    ):
        model = write_shape(shape, Path(folder, "model"))
        for count, context in LOADS:
            runner = build_runner(
                model, dtype="bfloat16", device=META, num_blocks=64, load_format="dummy"
            )
            limits = SlotLimits(count, -(-(context + BLOCK) // BLOCK))
            runner.slots = runner.inputs._slots = Slots(limits, META)
            runner.capture_graphs(empty_graphs(runner.model.spec.hidden_size), graph_sizes(count))
            prepared(runner, count, context)
            collect_rarely()
            rows += measure(runner, count, context, options.rounds)
    publish("node/step_host", rows, dry=options.dry)


if __name__ == "__main__":
    main()

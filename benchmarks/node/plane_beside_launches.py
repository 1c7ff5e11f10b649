"""The data plane beside a thread that launches small operators, as the engine's does on a GPU.

    python -m tandem.benchmarks.node.plane_beside_launches

A batch is 600 operators, about a decode step's launches. It runs alone, beside the plane of a
prefill node with a transfer whose layers are announced but not yet computed, by fake events, and
for comparison beside the same plane if it looked for them every millisecond. The variants take
turns.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.shared.handoff.plane.computed_layers import ComputedLayers
from tandem.shared.handoff.plane.messages import LayerReady, SendFinished
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCKS,
    END,
    LAYERS,
    PlaneRank,
    until,
)

OPERATORS = 600
TURN_SECONDS = 0.001


def launch(x: torch.Tensor) -> float:
    """Milliseconds of a batch."""
    start = time.perf_counter()
    for _ in range(OPERATORS):
        torch.add(x, 1)
    return (time.perf_counter() - start) * 1e3


class Beside:
    """Two planes, and a transfer between them that waits for its layers."""

    def __init__(self, prefill: PlaneRank, decode: PlaneRank) -> None:
        self._prefill, self._decode = prefill, decode
        self._number = 0
        self._events: list[threading.Event] = []
        self._computed = ComputedLayers(self._mark, prefill.plane.submit)

    def _mark(self) -> Callable[[], Any]:
        self._events.append(threading.Event())
        return self._events[-1].wait

    @contextmanager
    def pending(self) -> Iterator[None]:
        """Layers are announced, and computed at the end."""
        self._number += 1
        number, span = self._number, {"first_token": 0, "end_token": END}
        self._decode.expect(self._prefill, number, BLOCKS, **span)
        self._prefill.open(self._decode, number, BLOCKS, **span)
        self._events.clear()
        for layer in range(LAYERS):
            self._computed.announce([_ready(number, layer)])
        yield
        for event in self._events:
            event.set()
        self._prefill.log.wait(SendFinished, number)

    @contextmanager
    def polling(self) -> Iterator[None]:
        """The plane takes a turn every millisecond, as if it polled for its layers."""
        over = threading.Event()
        waking = threading.Thread(target=self._wake, args=(over,))
        with self.pending():
            waking.start()
            try:
                yield
            finally:
                over.set()
                waking.join()

    def _wake(self, over: threading.Event) -> None:
        while not over.wait(TURN_SECONDS):
            self._prefill.plane._commands.wake()


def _ready(number: int, layer: int) -> LayerReady:
    return LayerReady(
        transfer_id=number,
        attempt=1,
        first_layer=layer,
        end_layer=layer + 1,
        first_token=0,
        end_token=END,
    )


@contextmanager
def alone() -> Iterator[None]:
    yield


def measure(rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    x = torch.ones(8)
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        beside = Beside(prefill, decode)
        variants = {
            "alone": alone,
            "layers pending": beside.pending,
            "a turn every millisecond": beside.polling,
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, variant in variants.items():
                with variant():
                    seconds[name] += sorted(launch(x) for _ in range(10))[2:8]
        until(lambda: not prefill.plane.stats().active_sends)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    goals = {"layers pending": "<=1.1"}
    return [
        {
            "metric": f"{OPERATORS} operators, {name}",
            "value": value / (medians["alone"] if name in goals else 1),
            "unit": "x" if name in goals else "ms",
            "goal": goals.get(name, ""),
            "against": "alone",
            "ratio": value / medians["alone"],
        }
        for name, value in medians.items()
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    publish("node/plane_beside_launches", measure(options.rounds), dry=options.dry)


if __name__ == "__main__":
    main()

"""One rank: a process with its slice of the model, of the KV cache, and of the data plane.

The head starts ``python -m tandem.shared.engine.rank.process FD`` with one end of a socket pair.
The main thread computes; a reader thread answers pings and passes data-plane commands on at once,
so that a long step never delays a cancel; the data plane has a thread of its own. When the head's
end closes, the process exits: a rank never outlives its head.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from ...errors import ModelError, TandemError
from ...telemetry.logs import LogSettings, setup_logging
from ..channel import BlockingChannel
from ..plan import StepFailure, StepPlan, plan_from_wire, to_wire

if TYPE_CHECKING:
    from ...handoff.plane.data_plane import DataPlane
    from ...kv.backing import Backing
    from .runner import ModelRunner

log = logging.getLogger("tandem.rank")


class Rank:
    """Answers the head's messages, one at a time, in the main thread."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._settings: dict[str, Any] = {}
        self._device: Any = None
        self._loaded: Any = None
        self._runner: ModelRunner | None = None
        self._plane: DataPlane | None = None
        self._layers = 0  # computed since the start
        self._mark: Callable[[], Callable[[], bool]] | None = None
        self._backing: Backing | None = None  # on a CPU

    def serve(self) -> None:
        """Answer until the head is gone; that ends the process from the reader thread."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        handlers: dict[str, Callable[[Any], None]] = {
            "open": self._open,
            "load": self._load,
            "allocate": self._allocate,
            "step": self._step,
        }
        while True:
            kind, payload = self._inbox.get()
            try:
                handlers[kind](payload)
            except TandemError as error:
                category = "model" if isinstance(error, ModelError) else "startup"
                self._channel.send("failed", [category, str(error)])
            except Exception as error:
                log.exception("%r failed", kind)
                self._channel.send("failed", ["internal", f"{type(error).__name__}: {error}"])

    def _read(self) -> None:
        """Ends the process in any case: nobody else would notice that the head is gone."""
        status = 1
        try:
            self._sort()
            status = 0
        except Exception:
            log.exception("the head's messages cannot be read")
        finally:
            os._exit(status)  # the main thread may be deep in a forward pass; nothing needs saving

    def _sort(self) -> None:
        """Until the head is gone."""
        while (message := self._channel.receive()) is not None:
            kind, payload = message
            if kind == "data":
                self._command(payload)
            elif kind == "ping":
                self._channel.send("pong", self._layers)
            else:
                self._inbox.put((kind, payload))

    def _open(self, settings: dict[str, Any]) -> None:
        from .setup import open_device, report

        setup_logging(LogSettings(**settings.get("log", {})))
        self._settings = settings
        self._device = open_device(settings)
        self._channel.send("device", astuple(report(self._device)))

    def _load(self, formats: dict[str, str]) -> None:
        from .setup import load_model, memory_of

        self._settings |= formats
        self._loaded = load_model(self._settings, self._device)
        self._channel.send("loaded", astuple(memory_of(self._loaded, self._settings)))

    def _allocate(self, num_blocks: int) -> None:
        from .setup import backing_of

        self._runner = self._loaded.runner(num_blocks)
        self._backing = backing_of(self._runner.cache)
        endpoints: list[str] = []
        if self._settings["data_plane"] is not None:
            from .setup import layer_marker, start_data_plane

            self._plane = start_data_plane(self._settings, self._runner.cache, self._event)
            self._mark = layer_marker(self._runner.cache.device)
            ends = self._plane.endpoints
            endpoints = [ends.bulk, ends.control, ends.key]
        # What is loaded now stays: the collector need not look through it between two steps.
        gc.collect()
        gc.freeze()
        self._channel.send("ready", endpoints)

    def _event(self, event: Any) -> None:
        from ...handoff.plane.messages import to_wire as event_to_wire

        self._channel.send("event", event_to_wire(event))

    def _command(self, data: bytes) -> None:
        from ...handoff.plane.messages import Expect, from_wire

        command = from_wire(data)
        if isinstance(command, Expect) and self._backing is not None:
            self._backing.reach_all([command.block_table])
        if self._plane is not None:
            self._plane.submit(command)  # type: ignore[arg-type]

    def _step(self, payload: list[Any]) -> None:
        assert self._runner is not None
        plan = plan_from_wire(payload[0])
        if self._backing is not None:
            self._backing.reach_all(row.block_table for row in plan.sequences)
        streams = {sequence: (transfer, attempt) for sequence, transfer, attempt in payload[1]}
        hand_over = self._layer_hook(plan, streams)

        def computed(layer: int) -> None:
            self._layers += 1
            if hand_over is not None:
                hand_over(layer)

        answer, failure = None, None
        try:
            result = self._runner.execute(plan, computed)
            answer = to_wire(result) if self._settings["rank"] == 0 else None
        except Exception as error:
            log.exception("step %d failed", plan.step)
            failure = self._failure(error)
        if failure is not None:  # and the traceback holds no tensor any more
            self._runner.recover()
        collectives = self._runner.tp.collectives
        counts = [collectives.begun, collectives.ended]
        self._channel.send("result", [answer, failure and astuple(failure), counts])

    def _failure(self, error: Exception) -> StepFailure:
        from .runner import cause_of

        words = (str(error).splitlines() or [""])[0]
        return StepFailure(cause_of(error), f"{type(error).__name__}: {words}")

    def _layer_hook(self, plan: StepPlan, streams: dict[int, tuple[int, int]]) -> Any:
        """Tells the data plane which cells a layer has just computed, if anybody wants them."""
        rows = [
            (streams[row.sequence_id], row.start, row.start + len(row.tokens))
            for row in plan.sequences
            if row.sequence_id in streams
        ]
        plane, mark = self._plane, self._mark
        if not rows or plane is None:
            return None
        from ...handoff.plane.computing import Announced
        from ...handoff.plane.messages import LayerReady

        def computed(layer: int) -> None:
            is_computed = None if mark is None else mark()
            for (transfer, attempt), first, end in rows:
                ready = LayerReady(
                    transfer_id=transfer,
                    attempt=attempt,
                    first_layer=layer,
                    end_layer=layer + 1,
                    first_token=first,
                    end_token=end,
                )
                plane.submit(ready if is_computed is None else Announced(ready, is_computed))

        return computed


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Rank(BlockingChannel(socket.socket(fileno=int(sys.argv[1])))).serve()


if __name__ == "__main__":
    main()

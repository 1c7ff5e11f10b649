"""One rank: a process with its slice of the model, of the KV cache, and of the data plane.

The head starts ``python -m tandem.shared.engine.rank.process FD`` with one end of a socket pair. On
another host a launcher does, and tells the rank to connect to the head.
The main thread computes; a reader thread replies to pings and passes data-plane commands on at
once, so that a long step never delays a cancel; the data plane has a thread of its own. When the
head's end closes, the process exits: a rank never outlives its head.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import ModelError, TandemError
from ...handoff.plane.messages import Command, Expect, LayerReady
from ...handoff.wire.codec import VersionError
from ...kv.planning import CPU, CUDA, RankDevice
from ...process.frame_room import with_frame_room
from ...process.garbage import collect_rarely, lasting_imports
from ...process.queued_stderr import end_stderr, queue_stderr
from ...telemetry.logs import setup_logging
from ..channel import BlockingChannel
from ..messages import (
    AllocateCache,
    CacheAllocated,
    DeviceOpened,
    ExecuteStep,
    Failed,
    JoinHead,
    LoadModel,
    ModelLoaded,
    OpenDevice,
    Ping,
    Pong,
    RankEndpoints,
    RankJoins,
    RankMessage,
    RankSettings,
    StepDone,
)
from ..plan import VOID, StepFailure, StepResult, TokenMasks

if TYPE_CHECKING:
    import torch

    from ...handoff.plane.computed_layers import ComputedLayers
    from ...handoff.plane.endpoint import DataPlane
    from ...kv.backing import Backing
    from ...models.parallel import Collectives
    from .collector import Collector
    from .loading import LoadedModel
    from .runner import LaunchedStep, ModelRunner

log = logging.getLogger("tandem.rank")


class RankProcess:
    """Handles the head's requests, one at a time, in the main thread."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel
        # Bounded by the head, which has at most two requests in flight.
        self._requests: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
        self._settings: RankSettings
        self._device: torch.device
        self._opened: RankDevice
        self._claim: int | None = None
        self._model: LoadedModel
        self._runner: ModelRunner
        self._plane: DataPlane | None = None
        self._layers = 0  # computed since the start
        self._computed_layers: ComputedLayers | None = None  # on a GPU, beside the plane
        self._backing: Backing | None = None  # on a CPU
        self._collector: Collector

    def serve(self) -> None:
        """Reply to requests until the head is gone, when the reader thread ends the process."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        handlers: dict[type, Callable[[Any], RankMessage | None]] = {
            OpenDevice: self._open,
            LoadModel: self._load,
            AllocateCache: self._allocate,
            ExecuteStep: self._step,
        }
        while True:
            request = self._requests.get()
            try:
                reply = handlers[type(request)](request)  # none if it is sent later
            except TandemError as error:
                category = "model" if isinstance(error, ModelError) else "startup"
                reply = Failed(category, str(error))  # type: ignore[arg-type]
            except Exception as error:
                log.exception("%s failed", type(request).__name__)
                reply = Failed("internal", f"{type(error).__name__}: {error}")
            if reply is not None:
                self._channel.send(reply)

    def _read(self) -> None:
        """Read until the head is gone, then end the process."""
        status = 1
        try:
            self._dispatch()
            status = 0
        except VersionError as error:
            log.error("the head's messages cannot be read: %s", error)
            end_stderr()  # before the reply, on which the head kills this process
            self._channel.send(
                Failed("startup", str(error))
            )  # the head cannot decode it either, but ends
        except TandemError as error:
            log.error("this rank cannot join its head: %s", error)
        except Exception:
            log.exception("the head's messages cannot be read")
        finally:
            end_stderr()
            os._exit(status)  # the main thread may be deep in a forward pass; nothing needs saving

    def _dispatch(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, Command):
                self._command(message)
            elif isinstance(message, TokenMasks):
                self._runner.masks.put(message)
            elif isinstance(message, JoinHead):
                self._channel = self._join(message)
            elif isinstance(message, Ping):
                self._channel.send(Pong(self._layers))
            else:
                self._requests.put(message)

    def _join(self, message: JoinHead) -> BlockingChannel:
        """Connect to the head on another host; this process also ends with its launcher."""
        from ..join import connect

        launcher = self._channel
        threading.Thread(target=_end_with, args=(launcher,), name="launcher", daemon=True).start()
        head = connect(message.host, message.port, message.secrets)
        head.send(RankJoins(message.rank))
        return head

    # ---- requests --------------------------------------------------------------------------

    def _open(self, request: OpenDevice) -> DeviceOpened:
        with lasting_imports():
            from ....kernels.streams import use_compute_stream
            from ..device_memory import report
            from . import step_profile  # noqa: F401  for the next request
            from .device import open_device
            from .device_claim import claim

        setup_logging(request.settings.log)
        self._settings = request.settings
        self._device = open_device(request.settings)
        self._claim = claim(self._device, shared=request.settings.shares_device)
        use_compute_stream(self._device)
        self._opened = report(self._device)
        return DeviceOpened(self._opened)

    def _load(self, request: LoadModel) -> ModelLoaded:
        from .loading import load_model
        from .step_profile import CudaMemory, memory_of

        device, settings = self._device, self._settings
        self._model = load_model(settings, request.formats, device)
        memory = CudaMemory(device) if device.type == CUDA else None
        return ModelLoaded(memory_of(self._model, settings, request.limits, self._opened, memory))

    def _allocate(self, request: AllocateCache) -> CacheAllocated:
        from .collector import Collector
        from .device import bind_threads
        from .graphs import cuda_capture, graph_sizes
        from .loading import backing_of

        self._runner = self._model.runner(request.num_blocks, request.limits)
        self._backing = backing_of(self._runner.cache)
        collect, on_gpu = self._runner.collect, self._runner.cache.device.type != CPU
        self._collector = Collector(collect, self._reply, _failure, waits=on_gpu)
        if self._runner.cache.device.type == "cuda" and not self._settings.enforce_eager:
            # Before the data plane, whose use of the device a capture would forbid.
            self._runner.capture_graphs(cuda_capture(), graph_sizes(request.limits.sequences))
        endpoints = None
        if self._settings.data_plane is not None:
            from ...handoff.plane.computed_layers import ComputedLayers
            from .plane import start_data_plane

            self._plane = start_data_plane(self._settings, self._runner.cache, self._channel.send)
            cache = self._runner.cache
            if cache.mark is not None:
                layers = len(cache.layers)
                self._computed_layers = ComputedLayers(cache.mark, self._plane.submit, layers)
            ends = self._plane.endpoints
            endpoints = RankEndpoints(ends.bulk, ends.control, ends.key)
        bind_threads(self._settings, self._device)
        collect_rarely()
        return CacheAllocated(endpoints)

    def _step(self, request: ExecuteStep) -> None:
        """Launch a step, to which the collector replies."""
        plan = request.plan
        if self._backing is not None:
            self._backing.reach_all(new.blocks for new in plan.columns.blocks.values())
        hand_over = self._layer_hook(request)

        def computed(layer: int) -> None:
            self._layers += 1
            if hand_over is not None:
                hand_over(layer)

        step: LaunchedStep | StepFailure
        try:
            step = self._runner.launch(plan, computed)
        except Exception as error:
            step = _failure(plan.step, error)
        if isinstance(step, StepFailure):  # after the traceback, which referred to tensors, is gone
            self._runner.recover()
        # The counts before the next step adds its own.
        self._collector.put(step, self._runner.tp.collectives.copy())

    def _reply(self, outcome: StepResult | StepFailure, collectives: Collectives) -> None:
        result = failure = None
        if isinstance(outcome, StepFailure):
            failure = outcome
        elif self._settings.rank == 0:
            result = outcome
        self._channel.send(StepDone(result, failure, collectives.started, collectives.finished))

    def _layer_hook(self, request: ExecuteStep) -> Callable[[int], None] | None:
        """A hook that announces each computed layer to the data plane, if a transfer takes a row's
        KV."""
        plane, computed_layers = self._plane, self._computed_layers
        if not request.sending or plane is None:
            return None
        transfers = {each.sequence_id: each for each in request.sending}
        columns = request.plan.columns
        rows = [
            (transfers[each], start, start + count)
            for each, start, count in zip(
                columns.sequence_id, columns.start, columns.count, strict=True
            )
            if each in transfers
        ]

        def computed(layer: int) -> None:
            ready = [
                LayerReady(
                    transfer_id=transfer.transfer_id,
                    attempt=transfer.attempt,
                    first_layer=layer,
                    end_layer=layer + 1,
                    first_token=start,
                    end_token=end,
                )
                for transfer, start, end in rows
            ]
            if computed_layers is not None:
                computed_layers.announce(ready)
                return
            for each in ready:
                plane.submit(each)

        return computed

    # ---- the data plane --------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        if isinstance(command, Expect) and self._backing is not None:
            self._backing.reach_all([command.block_table])
        if self._plane is not None:
            self._plane.submit(command)


def _end_with(launcher: BlockingChannel) -> None:
    """End this process when its launcher is gone, which sends nothing more."""
    launcher.receive()
    end_stderr()
    os._exit(1)


def _failure(step: int, error: Exception) -> StepFailure:
    """The failure of a step, which is logged."""
    from .runner import cause_of

    summary = (str(error).splitlines() or [""])[0]
    failure = StepFailure(cause_of(error), f"{type(error).__name__}: {summary}")
    if failure.cause == VOID:
        log.info("step %d was not run: %s", step, failure.reason)
    else:
        log.error("step %d failed", step, exc_info=error)
    return failure


def main() -> None:
    # Only the head ends a rank, but service managers signal all processes of a service.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    queue_stderr()
    # Without room, a few calls take as long as a layer of a small model.
    with_frame_room(RankProcess(BlockingChannel(socket.socket(fileno=int(sys.argv[1])))).serve)


if __name__ == "__main__":
    main()

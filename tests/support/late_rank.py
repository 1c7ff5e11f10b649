"""A rank in the test's process whose device is behind the host, as a GPU is.

The rank's own code runs in its own threads, and takes a GPU's branches. What a step sends to the
host is poison until the test lets the device reach the step's end, which may be after later steps
were launched.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tandem.kernels import streams
from tandem.shared.engine.channel import BlockingChannel
from tandem.shared.engine.messages import CODEC, ExecuteStep, RankMessage, StepDone
from tandem.shared.engine.plan import StepPlan, StepResult, TokenMasks
from tandem.shared.engine.rank import device_logprobs, gpu_sampler, output_rows, process
from tandem.shared.engine.rank import runner as runner_module
from tandem.shared.engine.rank.collector import Collector
from tandem.shared.engine.rank.gpu_sampler import GpuSampler
from tandem.shared.engine.rank.mask_inbox import MaskInbox
from tandem.shared.engine.rank.runner import LaunchedStep, ModelRunner, Output

SECONDS = 20  # within which a thread does what it is told
# The places of a step at which it may fail: before the model runs, after its first layer, once
# tokens are drawn, and on the device.
PLACES = ("start", "layer", "end", "device")
_NAME = "late rank"


@dataclass(frozen=True)
class LateWait:
    """See ``streams.Wait``."""

    device: LateDevice
    number: int

    def __call__(self) -> None:
        self.device.wait_until(self.number)

    def is_over(self) -> bool:
        return self.device.has_reached(self.number)


class LateDevice:
    """Marks that the device reaches when the test says so, and copies that wait for them."""

    def __init__(self) -> None:
        self.marked = 0
        self._reached = 0
        self._copies: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._changed = threading.Condition()

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        """See ``streams.to_host``."""
        host = torch.empty_like(x, memory_format=torch.contiguous_format)
        host.view(torch.uint8).fill_(0 if x.dtype == torch.bool else 0x7E)
        self._copies.append((self.marked + 1, host, x.clone()))
        return host

    def mark(self) -> LateWait:
        """See ``streams.Mark``."""
        self.marked += 1
        return LateWait(self, self.marked)

    def has_reached(self, number: int) -> bool:
        return self._reached >= number

    def wait_until(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.has_reached(number), SECONDS)

    def advance(self) -> None:
        """Compute up to the next mark."""
        with self._changed:
            self._reached += 1
            while self._copies and self._copies[0][0] <= self._reached:
                _, host, value = self._copies.popleft()
                host.numpy()[...] = value.numpy()  # not by torch, in any mode
            self._changed.notify_all()


class _Masks(MaskInbox):
    """Tells when the main thread waits for masks that have not come."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()
        self._known: set[int] = set()
        self._lock = threading.Lock()
        self._wanted = 0
        self.on_wait: Callable[[], None] = lambda: None

    def put(self, masks: TokenMasks) -> None:
        with self._lock:
            self._known.add(masks.step)
            if masks.step == self._wanted:
                self.waiting.clear()
        super().put(masks)

    def take(self, step: int) -> dict[int, bytes]:
        with self._lock:
            self._wanted = step
            if step not in self._known:
                self.waiting.set()
        self.on_wait()
        return super().take(step)


class LateRank:
    """Runs the steps of a head in this process. ``runner`` is one of a CPU, made by
    ``as_on_gpu``. ``check`` is called in the rank's thread after each launch."""

    def __init__(self, runner: ModelRunner, device: LateDevice) -> None:
        self.runner = runner
        self.device = device
        self.fault = ""  # the place at which the next step fails
        self.fault_is_memory = False
        self.check: Callable[[ExecuteStep], None] = lambda request: None
        self._device_faults: set[int] = set()
        self._launched: deque[int] = deque()  # steps without a reply, by their marks
        self._replies: queue.SimpleQueue[StepDone] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[ExecuteStep | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._busy = False
        self._broken: BaseException | None = None
        self._masks = runner.masks = _Masks()
        self._masks.on_wait = self._notify
        self._run, runner._run = runner._run, self._run_or_fail  # type: ignore[method-assign]
        rank = self._rank = process.RankProcess(cast(BlockingChannel, self))
        rank._settings = cast(Any, SimpleNamespace(rank=0))
        rank._runner = runner
        rank._collector = Collector(self._collect, rank._reply, process._failure, waits=True)
        self._thread = threading.Thread(target=self._serve, name=_NAME, daemon=True)
        self._thread.start()

    # ---- for the test ----------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while the main thread waits for masks."""
        return self._busy

    @property
    def replies_due(self) -> int:
        """The number of launched steps without a reply."""
        return len(self._launched)

    def launch(self, request: ExecuteStep) -> None:
        """Launch a step, until that is done or it waits for masks."""
        assert not self._busy
        self._busy = True
        self._requests.put(request)
        self.join()

    def join(self) -> None:
        """Wait until the main thread has nothing to do, or waits for masks."""
        with self._changed:
            idle = lambda: not self._busy or self._masks.waiting.is_set()  # noqa: E731
            assert self._changed.wait_for(idle, SECONDS), "the rank hangs"
        if self._broken is not None:
            raise self._broken

    def complete(self) -> StepDone:
        """Compute the oldest launched step on the device, and return its reply."""
        if self._launched.popleft():
            self.device.advance()
        return self._replies.get(timeout=SECONDS)

    def put_masks(self, masks: TokenMasks) -> None:
        self._masks.put(masks)
        self.join()

    def end(self) -> None:
        """End the main thread, which must not wait for masks."""
        self._requests.put(None)
        self._thread.join(SECONDS)

    # ---- the rank's threads ----------------------------------------------------------------

    def send(self, message: RankMessage) -> None:
        """What the rank sends on its channel."""
        done = CODEC.decode(CODEC.encode(message))
        assert isinstance(done, StepDone)
        self._replies.put(done)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            before = self.device.marked
            try:
                self._rank._step(request)
                self.check(request)
            except BaseException as error:
                self._broken = error
            self._launched.append(self.device.marked - before)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _error(self) -> Exception:
        if self.fault_is_memory:
            return torch.OutOfMemoryError("CUDA out of memory")
        return IndexError("no such block")

    def _run_or_fail(self, plan: StepPlan, on_layer: Callable[[int], None] | None) -> list[Output]:
        fault, self.fault = self.fault, ""
        if fault == "device":
            self._device_faults.add(plan.step)
        if fault == "start":
            raise self._error()

        def announce(layer: int) -> None:
            if fault == "layer":
                raise self._error()
            if on_layer is not None:
                on_layer(layer)

        outputs = self._run(plan, announce)
        if fault == "end":
            raise self._error()
        return outputs

    def _collect(self, step: LaunchedStep) -> StepResult:
        result = self.runner.collect(step)
        if step.step in self._device_faults:
            raise self._error()
        return result


def as_on_gpu(runner: ModelRunner, stack: ExitStack) -> LateDevice:
    """Let a CPU's runner compute a step as on a GPU, until the stack ends. Its cache is not
    shared with the data plane of a real GPU, so ``mark`` is only of steps."""
    device = LateDevice()
    runner.slots.tables = torch.zeros_like(runner.slots.tables)  # no longer the host's
    runner.inputs._on_cpu = runner.inputs._on_gpu  # type: ignore[assignment, method-assign]
    runner.sampler = GpuSampler(runner.model.spec.vocab_size, runner.slots.last_tokens)
    runner.cache.mark = device.mark
    patch = stack.enter_context(pytest.MonkeyPatch.context())

    def to_host(x: torch.Tensor) -> torch.Tensor:
        """Other runners compute in other threads."""
        return device.to_host(x) if threading.current_thread().name == _NAME else streams.to_host(x)

    for module in (device_logprobs, gpu_sampler, output_rows, runner_module):
        patch.setattr(module, "to_host", to_host)
    return device

"""CUDA streams of a rank: their priorities, marks in them, and copies to the host.

A rank has two streams: its main thread computes in one of high priority, and the thread of the data
plane copies KV in one of low priority, whose programs run where the first leaves room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Wait(Protocol):
    """The wait for a mark. Any thread may use it, any number of times."""

    def __call__(self) -> None:
        """Sleep until the GPU has passed the mark, without holding the GIL."""

    def is_over(self) -> bool:
        """True if the GPU has passed the mark. Never waits."""


# Marks the current point of what the calling thread has launched.
Mark = Callable[[], Wait]

_HIGH, _LOW = -1, 0


def use_compute_stream(device: torch.device) -> None:
    """Compute in a stream of high priority from now on, in this thread. No-op without CUDA."""
    if device.type == "cuda":
        _use(torch.cuda.Stream(device, priority=_HIGH))


def use_background_stream(device: torch.device) -> int:
    """Use a stream of low priority from now on, in this thread. Returns its handle; 0 without
    CUDA."""
    if device.type != "cuda":
        return 0
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device, priority=_LOW)
    _use(stream)
    return int(stream.cuda_stream)


def _use(stream: torch.cuda.Stream) -> None:
    # What was launched before in this thread's last stream may still be under way.
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    torch.cuda.set_stream(stream)


@dataclass(frozen=True, slots=True)
class EventWait:
    """A ``Wait`` for an event."""

    event: torch.cuda.Event

    def __call__(self) -> None:
        self.event.synchronize()

    def is_over(self) -> bool:
        return self.event.query()


def marker(device: torch.device) -> Mark | None:
    """The marks of a device; ``None`` if operators are over when they return."""
    if device.type != "cuda":
        return None

    def mark() -> Wait:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        return EventWait(event)

    return mark


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned by a GPU, which is complete once the GPU has passed a later
    mark; a CPU's tensor itself."""
    if x.device.type == "meta":  # nothing is computed there
        return torch.zeros_like(x, device="cpu")
    return x.to("cpu", non_blocking=True)

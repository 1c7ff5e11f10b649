"""The data plane's operations on a GPU with torch: its stream, its views of memory, its sums.

The plane's thread has a stream of its own, so that packing does not wait for a layer that is still
being computed; ``marker`` waits until one has been.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .....kernels.row_sums import row_sums
from ...wire.buffer import Buffer
from ..device import DeviceDriver


class Gpu:
    """A ``Device``. On a CPU, whose memory stands for a device's in tests, it has no stream."""

    def __init__(self, driver: DeviceDriver, device: torch.device) -> None:
        self.driver = driver
        self._device = device

    def enter(self) -> None:
        self.driver.enter()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device))

    def leave(self) -> None:
        self.driver.leave()

    def view(self, address: int, size: int) -> Buffer:
        return torch.as_tensor(self.driver.array(address, size), device=self._device)

    def sums(self, payload: Buffer) -> bytes:
        # The copy to the host waits for everything before it on this stream.
        with torch.inference_mode():
            return row_sums(payload).cpu().numpy().tobytes()


def marker(device: torch.device) -> Callable[[], Callable[[], None]]:
    """A function that marks a point in this thread's computation; the mark, called in any thread,
    returns when the point has been passed. Its thread sleeps until then, without Python's lock."""
    stream = torch.cuda.current_stream(device)

    def mark() -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event.synchronize

    return mark

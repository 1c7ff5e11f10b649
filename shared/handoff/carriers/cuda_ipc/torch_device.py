"""The data plane's GPU operations with torch: a stream, views of memory, sums.

The plane's thread has its own stream, so that packing does not wait for later layers; ``marker``
waits until a layer is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .....kernels.row_sums import row_sums
from ...wire.buffer import Buffer
from ..device import DeviceDriver


class Gpu:
    """A ``Device``. On a CPU, as in tests, it has no stream."""

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
    """A function that marks the current point of this thread's computation. Calling the mark, in
    any thread, sleeps until the GPU has passed that point, without holding the GIL."""
    stream = torch.cuda.current_stream(device)

    def mark() -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event.synchronize

    return mark

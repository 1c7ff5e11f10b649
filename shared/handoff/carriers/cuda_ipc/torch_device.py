"""The data plane's GPU operations with torch: its stream, views of memory, sums."""

from __future__ import annotations

import torch

from .....kernels.row_sums import row_sums
from .....kernels.streams import use_background_stream
from ...wire.buffer import Buffer
from ..device import DeviceDriver


class Gpu:
    """A ``Device``. On a CPU, as in tests, it has no stream."""

    def __init__(self, driver: DeviceDriver, device: torch.device) -> None:
        self.driver = driver
        self._device = device

    def enter(self) -> None:
        self.driver.enter(use_background_stream(self._device))

    def leave(self) -> None:
        self.driver.leave()

    def view(self, address: int, size: int) -> Buffer:
        return torch.as_tensor(self.driver.array(address, size), device=self._device)

    def sums(self, payload: Buffer) -> bytes:
        # The copy to the host waits for everything before it on this stream.
        with torch.inference_mode():
            return row_sums(payload).cpu().numpy().tobytes()

"""The boundary between the handoff and a GPU: memory that other processes can map.

A driver deals in addresses; torch sees them only where this process owns the memory. This module
does not import torch: a rank supplies its ``Device`` (``cuda_ipc/torch_device.py``), and tests
supply one of their own. All of it is used on the data-plane thread.
"""

from __future__ import annotations

from typing import Any, Protocol

from ...errors import TransferError
from ..wire.buffer import Buffer

# Copying a MiB within a GPU takes less time than starting the copy, so frames are larger than in
# memory of the host, and the window holds four of them.
DEVICE_SLOT_BYTES = 16 << 20
DEVICE_SLOTS = 8
DEVICE_WINDOW_BYTES = 4 * DEVICE_SLOT_BYTES
# GPU memory that a data plane takes: the ring, a slot to receive into, and the products of a sum.
DEVICE_BYTES = (DEVICE_SLOTS + 3) * DEVICE_SLOT_BYTES


class DeviceError(TransferError):
    """The device's driver rejected a call."""


class DeviceDriver(Protocol):
    """Moves bytes between processes on one host. Errors are ``DeviceError``."""

    @property
    def identity(self) -> str:
        """The GPU, by a name that is the same in every process."""

    def enter(self) -> None:
        """Begin to use the device in this thread."""

    def leave(self) -> None:
        """End the use of the device; nothing of it may be in use any longer."""

    def allocate(self, size: int) -> int:
        """The address of new memory that can be exported."""

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """A handle by which another process opens the memory."""

    def open(self, handle: bytes, size: int) -> int:
        """Map another process's memory of at least this size, until ``close``; its address."""

    def close(self, address: int) -> None: ...

    def copy(self, into: int, source: int, length: int) -> None:
        """Copy bytes, and return when they are there."""

    def array(self, address: int, size: int) -> Any:
        """Memory of ``allocate`` in a form that ``torch.as_tensor`` takes without a copy."""

    def pin(self, address: int, size: int) -> None:
        """Let the device read and write this memory of the host by itself, until ``unpin``."""

    def unpin(self, address: int) -> None: ...


class Device(Protocol):
    """The GPU that a rank's cache lives on."""

    @property
    def driver(self) -> DeviceDriver: ...

    def enter(self) -> None:
        """Begin to use the device in this thread, concurrently with computations in others."""

    def leave(self) -> None: ...

    def view(self, address: int, size: int) -> Buffer:
        """Memory of the driver's ``allocate``, as bytes that can be sliced."""

    def sums(self, payload: Buffer) -> bytes:
        """Sums of these bytes, from which a checksum is made. Waits until they are written."""

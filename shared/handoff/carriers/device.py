"""The boundary between the handoff and a GPU: memory that other processes can map.

A driver works with addresses; torch gets views only of memory that this process owns. This module
does not import torch: a rank supplies its ``Device`` (``cuda_ipc/torch_device.py``), tests supply a
fake. Everything here runs on the data-plane thread.
"""

from __future__ import annotations

from typing import Any, Protocol

from ...errors import TransferError
from ..wire.buffer import Buffer

# Copying 1 MiB within a GPU takes less time than launching the copy, so frames are larger than in
# host memory: a layer of 8,192 tokens with 8 KV heads of 128 in bf16 is one. The window holds four.
DEVICE_SLOT_BYTES = 32 << 20
DEVICE_SLOTS = 8
DEVICE_WINDOW_BYTES = 4 * DEVICE_SLOT_BYTES
# GPU memory of a data plane: the ring, a slot to receive into, and the temporaries of a sum.
DEVICE_BYTES = (DEVICE_SLOTS + 3) * DEVICE_SLOT_BYTES


class DeviceError(TransferError):
    """The device's driver rejected a call."""


class DeviceDriver(Protocol):
    """Moves bytes between processes on one host. Errors are ``DeviceError``."""

    @property
    def identity(self) -> str:
        """The name of the GPU, the same in every process."""

    def enter(self, stream: int) -> None:
        """Begin to use the device in this thread, and to copy in one of torch's streams."""

    def leave(self) -> None:
        """Stop using the device in this thread. None of its memory may be in use."""

    def allocate(self, size: int) -> int:
        """Allocate memory that can be exported; returns its address."""

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """A handle with which another process opens the memory."""

    def open(self, handle: bytes, size: int) -> int:
        """Map another process's memory of at least this size until ``close``; returns its
        address."""

    def close(self, address: int) -> None: ...

    def copy(self, into: int, source: int, length: int) -> None:
        """Begin to copy bytes, in the order of the stream."""

    def settle(self) -> None:
        """Wait for all that was launched in the stream."""

    def array(self, address: int, size: int) -> Any:
        """Memory of ``allocate`` in a form for ``torch.as_tensor``, without a copy."""

    def pin(self, address: int, size: int) -> None:
        """Pin host memory, for direct access by the device, until ``unpin``."""

    def unpin(self, address: int) -> None: ...


class Device(Protocol):
    """The GPU with a rank's cache."""

    @property
    def driver(self) -> DeviceDriver: ...

    def enter(self) -> None:
        """Begin to use the device in this thread, beside computations of other threads."""

    def leave(self) -> None: ...

    def view(self, address: int, size: int) -> Buffer:
        """A view of memory of the driver's ``allocate``, as bytes that can be sliced."""

    def sums(self, payload: Buffer) -> bytes:
        """Sums of these bytes, as input of a checksum. Waits until the bytes are written."""

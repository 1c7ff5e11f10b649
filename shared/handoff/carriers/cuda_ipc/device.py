"""The boundary between the handoff and a GPU: memory that other processes can map.

A driver deals in addresses; torch sees them only where this process owns the memory. Nothing here
imports torch: who starts a data plane brings the ``Device`` (``torch_device.py``), tests one of
their own. All of it is used on the data-plane thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ....errors import StartupError, TransferError
from ...plane.cache_port import Buffer
from ..names import CUDA_IPC

# A copy within a GPU takes a microsecond a MiB, and to start something on it takes several: so
# frames are larger than over TCP, and the window holds four of them.
DEVICE_SLOT_BYTES = 16 << 20
DEVICE_SLOTS = 8
DEVICE_WINDOW_BYTES = 4 * DEVICE_SLOT_BYTES
# What a data plane takes of a device: the ring, a slot to receive into, and the products of a sum.
DEVICE_BYTES = (DEVICE_SLOTS + 3) * DEVICE_SLOT_BYTES

NO_GPU = "the KV cache is not on a CUDA device; use --device cuda, or --carrier auto"


class DeviceError(TransferError):
    """The device's driver refused something."""


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Memory of a device, as other processes get to know it. ``device`` names the GPU."""

    device: str
    handle: bytes
    bytes: int


NO_DEVICE_PLACE = DevicePlace("", b"", 0)


class DeviceDriver(Protocol):
    """What moves bytes between processes on one host. Errors are ``DeviceError``."""

    @property
    def identity(self) -> str:
        """The GPU, by a name that is the same in every process."""

    def enter(self) -> None:
        """From now on this thread uses the device, until ``leave``."""

    def leave(self) -> None:
        """Nothing of it is used any more."""

    def allocate(self, size: int) -> int:
        """Memory of its own, which can be exported; its address."""

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """What another process opens the memory by."""

    def open(self, handle: bytes, size: int) -> int:
        """Where another process's memory of at least this size is in this one, until ``close``."""

    def close(self, address: int) -> None: ...

    def copy(self, into: int, source: int, length: int) -> None:
        """When it returns, the bytes are there."""

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
        """From now on this thread uses the device, beside what others compute there, until
        ``leave``."""

    def leave(self) -> None: ...

    def view(self, address: int, size: int) -> Buffer:
        """Memory of the driver's ``allocate``, as bytes that can be cut."""

    def sums(self, payload: Buffer) -> bytes:
        """What a checksum of these bytes is made from. Waits for whatever writes them."""


def not_possible(problem: str) -> StartupError:
    return StartupError(f"--carrier {CUDA_IPC} is not possible here: {problem}")

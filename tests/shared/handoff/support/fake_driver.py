"""A GPU's driver whose memory is that of the CPU: memfds, which other processes can map.

It keeps the books that the real one keeps badly: what is not freed, opened twice, or closed twice
fails the test that did it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tandem.shared.handoff.carriers.cuda_ipc.cuda_driver import CudaDriver
from tandem.shared.handoff.carriers.cuda_ipc.torch_device import Gpu
from tandem.shared.handoff.carriers.device import DeviceError
from tandem.shared.handoff.wire.buffer import Buffer

_HANDLE = struct.Struct("<QQQ40x")
_NUMBER = struct.Struct("<Q")
NAME = "fake-device"


class _Mapped:
    """A memfd in this process: a page with its number, then the memory."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self.map = mmap.mmap(descriptor, mmap.PAGESIZE + size)
        self.pages = np.frombuffer(self.map, dtype=np.uint8)

    @property
    def address(self) -> int:
        return int(self.pages.ctypes.data) + mmap.PAGESIZE

    @property
    def number(self) -> int:
        return int(_NUMBER.unpack_from(self.map)[0])

    def close(self) -> None:
        os.close(self.descriptor)


class FakeDriver:
    """A ``DeviceDriver``. ``calls`` counts what was asked for; ``refuse`` names what fails."""

    identity = "GPU-fake"

    def __init__(self, *refuse: str) -> None:
        self.refuse = set(refuse)
        self.calls: Counter[str] = Counter()
        self.owned: dict[int, _Mapped] = {}
        self.opened: dict[int, _Mapped] = {}
        self.pinned: set[int] = set()
        self.entered = 0

    def _called(self, what: str) -> None:
        self.calls[what] += 1
        if what in self.refuse:
            raise DeviceError(f"{what}: no such luck")

    def enter(self, stream: int) -> None:
        self._called("enter")
        self.entered += 1

    def leave(self) -> None:
        self._called("leave")
        self.entered -= 1

    def allocate(self, size: int) -> int:
        self._called("allocate")
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE + size)
        mapped = _Mapped(descriptor, size)
        _NUMBER.pack_into(mapped.map, 0, secrets.randbits(64))
        mapped.pages[mmap.PAGESIZE :] = 0xCD  # unwritten memory is not zero
        self.owned[mapped.address] = mapped
        return mapped.address

    def free(self, address: int) -> None:
        self._called("free")
        self.owned.pop(address).close()

    def export(self, address: int) -> bytes:
        self._called("export")
        mapped = self.owned[address]
        return _HANDLE.pack(os.getpid(), mapped.descriptor, mapped.number)

    def open(self, handle: bytes, size: int) -> int:
        self._called("open")
        try:
            pid, descriptor, number = _HANDLE.unpack(handle)
            ours = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except (struct.error, OSError) as error:
            raise DeviceError(f"open: {error}") from None
        there = os.fstat(ours).st_size - mmap.PAGESIZE
        if there < size:
            os.close(ours)
            raise DeviceError(f"open: {there} bytes, not {size}")
        mapped = _Mapped(ours, size)
        if mapped.number != number:
            mapped.close()
            raise DeviceError("open: the memory of another process")
        self.opened[mapped.address] = mapped
        return mapped.address

    def close(self, address: int) -> None:
        self._called("close")
        self.opened.pop(address).close()

    def copy(self, into: int, source: int, length: int) -> None:
        self._called("copy")
        self._check(self.owned, into, length)
        self._check(self.opened, source, length)
        ctypes.memmove(into, source, length)

    def settle(self) -> None:
        self._called("settle")

    @staticmethod
    def _check(among: dict[int, _Mapped], address: int, length: int) -> None:
        assert any(
            start <= address and address + length <= start + mapped.size
            for start, mapped in among.items()
        ), "an address that is none"

    def array(self, address: int, size: int) -> Any:
        mapped = self.owned[address]
        return mapped.pages[mmap.PAGESIZE : mmap.PAGESIZE + size]

    def pin(self, address: int, size: int) -> None:
        self._called("pin")
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self._called("unpin")
        self.pinned.remove(address)

    def check_books(self) -> None:
        """Assert that everything was given back, once."""
        assert not (self.owned or self.opened or self.pinned or self.entered), vars(self)


class FakeDevice(Gpu):
    """A fake GPU with memory on the CPU."""

    driver: FakeDriver

    def __init__(self, driver: FakeDriver | None = None) -> None:
        super().__init__(driver or FakeDriver(), torch.device("cpu"))


FAKE, REAL = "fake", "cuda"
DEVICES = [
    FAKE,
    pytest.param(
        REAL, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]


def device_named(name: str) -> Gpu:
    """A fake GPU, or the first GPU of this machine."""
    if name == FAKE:
        return FakeDevice()
    return Gpu(CudaDriver(0), torch.device("cuda", 0))


def as_memory(buffer: Buffer) -> memoryview:
    """A buffer of the host or of the fake device, readable and writable as bytes."""
    if not isinstance(buffer, torch.Tensor):
        return buffer
    array: Any = buffer.numpy()
    return memoryview(array)

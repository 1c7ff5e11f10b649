"""The memory under a rank's staging ring, shared as far as the carriers allow."""

from __future__ import annotations

import ctypes
import logging
import mmap

from ...errors import StartupError
from ..wire.greeting import Greeting
from .cuda_ipc.device import DeviceDriver, DeviceError
from .names import SHARED_MEMORY, allows
from .nixl.agent import NixlAgent
from .shared_memory.ring import SharedRing, can_share

log = logging.getLogger("tandem.handoff")


class StagingMemory:
    """``memory`` is as large as was asked for. Processes of this host can map it where ``setting``
    (of ``--carrier``) and the system allow that; peers of the ``agent`` can read it, and a GPU can
    by itself where there is a ``driver`` of one."""

    def __init__(
        self,
        setting: str,
        size: int,
        agent: NixlAgent | None,
        driver: DeviceDriver | None = None,
    ) -> None:
        """Raises ``StartupError``."""
        self._shared = _shared_ring(setting, size)
        if self._shared is not None:
            self.memory = self._shared.memory
        else:
            self.memory = memoryview(mmap.mmap(-1, size))
        self._registered = None if agent is None else agent.register(self.memory)
        self._pinned = None if driver is None else _Pinned.of(driver, self.memory)

    def introduce(self, me: Greeting) -> Greeting:
        """The greeting of a rank that has this memory."""
        me = me.without_ring() if self._shared is None else me.with_ring(self._shared.place)
        if self._registered is None:
            return me.without_nixl()
        return me.with_nixl(self._registered.place)

    def close(self) -> None:
        """Nobody can map it any more."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        if self._shared is not None:
            self._shared.close()


class _Pinned:
    """Memory that a GPU copies to and from by itself, which is several times as fast."""

    def __init__(self, driver: DeviceDriver, memory: memoryview) -> None:
        """Raises ``DeviceError``."""
        self._driver = driver
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        driver.pin(self._address, len(memory))

    @classmethod
    def of(cls, driver: DeviceDriver, memory: memoryview) -> _Pinned | None:
        """``None`` where it cannot be: slower, but no less right."""
        try:
            return cls(driver, memory)
        except DeviceError as error:
            log.warning("the staging ring is not pinned (%s): KV leaves the GPU slower", error)
            return None

    def close(self) -> None:
        try:
            self._driver.unpin(self._address)
        except DeviceError as error:
            log.warning("the staging ring stays pinned: %s", error)


def _shared_ring(setting: str, size: int) -> SharedRing | None:
    """``None`` where another carrier has to do."""
    if not allows(setting, SHARED_MEMORY):
        return None
    problem = "this system has no sealed memfd, or no /proc"
    if can_share():
        try:
            return SharedRing(size)
        except OSError as error:
            problem = str(error)
    if setting == SHARED_MEMORY:
        raise StartupError(f"--carrier {SHARED_MEMORY} is not possible here: {problem}")
    return None

"""An agent of NIXL, which reads other processes' memory over RDMA: all that is used of the library.

The owner of memory registers it and describes it; an agent that adds the description can read from
it. The agent has no thread of its own, which would keep a core busy forever: while something is
under way, both ends have to call in often (``progress``, ``ReadHandle.finished``). Nothing here
waits, and all of it belongs to one thread.

The library parses descriptions in C++, and its keys let a peer write as well as read. It is meant
for networks on which every peer is trusted.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
from dataclasses import dataclass
from typing import Any

from ....errors import StartupError, TransferError
from ....version import install_command

# A worker's address lists every network device of the machine; one of them takes 330 bytes.
MAX_DESCRIPTION_BYTES = 16 << 10
_BACKEND = "UCX"
_MEMORY = "DRAM"


class NixlError(TransferError):
    """The library cannot reach a peer, or could not read from it."""


@dataclass(frozen=True, slots=True)
class NixlPlace:
    """Registered memory of an agent, as it is announced to others."""

    description: bytes
    address: int
    bytes: int


def check_installed() -> None:
    """Raise ``StartupError`` if the library is missing, without loading it."""
    if importlib.util.find_spec("nixl") is None:
        raise StartupError(
            "--carrier nixl needs the package nixl, which is not installed: "
            f"{install_command('nixl')}"
        )


def load() -> Any:
    """Load the library, which takes seconds for the first time. Raises ``StartupError``."""
    check_installed()
    before = logging.raiseExceptions
    try:
        from nixl import _api
    except ImportError as error:  # built for another CUDA than torch's
        raise StartupError(f"--carrier nixl is not possible here: {error}") from error
    finally:
        # It configures logging for the whole process, and sends its own lines to stdout.
        logging.raiseExceptions = before
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    if not os.environ.get("NIXL_LOG_LEVEL"):
        logger.setLevel(logging.WARNING)
    return _api


@dataclass(frozen=True, slots=True)
class Registered:
    """Memory that the network may reach. ``buffer`` keeps it from being unmapped."""

    place: NixlPlace
    descriptors: Any
    buffer: Any


class ReadHandle:
    """A read, which may write into our memory until it is over."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle

    def finished(self) -> bool:
        """True if all bytes are here. Raises ``NixlError`` when the read has failed."""
        try:
            state = self._agent.check_xfer_state(self._handle)
        except Exception as error:
            raise NixlError(f"a read failed: {error}") from None
        if state not in ("DONE", "PROC"):
            raise NixlError(f"a read failed: {state}")
        return bool(state == "DONE")

    def over(self) -> bool:
        """True if nothing is written any longer: the read has finished or failed."""
        try:
            return self.finished()
        except NixlError:
            return True

    def release(self) -> None:
        with contextlib.suppress(Exception):  # nothing is left to release if the peer is gone
            self._agent.release_xfer_handle(self._handle)


class NixlAgent:
    """Registers our memory, and reads that of agents which were added."""

    def __init__(self, name: str) -> None:
        """Find the network devices, which takes up to a second. Raises ``StartupError``."""
        library = load()
        options = library.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        try:
            self._agent: Any = library.nixl_agent(name, options)
        except Exception as error:  # the library's own types, which share no base
            raise StartupError(f"--carrier nixl is not possible here: {error}") from error
        self._registered: list[Registered] = []

    def register(self, memory: memoryview) -> Registered:
        """Let the network reach this memory until ``close``. Raises ``StartupError``."""
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        address = ctypes.addressof(buffer)
        try:
            descriptors = self._agent.register_memory([(address, len(memory), 0, "")], _MEMORY)
            described = self._agent.get_partial_agent_metadata(descriptors, True, [_BACKEND])
        except Exception as error:  # mostly the limit of locked memory
            raise StartupError(
                f"NIXL cannot register {len(memory)} bytes: {error}; see ulimit -l"
            ) from error
        if len(described) > MAX_DESCRIPTION_BYTES:
            raise StartupError(
                f"NIXL describes this machine in {len(described)} bytes; the limit is "
                f"{MAX_DESCRIPTION_BYTES}: name fewer network devices in UCX_NET_DEVICES"
            )
        place = NixlPlace(bytes(described), address, len(memory))
        self._registered.append(Registered(place, descriptors, buffer))
        return self._registered[-1]

    def add(self, name: str, description: bytes) -> None:
        """Add the memory of a peer. Raises ``NixlError``."""
        try:
            found = self._agent.add_remote_agent(description)
        except Exception as error:
            raise NixlError(f"NIXL cannot use the description of {name}: {error}") from None
        text = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        if text != name:
            self.remove(found)
            raise NixlError(f"NIXL was given the description of {text!r} as that of {name!r}")

    def remove(self, name: str) -> None:
        """Disconnect from a peer. Its reads should be over."""
        with contextlib.suppress(Exception):  # it may have gone by itself
            self._agent.remove_remote_agent(name)

    def read(self, name: str, theirs: int, ours: int, length: int) -> ReadHandle:
        """Begin to read from one address into another. Raises ``NixlError``."""
        local = self._agent.get_xfer_descs([(ours, length, 0)], _MEMORY)
        remote = self._agent.get_xfer_descs([(theirs, length, 0)], _MEMORY)
        try:
            handle = self._agent.initialize_xfer("READ", local, remote, name)
            self._agent.transfer(handle)
        except Exception as error:
            raise NixlError(f"NIXL cannot read {length} bytes of {name}: {error}") from None
        return ReadHandle(self._agent, handle)

    def progress(self) -> None:
        """Serve the reads of peers, where the network does not read our memory by itself."""
        with contextlib.suppress(Exception):  # a peer that is gone is noticed by its connection
            self._agent.get_new_notifs()

    def close(self) -> None:
        for each in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(each.descriptors)
        self._registered.clear()
        self._agent = None

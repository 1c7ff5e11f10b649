"""An agent of NIXL, which reads other processes' memory over RDMA; the only module that uses NIXL.

The owner of memory registers it and sends a description; an agent that adds the description can
read the memory. NIXL's progress thread would keep a core busy forever, so it is off: while reads
are in flight, both ends must call ``progress`` or ``ReadHandle.finished`` often. Nothing here
waits, and everything belongs to one thread.

The library parses descriptions in C++, and its keys let a peer write as well as read, so it is only
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
    """An agent's registered memory, for peers."""

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
    """Load the library, which takes seconds the first time. Raises ``StartupError``."""
    check_installed()
    before = logging.raiseExceptions
    try:
        from nixl import _api
    except ImportError as error:  # built for another CUDA than torch's
        raise StartupError(f"--carrier nixl is not possible here: {error}") from error
    finally:
        # It configures the logging of the whole process, and logs to stdout.
        logging.raiseExceptions = before
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    if not os.environ.get("NIXL_LOG_LEVEL"):
        logger.setLevel(logging.WARNING)
    return _api


@dataclass(frozen=True, slots=True)
class Registration:
    """Memory that the network may access. ``buffer`` keeps it mapped."""

    place: NixlPlace
    descriptors: Any
    buffer: Any


class ReadHandle:
    """A read, which may write to our memory until it is over."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle

    def finished(self) -> bool:
        """True if all bytes have arrived. Raises ``NixlError`` if the read has failed."""
        try:
            state = self._agent.check_xfer_state(self._handle)
        except Exception as error:
            raise NixlError(f"a read failed: {error}") from None
        if state not in ("DONE", "PROC"):
            raise NixlError(f"a read failed: {state}")
        return bool(state == "DONE")

    def over(self) -> bool:
        """True if the read has finished or failed, so that it writes no more."""
        try:
            return self.finished()
        except NixlError:
            return True

    def release(self) -> None:
        with contextlib.suppress(Exception):  # fails if the peer is gone
            self._agent.release_xfer_handle(self._handle)


class NixlAgent:
    """Registers our memory, and reads the memory of added agents."""

    def __init__(self, name: str) -> None:
        """Find the network devices, which takes up to a second. Raises ``StartupError``."""
        library = load()
        options = library.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        try:
            self._agent: Any = library.nixl_agent(name, options)
        except Exception as error:  # the library's own types, which share no base
            raise StartupError(f"--carrier nixl is not possible here: {error}") from error
        self._registrations: list[Registration] = []

    def register(self, memory: memoryview) -> Registration:
        """Let the network access this memory until ``close``. Raises ``StartupError``."""
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        address = ctypes.addressof(buffer)
        try:
            descriptors = self._agent.register_memory([(address, len(memory), 0, "")], _MEMORY)
            description = self._agent.get_partial_agent_metadata(descriptors, True, [_BACKEND])
        except Exception as error:  # mostly the limit of locked memory
            raise StartupError(
                f"NIXL cannot register {len(memory)} bytes: {error}; see ulimit -l"
            ) from error
        if len(description) > MAX_DESCRIPTION_BYTES:
            raise StartupError(
                f"NIXL describes this machine in {len(description)} bytes; the limit is "
                f"{MAX_DESCRIPTION_BYTES}: name fewer network devices in UCX_NET_DEVICES"
            )
        place = NixlPlace(bytes(description), address, len(memory))
        self._registrations.append(Registration(place, descriptors, buffer))
        return self._registrations[-1]

    def add(self, name: str, description: bytes) -> None:
        """Add the memory of a peer. Raises ``NixlError``."""
        try:
            result = self._agent.add_remote_agent(description)
        except Exception as error:
            raise NixlError(f"NIXL cannot use the description of {name}: {error}") from None
        text = result.decode(errors="replace") if isinstance(result, bytes) else str(result)
        if text != name:
            self.remove(result)
            raise NixlError(f"the description of {name!r} is for {text!r}")

    def remove(self, name: str) -> None:
        """Disconnect from a peer. Its reads should be over."""
        with contextlib.suppress(Exception):  # it may be gone already
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
        """Serve reads by peers, on networks that need the CPU for it."""
        with contextlib.suppress(Exception):  # the connection reports a lost peer
            self._agent.get_new_notifs()

    def close(self) -> None:
        for each in self._registrations:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(each.descriptors)
        self._registrations.clear()
        self._agent = None

"""The process group of a node's ranks."""

from __future__ import annotations

import datetime
import fcntl
import os
import queue
import re
import socket
import struct
import threading
import time
from typing import Any

import torch

from ...errors import StartupError
from ...host_port import is_loopback, split_host_port
from ...kv.planning import CUDA
from ...models.parallel import TensorParallel
from ..messages import RankSettings

RENDEZVOUS_SECONDS = 60
# For all parts of a rendezvous: the store, NCCL, and gloo.
LIMIT_SECONDS = 150
_LOOPBACKS = {"lo", "lo0"}  # Linux and macOS
_TCP = "tcp://"
_SIOCGIFADDR = 0x8915
# As in torch's c10d: place, kind, version.
_NCCL_ERROR = re.compile(
    r"NCCL error in: [^,]*, (?P<kind>[^,(]*[^,( ])[^,]*(?:, NCCL version(?P<version> [\d.]+))?"
)
_LAST_ERROR = "Last error:"


def meet(settings: RankSettings, device: torch.device) -> TensorParallel:
    """Wait for the other ranks, if there are any. Raises ``StartupError``."""
    if settings.size == 1:
        return TensorParallel()
    interface = _use_interface(settings.rendezvous)
    outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def begin() -> None:
        try:
            outcome.put(_begin(settings, device))
        except Exception as error:
            outcome.put(error)

    start = time.monotonic()
    # In a thread, because NCCL may wait without end.
    threading.Thread(target=begin, name="rendezvous", daemon=True).start()
    try:
        control = outcome.get(timeout=LIMIT_SECONDS)
    except queue.Empty:
        control = TimeoutError(f"{_backend(device)} still waits for a rank")
    if isinstance(control, StartupError):
        raise control
    if isinstance(control, Exception):
        raise StartupError(
            f"rank {settings.rank} did not meet the other {settings.size - 1} at "
            f"{settings.rendezvous}, after {time.monotonic() - start:.1f} s: {_reason(control)}"
            f"{_remedy(settings, device, interface)}"
        )
    return TensorParallel(settings.rank, settings.size, control=control)


def _begin(settings: RankSettings, device: torch.device) -> Any:
    """Meet the other ranks. Returns a group for messages between processes."""
    torch.distributed.init_process_group(
        _backend(device),
        **_meeting(settings),
        rank=settings.rank,
        world_size=settings.size,
        timeout=datetime.timedelta(seconds=RENDEZVOUS_SECONDS),
        # Makes NCCL connect at once: missing libraries are noticed now, and its memory is
        # allocated before the cache is planned.
        device_id=device if device.type == CUDA else None,
    )
    return torch.distributed.new_group(backend="gloo")


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == CUDA else "gloo"


def _reason(error: Exception) -> str:
    """The problem in one line: of NCCL the version, the kind and the "Last error", which torch
    puts below the place in its code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    nccl = _NCCL_ERROR.search(lines[0])
    if nccl is None:
        return lines[0]
    last = next((i for i, line in enumerate(lines) if line.startswith(_LAST_ERROR)), len(lines))
    details = " ".join(lines[last:]).removeprefix(_LAST_ERROR).strip()
    return f"NCCL{nccl['version'] or ''}: {nccl['kind']}" + (f": {details}" if details else "")


def _remedy(settings: RankSettings, device: torch.device, interface: str) -> str:
    remedies = []
    if _is_remote(settings.rendezvous):
        remedies.append(
            f"the hosts must reach each other at all ports of {interface or 'an interface'}, or of "
            f"the one that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name"
        )
    if device.type == CUDA:
        name = os.environ.get("NCCL_SOCKET_IFNAME", "not set")
        remedies.append(
            f"NCCL_DEBUG=INFO logs more, NCCL_SOCKET_IFNAME ({name}) selects the interface, and "
            f"NCCL_P2P_DISABLE=1 does without peer access between GPUs"
        )
    return "".join(f"; {remedy}" for remedy in remedies)


def _is_remote(rendezvous: str) -> bool:
    return rendezvous.startswith(_TCP)


def _meeting(settings: RankSettings) -> dict[str, Any]:
    """Where the ranks meet: at a file on one host, or at rank 0, which listens at the address of
    the rendezvous only. Raises ``StartupError``."""
    if not _is_remote(settings.rendezvous):
        return {"init_method": settings.rendezvous}
    host, port = split_host_port(settings.rendezvous.removeprefix(_TCP))
    listener = _listen(host, int(port)) if settings.rank == 0 else None
    store = torch.distributed.TCPStore(
        host,
        int(port),
        settings.size,
        settings.rank == 0,
        datetime.timedelta(seconds=RENDEZVOUS_SECONDS),
        master_listen_fd=listener,
    )
    return {"store": store}


def _listen(host: str, port: int) -> int:
    """The descriptor of a listening socket. Raises ``StartupError``."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family).detach()
    except OSError as error:
        raise StartupError(
            f"rank 0 cannot listen on port {port} of {host}, the one after --master-port: "
            f"{error.strerror or error}; choose another --master-port"
        ) from None


def _use_interface(rendezvous: str) -> str:
    """Let the ranks listen for each other on one interface: loopback if they share a host, else the
    one on the route to rank 0; returns its name, if it is known.

    By default gloo takes the address of the host's name, and NCCL any interface. Variables that are
    already set stay.
    """
    names = [name for _, name in socket.if_nameindex()]
    if _is_remote(rendezvous):
        host, port = split_host_port(rendezvous.removeprefix(_TCP))
        name = _interface_to(host, int(port), names)
    else:
        name = next((name for name in names if name in _LOOPBACKS), "")
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # and none that begins so
    return name


def _interface_to(host: str, port: int, names: list[str]) -> str:
    """The interface on the route to a host; empty if it has no address of its own there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            source = str(probe.getsockname()[0])
            if is_loopback(source):
                return next((name for name in names if name in _LOOPBACKS), "")
            return next((name for name in names if _address_of(probe, name) == source), "")
    except OSError:
        return ""


def _address_of(probe: socket.socket, name: str) -> str:
    """The IPv4 address of an interface, by Linux's ioctl; empty without one."""
    try:
        reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(reply[20:24])

"""The process group of a node's ranks."""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
import struct
from typing import Any

import torch

from ...errors import StartupError
from ...host_port import is_loopback, split_host_port
from ...kv.planning import CUDA
from ...models.parallel import TensorParallel
from ..messages import RankSettings

RENDEZVOUS_SECONDS = 60
_LOOPBACKS = {"lo", "lo0"}  # Linux and macOS
_TCP = "tcp://"
_SIOCGIFADDR = 0x8915


def meet(settings: RankSettings, device: torch.device) -> TensorParallel:
    """Wait for the other ranks, if there are any. Raises ``StartupError``."""
    if settings.size == 1:
        return TensorParallel()
    interface = _use_interface(settings.rendezvous)
    try:
        torch.distributed.init_process_group(
            "nccl" if device.type == CUDA else "gloo",
            **_meeting(settings),
            rank=settings.rank,
            world_size=settings.size,
            timeout=datetime.timedelta(seconds=RENDEZVOUS_SECONDS),
            # Makes NCCL connect at once: missing libraries are noticed now, and its memory is
            # allocated before the cache is planned.
            device_id=device if device.type == CUDA else None,
        )
        control = torch.distributed.new_group(backend="gloo")
    except (RuntimeError, ValueError) as error:
        hint = ""
        if _is_remote(settings.rendezvous):
            hint = (
                f"; the hosts must reach each other at all ports of {interface or 'an interface'}, "
                f"or of the one that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name"
            )
        raise StartupError(
            f"rank {settings.rank} did not meet the other {settings.size - 1} at "
            f"{settings.rendezvous} within {RENDEZVOUS_SECONDS} s: {str(error).splitlines()[0]}"
            f"{hint}"
        ) from None
    return TensorParallel(settings.rank, settings.size, control=control)


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
        found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(found[20:24])

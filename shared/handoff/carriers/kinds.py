"""The kinds of carriers, best first: the only module that names them."""

from __future__ import annotations

from .base import Carrier
from .cuda_ipc.carrier import CudaIpcCarrier
from .nixl.carrier import NixlCarrier
from .shared_memory.carrier import SharedMemoryCarrier
from .tcp.carrier import TcpCarrier

CARRIERS: tuple[type[Carrier], ...] = (
    NixlCarrier,
    CudaIpcCarrier,
    SharedMemoryCarrier,
    TcpCarrier,
)
NAMES = tuple(carrier.name for carrier in CARRIERS)


def check(setting: str, *, insecure: bool) -> None:
    """Check ``--carrier`` before anything is loaded. Raises ``UsageError`` or ``StartupError``."""
    for carrier in CARRIERS:
        if carrier.name == setting:
            carrier.check(insecure=insecure)

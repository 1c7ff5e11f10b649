"""Options of the handoff."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..host_port import bracketed, split_host_port
from . import fields
from .fields import option, split_addresses
from .limits import MAX_PEERS, MAX_PEERS_LIMIT


@dataclass(frozen=True, kw_only=True)
class HandoffConfig:
    """Options of the handoff: ports, carriers, thresholds, limits and timeouts."""

    kv_host: str = option(
        "127.0.0.1",
        "--kv-host",
        "Address on which the data plane of a prefill node listens.",
        host=True,
    )
    kv_port: int = option(
        0,
        "--kv-port",
        "First port of a prefill node's data plane; each rank uses two (0: any free ports).",
        minimum=0,
        maximum=65000,
    )
    kv_advertise: str | None = option(
        None,
        "--kv-advertise",
        "host:port at which decode nodes reach the first port of a prefill node's data plane, if "
        "it differs from the one that it listens on; further ports follow it.",
    )
    carrier: str = option(
        "auto",
        "--carrier",
        "How KV is transferred between ranks. auto: CUDA IPC between GPUs or shared memory on one "
        "host, otherwise TCP. nixl (RDMA where available) must be set on both sides.",
        choices=("auto", "cuda_ipc", "shared_memory", "tcp", "nixl"),
    )
    insecure: bool = fields.insecure()
    staging_bytes: int = option(
        32 << 20, "--staging-bytes", "Staging memory per rank, in bytes.", minimum=1 << 20
    )
    window_bytes: int | None = option(
        None,
        "--window-bytes",
        "Bytes of one transfer in flight (default: 8 MiB; 128 MiB from GPU to GPU).",
        minimum=1 << 16,
    )
    prefill_threshold: int | None = option(
        None,
        "--prefill-threshold",
        "Prefill prompts with fewer uncached tokens locally, and all others remotely (default: "
        "estimated for each prompt from measured rates; 64 until they are known).",
        minimum=1,
    )
    lease_seconds: float = option(
        10.0,
        "--lease-seconds",
        "Seconds that a prefill node keeps KV without a renewal.",
        minimum=0.5,
    )
    transfer_timeout: float = option(
        120.0,
        "--transfer-timeout",
        "Seconds that a prompt may wait while the prefill node computes neither it nor prompts "
        "ahead of it. A transfer that makes progress is only limited by its request's deadline.",
        minimum=0.1,
    )
    progress_timeout: float = option(
        2.5,
        "--progress-timeout",
        "End an attempt after this many seconds without a sign of life from the other side; peers "
        "send one every second.",
        minimum=1.5,
    )
    max_peers: int = option(
        MAX_PEERS,
        "--max-peers",
        "Maximum number of prefill nodes that a decode node greets, of decode nodes that a prefill "
        "node admits, and of ranks connected to one of its ranks.",
        minimum=1,
        maximum=MAX_PEERS_LIMIT,
    )

    def kv_port_of(self, rank: int) -> int:
        """The first of a rank's two ports, bulk and control; 0 means any."""
        return self.kv_port and self.kv_port + 2 * rank

    def kv_advertised(self, rank: int) -> tuple[str, str] | None:
        """The endpoints to announce for a rank's two ports; ``None`` if they are those that it
        listens on. Raises ``UsageError``.
        """
        if self.kv_advertise is None:
            return None
        addresses = split_addresses("--kv-advertise", self.kv_advertise)
        if len(addresses) != 1:
            raise UsageError(f"--kv-advertise {self.kv_advertise!r}: a node has one first port")
        host, port = split_host_port(addresses[0])
        first = int(port) + 2 * rank
        if not 0 < int(port) <= first < 65535:
            raise UsageError(f"--kv-advertise {self.kv_advertise!r}: rank {rank} has no port")
        host = bracketed(host)
        return f"tcp://{host}:{first}", f"tcp://{host}:{first + 1}"

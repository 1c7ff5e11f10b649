"""Options of a node whose ranks are on several hosts."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..host_port import is_wildcard, join_host_port
from .fields import option


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """Options of a node whose ranks are on several hosts, each of which runs the same command with
    another ``node_rank``."""

    nnodes: int = option(
        1,
        "--nnodes",
        "Number of hosts among which the ranks of one node are divided. Each runs the same command "
        "with another --node-rank, and all need a cluster token.",
        minimum=1,
        maximum=64,
    )
    node_rank: int = option(
        0,
        "--node-rank",
        "Number of this host among --nnodes. Host 0 has the head; the others only run ranks, and "
        "end with the head.",
        minimum=0,
        maximum=63,
    )
    master_addr: str | None = option(
        None,
        "--master-addr",
        "Address of host 0, at which it listens for the others.",
        host=True,
    )
    master_port: int = option(
        29501,
        "--master-port",
        "Port of host 0 at which the others join; the ranks meet at the next one.",
        minimum=1,
        maximum=65534,
    )
    headless: bool = option(
        False, "--headless", "Only run ranks, as every host with a --node-rank above 0 does anyway."
    )
    join_timeout: float = option(
        600.0,
        "--join-timeout",
        "Seconds that the hosts of --nnodes wait for each other, once each has the model.",
        minimum=0.01,
    )

    @property
    def several_hosts(self) -> bool:
        return self.nnodes > 1

    @property
    def master(self) -> str:
        """host:port at which other hosts join."""
        return join_host_port(self.master_addr or "", self.master_port)

    @property
    def rendezvous(self) -> str:
        """The address at which the ranks meet."""
        return f"tcp://{join_host_port(self.master_addr or '', self.master_port + 1)}"

    def check_hosts(self) -> None:
        """Raise ``UsageError`` for contradictory options."""
        if self.node_rank >= self.nnodes:
            raise UsageError(
                f"--node-rank {self.node_rank} with --nnodes {self.nnodes}: hosts are numbered "
                f"from 0 to {self.nnodes - 1}"
            )
        if self.headless and self.node_rank == 0:
            raise UsageError(
                "--headless is for hosts with a --node-rank above 0; host 0 has the head"
            )
        if self.several_hosts and (self.master_addr is None or is_wildcard(self.master_addr)):
            raise UsageError(
                f"--nnodes {self.nnodes} needs --master-addr, the address of host 0 at which the "
                f"others reach it"
            )

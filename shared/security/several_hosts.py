"""What a node on several hosts needs: a cluster token, and a network that is trusted."""

from __future__ import annotations

import logging

from ..config import EngineConfig, HandoffConfig
from ..errors import UsageError
from ..host_port import is_loopback
from ..unix_sockets import folder_of
from .credentials import Credentials

log = logging.getLogger("tandem.security")


def check_hosts(config: EngineConfig, handoff: HandoffConfig, credentials: Credentials) -> None:
    """Raise ``UsageError`` if the options do not suit a node on several hosts."""
    if not config.several_hosts:
        return
    hosts = f"--nnodes {config.nnodes}"
    if not credentials.tokens:
        raise UsageError(
            f"{hosts} needs a cluster token, with which hosts recognise each other: give all of "
            f"them the same --cluster-token-file, or TANDEM_CLUSTER_TOKEN"
        )
    if handoff.kv_advertise is not None:
        raise UsageError(
            f"--kv-advertise is one host's address, and {hosts} are several; leave it out: ranks "
            f"on other hosts announce the address from which their host reaches --master-addr"
        )
    if folder_of(handoff.kv_host):
        raise UsageError(
            f"{hosts} need a network: sockets in {folder_of(handoff.kv_host)} are this host's only"
        )
    if is_loopback(config.master_addr or ""):
        return
    if not handoff.insecure:
        raise UsageError(
            f"--master-addr {config.master_addr}: what the ranks of several hosts exchange is "
            f"neither encrypted nor authenticated (NCCL and gloo cannot); add --insecure if the "
            f"network between them is trusted"
        )
    log.warning(
        "--master-addr %s: what ranks exchange (NCCL, gloo) is open to the network (--insecure); "
        "hosts join with the cluster token%s",
        config.master_addr,
        " and TLS" if credentials.encrypted else ", without TLS",
    )

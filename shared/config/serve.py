"""Options of ``tandem serve``: which processes it starts."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import option


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of ``tandem serve``: the processes to start."""

    pd_server: bool = option(
        False, "--pd-server", "Start a prefill node only, which listens at --pd-url."
    )
    pd_client: bool = option(
        False,
        "--pd-client",
        "Start a router and a decode node that use the prefill nodes at --pd-url.",
    )
    interactive: bool = option(
        False, "--interactive", "Chat on this terminal while it serves (--i is short for it)."
    )
    prompts: str | None = option(
        None,
        "--prompts",
        "Answer these messages, separated by '|', instead of serving until Ctrl-C.",
    )
    prefill_nodes: int = option(
        0,
        "--prefill-nodes",
        "Number of prefill nodes to start on this machine.",
        minimum=0,
        maximum=64,
    )
    decode_nodes: int = option(
        1,
        "--decode-nodes",
        "Number of decode nodes to start on this machine.",
        minimum=1,
        maximum=64,
    )
    share_devices: bool = option(
        False,
        "--share-devices",
        "Let nodes share GPUs, in equal parts of the memory, where there are fewer than they need.",
    )
    # Any free port by default: its own nodes are told the port.
    registry_port: int = option(
        0,
        "--registry-port",
        "Port at which nodes of other commands join (0: any free port, shown at the start).",
        minimum=0,
        maximum=65535,
    )
    log_dir: str = option(
        "logs",
        "--log-dir",
        "Folder for logs. Each start gets a folder in it, and the last ten are kept; the link "
        "'latest' points to the newest. Each process has a file; one longer than 64 MiB becomes "
        "NAME.log.1.",
    )
    start_timeout: float | None = option(
        None,
        "--start-timeout",
        "Seconds until all processes, or a restarted node, must be ready (default: three times "
        "--load-timeout plus an hour for a download, so that a node's own limits apply).",
        minimum=1.0,
    )

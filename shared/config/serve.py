"""Options of ``tandem serve``: which processes it starts."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import option


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of ``tandem serve``: the processes to start."""

    pd_server: bool = option(
        False, "--pd-server", "Start only a prefill node, which listens at --pd-url."
    )
    pd_client: bool = option(
        False,
        "--pd-client",
        "Start a router and a decode node that use the prefill nodes at --pd-url.",
    )
    interactive: bool = option(
        False, "--interactive", "Chat on this terminal during serving (short form: --i)."
    )
    prompts: str | None = option(
        None,
        "--prompts",
        "Reply to these messages, separated by '|', instead of serving until Ctrl-C.",
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
        "Let nodes share GPUs, with equal parts of the memory, if there are too few.",
    )
    prefill_gpu_share: int | None = option(
        None,
        "--prefill-gpu-share",
        "Percentage of a shared GPU's processors for prefill nodes (default: 100, as decode nodes "
        "always have). Needs NVIDIA's MPS.",
        minimum=1,
        maximum=100,
    )
    # Any free port by default: the launcher passes it to its own nodes.
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
        "Folder for logs. Each start has its own folder in it; the last ten are kept, and the link "
        "'latest' points to the newest. Each process has a file; beyond 64 MiB it is moved to "
        "NAME.log.1.",
    )
    start_timeout: float | None = option(
        None,
        "--start-timeout",
        "Seconds within which all processes, or a restarted node, must be ready (default: three "
        "times --load-timeout plus an hour for a download, so that a node's own limits apply).",
        minimum=1.0,
    )

"""Options of ``tandem serve``: which processes it starts."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import option


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Which processes ``tandem serve`` starts."""

    pd_server: bool = option(
        False, "--pd-server", "Start a prefill node only; --pd-url is where it listens."
    )
    pd_client: bool = option(
        False,
        "--pd-client",
        "Start a router and a decode node that use the prefill nodes of --pd-url.",
    )
    prefill_nodes: int = option(
        0, "--prefill-nodes", "Prefill nodes to start on this machine.", minimum=0, maximum=64
    )
    decode_nodes: int = option(
        1, "--decode-nodes", "Decode nodes to start on this machine.", minimum=1, maximum=64
    )
    # Its own parts are told the port, so two clusters on one machine need not agree on them.
    registry_port: int = option(
        0,
        "--registry-port",
        "Port that nodes of other commands join at (0: any free one, which the greeting shows).",
        minimum=0,
        maximum=65535,
    )
    log_dir: str = option("logs", "--log-dir", "Folder for one log file a process.")
    start_timeout: float | None = option(
        None,
        "--start-timeout",
        "Seconds that all processes may take to be ready, and a node that is started again "
        "(default: three times --load-timeout and an hour for a download, so that only a node's "
        "own limits end its load).",
        minimum=1.0,
    )

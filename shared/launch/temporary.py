"""A cluster for the use of a single command, which starts and ends it."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import (
    EngineConfig,
    HandoffConfig,
    RouterConfig,
    SecurityConfig,
    ServeConfig,
    TelemetryConfig,
)
from ..config.client import ConnectionConfig

Values = dict[str, Any]

# The cluster is not drained at the end: its only client has left.
NO_DRAIN = {"drain_timeout": 0.0, "shutdown_delay": 0.0}


def of_engine(engine: EngineConfig, logs: Path) -> Values:
    """The options of a cluster for one engine; all others are defaults."""
    configs = (TelemetryConfig, SecurityConfig, HandoffConfig, RouterConfig, ServeConfig)
    values = {item.name: item.default for config in configs for item in fields(config)}
    own = {"port": 0, "log_dir": str(logs), "access_log": False, "reasoning_parser": "auto"}
    return values | vars(engine) | own | NO_DRAIN


def for_own_use(values: Values, *, fixed_port: bool) -> tuple[Values, ConnectionConfig]:
    """The options of a cluster and of this command's connection to it: with a generated key if
    clients need one, and on a free port unless ``fixed_port``."""
    values = values | NO_DRAIN | ({} if fixed_port else {"port": 0})
    if values["reasoning_parser"] == "none":
        values["reasoning_parser"] = "auto"
    key = None
    if values["api_key"] is not None or values["api_key_file"] is not None:
        key = secrets.token_hex(16)
        values["api_key"] = ",".join(filter(None, (values["api_key"], f"this-terminal: {key}")))
    return values, ConnectionConfig(api_key=key)


def mcp_labels(values: Values) -> str | None:
    """The labels of the MCP servers of ``--mcp-command`` and ``--mcp-config``; the router has
    checked the file."""
    labels = ["mcp"] if values["mcp_command"] is not None else []
    if values["mcp_config"] is not None:
        labels += json.loads(Path(values["mcp_config"]).read_text()).get("mcpServers", {})
    return ",".join(labels) or None


@contextlib.contextmanager
def log_folder() -> Iterator[Path]:
    """A log folder that is removed with the cluster, but kept if the cluster fails."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-"))
    try:
        yield folder
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def end_on_signals() -> None:
    """Let SIGTERM, or a closed terminal, end this process with its cleanup."""

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # both the shell and the kernel send it
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end)

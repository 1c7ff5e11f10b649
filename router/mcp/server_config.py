"""The configuration of MCP servers: --mcp-command, and the file of --mcp-config, in the format that
other programs share."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...shared.config.mcp import McpConfig
from ...shared.errors import UsageError

COMMAND_LABEL = "mcp"
MAX_SERVERS = 64
MAX_FILE_BYTES = 1 << 20
_LABEL = re.compile(r"[\w .-]{1,64}")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_KEYS = ("command", "args", "env", "cwd", "url", "headers", "type", "disabled")
_STDIO_TYPES, _HTTP_TYPES = ("stdio",), ("http", "streamable-http", "streamable_http")


@dataclass(frozen=True, kw_only=True)
class McpServerConfig:
    """One server: a program to start, or a URL. ``repr`` leaves out what may be secret."""

    label: str
    command: str = ""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def read_servers(
    config: McpConfig, environment: Mapping[str, str] = os.environ
) -> tuple[McpServerConfig, ...]:
    """The servers of a router. Raises ``UsageError``, without values of the file."""
    servers = []
    if config.mcp_command is not None:
        args = tuple(config.mcp_args.split(",")) if config.mcp_args else ()
        servers.append(McpServerConfig(label=COMMAND_LABEL, command=config.mcp_command, args=args))
    elif config.mcp_args is not None:
        raise UsageError("--mcp-args needs --mcp-command")
    if config.mcp_config is not None:
        servers += _read_file(Path(config.mcp_config), environment)
    labels = [server.label for server in servers]
    if duplicates := {label for label in labels if labels.count(label) > 1}:
        raise UsageError(f"--mcp-config: {duplicates.pop()!r} is the label of --mcp-command")
    if len(servers) > MAX_SERVERS:
        raise UsageError(f"--mcp-config has {len(servers)} servers; the limit is {MAX_SERVERS}")
    return tuple(servers)


def _read_file(path: Path, environment: Mapping[str, str]) -> list[McpServerConfig]:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MAX_FILE_BYTES))
    except OSError as error:
        raise UsageError(f"--mcp-config: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--mcp-config: {path} is not valid JSON") from None
    servers = document.get("mcpServers") if isinstance(document, dict) else None
    if not isinstance(servers, dict):
        raise UsageError(f"--mcp-config: {path} must have an object 'mcpServers'")
    configs = [
        _server(label, item, f"{path}: {label!r:.70}", environment)
        for label, item in servers.items()
    ]
    return [config for config in configs if config is not None]


def _server(
    label: str, item: Any, place: str, environment: Mapping[str, str]
) -> McpServerConfig | None:
    if not _LABEL.fullmatch(label):
        raise UsageError(
            f"--mcp-config: {place}: a label has 1 to 64 letters, digits, '.', '-', '_'"
        )
    if not isinstance(item, dict):
        raise UsageError(f"--mcp-config: {place} must be an object")
    for key in item:
        if key not in _KEYS:
            keys = ", ".join(_KEYS)
            raise UsageError(f"--mcp-config: {place}: unknown key {key!r:.70}; known are {keys}")
    if item.get("disabled", False):
        return None
    _check_kind(item, place)
    reader = _Values(item, place, environment)
    return McpServerConfig(
        label=label,
        command=reader.text("command"),
        args=reader.texts("args"),
        env=reader.mapping("env"),
        cwd=reader.text("cwd") or None,
        url=reader.text("url"),
        headers=reader.mapping("headers"),
    )


def _check_kind(item: dict[str, Any], place: str) -> None:
    if ("command" in item) == ("url" in item):
        raise UsageError(f"--mcp-config: {place} must have either 'command' or 'url'")
    kinds = _STDIO_TYPES if "command" in item else _HTTP_TYPES
    if item.get("type", kinds[0]) not in kinds:
        raise UsageError(f"--mcp-config: {place}: 'type' must be {' or '.join(kinds)}")


class _Values:
    """Reads the values of one server and expands variables."""

    def __init__(self, item: dict[str, Any], place: str, environment: Mapping[str, str]) -> None:
        self._item = item
        self._place = place
        self._environment = environment

    def text(self, key: str) -> str:
        return self._expanded(self._item.get(key, ""), key)

    def texts(self, key: str) -> tuple[str, ...]:
        values = self._item.get(key, [])
        if not isinstance(values, list):
            raise UsageError(f"--mcp-config: {self._place}: {key!r} must be an array of strings")
        return tuple(self._expanded(value, key) for value in values)

    def mapping(self, key: str) -> dict[str, str]:
        values = self._item.get(key, {})
        if not isinstance(values, dict):
            raise UsageError(f"--mcp-config: {self._place}: {key!r} must be an object of strings")
        return {name: self._expanded(value, key) for name, value in values.items()}

    def _expanded(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise UsageError(f"--mcp-config: {self._place}: {key!r} must have strings as values")
        return _VARIABLE.sub(lambda match: self._variable(match[1]), value)

    def _variable(self, name: str) -> str:
        if name not in self._environment:
            raise UsageError(f"--mcp-config: {self._place}: the variable {name} is not set")
        return self._environment[name]

"""Dataclass fields that are command-line options, and the fields that several parts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import inf
from typing import Any

from ..errors import UsageError


def option(
    default: Any,
    flags: str,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    environment: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a flag; of ``flags``, the first is its name.

    ``environment`` are variables beside ``TANDEM_...``, which goes first. An empty variable of a
    ``secret`` is not the same as none.
    """
    metadata = {
        "flags": flags.split(),
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "environment": environment,
        "secret": secret,
    }
    return field(default=default, metadata=metadata)


def check_option(about: Mapping[str, Any], value: Any) -> None:
    """Raise ``UsageError`` for a value that an option does not take; ``about`` is its metadata."""
    flag, choices = about["flags"][0], about["choices"]
    if choices and value not in choices:
        raise UsageError(f"{flag} {value!r} is not supported; use {' or '.join(choices)}")
    low, high = about["minimum"], about["maximum"]
    low, high = -inf if low is None else low, inf if high is None else high
    if isinstance(value, (int, float)) and not low <= value <= high:
        raise UsageError(f"{flag} {value!r} is out of range: it must be from {low:g} to {high:g}")


def served_model_name() -> Any:
    """Nodes announce the name, and a router may insist on one: the same flag for both."""
    return option(
        None, "--served-model-name", "Name that clients use; the model's own if not given."
    )


def ignore_config_keys() -> Any:
    """Nodes read the model's configuration, and so does a router that was told its model."""
    return option(
        None,
        "--ignore-config-keys",
        "Keys of the model's config.json to treat as if they were not there, separated by commas: "
        "for keys that are refused as unknown although they do not change what the model computes.",
    )


def insecure() -> Any:
    """Nodes and routers listen for each other: the same flag for both."""
    return option(
        False,
        "--insecure",
        "Listen for other machines without TLS and a cluster token: the network is trusted.",
    )


def stats_interval() -> Any:
    """Nodes and routers log the same line."""
    return option(
        10.0,
        "--stats-interval",
        "Seconds between two lines of the log about throughput, queues and KV usage, while there "
        "is work (0: none).",
        minimum=0.0,
    )


def split_names(value: str | None) -> frozenset[str]:
    """The names of a list with commas."""
    return frozenset(name.strip() for name in (value or "").split(",") if name.strip())


def split_addresses(flag: str, value: str | None) -> tuple[str, ...]:
    """``host:port[,host:port]`` as a tuple. Raises ``UsageError`` for anything else."""
    if value is None:
        return ()
    addresses = tuple(part.strip() for part in value.split(","))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 <= int(port) <= 65535:
            raise UsageError(f"{flag} {address!r} is not host:port, such as 127.0.0.1:8100")
    return addresses

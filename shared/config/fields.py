"""Dataclass fields that are command-line options, and fields that several parts share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import field
from math import inf
from typing import Any

from ..errors import UsageError
from ..host_port import split_host_port

_PORT = re.compile("[0-9]{1,5}")


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
    host: bool = False,
) -> Any:
    """A dataclass field that is also a flag; the first of ``flags`` is its name.

    ``environment`` lists variables besides ``TANDEM_...``, which takes precedence. For a
    ``secret``, an empty variable differs from a missing one. A ``host`` may be an IPv6 address in
    brackets."""
    metadata = {
        "flags": flags.split(),
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "environment": environment,
        "secret": secret,
        "host": host,
    }
    return field(default=default, metadata=metadata)


def check_option(about: Mapping[str, Any], value: Any) -> None:
    """Raise ``UsageError`` for an invalid value; ``about`` is the option's metadata."""
    flag, choices = about["flags"][0], about["choices"]
    if choices and value is not None and value not in choices:
        raise UsageError(f"{flag} {value!r} is not supported; use {' or '.join(choices)}")
    low, high = about["minimum"], about["maximum"]
    low, high = -inf if low is None else low, inf if high is None else high
    if isinstance(value, (int, float)) and not low <= value <= high:
        words = range_in_words(about["minimum"], about["maximum"])
        raise UsageError(f"{flag} {value!r} is out of range: it must be {words}")


def range_in_words(
    low: float | None, high: float | None, *, above: bool = False, below: bool = False
) -> str:
    """The range from ``low`` to ``high``, without the bounds themselves if ``above`` or
    ``below``."""
    first = None if low is None else f"{'more than' if above else 'at least'} {_format(low)}"
    last = None if high is None else f"{'less than' if below else 'at most'} {_format(high)}"
    if first and last and not above and not below:
        return f"from {_format(low)} to {_format(high)}"
    return " and ".join(filter(None, (first, last)))


def _format(bound: float | None) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def served_model_name() -> Any:
    """An option of nodes, which announce the name, and routers, which may require one."""
    return option(
        None,
        "--served-model-name",
        "Name of the model in requests and responses (default: the model's own). If there are "
        "several, separated by commas, or by spaces after MODEL, requests may use any of them, and "
        "responses have the first.",
    )


def served_names(value: str | None) -> tuple[str, ...]:
    """The names of ``--served-model-name``, the model's own first."""
    return tuple((value or "").replace(",", " ").split())


def ignore_config_keys() -> Any:
    """An option of nodes and of routers with ``--model``, which read the model's configuration."""
    return option(
        None,
        "--ignore-config-keys",
        "Keys of the model's config.json to ignore, separated by commas: those that are rejected "
        "as unknown although they do not affect the model's computation.",
    )


def hf_overrides() -> Any:
    """An option of nodes and of routers with ``--model``, which read the model's configuration."""
    return option(
        None,
        "--hf-overrides",
        "JSON object whose keys replace those of the model's config.json, as in vLLM. Nested "
        "configurations such as text_config are merged key by key.",
    )


def insecure() -> Any:
    """An option of nodes and routers."""
    return option(
        False,
        "--insecure",
        "Allow other machines to connect without TLS and a cluster token, on a trusted network.",
    )


def stats_interval() -> Any:
    """An option of nodes and routers."""
    return option(
        10.0,
        "--stats-interval",
        "Seconds between log lines about throughput, queues and KV usage, while there is work "
        "(0: none).",
        minimum=0.0,
    )


def split_names(value: str | None) -> frozenset[str]:
    """The names in a comma-separated list."""
    return frozenset(name.strip() for name in (value or "").split(",") if name.strip())


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """The JSON object of an option; empty if it is not given. Raises ``UsageError``."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{flag} {text[:200]!r} is not a JSON object")
    return value


def split_list(flag: str, value: str | None) -> tuple[str, ...]:
    """The words of a comma-separated list, or of a JSON list, vLLM's form. Raises
    ``UsageError``."""
    if not (value or "").lstrip().startswith("["):
        return tuple(word.strip() for word in (value or "").split(",") if word.strip())
    try:
        words = json.loads(value or "")
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UsageError(
            f"{flag} {value!r} is neither a JSON list of strings nor words with commas"
        )
    return tuple(words)


def split_addresses(flag: str, value: str | None) -> tuple[str, ...]:
    """``host:port[,host:port]`` as a tuple. Raises ``UsageError`` for anything else."""
    if value is None:
        return ()
    addresses = tuple(part.strip() for part in value.split(","))
    for address in addresses:
        host, port = split_host_port(address)
        if not host or not _PORT.fullmatch(port) or int(port) > 65535:
            raise UsageError(
                f"{flag} {address!r} is not host:port, such as 127.0.0.1:8100 or [::1]:8100"
            )
    return addresses

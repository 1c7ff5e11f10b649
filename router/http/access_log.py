"""The access log: one line for each request, without its text or its key."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...proto import tandem_pb2 as pb
from ...shared.telemetry.prefill_origin import LOCAL, REMOTE, known_reason
from ..usage import ServedPrompt, Usage

log = logging.getLogger("tandem.access")

# Logged for a client that disconnected before its status, as proxies do.
CLIENT_CLOSED_REQUEST = 499
# Open to everybody, because the machines that ask have no key.
PROBES = frozenset(("/live", "/health", "/ready", "/health/live", "/health/ready", "/ping"))
# Polled by machines all the time; their lines are for debugging.
POLLED = PROBES | {"/metrics", "/load", "/cluster/state"}
# The page for browsers, which has no data and needs no key, and its files.
PAGE = frozenset(("/", "/cluster"))
PAGE_FILES = "/web/"
LONGEST_PATH = 200


@dataclass(slots=True)
class AccessRecord:
    """One request's line, filled while it is served; ``log`` is called once, at its end.

    ``status`` is the status that was sent, 0 if none was. ``first_token_seconds`` and the total
    count from the parsed request, or from its head if it was never parsed.
    """

    method: str
    path: str
    status: int = 0
    error: str = ""  # the code of the error, also after a status of 200
    key: str = ""  # the name of the API key's owner
    model: str = ""
    output_tokens: int = 0
    first_token_seconds: float | None = None
    finish_reasons: Counter[str] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    gone: bool = False  # the client disconnected
    begun: float = field(default_factory=time.monotonic)

    @property
    def is_routine(self) -> bool:
        """True for what monitors and the page request all the time."""
        return self.path in POLLED or self.path.startswith(PAGE_FILES)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts so far."""
        return self.usage.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Of the prompt tokens, those that nodes had."""
        computed = [prompt.computed for prompt in self.usage.served]
        return sum(one.cached_tokens + one.remote_cached_tokens for one in computed)

    @property
    def tokens(self) -> int:
        """Tokens of the request so far; none before a node has it."""
        return self.prompt_tokens + self.output_tokens if self.usage.served else 0

    def log(self) -> None:
        level = logging.DEBUG if self.is_routine else logging.INFO
        if log.isEnabledFor(level):
            fields = self._fields()
            words = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
            status = self.status or (CLIENT_CLOSED_REQUEST if self.gone else 0)
            head = {"method": self.method, "path": self.path[:LONGEST_PATH], "status": status}
            extra = {"fields": head | fields, "words": words}
            log.log(level, "%s %s %d", *head.values(), extra=extra)

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"error": self.error, "client_gone": self.gone, "key": self.key}
        if self.model:
            served = self.usage.served
            fields |= {
                "model": self.model,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "output_tokens": self.output_tokens,
                "finish_reason": _counted(self.finish_reasons),
                "ttft_seconds": self.first_token_seconds,
                "decode_nodes": _names(name for prompt in served for name in prompt.nodes),
                "prefill_nodes": _names(prompt.computed.prefill_node for prompt in served),
                "prefilled": _counted(Counter(map(_prefilled, filter(_is_computed, served)))),
                "first_token": self.phases(),
            }
        fields["total_seconds"] = round(time.monotonic() - self.begun, 4)
        return {name: value for name, value in fields.items() if _is_shown(value)}

    def phases(self) -> dict[str, float]:
        """Seconds until the first token by phase; the router's are what the node's phases leave.
        Empty for several prompts, where it is unknown whose token was the first. Of several rounds
        they are the first one's."""
        served = self.usage.served
        if not served or any(one.number for one in served) or self.first_token_seconds is None:
            return {}
        spent = _seconds(served[0].computed.first_token)
        rest = max(0.0, self.first_token_seconds - sum(spent.values()))
        return {"router": round(rest, 4)} | spent if spent else {}


def prefill_origin(served: ServedPrompt) -> tuple[str, str]:
    """The side that prefilled a prompt, and the reason if it was its decode node."""
    if served.computed.prefill_node:
        return REMOTE, ""
    return LOCAL, known_reason(served.computed.local_reason)


def _is_computed(served: ServedPrompt) -> bool:
    return served.computed.prompt_tokens > 0


def _prefilled(served: ServedPrompt) -> str:
    where, reason = prefill_origin(served)
    return f"{where} ({reason})" if reason else where


def _seconds(spent: pb.FirstToken) -> dict[str, float]:
    return {
        item.name.removesuffix("_seconds"): round(seconds, 4)
        for item, seconds in spent.ListFields()
    }


def _is_shown(value: Any) -> bool:
    """Return whether a field is part of the line; numbers always are."""
    return value is not None and value is not False and value not in ("", [], {})


def _counted(counts: Counter[str]) -> str:
    return ", ".join(word if n == 1 else f"{word} x{n}" for word, n in counts.items())


def _names(names: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, names)))


def _word(value: Any) -> str:
    """A value as one word of a line for people."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return ",".join(value)
    if isinstance(value, dict):
        value = " ".join(f"{name} {seconds:.3f}" for name, seconds in value.items())
    return f'"{value}"' if " " in str(value) else str(value)

"""The access log: one line per request, without its text or its key."""

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

# nginx's status for a client that disconnected before the response.
CLIENT_CLOSED_REQUEST = 499
# Served without a key, because load balancers have none.
PROBES = frozenset(("/live", "/health", "/ready", "/health/live", "/health/ready", "/ping"))
# Polled continuously by machines, and logged at level DEBUG.
POLLED = PROBES | {"/metrics", "/load", "/cluster/state"}
# The web page and its files, which contain no data and need no key.
PAGE = frozenset(("/", "/cluster"))
PAGE_FILES = "/web/"
MAX_PATH = 200  # characters


@dataclass(slots=True)
class AccessRecord:
    """The log line of one request, filled while it is served; call ``log`` once, at its end.

    ``status`` is 0 until one is sent. ``first_token_seconds`` and the total count from ``start``:
    when the request was parsed, or its head arrived if it never was.
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
    client_gone: bool = False  # disconnected before the end
    start: float = field(default_factory=time.monotonic)

    @property
    def is_routine(self) -> bool:
        """True for paths that monitors and the page request continuously."""
        return self.path in POLLED or self.path.startswith(PAGE_FILES)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts so far."""
        return self.usage.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in caches of nodes."""
        prefills = [prompt.prefill for prompt in self.usage.served]
        return sum(one.cached_tokens + one.remote_cached_tokens for one in prefills)

    @property
    def tokens(self) -> int:
        """Prompt and output tokens so far; 0 until a node has admitted a prompt."""
        return self.prompt_tokens + self.output_tokens if self.usage.served else 0

    def log(self) -> None:
        level = logging.DEBUG if self.is_routine else logging.INFO
        if log.isEnabledFor(level):
            fields = self._fields()
            words = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
            status = self.status or (CLIENT_CLOSED_REQUEST if self.client_gone else 0)
            head = {"method": self.method, "path": self.path[:MAX_PATH], "status": status}
            extra = {"fields": head | fields, "words": words}
            log.log(level, "%s %s %d", *head.values(), extra=extra)

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "error": self.error,
            "client_gone": self.client_gone,
            "key": self.key,
        }
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
                "prefill_nodes": _names(prompt.prefill.prefill_node for prompt in served),
                "prefilled": _counted(Counter(map(_prefilled, filter(_is_computed, served)))),
                "first_token": self.phases(),
            }
        fields["total_seconds"] = round(time.monotonic() - self.start, 4)
        return {name: value for name, value in fields.items() if _is_shown(value)}

    def phases(self) -> dict[str, float]:
        """Seconds to the first token, by phase; "router" is the time outside the node's phases.
        Empty for several prompts, because the prompt of the first token is unknown. With several
        rounds of tool calls, the phases of the first round."""
        served = self.usage.served
        if not served or any(one.number for one in served) or self.first_token_seconds is None:
            return {}
        phases = _seconds(served[0].prefill.first_token)
        rest = max(0.0, self.first_token_seconds - sum(phases.values()))
        return {"router": round(rest, 4)} | phases if phases else {}


def prefill_origin(served: ServedPrompt) -> tuple[str, str]:
    """Where a prompt was prefilled, and the reason if that was its decode node."""
    if served.prefill.prefill_node:
        return REMOTE, ""
    return LOCAL, known_reason(served.prefill.local_reason)


def _is_computed(served: ServedPrompt) -> bool:
    return served.prefill.prompt_tokens > 0


def _prefilled(served: ServedPrompt) -> str:
    where, reason = prefill_origin(served)
    return f"{where} ({reason})" if reason else where


def _seconds(phases: pb.FirstToken) -> dict[str, float]:
    return {
        field.name.removesuffix("_seconds"): round(seconds, 4)
        for field, seconds in phases.ListFields()
    }


def _is_shown(value: Any) -> bool:
    """True if a field is part of the line; numbers always are."""
    return value is not None and value is not False and value not in ("", [], {})


def _counted(counts: Counter[str]) -> str:
    return ", ".join(word if n == 1 else f"{word} x{n}" for word, n in counts.items())


def _names(names: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, names)))


def _word(value: Any) -> str:
    """A value as one word of the text line."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return ",".join(value)
    if isinstance(value, dict):
        value = " ".join(f"{name} {seconds:.3f}" for name, seconds in value.items())
    return f'"{value}"' if " " in str(value) else str(value)

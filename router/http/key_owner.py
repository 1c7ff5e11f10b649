"""The owner of an API key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The owner of one or several keys. Limits of ``None`` are those of the router."""

    name: str
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


# Every client of a router that asks for no keys.
ANYBODY = KeyOwner("")

"""Decode nodes that have greeted this one; their CURVE keys are admitted to its data plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..shared.config.limits import MAX_PEERS
from ..shared.errors import OverloadedError, TransferError
from ..shared.handoff.inbox import Inbox
from ..shared.handoff.lease import Tenant
from ..shared.handoff.plane.messages import AdmitKeys

# A live decode node asks for its live transfers every five seconds.
SILENCE_SECONDS = 30.0
CONFIRM_SECONDS = 1.5


@dataclass(slots=True)
class _AdmittedPeer:
    epoch: int
    keys: tuple[str, ...]
    last_seen: float


@dataclass(slots=True)
class _Round:
    """Distribution of one list; ``missing`` ranks have not confirmed it."""

    missing: set[int]
    done: asyncio.Event = field(default_factory=asyncio.Event)


class AdmittedPeers:
    """Owns the list of admitted keys. At each change every rank gets the whole list."""

    def __init__(
        self,
        inbox: Inbox,
        ranks: int,
        clock: Callable[[], float],
        *,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._inbox = inbox
        self._ranks = ranks
        self._clock = clock
        self._max_peers = max_peers
        self._admitted: dict[str, _AdmittedPeer] = {}
        self._version = 0
        self._rounds: dict[int, _Round] = {}
        inbox.on_admitted = self._on_confirmed

    async def admit(self, tenant: Tenant, keys: Iterable[str]) -> None:
        """Admit the ranks of ``tenant``, in place of those of its previous start.

        Raises ``OverloadedError`` if too many peers are admitted, ``TransferError`` if a rank does
        not confirm in time.
        """
        if tenant.node_id not in self._admitted and len(self._admitted) >= self._max_peers:
            raise OverloadedError(
                f"{self._max_peers} decode nodes have greeted, which is the limit; see --max-peers"
            )
        self._admitted[tenant.node_id] = _AdmittedPeer(tenant.epoch, tuple(keys), self._clock())
        version = self._publish()
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                await self._rounds[version].done.wait()
        except TimeoutError:
            missing = sorted(self._rounds[version].missing)
            raise TransferError(
                f"ranks {missing} have not confirmed the CURVE keys within {CONFIRM_SECONDS:g} s"
            ) from None
        finally:
            del self._rounds[version]

    def note_alive(self, tenant: Tenant) -> bool:
        """Note a sign of life; returns false if this start of the node is not admitted."""
        peer = self._admitted.get(tenant.node_id)
        if peer is None or peer.epoch != tenant.epoch:
            return False
        peer.last_seen = self._clock()
        return True

    def remove_silent(self) -> list[str]:
        """Withdraw the keys of peers that have been silent for too long; returns their names."""
        oldest = self._clock() - SILENCE_SECONDS
        silent = [name for name, peer in self._admitted.items() if peer.last_seen < oldest]
        for name in silent:
            del self._admitted[name]
        if silent:
            del self._rounds[self._publish()]  # no caller waits for the confirmation
        return silent

    def _publish(self) -> int:
        self._version += 1
        self._rounds[self._version] = _Round(set(range(self._ranks)))
        keys = tuple(key for peer in self._admitted.values() for key in peer.keys)
        for rank in range(self._ranks):
            self._inbox.tell(rank, AdmitKeys(version=self._version, keys=keys))
        return self._version

    def _on_confirmed(self, rank: int, version: int) -> None:
        """A rank has applied a list, which may not be the newest."""
        current = self._rounds.get(version)
        if current is not None:
            current.missing.discard(rank)
            if not current.missing:
                current.done.set()

"""The decode nodes that have greeted, whose ranks' CURVE keys open this node's data plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..shared.config.limits import MAX_PEERS
from ..shared.errors import OverloadedError, TransferError
from ..shared.handoff.inbox import Inbox
from ..shared.handoff.lease import Tenant
from ..shared.handoff.plane.messages import Admit

# A decode node that is there asks every five seconds what is held for it.
SILENCE_SECONDS = 30.0
CONFIRM_SECONDS = 1.5


@dataclass(slots=True)
class _Peer:
    epoch: int
    keys: tuple[str, ...]
    heard: float


@dataclass(slots=True)
class _Round:
    """One list on its way to the ranks, and which of them have not confirmed it."""

    missing: set[int]
    done: asyncio.Event = field(default_factory=asyncio.Event)


class AdmittedPeers:
    """Owns the list of admitted keys. The ranks get the whole of it whenever it changes, so that
    none can hold another list for long."""

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
        self._admitted: dict[str, _Peer] = {}
        self._version = 0
        self._rounds: dict[int, _Round] = {}
        inbox.on_admitted = self._confirmed

    async def admit(self, tenant: Tenant, keys: Iterable[str]) -> None:
        """Once this returns, the ranks of ``tenant`` may connect; those of its last start may not.

        Raises ``OverloadedError`` when too many are here, ``TransferError`` when a rank does not
        confirm in time.
        """
        if tenant.node_id not in self._admitted and len(self._admitted) >= self._max_peers:
            raise OverloadedError(
                f"{self._max_peers} decode nodes have greeted, which is the limit; see --max-peers"
            )
        self._admitted[tenant.node_id] = _Peer(tenant.epoch, tuple(keys), self._clock())
        version = self._publish()
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                await self._rounds[version].done.wait()
        except TimeoutError:
            missing = sorted(self._rounds[version].missing)
            raise TransferError(f"ranks {missing} have not taken the CURVE keys in time") from None
        finally:
            del self._rounds[version]

    def heard(self, tenant: Tenant) -> bool:
        """Whether this start of the node is admitted; if so, it goes on to be."""
        guest = self._admitted.get(tenant.node_id)
        if guest is None or guest.epoch != tenant.epoch:
            return False
        guest.heard = self._clock()
        return True

    def dismiss_silent(self) -> list[str]:
        """The names of those who have gone without a word; their keys open nothing any more."""
        now = self._clock()
        gone = [n for n, guest in self._admitted.items() if now - guest.heard > SILENCE_SECONDS]
        for name in gone:
            del self._admitted[name]
        if gone:
            del self._rounds[self._publish()]  # nobody waits for the confirmation
        return gone

    def _publish(self) -> int:
        self._version += 1
        self._rounds[self._version] = _Round(set(range(self._ranks)))
        keys = tuple(key for guest in self._admitted.values() for key in guest.keys)
        for rank in range(self._ranks):
            self._inbox.tell(rank, Admit(version=self._version, keys=keys))
        return self._version

    def _confirmed(self, rank: int, version: int) -> None:
        """A rank has taken a list, of which a newer one may be on its way."""
        turn = self._rounds.get(version)
        if turn is not None:
            turn.missing.discard(rank)
            if not turn.missing:
                turn.done.set()

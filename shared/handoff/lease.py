"""Leases on blocks that a prefill node keeps because a decode node may still need them.

Each side uses its own monotonic clock. The holder counts from the arrival of a request; the other
side counts from before it sent the request, and a little less. So trust ends before the blocks are
freed, however slow the reply is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# The fraction of a lease that the side without the blocks relies on.
TRUSTED_PART = 0.9


def new_epoch() -> int:
    """A random number that identifies one start of a process; never 0, which means "unknown"."""
    return secrets.randbits(64) or 1


@dataclass(frozen=True, slots=True)
class Tenant:
    """One start of a node for which blocks are kept."""

    node_id: str
    epoch: int


@dataclass(slots=True)
class _Lease:
    tenant: Tenant
    attempt: int
    expires: float


class LeaseTable:
    """The leases on the holder's side, by transfer.

    Methods that end leases return their ids; the caller frees their blocks, once.
    """

    def __init__(self, lease_seconds: float, clock: Callable[[], float]) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._leases: dict[int, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, tenant: Tenant, transfer_id: int, attempt: int) -> bool:
        """Begin a lease; False if the attempt is not newer, or the transfer is another tenant's."""
        lease = self._leases.get(transfer_id)
        if lease is not None and (lease.tenant != tenant or lease.attempt >= attempt):
            return False
        self._leases[transfer_id] = _Lease(tenant, attempt, self._clock() + self.lease_seconds)
        return True

    def renew(self, tenant: Tenant, transfer_ids: Iterable[int]) -> list[int]:
        """Extend this tenant's live leases; returns their ids.

        An expired lease is not revived, even if ``expire`` was not called yet.
        """
        now = self._clock()
        live_ids = [i for i in transfer_ids if self._is_live(tenant, i, now)]
        for transfer_id in live_ids:
            self._leases[transfer_id].expires = now + self.lease_seconds
        return live_ids

    def release(self, tenant: Tenant, transfer_ids: Iterable[int]) -> list[int]:
        """End leases of this tenant only; returns the ids that were in the table."""
        return self._remove([i for i in dict.fromkeys(transfer_ids) if self._is_of(tenant, i)])

    def live(self, tenant: Tenant) -> list[int]:
        """A tenant's live transfers, for reconciling."""
        now = self._clock()
        return [i for i in self._leases if self._is_live(tenant, i, now)]

    def expire(self) -> list[int]:
        """End the leases that have expired."""
        now = self._clock()
        return self._remove([i for i, lease in self._leases.items() if lease.expires <= now])

    def void(self, current: Tenant) -> list[int]:
        """End the leases of a node's earlier starts, once it announces its epoch."""
        return self._remove(
            [
                i
                for i, lease in self._leases.items()
                if lease.tenant.node_id == current.node_id and lease.tenant != current
            ]
        )

    def _is_of(self, tenant: Tenant, transfer_id: int) -> bool:
        lease = self._leases.get(transfer_id)
        return lease is not None and lease.tenant == tenant

    def _is_live(self, tenant: Tenant, transfer_id: int, now: float) -> bool:
        return self._is_of(tenant, transfer_id) and self._leases[transfer_id].expires > now

    def _remove(self, transfer_ids: list[int]) -> list[int]:
        for transfer_id in transfer_ids:
            del self._leases[transfer_id]
        return transfer_ids


class LeaseTrust:
    """The transfers that one peer holds for this node, and how long it can be relied on."""

    def __init__(self, lease_seconds: float, clock: Callable[[], float]) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._until: dict[int, float] = {}

    @property
    def ids(self) -> list[int]:
        """The transfers that are alive on this side."""
        return list(self._until)

    def begin(self, transfer_id: int) -> None:
        """Call before opening the transfer, so that reconciling never considers it an orphan."""
        self._until[transfer_id] = self._clock() + TRUSTED_PART * self.lease_seconds

    def renewed(self, transfer_ids: Iterable[int], request_time: float) -> None:
        """Extend the trust in transfers that the peer renewed at our request of
        ``request_time``."""
        for transfer_id in transfer_ids:
            if transfer_id in self._until:
                self._until[transfer_id] = request_time + TRUSTED_PART * self.lease_seconds

    def end(self, transfer_id: int) -> None:
        """Idempotent."""
        self._until.pop(transfer_id, None)

    def remaining(self, transfer_id: int) -> float:
        """Seconds for which the peer surely holds this transfer; infinity before it is opened."""
        return self._until.get(transfer_id, float("inf")) - self._clock()

    def orphans(self, transfer_ids: Iterable[int]) -> list[int]:
        """Those of the peer's transfers that have ended here."""
        return [transfer_id for transfer_id in transfer_ids if transfer_id not in self._until]

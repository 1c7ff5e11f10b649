"""How long a prefill node keeps blocks that a decode node may still need.

Each side uses its own monotonic clock, and no clocks are compared: the holder counts from the
arrival of a call, the side that relies on it from before the call left, and a little less. So trust
ends before the blocks are freed, however slow an answer was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

# The part of a lease for which the side without the blocks trusts it.
TRUSTED_PART = 0.9


@dataclass(frozen=True, slots=True)
class Tenant:
    """One start of the node for which blocks are held."""

    node_id: str
    epoch: int


@dataclass(slots=True)
class _Lease:
    tenant: Tenant
    attempt: int
    expires: float


class LeaseTable:
    """Kept by the holder of the blocks. A lease is keyed by transfer.

    Every method that ends leases returns their ids, and the caller frees what they held, once.
    """

    def __init__(self, lease_seconds: float, clock: Callable[[], float]) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._leases: dict[int, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, tenant: Tenant, transfer_id: int, attempt: int) -> bool:
        """Begin a lease; False for an attempt that is not newer, or another tenant's transfer."""
        known = self._leases.get(transfer_id)
        if known is not None and (known.tenant != tenant or known.attempt >= attempt):
            return False
        self._leases[transfer_id] = _Lease(tenant, attempt, self._clock() + self.lease_seconds)
        return True

    def renew(self, tenant: Tenant, transfer_ids: Iterable[int]) -> list[int]:
        """Extend those that are still held for this tenant; returns them.

        One that has ended is not revived, even if ``expire`` was not called yet.
        """
        now = self._clock()
        held = [i for i in transfer_ids if self._is_held(tenant, i, now)]
        for transfer_id in held:
            self._leases[transfer_id].expires = now + self.lease_seconds
        return held

    def release(self, tenant: Tenant, transfer_ids: Iterable[int]) -> list[int]:
        """End leases of this tenant, and of no other; returns those that were in the table."""
        return self._remove([i for i in dict.fromkeys(transfer_ids) if self._is_of(tenant, i)])

    def live(self, tenant: Tenant) -> list[int]:
        """The transfers held for a tenant, for reconciling."""
        now = self._clock()
        return [i for i in self._leases if self._is_held(tenant, i, now)]

    def expire(self) -> list[int]:
        """End the leases that have expired."""
        now = self._clock()
        return self._remove([i for i, lease in self._leases.items() if lease.expires <= now])

    def void(self, current: Tenant) -> list[int]:
        """End the leases of a node's earlier starts, when it announces its epoch."""
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

    def _is_held(self, tenant: Tenant, transfer_id: int, now: float) -> bool:
        return self._is_of(tenant, transfer_id) and self._leases[transfer_id].expires > now

    def _remove(self, transfer_ids: list[int]) -> list[int]:
        for transfer_id in transfer_ids:
            del self._leases[transfer_id]
        return transfer_ids


class LeaseTrust:
    """The transfers that one peer holds for this node, and until when it can be relied on."""

    def __init__(self, lease_seconds: float, clock: Callable[[], float]) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._until: dict[int, float] = {}

    @property
    def ids(self) -> list[int]:
        """The transfers that are alive on this side."""
        return list(self._until)

    def begin(self, transfer_id: int) -> None:
        """Before the transfer is opened, so that reconciling never takes it for an orphan."""
        self._until[transfer_id] = self._clock() + TRUSTED_PART * self.lease_seconds

    def renewed(self, held: Iterable[int], asked_at: float) -> None:
        """Take the peer's answer to a renewal that left at ``asked_at``."""
        for transfer_id in held:
            if transfer_id in self._until:
                self._until[transfer_id] = asked_at + TRUSTED_PART * self.lease_seconds

    def end(self, transfer_id: int) -> None:
        """Idempotent."""
        self._until.pop(transfer_id, None)

    def left(self, transfer_id: int) -> float:
        """Seconds for which the peer still holds this transfer; infinity before it was opened."""
        return self._until.get(transfer_id, float("inf")) - self._clock()

    def orphans(self, held: Iterable[int]) -> list[int]:
        """The transfers that the peer holds, but that have ended here."""
        return [transfer_id for transfer_id in held if transfer_id not in self._until]

"""How long a prefill node must keep what a decode node may still count on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

LEASE_SECONDS = 10.0
RENEW_SECONDS = LEASE_SECONDS / 3
# The side that does not hold the blocks stops trusting a lease this much before it ends, so that
# a slow answer can never make it count on blocks that were freed.
TRUST_MARGIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """One start of the node for which something is held."""

    node_id: str
    epoch: int


@dataclass(slots=True)
class _Lease:
    tenant: Tenant
    attempt: int
    expires: float


class LeaseTable:
    """Kept by the holder of the blocks, by its own monotonic clock: no clocks are compared.

    A lease is keyed by transfer; a newer attempt replaces an older one. Every method that ends
    leases returns their ids, and the caller frees what they held, once.
    """

    def __init__(self, *, clock: Callable[[], float], lease_seconds: float = LEASE_SECONDS) -> None:
        self._clock = clock
        self.lease_seconds = lease_seconds
        self._leases: dict[int, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, tenant: Tenant, transfer_id: int, attempt: int) -> bool:
        """Begin or renew a lease; False for an older attempt or another tenant's transfer."""
        known = self._leases.get(transfer_id)
        if known is not None and (known.tenant != tenant or known.attempt > attempt):
            return False
        self._leases[transfer_id] = _Lease(tenant, attempt, self._clock() + self.lease_seconds)
        return True

    def renew(self, tenant: Tenant, transfer_ids: Iterable[int]) -> list[int]:
        """Extend those that are still held for this tenant; returns them.

        One that is past its end is not revived, even when nobody has called ``expire`` yet.
        """
        now = self._clock()
        held = [i for i in transfer_ids if self._is_held(tenant, i, now)]
        for transfer_id in held:
            self._leases[transfer_id].expires = now + self.lease_seconds
        return held

    def release(self, tenant: Tenant, transfer_ids: Iterable[int]) -> list[int]:
        """End leases of this tenant; returns those that were in the table."""
        mine = [i for i in dict.fromkeys(transfer_ids) if self._is_of(tenant, i)]
        return self._remove(mine)

    def live(self, tenant: Tenant) -> list[int]:
        """What is held for a tenant, for reconciling."""
        now = self._clock()
        return [i for i in self._leases if self._is_held(tenant, i, now)]

    def expire(self) -> list[int]:
        """End the leases whose time is over."""
        now = self._clock()
        return self._remove([i for i, lease in self._leases.items() if lease.expires <= now])

    def void(self, current: Tenant) -> list[int]:
        """A node announced its epoch: end what its earlier starts held."""
        return self._remove(
            [
                i
                for i, lease in self._leases.items()
                if lease.tenant.node_id == current.node_id and lease.tenant != current
            ]
        )

    def reconcile(self, tenant: Tenant, known_to_tenant: Iterable[int]) -> list[int]:
        """End the leases that their tenant does not know of (orphans)."""
        known = set(known_to_tenant)
        return self._remove([i for i in self.live(tenant) if i not in known])

    @property
    def next_expiry(self) -> float | None:
        return min((lease.expires for lease in self._leases.values()), default=None)

    def _is_of(self, tenant: Tenant, transfer_id: int) -> bool:
        lease = self._leases.get(transfer_id)
        return lease is not None and lease.tenant == tenant

    def _is_held(self, tenant: Tenant, transfer_id: int, now: float) -> bool:
        return self._is_of(tenant, transfer_id) and self._leases[transfer_id].expires > now

    def _remove(self, transfer_ids: list[int]) -> list[int]:
        for transfer_id in transfer_ids:
            del self._leases[transfer_id]
        return transfer_ids

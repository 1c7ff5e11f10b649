from __future__ import annotations

from tandem.shared.handoff.lease import LeaseTable, LeaseTrust, Tenant, new_epoch
from tandem.shared.handoff.plane.transfer_end import ClosedAttempts
from tandem.tests.support.clock import SteppedClock

ONE, TWO = Tenant("d", 1), Tenant("d", 2)
OTHER = Tenant("e", 1)


def _table() -> tuple[LeaseTable, SteppedClock]:
    clock = SteppedClock()
    return LeaseTable(10.0, clock), clock


def test_a_lease_ends_after_ten_seconds_unless_renewed() -> None:
    table, clock = _table()
    table.grant(ONE, 1, 1)
    table.grant(ONE, 2, 1)
    clock.now += 9
    assert table.renew(ONE, [1, 3]) == [1]
    clock.now += 2
    assert table.live(ONE) == [1]
    assert table.expire() == [2]
    assert table.expire() == []
    clock.now += 8
    assert table.expire() == [1]
    assert len(table) == 0


def test_a_lease_past_its_end_is_not_revived() -> None:
    table, clock = _table()
    table.grant(ONE, 1, 1)
    clock.now += 10
    assert table.renew(ONE, [1]) == []
    assert table.expire() == [1]


def test_release_ends_a_lease_once_and_only_for_its_tenant() -> None:
    table, _ = _table()
    table.grant(ONE, 1, 1)
    assert table.release(OTHER, [1]) == []
    assert table.release(TWO, [1]) == []
    assert table.release(ONE, [1, 1, 2]) == [1]
    assert table.release(ONE, [1]) == []


def test_an_older_attempt_cannot_take_over_a_lease() -> None:
    table, _ = _table()
    assert table.grant(ONE, 1, 2)
    assert not table.grant(ONE, 1, 1)
    assert not table.grant(ONE, 1, 2)
    assert not table.grant(OTHER, 1, 3)
    assert table.grant(ONE, 1, 3)


def test_a_new_epoch_voids_what_the_old_one_held() -> None:
    table, _ = _table()
    table.grant(ONE, 1, 1)
    table.grant(OTHER, 2, 1)
    assert table.void(TWO) == [1]
    assert table.live(OTHER) == [2]


def test_trust_ends_before_the_lease_does_and_renewals_count_from_when_they_left() -> None:
    table, clock = _table()
    trust = LeaseTrust(10.0, clock)
    assert trust.remaining(1) == float("inf")
    trust.begin(1)
    clock.now += 1  # the call is slow
    table.grant(ONE, 1, 1)
    assert trust.remaining(1) == 8
    clock.now += 5
    asked_at = clock.now
    clock.now += 2
    trust.renewed(table.renew(ONE, [1, 2]), asked_at)
    clock.now = asked_at + 9
    assert trust.remaining(1) == 0
    assert table.live(ONE) == [1]
    assert trust.ids == [1]


def test_an_orphan_is_what_only_the_holder_knows() -> None:
    _, clock = _table()
    trust = LeaseTrust(10.0, clock)
    for transfer_id in (1, 2):
        trust.begin(transfer_id)
    trust.end(2)
    trust.end(2)
    assert trust.orphans([1, 2, 3]) == [2, 3]
    trust.renewed([2], clock.now)
    assert trust.ids == [1]


def test_epochs_differ_and_are_never_zero() -> None:
    epochs = {new_epoch() for _ in range(1000)}
    assert len(epochs) == 1000
    assert all(0 < epoch < 2**64 for epoch in epochs)


def test_closed_attempts_cover_older_ones_and_forget_the_oldest_transfers() -> None:
    closed = ClosedAttempts(limit=2)
    closed.add((1, None), 3)
    closed.add((1, None), 2)
    assert closed.covers((1, None), 3)
    assert closed.covers((1, None), 1)
    assert not closed.covers((1, None), 4)
    closed.add((2, None), 1)
    closed.add((3, None), 1)
    assert not closed.covers((1, None), 1)
    assert closed.covers((2, None), 1)

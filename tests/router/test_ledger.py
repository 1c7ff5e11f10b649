"""What a router has placed counts at once, once, and until the node has told of it itself."""

from __future__ import annotations

from tandem.router.cluster.inflight import REPORTS, Booking, InflightLoad, Placed


def test_own_prompts_count_from_their_placement_to_their_end() -> None:
    ledger, first, second = InflightLoad(), Placed(100, 120, (1,)), Placed(50, 60, (1, 2))
    ledger.begin(first)
    ledger.begin(second)
    assert ledger.queued_tokens == 150 and ledger.room_tokens == 180
    ledger.end(first, computed=True)
    assert ledger.queued_tokens == 50
    ledger.end(second, computed=False)
    assert ledger.queued_tokens == 0


def test_a_report_adds_what_others_have_queued_and_counts_nothing_twice() -> None:
    ledger, ours = InflightLoad(), Placed(100, 100, ())
    ledger.begin(ours)
    ledger.reported(100)
    assert ledger.queued_tokens == 100 and ledger.room_tokens == 0
    ledger.reported(130)
    assert ledger.queued_tokens == 130
    ledger.end(ours, computed=True)
    assert ledger.queued_tokens == 30
    ledger.reported(0)
    assert ledger.queued_tokens == 0


def test_a_prefix_is_expected_until_the_node_has_had_the_time_to_tell() -> None:
    ledger, placed = InflightLoad(), Placed(10, 10, (7,))
    ledger.begin(placed)
    for _ in range(5):  # it takes long to compute
        ledger.reported(10)
    assert ledger.expects(7)
    ledger.end(placed, computed=True)
    for _ in range(REPORTS):
        assert ledger.expects(7)
        ledger.reported(0)
    assert not ledger.expects(7)


def test_a_prefix_that_was_not_computed_is_not_expected_but_for_another_prompt() -> None:
    ledger, lost, other = InflightLoad(), Placed(1, 1, (7, 8)), Placed(1, 1, (7,))
    ledger.begin(lost)
    ledger.begin(other)
    ledger.end(lost, computed=False)
    assert ledger.expects(7) and not ledger.expects(8)


def test_a_booking_is_settled_once_on_the_nodes_that_computed() -> None:
    decode, prefill = InflightLoad(), InflightLoad()
    booking = Booking()
    booking.enter("d", decode, Placed(0, 10, (1,)))
    booking.enter("p", prefill, Placed(10, 10, (1,)))
    booking.settle("d", "another")  # the decode node had it from elsewhere
    booking.settle()
    assert decode.expects(1) and not prefill.expects(1)
    assert prefill.queued_tokens == 0

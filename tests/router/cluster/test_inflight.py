"""In-flight load: a prompt counts immediately, once, and until the node reports it."""

from __future__ import annotations

from tandem.router.cluster.inflight import REPORTS, InflightLoad, InflightPlacement, InflightPrompt


def test_own_prompts_count_from_their_placement_to_their_end() -> None:
    load = InflightLoad()
    load.apply_report(0, 500)
    first, second = InflightPrompt(100, 120, (1,)), InflightPrompt(50, 60, (1, 2))
    load.begin(first)
    load.begin(second)
    assert load.queued_tokens == 150 and load.room_tokens == 320
    load.end(first, computed=True)
    assert load.queued_tokens == 50
    load.end(second, computed=False)
    assert load.queued_tokens == 0


def test_a_report_adds_what_others_have_queued_and_counts_nothing_twice() -> None:
    load, ours = InflightLoad(), InflightPrompt(100, 100, ())
    load.begin(ours)
    assert load.room_tokens is None
    load.apply_report(100, 700)
    assert load.queued_tokens == 100 and load.room_tokens == 700
    load.apply_report(130, None)
    assert load.queued_tokens == 130
    load.end(ours, computed=True)
    assert load.queued_tokens == 30
    load.apply_report(0, None)
    assert load.queued_tokens == 0


def test_a_prefix_is_expected_until_the_node_has_had_the_time_to_tell() -> None:
    load, prompt = InflightLoad(), InflightPrompt(10, 10, (7,))
    load.begin(prompt)
    for _ in range(5):  # it takes long to compute
        load.apply_report(10, None)
    assert load.expects(7)
    load.end(prompt, computed=True)
    for _ in range(REPORTS):
        assert load.expects(7)
        load.apply_report(0, None)
    assert not load.expects(7)


def test_a_prefix_that_was_not_computed_is_not_expected_but_for_another_prompt() -> None:
    load, lost, other = InflightLoad(), InflightPrompt(1, 1, (7, 8)), InflightPrompt(1, 1, (7,))
    load.begin(lost)
    load.begin(other)
    load.end(lost, computed=False)
    assert load.expects(7) and not load.expects(8)


def test_a_placement_ends_once_on_the_nodes_that_computed() -> None:
    decode, prefill = InflightLoad(), InflightLoad()
    placement = InflightPlacement()
    placement.begin("d", decode, InflightPrompt(0, 10, (1,)))
    placement.begin("p", prefill, InflightPrompt(10, 10, (1,)))
    placement.end("d", "another")  # the decode node received it from another node
    placement.end()
    assert decode.expects(1) and not prefill.expects(1)
    assert prefill.queued_tokens == 0

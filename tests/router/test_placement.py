"""Placement is a pure function: tables of nodes in, a decision out."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.placement import AFFINITY_TOKENS, DECODE_SLACK, NodeView, place

LONG = list(range(AFFINITY_TOKENS))


def decode(name: str, **fields: Any) -> NodeView:
    return NodeView(node_id=name, epoch=1, address=name, prefill=False, **fields)


def prefill(name: str, **fields: Any) -> NodeView:
    return NodeView(node_id=name, epoch=1, address=name, prefill=True, **fields)


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        ([], None),
        ([prefill("p")], None),
        ([decode("a", draining=True)], None),
        ([decode("a")], "a"),
        ([decode("a", running=2), decode("b", running=1)], "b"),
        ([decode("a", waiting=2), decode("b", running=1)], "b"),
        ([decode("a", inflight=2), decode("b", running=1)], "b"),
        ([decode("a", draining=True), decode("b", running=9)], "b"),
    ],
)
def test_the_least_loaded_decode_node_gets_a_short_prompt(
    nodes: list[NodeView], chosen: str | None
) -> None:
    made = place(nodes, [1, 2, 3])
    assert (made and made.decode.node_id) == chosen


def test_prefill_nodes_come_in_the_order_of_their_queues() -> None:
    nodes = [
        decode("d"),
        prefill("slow", queued_prefill_tokens=900, prefill_tokens_per_second=100),
        prefill("fast", queued_prefill_tokens=1000, prefill_tokens_per_second=10_000),
        prefill("idle"),
        prefill("gone", draining=True),
    ]
    made = place(nodes, [1])
    assert made is not None
    assert [node.node_id for node in made.prefill] == ["idle", "fast", "slow"]


def test_equal_prefixes_go_to_the_same_node_until_it_is_busier() -> None:
    nodes = [decode(f"d{i}") for i in range(5)]
    homes = {place(nodes, [*LONG, tail]).decode.node_id for tail in range(20)}  # type: ignore[union-attr]
    assert len(homes) == 1
    home = homes.pop()
    busy = [decode(n.node_id, running=DECODE_SLACK + 1 if n.node_id == home else 0) for n in nodes]
    moved = place(busy, LONG)
    assert moved is not None and moved.decode.node_id != home
    other = [place(nodes, [tail, *LONG]) for tail in range(1000, 1030)]
    assert len({made.decode.node_id for made in other if made}) > 1


def test_tenants_have_homes_of_their_own() -> None:
    nodes = [decode(f"d{i}") for i in range(8)]
    homes = {place(nodes, LONG, salt=str(i)).decode.node_id for i in range(30)}  # type: ignore[union-attr]
    assert len(homes) > 1


def test_a_node_that_failed_is_not_asked_again_but_its_next_start_is() -> None:
    made = place([decode("a")], [1], exclude=frozenset({("a", 1)}))
    assert made is None
    assert place([decode("a")], [1], exclude=frozenset({("a", 2)})) is not None

"""Placement is a pure function: tables of nodes in, a decision out."""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.placement.place import (
    MAX_PREFILL_CANDIDATES,
    NodeView,
    Placement,
    PromptView,
    _start,
    place,
)
from tandem.router.placement.policies import (
    ASSUMED_TOKENS_PER_SECOND,
    CONTENDERS,
    LINK_PACES,
    POLICIES,
    SEQUENCE_TOKENS,
    STEP_TOKENS,
)
from tandem.shared.config import RouterConfig

LONG = list(range(1000))
AWARE = POLICIES["prefix-aware"]
every_policy = pytest.mark.parametrize("name", POLICIES)


def decode(name: str, **fields: Any) -> NodeView:
    return NodeView(node_id=name, epoch=1, address=name, prefill=False, **fields)


def prefill(name: str, **fields: Any) -> NodeView:
    return NodeView(node_id=name, epoch=1, address=name, prefill=True, **fields)


def placed(
    nodes: list[NodeView], prompt: list[int] = LONG, name: str = "prefix-aware"
) -> Placement:
    placement = place(nodes, prompt, POLICIES[name])
    assert placement is not None
    return placement


def slow(name: str, link_rates: dict[str, float]) -> NodeView:
    return decode(name, prefill_tokens_per_second=1e3, link_rates=link_rates)


FAST = prefill("p", prefill_tokens_per_second=1e4)


def names(nodes: typing.Iterable[NodeView]) -> list[str]:
    return [node.node_id for node in nodes]


def test_every_policy_has_a_flag_and_the_reverse() -> None:
    (field,) = [f for f in dataclasses.fields(RouterConfig) if f.name == "placement_policy"]
    assert field.metadata["choices"] == tuple(POLICIES)


# ---- which nodes may be chosen -------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], None),
        ([prefill("p")], None),
        ([decode("a", draining=True)], None),
        ([decode("a")], "a"),
        ([decode("a", draining=True), decode("b", sequences=9)], "b"),
    ],
)
def test_only_a_decode_node_that_takes_work_is_chosen(
    name: str, nodes: list[NodeView], expected: str | None
) -> None:
    placement = place(nodes, [1, 2, 3], POLICIES[name])
    assert (placement and placement.decode.node_id) == expected


@every_policy
def test_a_node_that_failed_is_not_used_again_but_its_next_start_is(name: str) -> None:
    policy = POLICIES[name]
    assert place([decode("a")], [1], policy, exclude=frozenset({("a", 1)})) is None
    assert place([decode("a")], [1], policy, exclude=frozenset({("a", 2)})) is not None


@every_policy
def test_old_and_new_versions_are_never_paired(name: str) -> None:
    old = [decode("d1", group="old"), prefill("p1", group="old"), prefill("p2", group="old")]
    new = [decode("d2", group="new"), prefill("p3", group="new")]
    for turn in range(4):
        placement = place([*old, *new], LONG, POLICIES[name], turn=turn)
        assert placement is not None
        of_its_own = {"d1": {"p1", "p2"}, "d2": {"p3"}}[placement.decode.node_id]
        assert set(names(placement.prefill)) == of_its_own
    # A version without prefill nodes serves alone.
    assert placed([decode("d", group="new"), *old[1:]], LONG, name).prefill == ()


GROUPS = st.sampled_from(["old", "new"])
TOKENS = st.integers(0, 5000)
RATES = st.sampled_from([0.0, 100.0, 10_000.0])
VIEWS = st.lists(
    st.builds(
        NodeView,
        node_id=st.text("abcdef", min_size=1, max_size=3),
        epoch=st.just(1),
        address=st.just(""),
        prefill=st.booleans(),
        group=GROUPS,
        draining=st.booleans(),
        sequences=st.integers(0, 20),
        queued_prefill_tokens=TOKENS,
        prefill_tokens_per_second=RATES,
        held_tokens=st.integers(0, len(LONG) - 1),
        room_tokens=st.one_of(st.none(), TOKENS),
        link_rates=st.dictionaries(st.text("abcdef", min_size=1, max_size=2), RATES, max_size=2),
    ),
    max_size=24,
    unique_by=lambda node: node.node_id,
)


@given(nodes=VIEWS, name=st.sampled_from(sorted(POLICIES)), turn=st.integers(0, 99))
def test_a_placement_names_only_admissible_nodes(
    nodes: list[NodeView], name: str, turn: int
) -> None:
    placement = place(nodes, LONG, POLICIES[name], turn=turn)
    usable = [node for node in nodes if not node.draining]
    if placement is None:
        assert all(node.prefill for node in usable)
        return
    assert placement.decode in usable and not placement.decode.prefill
    assert all(node in usable and node.prefill for node in placement.prefill)
    assert {node.group for node in placement.prefill} <= {placement.decode.group}
    helpers = [n for n in usable if n.prefill and n.group == placement.decode.group]
    assert len(placement.prefill) == len(set(names(placement.prefill)))
    assert len(placement.prefill) == min(MAX_PREFILL_CANDIDATES, len(helpers))


@given(nodes=VIEWS, name=st.sampled_from(sorted(POLICIES)), turn=st.integers(0, 99))
def test_the_order_in_which_nodes_are_listed_changes_nothing(
    nodes: list[NodeView], name: str, turn: int
) -> None:
    forth = place(nodes, LONG, POLICIES[name], turn=turn)
    assert place(nodes[::-1], LONG, POLICIES[name], turn=turn) == forth


# ---- prefix-aware --------------------------------------------------------------------------------


@given(nodes=VIEWS, more=st.integers(1, 500))
def test_more_hits_never_make_a_node_less_preferred(nodes: list[NodeView], more: int) -> None:
    placement = place(nodes, LONG, AWARE)
    if placement is None:
        return
    better = min(len(LONG) - 1, placement.decode.held_tokens + more)
    richer = [
        dataclasses.replace(n, held_tokens=better) if n is placement.decode else n for n in nodes
    ]
    assert placed(richer).decode.node_id == placement.decode.node_id
    if not placement.prefill:
        return
    # The same holds for the prefill nodes of one decode node.
    (first, *_), decode_node = placement.prefill, placement.decode
    better = min(len(LONG) - 1, first.held_tokens + more)
    others = [decode_node, *(node for node in nodes if node.prefill)]
    alone = placed(others).prefill[0]
    richer = [dataclasses.replace(n, held_tokens=better) if n is alone else n for n in others]
    if better >= alone.held_tokens:
        assert placed(richer).prefill[0].node_id == alone.node_id


def plain(nodes: list[NodeView]) -> tuple[str, list[str]]:
    """The decision of ``prefix-aware`` in a small cluster, without shortcuts."""
    rates = [n.prefill_tokens_per_second for n in nodes if n.prefill_tokens_per_second]
    pace = fmean(rates) if rates else ASSUMED_TOKENS_PER_SECOND
    prompt = PromptView(len(LONG), _start(LONG, ""), 0)

    def rate(node: NodeView) -> float:
        return node.prefill_tokens_per_second or pace

    def missing(node: NodeView) -> int:
        return len(LONG) - node.held_tokens

    def rank(node: NodeView, seconds: float) -> tuple[bool, float, int, bytes]:
        full = node.room_tokens is not None and node.room_tokens < missing(node)
        return full, seconds, missing(node), prompt.affinity(node)

    def remote_seconds(node: NodeView, helper: NodeView) -> float:
        link = node.link_rates.get(helper.node_id) or LINK_PACES * pace
        compute = max(missing(helper), STEP_TOKENS) / rate(helper)
        return helper.queued_prefill_tokens / rate(helper) + max(compute, missing(node) / link)

    def helpers(node: NodeView) -> list[NodeView]:
        able = [n for n in nodes if n.prefill and n.group == node.group]
        return sorted(able, key=lambda helper: rank(helper, remote_seconds(node, helper)))

    def cost(node: NodeView) -> tuple[bool, float, int, bytes]:
        step = STEP_TOKENS / rate(node)
        ways = [max(missing(node) / rate(node), step)]
        ways += [remote_seconds(node, n) + step for n in helpers(node)[:1]]
        queue = node.queued_prefill_tokens / rate(node)
        return rank(node, queue + node.sequences * SEQUENCE_TOKENS / rate(node) + min(ways))

    best = min((node for node in nodes if not node.prefill), key=cost)
    return best.node_id, names(helpers(best))[:MAX_PREFILL_CANDIDATES]


@given(nodes=VIEWS)
def test_shortcuts_change_no_decision(nodes: list[NodeView]) -> None:
    nodes = [node for node in nodes if not node.draining]
    few = [n for n in nodes if not n.prefill][:CONTENDERS]
    few += [n for n in nodes if n.prefill][:CONTENDERS]
    if any(not node.prefill for node in few):
        placement = placed(few)
        assert (placement.decode.node_id, names(placement.prefill)) == plain(few)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        # A held prefix decides among equals, but not against a much higher load.
        ([decode("a"), decode("b", held_tokens=16)], "b"),
        ([decode("a"), decode("b", held_tokens=900, sequences=3)], "b"),
        ([decode("a"), decode("b", held_tokens=900, sequences=4)], "a"),
        ([decode("a"), decode("b", held_tokens=500, queued_prefill_tokens=400)], "b"),
        ([decode("a"), decode("b", held_tokens=500, queued_prefill_tokens=600)], "a"),
        # A full node comes last, unless it holds enough.
        ([decode("a", sequences=9), decode("b", held_tokens=500, room_tokens=400)], "a"),
        ([decode("a", sequences=9), decode("b", held_tokens=700, room_tokens=400)], "b"),
        ([decode("a", room_tokens=10), decode("b", room_tokens=20, sequences=1)], "a"),
        # A prefill node that holds the prompt, or a fast link to one that computes fast, makes up
        # for what the decode node lacks.
        ([slow("b", {"p": 1e3}), slow("a", {"p": 1e6}), FAST], "a"),
        (
            [
                *(decode("a", group="old"), decode("b", group="new")),
                *(prefill("p", group="old"), prefill("q", group="new", held_tokens=900)),
            ],
            "b",
        ),
    ],
)
def test_hits_are_weighed_against_load(nodes: list[NodeView], expected: str) -> None:
    assert placed(nodes).decode.node_id == expected


@pytest.mark.parametrize("link", [800.0, 8000.0])
def test_a_prompt_stays_where_it_is_held_whatever_the_rest_of_a_block_would_take(
    link: float,
) -> None:
    """Rates are noisy: one node, or its link, was slow when it was measured, and another fast."""
    nodes = [
        decode("home", held_tokens=192, link_rates={"p": link}),
        decode("other", link_rates={"p": 1e6}),
        prefill("p", prefill_tokens_per_second=30_000.0, held_tokens=192),
        prefill("slow", prefill_tokens_per_second=1500.0),
    ]
    assert placed(nodes, LONG[:200]).decode.node_id == "home"


def test_prefill_nodes_come_in_the_order_in_which_they_would_deliver() -> None:
    links = {"far": 500.0, "near": 50_000.0}
    nodes = [
        decode("d", link_rates=links),
        prefill("near"),
        prefill("far"),
        prefill("busy", queued_prefill_tokens=1500),
        prefill("gone", draining=True),
    ]
    assert names(placed(nodes).prefill) == ["near", "far", "busy"]
    # A held prefix is not computed; a fast node may have a longer queue.
    nodes[3] = prefill("busy", queued_prefill_tokens=500, held_tokens=900)
    assert names(placed(nodes).prefill)[0] == "busy"
    nodes[1] = prefill("near", prefill_tokens_per_second=1e3)
    nodes[3] = prefill("busy", queued_prefill_tokens=5000, prefill_tokens_per_second=1e5)
    assert names(placed(nodes).prefill)[0] == "busy"


def test_a_full_prefill_node_comes_last() -> None:
    full = prefill("full", held_tokens=500, room_tokens=400)
    assert names(
        placed([decode("d"), full, prefill("slow", queued_prefill_tokens=900)]).prefill
    ) == [
        "slow",
        "full",
    ]


def test_a_burst_of_one_prefix_spreads_when_its_home_is_loaded() -> None:
    """Placed prompts count immediately, without a heartbeat."""
    nodes = {name: decode(name) for name in "abcd"}
    for _ in range(24):
        node = placed(list(nodes.values())).decode
        nodes[node.node_id] = dataclasses.replace(
            node, sequences=node.sequences + 1, held_tokens=900
        )
    counts = [node.sequences for node in nodes.values()]
    assert max(counts) - min(counts) <= 900 / SEQUENCE_TOKENS + 1


def test_equal_starts_are_drawn_to_one_node_and_tenants_have_homes_of_their_own() -> None:
    nodes = [decode(f"d{i}") for i in range(8)]

    def homes(prompts: list[tuple[list[int], str]]) -> int:
        ids = {place(nodes, tokens, AWARE, salt=salt).decode.node_id for tokens, salt in prompts}  # type: ignore[union-attr]
        return len(ids)

    assert homes([([*LONG, tail], "") for tail in range(20)]) == 1
    assert homes([([tail, *LONG], "") for tail in range(30)]) > 4
    assert homes([(LONG, str(salt)) for salt in range(30)]) > 4


# ---- the others ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([decode("a", sequences=2), decode("b", sequences=1)], "b"),
        ([decode("a", sequences=2), decode("b", sequences=1, held_tokens=900)], "b"),
        ([decode("a", held_tokens=900, sequences=1), decode("b")], "b"),
    ],
)
def test_least_loaded_goes_by_sequences_alone(nodes: list[NodeView], expected: str) -> None:
    assert placed(nodes, name="least-loaded").decode.node_id == expected


def test_least_loaded_orders_prefill_nodes_by_their_queues_in_seconds() -> None:
    nodes = [
        decode("d"),
        prefill("slow", queued_prefill_tokens=900, prefill_tokens_per_second=100, held_tokens=900),
        prefill("fast", queued_prefill_tokens=1000, prefill_tokens_per_second=10_000),
        prefill("idle"),
    ]
    assert names(placed(nodes, name="least-loaded").prefill) == ["idle", "fast", "slow"]


@given(decodes=st.integers(1, 5), prefills=st.integers(0, 5), rounds=st.integers(1, 4))
def test_round_robin_is_fair(decodes: int, prefills: int, rounds: int) -> None:
    nodes = [decode(f"d{i}", sequences=i) for i in range(decodes)]
    nodes += [prefill(f"p{i}", held_tokens=99 * i) for i in range(prefills)]
    for role, count in (("decode", decodes), ("prefill", prefills)):
        counts: Counter[str] = Counter()
        for turn in range(rounds * count):
            placement = place(nodes, LONG, POLICIES["round-robin"], turn=turn)
            assert placement is not None
            counts[
                placement.decode.node_id if role == "decode" else placement.prefill[0].node_id
            ] += 1
        assert len(counts) == count and set(counts.values()) <= {rounds}

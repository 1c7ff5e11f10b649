"""Placement in a large cluster compares a few nodes, and includes the best ones."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.node_table import NodeTable
from tandem.router.cluster.shortlist import FEW, HOLDING, LIGHTEST
from tandem.router.placement import prefix_table as module
from tandem.router.placement.node_prefixes import PromptKeys
from tandem.router.placement.place import Placement, place
from tandem.router.placement.policies import POLICIES
from tandem.router.placement.prefix_table import PrefixTable
from tandem.shared.kv.prefix_keys import chain_keys, pack_keys, short_key

BLOCK = 4
PROMPT = list(range(200))
MANY = 150  # of each kind, more than a window
every_policy = pytest.mark.parametrize("name", ["prefix-aware", "least-loaded"])


def keys(tokens: Sequence[int]) -> list[int]:
    return [short_key(key) for key in chain_keys(tokens, BLOCK)]


class Fleet:
    """A table of nodes d0, d1, ... and p0, p1, ..., all equally busy."""

    def __init__(self, count: int = MANY, clock: Callable[[], float] = time.monotonic) -> None:
        self.table = NodeTable(3.0, clock)
        self.turn = 0
        for number in range(count):
            self.join(f"d{number}", pb.ROLE_DECODE)
        for number in range(count):
            self.join(f"p{number}", pb.ROLE_PREFILL)

    def join(self, name: str, role: pb.Role, group: str = "g") -> None:
        model = pb.ModelCard(fingerprint=group)
        request = pb.JoinRequest(node_id=name, epoch=1, role=role, model=model)
        self.table.join(request, "127.0.0.1:9")
        self.report(name)

    def report(self, name: str, *, tokens: Sequence[int] = (), **load: int) -> None:
        full = {"running": 5, "free_blocks": 1000, "total_blocks": 1000, "block_size": BLOCK}
        node = self.table.find(name)
        assert node is not None
        version = node.prefixes.version
        prefixes = pb.Prefixes(
            version=version + 1,
            base=version,
            block_size=BLOCK,
            stride=1,
            added=pack_keys(keys(tokens)),
        )
        beat = pb.HeartbeatRequest(node_id=name, epoch=1, load=pb.Load(**full | load))  # type: ignore[arg-type]
        beat.prefixes.MergeFrom(prefixes)
        self.table.heartbeat(beat)

    def place(
        self,
        name: str = "prefix-aware",
        exclude: frozenset[tuple[str, int]] = frozenset(),
        tokens: Sequence[int] = PROMPT,
    ) -> Placement:
        self.turn += 1
        placement = self.table.place(PromptKeys(tokens), POLICIES[name], exclude)
        assert placement is not None
        return placement


def test_few_of_many_nodes_are_compared_and_all_of_few() -> None:
    fleet = Fleet()
    assert len(fleet.table.views(PromptKeys(PROMPT))) <= HOLDING + 2 * 2 * LIGHTEST
    small = Fleet(FEW // 2)
    assert len(small.table.views(PromptKeys(PROMPT))) == FEW


def test_the_node_that_holds_a_prompt_gets_it_wherever_it_is_listed() -> None:
    fleet = Fleet()
    fleet.report("d97", tokens=PROMPT)
    fleet.report("p61", tokens=PROMPT[:100])
    for number in range(0, MANY, 3):
        fleet.report(f"d{number}", tokens=PROMPT[:8])  # a prefix that many share
    for _ in range(4):
        assert fleet.place().decode.node_id == "d97"
    without = fleet.place(exclude=frozenset({("d97", 1)}))
    assert without.decode.node_id != "d97" and without.prefill[0].node_id == "p61"


def test_a_prompt_goes_to_where_it_was_placed_before_any_report() -> None:
    fleet = Fleet()
    node = fleet.table.find("d120")
    assert node is not None
    node.inflight_load.begin(node.inflight_prompt(PromptKeys(PROMPT), 0))
    for _ in range(3):
        assert fleet.place().decode.node_id == "d120"


@every_policy
def test_evicted_prefixes_do_not_attract_prompts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STALE", 10)
    fleet = Fleet()
    fleet.report("d97", tokens=PROMPT, running=6)
    beat = pb.HeartbeatRequest(node_id="d97", epoch=1, load=pb.Load(running=6))
    beat.prefixes.MergeFrom(
        pb.Prefixes(version=3, base=2, block_size=BLOCK, stride=1, removed=pack_keys(keys(PROMPT)))
    )
    fleet.table.heartbeat(beat)
    for _ in range(6):
        assert fleet.place(name).decode.node_id != "d97"


@every_policy
def test_the_idle_node_is_found_as_the_window_moves_on(name: str) -> None:
    fleet = Fleet()
    fleet.report("d140", running=0)
    nodes = {fleet.place(name).decode.node_id for _ in range(3 * MANY // 64 + 3)}
    assert "d140" in nodes


@every_policy
def test_idle_unreachable_nodes_do_not_hide_others(name: str) -> None:
    """As many unreachable nodes as a window has, all in one window."""
    fleet = Fleet()
    unreachable = {f"d{number}" for number in range(2 * LIGHTEST)}
    for node_id in unreachable:
        fleet.report(node_id, running=0)
        fleet.table[node_id].ejection.on_failure("request")
    for _ in range(6):
        assert fleet.place(name).decode.node_id not in unreachable


@every_policy
def test_the_only_nodes_with_room_are_found_at_once(name: str) -> None:
    fleet = Fleet()
    for number in range(MANY):
        fleet.report(f"d{number}", free_blocks=1000 * (number == 140), running=9 - number // 99)
    if name == "prefix-aware":
        assert fleet.place(name).decode.node_id == "d140"
    assert "d140" in {view.node_id for view in fleet.table.views(PromptKeys(PROMPT), fleet.turn)}


def test_a_version_of_few_nodes_keeps_its_helpers() -> None:
    fleet = Fleet()
    fleet.join("new-d", pb.ROLE_DECODE, "h")
    fleet.join("new-p", pb.ROLE_PREFILL, "h")
    fleet.report("new-d", running=0, tokens=PROMPT)
    for _ in range(5):
        placement = fleet.place()
        assert placement.decode.node_id == "new-d"
        assert [view.node_id for view in placement.prefill] == ["new-p"]


def test_nodes_that_drain_or_go_take_no_place_of_others() -> None:
    fleet = Fleet()
    for number in range(MANY - 1):
        node = fleet.table.find(f"d{number}")
        assert node is not None
        node.drain()
    assert {fleet.place().decode.node_id for _ in range(6)} == {f"d{MANY - 1}"}
    replaced = pb.JoinRequest(node_id=f"d{MANY - 1}", epoch=2, role=pb.ROLE_DECODE)
    fleet.table.join(replaced, "127.0.0.1:9")
    placement = fleet.place()
    assert (placement.decode.node_id, placement.decode.epoch) == (f"d{MANY - 1}", 2)


def test_a_node_that_fell_silent_is_found_again_when_it_is_back() -> None:
    now = 100.0
    fleet = Fleet(clock=lambda: now)
    fleet.report("d97", tokens=PROMPT)
    assert fleet.place().decode.node_id == "d97"
    now += 2
    others = [node.node_id for node in fleet.table if node.node_id != "d97"]
    for name in others:
        fleet.report(name)
    now += 2
    fleet.table.expire()
    assert len(fleet.table) == len(others)
    assert fleet.place().decode.node_id != "d97"
    fleet.join("d97", pb.ROLE_DECODE)
    assert fleet.place().decode.node_id == "d97"


# ---- in turn -----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    nodes=st.lists(
        st.tuples(
            st.sampled_from([pb.ROLE_DECODE, pb.ROLE_PREFILL]),
            st.sampled_from(["g", "h"]),
            st.sampled_from(["", "drains", "failed", "ejected", "newer"]),
        ),
        max_size=12,
    ),
)
def test_round_robin_decides_as_if_it_looked_at_all_nodes(
    nodes: list[tuple[pb.Role, str, str]],
) -> None:
    fleet, exclude = Fleet(0), frozenset[tuple[str, int]]()
    for number, (role, group, state) in enumerate(nodes):
        name = f"n{7 * number % 12}"
        fleet.join(name, role, group)
        node = fleet.table[name]
        if state == "failed":
            exclude |= {node.key}
        elif state == "ejected":
            node.ejection.on_failure("request")
        elif state == "drains":
            node.drain()
    policy, prompt = POLICIES["round-robin"], PromptKeys(PROMPT)
    for turn in range(8):
        views = fleet.table.views(prompt)
        plain = place(views, PROMPT, policy, turn=turn, exclude=exclude)
        assert fleet.table.place(prompt, policy, exclude) == plain


def test_the_turn_of_a_node_that_came_or_went_is_known_at_once() -> None:
    fleet = Fleet(2)
    assert [fleet.place("round-robin").decode.node_id for _ in range(2)] == ["d0", "d1"]
    fleet.join("d2", pb.ROLE_DECODE)
    assert fleet.place("round-robin").decode.node_id == "d2"
    replaced = pb.JoinRequest(node_id="d0", epoch=2, role=pb.ROLE_DECODE)
    fleet.table.join(replaced, "127.0.0.1:9")
    assert fleet.place("round-robin").decode.epoch == 2


# ---- the table of holders ------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    depths=st.lists(st.integers(0, 20), min_size=1, max_size=40),
    released=st.sets(st.integers(0, 39)),
    turn=st.integers(0, 9),
    few=st.sampled_from([0, 5, module.FEW]),
)
def test_the_node_that_holds_the_most_is_found(
    depths: list[int], released: set[int], turn: int, few: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW", few)
        found_among(depths, released, turn)


def found_among(depths: list[int], released: set[int], turn: int) -> None:
    holders: PrefixTable[int] = PrefixTable()
    sample = [(BLOCK * number, key) for number, key in enumerate(keys(range(80)), 1)]
    columns = [holders.column(number) for number in range(len(depths))]
    for column, count in zip(columns, depths, strict=True):
        column.shape(BLOCK, 1)
        column.add(array("Q", [key for _, key in sample[:count]]))
    for number in released & set(range(len(depths))):
        columns[number].release()
        depths[number] = 0
    place_of = {key: at for at, (_, key) in enumerate(sample)}
    owners = holders.find(
        lambda block_size, stride: sample, lambda owner, key: depths[owner] > place_of[key], 3, turn
    )
    maximum = max(depths)
    assert bool(owners) == bool(maximum)
    assert all(depths[owner] for owner in owners) and len(owners) == len(set(owners)) <= 3
    if maximum:
        assert max(depths[owner] for owner in owners) == maximum


def test_a_released_slot_is_used_again() -> None:
    holders: PrefixTable[str] = PrefixTable()
    for _ in range(100):
        column = holders.column("a")
        column.shape(BLOCK, 1)
        column.add(array("Q", keys(PROMPT)))
        column.release()
    column = holders.column("b")
    column.shape(BLOCK, 1)
    sample = [(1, key) for key in keys(PROMPT)]
    assert holders.find(lambda block_size, stride: sample, lambda owner, key: True, 5, 0) == []

"""A worker's table follows its keeper's, and counts what other workers have placed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.inflight import PlacedLoad
from tandem.router.cluster.node_table import NodeTable
from tandem.router.options import RouterOptions
from tandem.router.placement.node_prefixes import PromptKeys
from tandem.router.processes.node_messages import (
    KeptCommands,
    KeptNodes,
    PlacedLoads,
    introduce,
    take_state,
)
from tandem.router.processes.process_link import Topic
from tandem.shared.kv.prefix_keys import chain_keys, pack_keys, short_key

PROMPT = list(range(64))
BLOCK = 4


class Followed:
    """A keeper's table, and a worker's that gets its messages."""

    def __init__(self) -> None:
        self.now = 100.0
        self.kept = KeptNodes(self._publish, 3.0, clock=lambda: self.now)
        self.table = NodeTable(3.0, clock=lambda: self.now)
        self.commands = KeptCommands(self._publish, RouterOptions(), self.kept)

    def _publish(self, topic: Topic, body: bytes) -> None:
        follow(self.table, topic, body)

    def join(self, name: str, role: pb.Role = pb.ROLE_DECODE, **load: int) -> None:
        request = pb.JoinRequest(
            node_id=name,
            epoch=1,
            role=role,
            model=pb.ModelCard(fingerprint="g"),
            capabilities=["embeddings"],
            load=pb.Load(free_blocks=9, total_blocks=9, block_size=BLOCK, **load),  # type: ignore[arg-type]
        )
        request.load.link_rates.add(node_id="p", tokens_per_second=5.0)
        self.kept.join(request, "127.0.0.1:9")

    def beat(self, name: str, **fields: Any) -> None:
        self.kept.heartbeat(pb.HeartbeatRequest(node_id=name, epoch=1, **fields))

    def check(self, table: NodeTable) -> None:
        """The tables lead to the same decisions."""
        prompt = PromptKeys(PROMPT)

        def views(nodes: NodeTable) -> list[Any]:
            return sorted(nodes.views(prompt), key=lambda view: view.node_id)

        assert views(table) == views(self.kept)
        kept, found = (sorted(map(str, nodes.infos())) for nodes in (self.kept, table))
        assert found == kept


def follow(table: NodeTable, topic: Topic, body: bytes) -> None:
    """Take a message as a worker does."""
    if topic is Topic.JOIN:
        request = pb.JoinRequest.FromString(body)
        table.join(request, request.address)
    elif topic is Topic.HEARTBEAT:
        table.heartbeat(pb.HeartbeatRequest.FromString(body))
    elif topic is Topic.STATE:
        take_state(table, body)
    else:
        assert topic is Topic.LOST
        node_id, epoch, keep = json.loads(body)
        table.lose(node_id, epoch, keep=keep)


def prefixes(version: int, start: int, end: int) -> pb.Prefixes:
    keys = [short_key(key) for key in chain_keys(PROMPT, BLOCK)][start:end]
    return pb.Prefixes(
        version=version, base=version - 1, block_size=BLOCK, stride=1, added=pack_keys(keys)
    )


def test_a_worker_follows_from_the_start_and_from_any_later_moment() -> None:
    followed = Followed()
    followed.join("a", running=3)
    followed.join("b", pb.ROLE_PREFILL)
    followed.beat(
        "a", load=pb.Load(running=5, queued_prefill_tokens=70), prefixes=prefixes(1, 0, 4)
    )
    followed.beat("a", prefixes=prefixes(2, 4, 9), draining=True)
    followed.beat("b", load=pb.Load(waiting=2, free_blocks=3, total_blocks=9, block_size=BLOCK))
    followed.commands.drain("a", 5.0)
    followed.kept.leave("b", 1)
    followed.check(followed.table)
    late = NodeTable(3.0, clock=lambda: followed.now)
    for node in followed.kept:
        for topic, body in introduce(node):
            follow(late, topic, body)
    followed.check(late)
    # Later changes mean the same to both.
    change = pb.HeartbeatRequest(node_id="a", epoch=1, prefixes=prefixes(3, 9, 12))
    follow(late, Topic.HEARTBEAT, change.SerializeToString())
    followed.kept.heartbeat(change)
    followed.check(late)
    followed.check(followed.table)


def test_only_the_keeper_loses_nodes() -> None:
    followed = Followed()
    followed.join("a")
    followed.join("b")
    followed.now += 2
    followed.beat("b")
    followed.now += 2
    assert len(followed.table) == 2
    followed.kept.expire()
    assert [node.node_id for node in followed.table] == ["b"]
    followed.join("a")
    followed.check(followed.table)


def test_what_other_workers_placed_counts_once() -> None:
    followed = Followed()
    followed.join("a")
    node = followed.table["a"]
    node.take_siblings(PlacedLoad(2, 3, 40))
    assert (node.sequences, node.inflight_load.queued_tokens, node.inflight_calls) == (3, 40, 2)
    # The node reports the same prompts, and one of another router.
    followed.beat("a", load=pb.Load(running=4, queued_prefill_tokens=50))
    assert (node.sequences, node.inflight_load.queued_tokens) == (4, 50)
    node.take_siblings(PlacedLoad())
    assert (node.sequences, node.inflight_load.queued_tokens) == (1, 10)


@pytest.mark.parametrize("without", [None, 0, 1])
def test_placed_loads_are_summed_over_workers(without: int | None) -> None:
    loads = PlacedLoads()
    key, other = ("a", 1), ("b", 1)
    loads.take(0, 2, {key: PlacedLoad(1, 2, 30), other: PlacedLoad(1, 1, 1)})
    loads.take(1, 3, {key: PlacedLoad(4, 5, 60)})
    expected = {None: (5, 7, 90), 0: (4, 5, 60), 1: (1, 2, 30)}[without]
    assert loads.sums([key], without=without) == {key: PlacedLoad(*expected)}
    assert loads.active(without=without) == {None: 5, 0: 3, 1: 2}[without]
    loads.take(0, 1, {other: PlacedLoad()})
    assert loads.drop(0) == {key: PlacedLoad(1, 2, 30)}
    assert loads.sums([key]) == {key: PlacedLoad(4, 5, 60)} and loads.active() == 3

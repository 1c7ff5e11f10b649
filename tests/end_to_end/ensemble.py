"""Nodes that differ in size and change their roles, so that each two are a pair in both ways."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from tandem.router import admin
from tandem.tests.end_to_end.cluster import Part, TestCluster, node_metric, until

COMMITTED = 'tandem_transfers_total{outcome="committed"}'


def side(kind: str, ranks: int, block_size: int, *flags: str) -> tuple[str, ...]:
    return (kind, f"--tensor-parallel-size={ranks}", f"--block-size={block_size}", *flags)


class Ensemble:
    """Nodes of which each two are a cluster of their own: a router knows no third, and who prefills
    is settled by their roles.

    ``sizes``: by name, the number of ranks and the block size.
    """

    def __init__(self, cluster: TestCluster, sizes: Mapping[str, tuple[int, int]]) -> None:
        self.cluster = cluster
        self.sizes = sizes
        self._routers = {pair: cluster.start_router() for pair in combinations(sizes, 2)}
        nodes = cluster.start_nodes(*(self._arguments(name) for name in sizes))
        self._nodes = dict(zip(sizes, nodes, strict=True))

    def cast(self, prefill: str, decode: str) -> tuple[Part, Part]:
        """The two, once they play these roles behind the router that knows them, and KV goes from
        one to the other: a first greeting may take longer than a request waits."""
        (self.cluster.router,) = (
            router for pair, router in self._routers.items() if {prefill, decode} == {*pair}
        )
        wanted = {prefill: "prefill", decode: "decode"}
        until(lambda: self.cluster.roles().keys() == wanted.keys(), "both nodes at the router")
        for name, role in wanted.items():
            if self.cluster.roles()[name] != role:
                admin.set_role(self.cluster.registry, name, role, force=True)
        self.cluster.wait_roles(wanted)
        nodes = self._nodes[prefill], self._nodes[decode]
        until(lambda: self._hands_over(nodes[1]), f"{prefill} to prefill for {decode}")
        self.cluster.wait_idle(*nodes)
        return nodes

    def _hands_over(self, decode: Part) -> bool:
        """Less than a block, so that no cache keeps any of it."""
        before = node_metric(decode, COMMITTED)
        self.cluster.complete([1, 2], max_tokens=1)
        return node_metric(decode, COMMITTED) > before

    def _arguments(self, name: str) -> tuple[str, ...]:
        joined = [
            f"127.0.0.1:{router.details['registry']}"
            for pair, router in self._routers.items()
            if name in pair
        ]
        flags = f"--node-id={name}", f"--join={','.join(joined)}"
        return side("decode-node", *self.sizes[name], *flags)

"""Nodes that differ and change their roles, so that two of them are a pair in both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tandem.router.cluster import admin
from tandem.tests.end_to_end.support.cluster import Part, TestCluster, committed_transfers, until


def side(kind: str, ranks: int, block_size: int, *flags: str) -> tuple[str, ...]:
    return (kind, f"--tensor-parallel-size={ranks}", f"--block-size={block_size}", *flags)


class Ensemble:
    """Nodes of which ``pairs`` are clusters of their own: a router knows no third node, and who
    prefills is settled by the roles. They begin as decode nodes.

    ``kinds``: by name, the number of ranks, the block size, and flags.
    """

    def __init__(
        self,
        cluster: TestCluster,
        kinds: Mapping[str, tuple[int, int, *tuple[str, ...]]],
        pairs: Iterable[tuple[str, str]],
    ) -> None:
        self.cluster = cluster
        self.kinds = kinds
        self._roles = dict.fromkeys(kinds, "decode")
        self._routers = {pair: cluster.start_router() for pair in pairs}
        nodes = cluster.start_nodes(*(self._arguments(name) for name in kinds))
        self._nodes = dict(zip(kinds, nodes, strict=True))

    def apart(self, one: str, other: str) -> None:
        """Behind the router that knows these two, both decode, and each prefills for itself."""
        self._play({one: "decode", other: "decode"})

    def cast(self, prefill: str, decode: str) -> tuple[Part, Part]:
        """The two, once they play these roles behind the router that knows them, and KV goes from
        one to the other: a first greeting may take longer than a request waits."""
        self._play({prefill: "prefill", decode: "decode"})
        nodes = self._nodes[prefill], self._nodes[decode]
        until(lambda: self._hands_over(nodes[1]), f"{prefill} to prefill for {decode}")
        self.cluster.wait_idle(*nodes)
        return nodes

    def _play(self, roles: dict[str, str]) -> None:
        (self.cluster.router,) = (
            router for pair, router in self._routers.items() if {*pair} == roles.keys()
        )
        # It may not have heard yet of what another router has asked for.
        played = {name: self._roles[name] for name in roles}
        self.cluster.wait_roles(played)
        for name, role in roles.items():
            if played[name] != role:
                admin.set_role(self.cluster.registry, name, role, force=True)
        self.cluster.wait_roles(roles)
        self._roles |= roles

    def _hands_over(self, decode: Part) -> bool:
        """Less than a block, so that no cache keeps any of it."""
        before = committed_transfers(decode)
        self.cluster.complete([1, 2], max_tokens=1)
        return committed_transfers(decode) > before

    def _arguments(self, name: str) -> tuple[str, ...]:
        joined = [
            f"127.0.0.1:{router.details['registry']}"
            for pair, router in self._routers.items()
            if name in pair
        ]
        flags = f"--node-id={name}", f"--join={','.join(joined)}"
        return side("decode-node", *self.kinds[name], *flags)

"""The roles of a node, and switching between them while it runs.

Model, cache and ports belong to neither role. The services of both are registered from the start,
and the inactive one rejects requests. So a switch only waits for the running requests: it loads no
weights, and keeps the prefix index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc

from ...proto import tandem_pb2 as pb
from .role import NodeProcess, NodeRole

POLL_SECONDS = 0.05


class RoleSwitch:
    """All roles of one node; the first is current at first."""

    def __init__(self, roles: Sequence[NodeRole]) -> None:
        self._roles = {role.role: role for role in roles}
        self._current = roles[0]
        self._ending = False

    @property
    def role(self) -> pb.Role:
        """The current role."""
        return self._current.role

    @property
    def listens(self) -> bool:
        return any(role.listens for role in self._roles.values())

    @property
    def busy(self) -> bool:
        return any(role.busy for role in self._roles.values())

    def can_play(self, role: pb.Role) -> bool:
        return role in self._roles

    def register(self, server: grpc.aio.Server, process: NodeProcess) -> None:
        for role in self._roles.values():
            role.register(server, process)
            if role is not self._current:
                role.drain()

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [loop for role in self._roles.values() for loop in role.background()]

    def drain(self) -> None:
        """Reject new requests in every role, for good."""
        self._ending = True
        for role in self._roles.values():
            role.drain()

    def cut_off(self) -> None:
        """End the running requests of every role."""
        for role in self._roles.values():
            role.cut_off()

    async def change(self, role: pb.Role) -> None:
        """Reject new requests, finish the running ones, and accept requests in the new role.

        There is no deadline, because each request has its own and none may be lost.
        """
        self._current.drain()
        while self._current.busy:  # noqa: ASYNC110 - requests end in many places, changes are rare
            await asyncio.sleep(POLL_SECONDS)
        await self._current.close()
        self._current = self._roles[role]
        if not self._ending:
            self._current.admit()

    async def close(self) -> None:
        for role in self._roles.values():
            await role.close()

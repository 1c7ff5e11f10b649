"""The other workers, asked through the keeper."""

from __future__ import annotations

import json
from typing import Any

from ...proto import tandem_pb2 as pb
from ...shared.errors import RequestError
from ..access.key_usage import KeyCounts
from ..cluster.node_commands import UnknownNodeError
from ..routes.services import Siblings
from ..web.overview import WorkerShare
from .merged_usage import read_usage
from .process_link import Link, LinkClosedError, Topic


class LinkedSiblings(Siblings):
    """What the keeper does not answer is answered for this worker alone, or refused."""

    link: Link

    async def drain(self, node_id: str, seconds: float | None) -> None:
        await self._command({"node": node_id, "seconds": seconds})

    async def set_role(self, node_id: str, role: pb.Role, *, force: bool) -> None:
        await self._command({"node": node_id, "role": role, "force": force})

    async def usage(self) -> dict[str, KeyCounts]:
        try:
            told = await self.link.ask(Topic.USAGE)
        except LinkClosedError:
            return await super().usage()
        return read_usage(told)

    async def shares(self) -> list[WorkerShare]:
        try:
            told = await self.link.ask(Topic.OVERVIEW)
        except LinkClosedError:
            return await super().shares()
        return [WorkerShare.model_validate(each) for each in json.loads(told)]

    async def page(self) -> bytes:
        try:
            return await self.link.ask(Topic.PAGE)
        except LinkClosedError:
            return await super().page()

    async def _command(self, command: dict[str, Any]) -> None:
        answer = json.loads(await self.link.ask(Topic.COMMAND, json.dumps(command).encode()))
        if refused := answer.get("refused"):
            raise UnknownNodeError(refused) if answer["unknown"] else RequestError(refused)

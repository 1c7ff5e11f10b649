"""Operators' routes, which need an admin key: drain nodes, change roles, shut down."""

from __future__ import annotations

import asyncio
from typing import Any, Literal, TypeVar

from fastapi import APIRouter
from google.protobuf.json_format import MessageToDict
from pydantic import BaseModel, Field

from ...proto import tandem_pb2 as pb
from ..cluster.node_commands import UnknownNodeError
from ..errors import ApiError
from ..http.exchange import CLOSE, HttpExchange
from ..http.json_body import parse_json
from ..openai.response_models import OpenAIError
from ..requests.body_model import BodyModel
from .documentation import documented, documented_errors
from .guards import ADMIN_CHECKED
from .services import Exchange, RouterServices, Services

MAX_COMMAND_BYTES = 4096
ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}

T = TypeVar("T", bound=BodyModel)

router = APIRouter(
    tags=["admin"], dependencies=ADMIN_CHECKED, responses=documented_errors(OpenAIError)
)


class DrainCommand(BodyModel):
    """``timeout``: seconds after which the node exits in any case; unlimited by default."""

    timeout: float | None = Field(default=None, ge=0)


class RoleCommand(BodyModel):
    """``force``: also change the last decode node."""

    role: Literal["prefill", "decode"]
    force: bool = False


class Accepted(BaseModel):
    """The node gets the command with its next heartbeat."""

    status: str = "accepted"


class NodeList(BaseModel):
    """The nodes with all fields of the protocol, and absent ones: rejected or lost."""

    nodes: list[dict[str, Any]]
    absent: list[dict[str, Any]]


MODELS = (DrainCommand, RoleCommand, Accepted)


@router.get("/admin/nodes")
async def list_nodes(services: RouterServices) -> NodeList:
    """The nodes of this router."""
    infos, absent = services.nodes.infos(), services.nodes.absent.all()
    # In a thread, because it takes long for a thousand nodes.
    return await asyncio.to_thread(
        lambda: NodeList(nodes=[_fields(i) for i in infos], absent=[_fields(a) for a in absent])
    )


@router.post("/admin/nodes/{node:path}/drain", **documented(DrainCommand, Accepted, optional=True))
async def drain_node(node: str, exchange: Exchange, services: RouterServices) -> Accepted:
    """Let a node finish its requests, and exit."""
    command = await _command(exchange, services, DrainCommand)
    try:
        services.registry.commands.drain(node, command.timeout)
    except UnknownNodeError as error:
        raise _unknown(error) from None
    return Accepted()


@router.post("/admin/nodes/{node:path}/role", **documented(RoleCommand, Accepted))
async def set_role(node: str, exchange: Exchange, services: RouterServices) -> Accepted:
    """Let a node finish its requests, and continue in another role."""
    command = await _command(exchange, services, RoleCommand)
    try:
        services.registry.commands.set_role(node, ROLES[command.role], force=command.force)
    except UnknownNodeError as error:
        raise _unknown(error) from None
    return Accepted()


@router.post("/shutdown")
async def shut_down(services: RouterServices) -> Accepted:
    """Stop the router like SIGTERM: it fails /ready, finishes its requests, and exits."""
    services.shut_down()
    return Accepted()


async def _command(exchange: HttpExchange, services: Services, model: type[T]) -> T:
    """The body, which may be missing. Raises ``RequestError`` or ``ApiError``."""
    if not exchange.has_body:
        return model.read({}, set())
    with services.handler.bodies.share() as share:
        body = await exchange.body(share)
    if len(body) > MAX_COMMAND_BYTES:
        message = f"The body is over the limit of {MAX_COMMAND_BYTES} bytes."
        raise ApiError(413, message, headers=CLOSE)
    ignored: set[str] = set()
    command = model.read(parse_json(body), ignored)
    if ignored:
        names = ", ".join(sorted(ignored))
        raise ApiError(400, f"A command has no field {names}.", param=min(ignored))
    return command


def _unknown(error: UnknownNodeError) -> ApiError:
    return ApiError(404, str(error), param="node", code="node_not_found")


def _fields(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields

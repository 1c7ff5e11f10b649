"""Dependencies of routes with stored objects: their owner, their folder, and pages of lists."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import Depends, Request

from ..batches.file_store import Page
from ..batches.runner import Batches
from ..errors import ApiError, invalid
from ..requests.body_errors import check_integer
from .services import Exchange, RouterServices


async def _owner(exchange: Exchange, services: RouterServices) -> str:
    """The owner of the objects that a request may access: its key's name. Without keys, all clients
    are one owner."""
    if not services.options.requires_key:
        return ""
    if exchange.access.key:
        return exchange.access.key
    key = exchange.header(b"authorization") or exchange.header(b"x-api-key")
    return hashlib.sha256(key).hexdigest()


async def _batches(services: RouterServices) -> Batches:
    if services.batches is None:
        raise ApiError(
            404,
            f"Files and batches are off: {services.batches_off}. Start the router with "
            "--batch-dir FOLDER to use them.",
            code="not_enabled",
        )
    return services.batches


def page_of(request: Request, *, max_limit: int, default: int) -> Page:
    """The requested page of a list, from the query. Raises ``RequestError``."""
    query = request.query_params
    limit, order = query.get("limit", str(default)), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("Invalid value for 'order': it must be 'asc' or 'desc'.", "order")
    valid = limit.isascii() and limit.isdigit() and len(limit) < 9
    number: Any = int(limit) if valid else limit[:32]
    check_integer("limit", number, 1, max_limit)
    return Page(after=query.get("after"), limit=number, newest_first=order == "desc")


Owner = Annotated[str, Depends(_owner)]
BatchFolder = Annotated[Batches, Depends(_batches)]


def query_parameter(name: str, schema: dict[str, Any], about: str) -> dict[str, Any]:
    """The documentation of a query parameter."""
    return {"name": name, "in": "query", "description": about, "schema": schema}


def page_parameters(max_limit: int, default: int) -> list[dict[str, Any]]:
    """The documentation of the query parameters that ``page_of`` reads."""
    limit = {"type": "integer", "minimum": 1, "maximum": max_limit, "default": default}
    order = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
    return [
        query_parameter("after", {"type": "string"}, "The last id of the previous page."),
        query_parameter("limit", limit, "Entries of a page."),
        query_parameter("order", order, "By time of creation."),
    ]

"""What routes of stored objects share: owners, pages of lists, folders that are not there."""

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
    """Whose objects a request may see: those of its key. All clients are one without keys."""
    if not services.options.requires_key:
        return ""
    if exchange.access.key:
        return exchange.access.key
    given = exchange.header(b"authorization") or exchange.header(b"x-api-key")
    return hashlib.sha256(given).hexdigest()


async def _batches(services: RouterServices) -> Batches:
    if services.batches is None:
        raise ApiError(
            404,
            f"Files and batches are off: {services.batches_off}. Start the router with "
            "--batch-dir FOLDER to use them.",
            code="not_enabled",
        )
    return services.batches


def page_of(request: Request, *, most: int, default: int) -> Page:
    """The page of a list that the query asks for. Raises ``RequestError``."""
    query = request.query_params
    limit, order = query.get("limit", str(default)), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("Invalid value for 'order': it must be 'asc' or 'desc'.", "order")
    valid = limit.isascii() and limit.isdigit() and len(limit) < 9
    number: Any = int(limit) if valid else limit[:32]
    check_integer("limit", number, 1, most)
    return Page(after=query.get("after"), limit=number, newest_first=order == "desc")


Owner = Annotated[str, Depends(_owner)]
BatchFolder = Annotated[Batches, Depends(_batches)]


def query_parameter(name: str, schema: dict[str, Any], about: str) -> dict[str, Any]:
    """The documentation of a parameter that ``page_of`` or a route reads."""
    return {"name": name, "in": "query", "description": about, "schema": schema}


def page_parameters(most: int, default: int) -> list[dict[str, Any]]:
    """The documentation of ``page_of``."""
    limit = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    order = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
    return [
        query_parameter("after", {"type": "string"}, "The last id of the page before."),
        query_parameter("limit", limit, "Entries of a page."),
        query_parameter("order", order, "By time of creation."),
    ]

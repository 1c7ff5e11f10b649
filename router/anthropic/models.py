"""The list of models in Anthropic's shape."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel

from ..errors import invalid
from ..served_model import ServedModel

VERSION_HEADER = b"anthropic-version"
DEFAULT_PAGE, MAX_PAGE = 20, 1000


class AnthropicModel(BaseModel):
    """A model's entry."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str


class AnthropicModelList(BaseModel):
    """A page of the list, with the ids of its first and last model."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_entry(model: ServedModel, name: str) -> AnthropicModel:
    """The model's entry under one of its names."""
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(id=name, display_name=name, created_at=created)


def model_page(
    model: ServedModel, after: str | None, before: str | None, limit: str | None
) -> AnthropicModelList:
    """The page of names after ``after`` or before ``before``. Raises ``RequestError``."""
    names = [model.name, *model.aliases]
    size = _page_size(limit)
    if after is not None:
        names = names[_index(names, after, "after_id") + 1 :]
    if before is not None:
        names = names[: _index(names, before, "before_id")]
    page = names[-size:] if before is not None and after is None else names[:size]
    return AnthropicModelList(
        data=[model_entry(model, name) for name in page],
        has_more=len(names) > len(page),
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
    )


def _index(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise invalid(f"Invalid '{param}': there is no model '{name[:128]}'.", param)
    return names.index(name)


def _page_size(limit: str | None) -> int:
    if limit is None:
        return DEFAULT_PAGE
    if not (limit.isascii() and limit.isdigit() and 0 < int(limit[:9]) <= MAX_PAGE):
        raise invalid(f"Invalid 'limit': {limit[:32]}; it must be from 1 to {MAX_PAGE}.", "limit")
    return int(limit)

"""The sampling parameters that are plain numbers, in bodies and in the message to a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from ...proto import tandem_pb2 as pb
from ...shared.config.sampling_fields import NUMBERS
from ..served_model import ServedModel
from .body_model import BOUNDED, WHOLE, BodyModel


def body_with_numbers(names: Mapping[str, str]) -> type[BodyModel]:
    """A body that has the table's parameters, under other ``names`` where an API has its own. One
    that a request leaves out is ``None``: the model's default counts."""
    rows: dict[str, Any] = {}
    for name, number in NUMBERS.items():
        kind: Any = number.kind
        limits: dict[str, Any] = {
            "gt" if number.above else "ge": number.minimum,
            "le": number.maximum,
        }
        check = WHOLE if kind is int else BOUNDED
        rows[names.get(name, name)] = (Annotated[kind, Field(**limits), check] | None, None)
    return create_model("BodyWithNumbers", __base__=BodyModel, **rows)


# No type checker takes a class as a base that a call has made.
if TYPE_CHECKING:
    SamplingBody = BodyModel
else:
    SamplingBody = body_with_numbers({})


def sampling_message(
    model: ServedModel, given: Mapping[str, float | None], **others: Any
) -> pb.Sampling:
    """A node's sampling parameters: the numbers that a request has ``given``, else the model's
    defaults, and ``others``. Raises ``RequestError`` for a default that no request may have."""
    for name, number in NUMBERS.items():
        value = model.default(name, given.get(name))
        # Messages have no negative whole numbers, such as vLLM's -1 for "off".
        others[name] = max(0, int(value)) if number.kind is int else value
    return pb.Sampling(**others)


def numbers_of(body: BodyModel) -> dict[str, float | None]:
    """The numbers of a ``SamplingBody``."""
    return {name: getattr(body, name) for name in NUMBERS}

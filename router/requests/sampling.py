"""Numeric sampling parameters, in bodies and in the message to a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from ...proto import tandem_pb2 as pb
from ...shared.config.sampling_fields import NUMBERS
from ..served_model import ServedModel
from .body_model import BOUNDED, WHOLE, BodyModel


def body_with_numbers(names: Mapping[str, str]) -> type[BodyModel]:
    """A body with the parameters of the table, under an API's own ``names`` where it has any. A
    parameter that a request omits is ``None``, and the model's default applies."""
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


# Type checkers reject a dynamically created base class.
if TYPE_CHECKING:
    SamplingBody = BodyModel
else:
    SamplingBody = body_with_numbers({})


def sampling_message(
    model: ServedModel, numbers: Mapping[str, float | None], **others: Any
) -> pb.Sampling:
    """A node's sampling parameters: a request's ``numbers``, or the model's defaults, and
    ``others``. Raises ``RequestError`` for a default outside the range of requests."""
    for name, number in NUMBERS.items():
        value = model.default(name, numbers.get(name))
        # vLLM's -1 for "off" becomes 0, because the message has unsigned integers.
        others[name] = max(0, int(value)) if number.kind is int else value
    return pb.Sampling(**others)


def numbers_of(body: BodyModel) -> dict[str, float | None]:
    """The numbers of a ``SamplingBody``."""
    return {name: getattr(body, name) for name in NUMBERS}

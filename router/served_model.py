"""The model that a router serves: its name, limits and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..shared.config.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from ..shared.config.sampling_fields import NUMBERS
from ..shared.version import version
from .errors import ApiError, invalid

if TYPE_CHECKING:
    from ..shared.text.tokenizer import Tokenizer


def system_fingerprint(name: str, architecture: str) -> str:
    """The value of OpenAI's field of that name, in vLLM's format: the version of Tandem, and a
    digest of the model's name and architecture."""
    digest = blake2b(f"{name}\n{architecture}".encode(), digest_size=4).hexdigest()
    return f"tandem-{version()}-{digest}"


class ModelCard(BaseModel):
    """A model's entry in /v1/models. ``default_sampling_params`` apply to requests that omit them,
    and include ``max_tokens`` if the operator or the model sets it."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tandem"
    root: str
    parent: None = None
    max_model_len: int
    default_sampling_params: dict[str, int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """``max_model_len`` is the smallest of all decode nodes, since any may get the request.
    ``aliases`` are further names for requests. ``template_variables`` are defaults for chat
    templates. ``scoring`` is how the model scores two texts: a ``Scoring``, or "" if it cannot.
    ``labels`` are the classes of a classifier."""

    name: str
    aliases: tuple[str, ...] = ()
    max_model_len: int
    vocab_size: int
    created: int
    tokenizer: Tokenizer
    system_fingerprint: str
    defaults: SamplingDefaults = NO_DEFAULTS
    template_variables: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()
    scoring: str = ""
    labels: tuple[str, ...] = ()

    def card(self, name: str = "") -> ModelCard:
        """The entry in /v1/models under one of the model's names."""
        return ModelCard(
            id=name or self.name,
            created=self.created,
            root=self.name,
            max_model_len=self.max_model_len,
            default_sampling_params=self._default_parameters(),
        )

    def _default_parameters(self) -> dict[str, int | float]:
        own = self.defaults.parameters
        params = {name: own.get(name, number.default) for name, number in NUMBERS.items()}
        max_tokens = self.defaults.max_tokens or self.defaults.limit
        return params if max_tokens is None else params | {"max_tokens": max_tokens}

    def default(self, name: str, requested: float | None) -> float:
        """A sampling parameter: the ``requested`` value, else the model's default, else OpenAI's.
        Raises ``RequestError`` for a default outside the range of requests."""
        if requested is not None:
            return requested
        number = NUMBERS[name]
        value = self.defaults.parameters.get(name, number.default)
        if number.above and value <= number.minimum:
            raise invalid(f"Invalid value for '{name}': must be above {number.minimum:g}.", name)
        return value

    def check_name(self, name: str) -> None:
        """Raise ``ApiError`` 404 for another model. An empty name means the served model."""
        if name not in ("", self.name, *self.aliases):
            short = name if len(name) <= 128 else name[:128] + "..."
            raise ApiError(
                404,
                f"The model '{short}' does not exist; this server has '{self.name}'.",
                param="model",
                code="model_not_found",
            )

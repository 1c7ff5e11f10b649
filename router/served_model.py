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
    """OpenAI's field of that name, in the form of vLLM's: the version of Tandem, and a digest of
    the model's name and architecture."""
    digest = blake2b(f"{name}\n{architecture}".encode(), digest_size=4).hexdigest()
    return f"tandem-{version()}-{digest}"


class ModelCard(BaseModel):
    """A model's entry in /v1/models. ``default_sampling_params`` are those of requests that leave
    them out; ``max_tokens`` is among them if the operator or the model has set it."""

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
    Requests may use the ``aliases`` too. Chat templates get the ``template_variables`` that a
    request does not set. Answers have the ``system_fingerprint``. ``scoring`` is how it scores two
    texts: as a ``Scoring``, or "" if it does not. ``labels`` are those of its classifier."""

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
        """The entry in /v1/models of the model under one of its names."""
        return ModelCard(
            id=name or self.name,
            created=self.created,
            root=self.name,
            max_model_len=self.max_model_len,
            default_sampling_params=self._default_parameters(),
        )

    def _default_parameters(self) -> dict[str, int | float]:
        own = self.defaults.parameters
        made = {name: own.get(name, number.default) for name, number in NUMBERS.items()}
        most = self.defaults.max_tokens or self.defaults.limit
        return made if most is None else made | {"max_tokens": most}

    def default(self, name: str, given: float | None) -> float:
        """A sampling parameter: as ``given``, else the model's default, else OpenAI's. Raises
        ``RequestError`` for a default that no request may have."""
        if given is not None:
            return given
        number = NUMBERS[name]
        value = self.defaults.parameters.get(name, number.default)
        if number.above and value <= number.minimum:
            raise invalid(f"Invalid value for '{name}': must be above {number.minimum:g}.", name)
        return value

    def check_name(self, name: str) -> None:
        """Raise ``ApiError`` 404 for another model. An empty name stands for the served one."""
        if name not in ("", self.name, *self.aliases):
            shown = name if len(name) <= 128 else name[:128] + "..."
            raise ApiError(
                404,
                f"The model '{shown}' does not exist; this server has '{self.name}'.",
                param="model",
                code="model_not_found",
            )

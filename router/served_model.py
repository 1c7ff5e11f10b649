"""The model that a router serves: its name, limits and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..shared.config.sampling_config import POSITIVE
from ..shared.config.sampling_defaults import NO_DEFAULTS, SamplingDefaults
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
    """A model's entry in /v1/models."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tandem"
    root: str
    parent: None = None
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """``max_model_len`` is the smallest of all decode nodes, since any may get the request.
    Requests may use the ``aliases`` too. Chat templates get the ``template_variables`` that a
    request does not set. Answers have the ``system_fingerprint``."""

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

    def card(self, name: str = "") -> ModelCard:
        """The entry in /v1/models of the model under one of its names."""
        return ModelCard(
            id=name or self.name,
            created=self.created,
            root=self.name,
            max_model_len=self.max_model_len,
        )

    def default(self, name: str, given: float | None, otherwise: float) -> float:
        """A sampling parameter: as ``given``, else the model's default, else ``otherwise``. Raises
        ``RequestError`` for a default that no request may have."""
        if given is not None:
            return given
        value = self.defaults.parameters.get(name, otherwise)
        if name in POSITIVE and value <= 0:
            raise invalid(f"Invalid value for '{name}': must be above 0.", name)
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

"""Variables of chat templates that clients may set."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ...shared.config.sampling import RESERVED_VARIABLES
from ..errors import invalid

TemplateVariables = Annotated[dict[str, Any], Field(max_length=64)]


def check_template_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Reject variables of ``chat_template_kwargs`` that would replace the server's own."""
    for name in given:
        if name in RESERVED_VARIABLES or name.startswith("_"):
            message = f"'chat_template_kwargs' must not set '{name[:64]}'."
            raise invalid(message, "chat_template_kwargs")
    return given

"""POST /v1/messages/count_tokens: the length of a prompt."""

from __future__ import annotations

from typing import Any

from ..requests.body_model import ResponseModel
from ..requests.context import ContextError
from ..served_model import ServedModel
from .prompt import PromptBody, read_prompt


class CountTokensRequest(PromptBody):
    """The body of POST /v1/messages/count_tokens: that of a message, without its sampling."""


class TokenCount(ResponseModel):
    """The tokens of a prompt, rendered by the model's chat template."""

    input_tokens: int


def count_prompt_tokens(body: Any, model: ServedModel, ignored: set[str]) -> dict[str, Any]:
    """The answer to a body. Raises ``RequestError``."""
    asked = CountTokensRequest.read(body, ignored)
    model.check_name(asked.model)
    prompt = read_prompt(asked, model, ignored)
    try:
        return {"input_tokens": len(prompt.encode(model, counted=True))}
    except ContextError as error:
        return {"input_tokens": error.length}

"""POST /detokenize: tokens as text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ..requests.body_errors import check_token
from ..requests.body_model import BodyModel, DocumentedAs, ResponseModel
from ..served_model import ServedModel


class DetokenizeRequest(BodyModel):
    """The body of POST /detokenize."""

    model: Annotated[str, Field(max_length=1024)] = ""
    tokens: Annotated[list[Any], DocumentedAs(list[int])]


class DetokenizeResponse(ResponseModel):
    """The text of tokens, special ones included. A request without ``model``, as llama.cpp's
    clients send it, gets it under llama.cpp's name too."""

    prompt: str
    content: str | None = None


def detokenize(body: Any, model: ServedModel, ignored: set[str]) -> dict[str, Any]:
    """The answer to a body. Raises ``RequestError``."""
    asked = DetokenizeRequest.read(body, ignored)
    model.check_name(asked.model)
    for i, token in enumerate(asked.tokens):
        check_token(f"tokens[{i}]", token, model.vocab_size)
    text = model.tokenizer.decode(asked.tokens, skip_special_tokens=False)
    return {"prompt": text} if asked.model else {"prompt": text, "content": text}

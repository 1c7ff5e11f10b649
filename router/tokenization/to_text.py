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
    """The text of the tokens, including special ones. A request without ``model``, as llama.cpp's
    clients send it, also gets it as ``content``."""

    prompt: str
    content: str | None = None


def detokenize(body: Any, model: ServedModel, ignored: set[str]) -> dict[str, Any]:
    """The response to a body. Raises ``RequestError``."""
    request = DetokenizeRequest.read(body, ignored)
    model.check_name(request.model)
    for i, token in enumerate(request.tokens):
        check_token(f"tokens[{i}]", token, model.vocab_size)
    text = model.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return {"prompt": text} if request.model else {"prompt": text, "content": text}

"""The ``input`` of requests that generate no text: strings or tokens."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from pydantic import Field

from ...proto import tandem_pb2 as pb
from ..errors import invalid
from ..generation import (
    EncodedPrompt,
    GenerationRequest,
    TextOptions,
    VectorOptions,
    new_tokens,
)
from ..requests.body_errors import check_token, wrong_type
from ..requests.body_model import INT32, WHOLE, BodyModel, DocumentedAs
from ..requests.context import check_context, encode_one
from ..requests.truncation import max_prompt_tokens, read_truncation
from ..served_model import ServedModel

# OpenAI's limit.
MAX_INPUTS = 2048


class InputBody(BodyModel):
    """The fields of all routes that take an ``input``."""

    model: Annotated[str, Field(max_length=1024)] = ""
    priority: Annotated[int, Field(ge=-INT32, le=INT32 - 1), WHOLE] = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32 - 1), WHOLE] | None = None
    truncation_side: Literal["left", "right"] = "right"
    input: Annotated[Any, DocumentedAs(str | list[str] | list[int] | list[list[int]])]
    # Accepted without effect: OpenAI uses it for its own accounting.
    user: Any = None


def read_inputs(
    request: InputBody, model: ServedModel, *, prompt: str = "", prompt_name: str | None = None
) -> list[EncodedPrompt]:
    """The tokens of each input: a string, token ids, or a list of either. ``prompt`` precedes texts
    only; a ``prompt_name`` with token ids is rejected."""
    value = request.input
    reader = _Reader(request, model, prompt, prompt_name)
    if isinstance(value, str):
        return [reader.text(value, "input")]
    if not isinstance(value, list):
        raise wrong_type("input", "a string or an array", value)
    if not value:
        raise invalid("Invalid 'input': empty array.", "input", "empty_array")
    if isinstance(value[0], int):
        return [reader.tokens(value, "input")]
    if len(value) > MAX_INPUTS:
        message = f"Invalid 'input': {len(value)} inputs, the limit is {MAX_INPUTS}."
        raise invalid(message, "input", "array_above_max_length")
    return [reader.item(item, type(value[0]), f"input[{i}]") for i, item in enumerate(value)]


def pooling_request(
    kind: str,
    model: ServedModel,
    prompts: list[EncodedPrompt],
    embed: VectorOptions,
    **fields: Any,
) -> GenerationRequest:
    """A request for the vectors or scores of prompts; its id begins with ``kind``."""
    return GenerationRequest(
        request_id=f"{kind}-{uuid.uuid4().hex}",
        model=model,
        prompts=prompts,
        max_tokens=[1] * len(prompts),
        sampling=pb.Sampling(n=1),
        text=TextOptions(),
        stream=False,
        embed=embed,
        **fields,
    )


class _Reader:
    """Reads inputs with the options of a body."""

    def __init__(
        self, request: InputBody, model: ServedModel, prompt: str, prompt_name: str | None
    ) -> None:
        self._request = request
        self._model = model
        self._truncation = read_truncation(request, max_prompt_tokens(model, 0))
        self._prompt = prompt
        self._prompt_name = prompt_name

    def item(self, value: Any, kind: type, param: str) -> EncodedPrompt:
        """Read one of several inputs, which must all be of one ``kind``."""
        if type(value) is not kind or not isinstance(value, (str, list)):
            raise invalid(
                "Invalid type for 'input': an array must hold only strings, only token ids, or "
                "only arrays of token ids.",
                "input",
                "invalid_type",
            )
        return self.text(value, param) if isinstance(value, str) else self.tokens(value, param)

    def text(self, text: str, param: str) -> EncodedPrompt:
        """Read a text, after its prompt."""
        model, special = self._model, self._request.add_special_tokens
        tokens: list[int] = []
        if text:
            tokens = encode_one(
                self._prompt + text,
                model,
                self._truncation,
                param="input",
                add_special_tokens=special,
            )
        if not tokens:
            raise invalid(f"Invalid '{param}': the input is empty.", "input", "empty_string")
        check_context([len(tokens)], 0, model, param="input", default=1)
        return EncodedPrompt(new_tokens(tokens))

    def tokens(self, tokens: list[Any], param: str) -> EncodedPrompt:
        """Read an input of token ids, which no prompt precedes."""
        if self._prompt_name is not None:
            raise invalid("'prompt_name' needs an input of texts.", "prompt_name")
        if not tokens:
            raise invalid(f"Invalid '{param}': the input is empty.", "input", "empty_array")
        if self._truncation is not None:
            tokens = self._truncation.cut(tokens)
        # Checked before the loop, so that a list of millions is rejected at once.
        check_context([len(tokens)], 0, self._model, param="input", default=1)
        for i, token in enumerate(tokens):
            check_token(f"{param}[{i}]", token, self._model.vocab_size)
        return EncodedPrompt(new_tokens(tokens))

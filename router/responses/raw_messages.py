"""vLLM's ``input_messages`` and ``output_messages``: raw prompts and outputs of the model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from io import StringIO
from typing import Any

from ...shared.text.output_parser import marker_tokens
from ..generation import new_tokens
from ..openai.chat_request import ChatRequest

TOKEN_BYTES = 4
NO_MESSAGES = {"input_messages": None, "output_messages": None}  # until the end


class RawMessages:
    """The first prompt of a response, then each output, with the prompts of later rounds between
    them. All are tokens and text; the text of outputs may omit special tokens."""

    def __init__(self, request: ChatRequest) -> None:
        self._input: list[dict[str, Any]] = []
        self._output: list[dict[str, Any]] = []
        self.begin(request)

    def begin(self, request: ChatRequest) -> None:
        """Begin a round. A prompt replaces the first one if there was no output so far."""
        prompt = _message(request.prompt_text or "", request.prompts[0].tokens)
        if self._output:
            self._output.append(prompt)
        else:
            self._input = [prompt]
        text = request.text
        self._tokens = new_tokens()
        self._text = StringIO()
        self._detokenizer = request.model.tokenizer.detokenizer(
            skip_special_tokens=text.skip_special_tokens,
            keep=marker_tokens(text.reasoning_parser, text.tools),
        )

    def take(self, tokens: Sequence[int]) -> int:
        """Add output. Returns its approximate size in bytes."""
        if not self._tokens and tokens:
            self._output.append(_message(self._text, self._tokens))
        self._tokens.extend(tokens)
        grown = 0
        for token in tokens:
            grown += TOKEN_BYTES + self._text.write(self._detokenizer.push(token))
        return grown

    def body(self) -> dict[str, Any]:
        """The fields of the response at its end."""
        self._text.write(self._detokenizer.flush())
        return {"input_messages": self._input, "output_messages": self._output}


def _message(text: str | StringIO, tokens: array[int]) -> dict[str, Any]:
    return {"message": text, "tokens": tokens, "type": "raw_message_tokens"}

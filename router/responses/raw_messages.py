"""vLLM's ``input_messages`` and ``output_messages``: what the model read and wrote."""

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
    """The first prompt of a response, then each output, and the prompts of later generations
    between them. All as tokens and as text, in which special tokens of outputs may be left out."""

    def __init__(self, request: ChatRequest) -> None:
        self._input: list[dict[str, Any]] = []
        self._output: list[dict[str, Any]] = []
        self.begin(request)

    def begin(self, request: ChatRequest) -> None:
        """Begin a generation. The first is that of the last prompt without an output before it."""
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
        """Add output. Returns about as many bytes as it takes."""
        if not self._tokens and tokens:
            self._output.append(_message(self._text, self._tokens))
        self._tokens.extend(tokens)
        grown = 0
        for token in tokens:
            grown += TOKEN_BYTES + self._text.write(self._detokenizer.push(token))
        return grown

    def body(self) -> dict[str, Any]:
        """The fields of a response that has ended."""
        self._text.write(self._detokenizer.flush())
        return {"input_messages": self._input, "output_messages": self._output}


def _message(text: str | StringIO, tokens: array[int]) -> dict[str, Any]:
    return {"message": text, "tokens": tokens, "type": "raw_message_tokens"}

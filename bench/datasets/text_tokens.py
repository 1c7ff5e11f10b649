"""Tokenizers of benchmarks: a local one, or the server's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ...shared.errors import BenchmarkError
from ..client.api_server import ApiServer

if TYPE_CHECKING:
    from ...shared.text.tokenizer import Tokenizer


class TextTokens(Protocol):
    """A tokenizer."""

    async def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""

    async def render(self, prompt: str) -> list[int]:
        """The tokens of a chat with the only message ``prompt``, up to the reply."""


class ServerTokens:
    """The server's own tokenizer."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    async def encode(self, text: str) -> list[int]:
        tokens = await self._server.tokenize(text)
        if tokens is None:
            raise BenchmarkError("the server has no /tokenize; give --tokenizer")
        return tokens

    async def render(self, prompt: str) -> list[int]:
        return await self._server.render(prompt)


class LocalTokens:
    """A tokenizer in this process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, name: str) -> LocalTokens:
        """The tokenizer of a model by its folder, file or name. Raises ``ModelError``."""
        # Imported late: only --tokenizer needs these.
        from ...shared.text.tokenizer import Tokenizer
        from ...shared.weights.locate import find_model
        from ...shared.weights.source import open_source

        with find_model(name) as model, open_source(model.path) as source:
            return cls(Tokenizer.load(source.tokenizer_files()))

    async def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    async def render(self, prompt: str) -> list[int]:
        return self._tokenizer.encode_chat([{"role": "user", "content": prompt}])

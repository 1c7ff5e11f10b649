"""The interface of a library that follows grammars."""

from __future__ import annotations

from typing import Protocol

from .params import GrammarKey


class GrammarError(Exception):
    """A grammar that cannot be compiled, or that no text satisfies."""


class Matcher(Protocol):
    """The position of one output in its grammar. Not thread-safe."""

    def advance(self, tokens: list[int]) -> None:
        """Move past ``tokens``. Raises ``GrammarError`` if they do not follow the grammar, or if
        the grammar has become too ambiguous."""

    def mask(self) -> bytearray:
        """The tokens that may come next, one bit each, from the lowest bit of the first byte.

        End tokens are excluded. Raises ``GrammarError`` like ``advance``.
        """

    @property
    def accepting(self) -> bool:
        """True if the output may end here."""


class Grammar(Protocol):
    """A compiled grammar."""

    def matcher(self) -> Matcher:
        """A new matcher at the beginning."""


class GrammarBackend(Protocol):
    """A grammar library for one tokenizer. Methods may take seconds and run in threads."""

    vocab_size: int

    def compile(self, key: GrammarKey) -> Grammar:
        """Compile a grammar. Raises ``GrammarError``."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, including special ones."""

    def text_of(self, token: int) -> bytes:
        """The text of one token, which may be special."""

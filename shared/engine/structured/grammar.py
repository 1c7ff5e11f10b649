"""The interface of a library that follows grammars."""

from __future__ import annotations

from typing import Protocol

from .params import GrammarKey


class GrammarError(Exception):
    """A grammar that cannot be compiled, or that no text satisfies."""


class Matcher(Protocol):
    """The place of one output in its grammar. Used in one thread."""

    def advance(self, tokens: list[int]) -> None:
        """Move past ``tokens``. Raises ``GrammarError`` if they do not follow the grammar, or if
        the grammar became too ambiguous to follow."""

    def mask(self) -> bytearray:
        """The tokens that may come next, a bit each, from the lowest bit of the first byte.

        End tokens are not among them. Raises ``GrammarError`` as ``advance`` does.
        """

    @property
    def accepting(self) -> bool:
        """True if the output may end here."""


class Grammar(Protocol):
    """A compiled grammar."""

    def matcher(self) -> Matcher:
        """A new place at the beginning."""


class GrammarBackend(Protocol):
    """A library for one tokenizer. Its methods may take seconds, and run in threads."""

    vocab_size: int

    def compile(self, key: GrammarKey) -> Grammar:
        """Raises ``GrammarError``."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, special ones among them."""

    def text_of(self, token: int) -> bytes:
        """The text of one token, a special one too."""

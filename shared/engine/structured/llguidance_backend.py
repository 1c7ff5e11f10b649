"""Grammars by llguidance, which computes a mask in microseconds to a few milliseconds.

Its matchers never raise, and report errors instead. Their work is limited, so that a maliciously
expensive grammar ends with an error.
"""

from __future__ import annotations

from collections.abc import Iterable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ...text.tokenizer_files import TokenizerFiles
from .constraint_text import constraint_text
from .grammar import GrammarError
from .grammar_text import TokenLiterals
from .params import GrammarKey

_SILENT = 0
# The limit of a parser's state. A schema has room for 3,000 optional properties, which take 12,000
# items; a mask then takes 0.1 s. With llguidance's default of 2,000, such outputs would end midway.
MAX_ROW_ITEMS = 14_000
MAX_ERROR_CHARACTERS = 300


class LLGuidanceBackend:
    """Grammars over the tokens of one model. ``end_tokens`` end an output."""

    def __init__(self, files: TokenizerFiles, vocab_size: int, end_tokens: Iterable[int]) -> None:
        vocabulary_size = 1 + max(files.vocabulary().values())
        self.vocab_size = vocab_size
        # The library needs an end token; without one, the last token serves as such.
        self._ends = sorted(token for token in end_tokens if token < vocabulary_size) or [
            vocabulary_size - 1
        ]
        self._tokenizer = _tokenizer(files, max(vocab_size, vocabulary_size), self._ends)
        self._special = TokenLiterals(
            {
                text: number
                for text, number in files.added_tokens().items()
                if self._tokenizer.is_special_token(number) and number not in self._ends
            }
        )
        # An error with the parser's state would be pages long.
        self._limits = LLParserLimits(
            max_items_in_row=MAX_ROW_ITEMS, max_lexer_states=50_000, verbose_errors=False
        )

    def compile(self, key: GrammarKey) -> LLGrammar:
        """See ``GrammarBackend.compile``."""
        try:
            text = constraint_text(key, self._special)
        except (ValueError, RecursionError) as error:
            raise GrammarError(_short(str(error))) from None
        matcher = LLMatcher(self._tokenizer, text, log_level=_SILENT, limits=self._limits)
        if problem := _problem(matcher):
            raise GrammarError(problem)
        grammar = LLGrammar(matcher, self.vocab_size, self._ends)
        first = grammar.matcher()
        if not (any(first.mask()) or first.accepting):
            raise GrammarError("no text can satisfy it")
        return grammar

    def encode(self, text: str) -> list[int]:
        """See ``GrammarBackend.encode``."""
        return self._tokenizer.tokenize_str(text, parse_special=True)

    def text_of(self, token: int) -> bytes:
        """See ``GrammarBackend.text_of``."""
        return self._tokenizer.decode_bytes([token])


class LLGrammar:
    """A compiled grammar: a matcher that stays at the beginning."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_tokens: list[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = end_tokens

    def matcher(self) -> LLGuidanceMatcher:
        """See ``Grammar.matcher``."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._vocab_size, self._ends)


class LLGuidanceMatcher:
    """See ``Matcher``."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_tokens: list[int]) -> None:
        self._matcher = matcher
        self._bytes = -(-vocab_size // 8)
        self._ends = end_tokens

    def advance(self, tokens: list[int]) -> None:
        """See ``Matcher.advance``."""
        if tokens and not self._matcher.consume_tokens(tokens):
            raise GrammarError(_problem(self._matcher) or "a token does not follow it")

    def mask(self) -> bytearray:
        """See ``Matcher.mask``."""
        mask = bytearray(self._matcher.compute_bitmask()[: self._bytes])
        if not self.accepting and (problem := _problem(self._matcher)):
            raise GrammarError(problem)
        for token in self._ends:
            if token >> 3 < self._bytes:
                mask[token >> 3] &= ~(1 << (token & 7))
        return mask

    @property
    def accepting(self) -> bool:
        """See ``Matcher.accepting``."""
        return self._matcher.is_accepting()


def _tokenizer(files: TokenizerFiles, size: int, end_tokens: list[int]) -> LLTokenizer:
    try:
        return LLTokenizer(files.tokenizer, n_vocab=size, eos_token=end_tokens)
    except ValueError as error:
        reason = _short(str(error))
        raise GrammarError(f"the model's tokenizer is of an unsupported kind: {reason}") from None


def _problem(matcher: LLMatcher) -> str:
    """The matcher's error; empty if there is none."""
    if not matcher.is_error():
        return ""
    message = matcher.get_error()
    return "no text can satisfy it" if message.startswith("NoExtension") else _short(message)


def _short(message: str) -> str:
    """The beginning of a message, as one line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:MAX_ERROR_CHARACTERS].rstrip(
        "."
    )

"""Grammars by llguidance, which computes a mask in the time of a few microseconds to milliseconds.

Its matchers never raise, and report errors instead. What they compute is limited, so that a grammar
made to be expensive ends with an error.
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
# Of a parser's state: 3,000 optional properties, which is as many as a schema has room for, take
# 12,000. A mask of such a state takes 0.1 s; llguidance's own limit of 2,000 ends an output in the
# middle.
MAX_ROW_ITEMS = 14_000
MAX_SHOWN = 300


class LLGuidanceBackend:
    """Grammars over the tokens of one model, of which ``end_tokens`` end an output."""

    def __init__(self, files: TokenizerFiles, vocab_size: int, end_tokens: Iterable[int]) -> None:
        known = 1 + max(files.vocabulary().values())
        self.vocab_size = vocab_size
        # Without an end token, the last one takes the role, which it can have at most once.
        self._ends = sorted(token for token in end_tokens if token < known) or [known - 1]
        self._tokenizer = _tokenizer(files, max(vocab_size, known), self._ends)
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
    return " ".join(message.replace("<non-verbose/>", "").split())[:MAX_SHOWN].rstrip(".")

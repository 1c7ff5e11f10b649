"""Special tokens: their names in tokenizer_config.json, and their places in a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

# ``re`` holds the GIL for a whole search: a few milliseconds for this many characters.
WINDOW = 256 * 1024
_SPACE = re.compile(r"\s*")

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by name, such as ``bos_token``, as templates use them."""
    tokens = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


class SpecialTokens:
    """Finds a tokenizer's special tokens in text, longest first, each with the white space that it
    strips.

    White space is not part of the pattern: ``re`` would look ahead for it at each character, which
    took 3 s per megabyte.
    """

    def __init__(self, raw: RawTokenizer) -> None:
        special = [t for t in raw.get_added_tokens_decoder().values() if t.special and t.content]
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in special}
        contents = sorted(self._strips, key=len, reverse=True)
        self._longest = len(contents[0]) if contents else 0
        self._pattern = re.compile("|".join(map(re.escape, contents)) or "(?!)")

    def within(self, text: str) -> bool:
        """Return whether the text contains a special token."""
        return next(self._matches(text), None) is not None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of each special token, in order, without overlap."""
        end = 0
        for match in self._matches(text):
            start, stop = match.span()
            if start < end:
                continue  # it starts with white space that belongs to the previous one
            left, right = self._strips[match[0]]
            if left:
                start = end + len(text[end:start].rstrip())
            if right:
                space = _SPACE.match(text, stop)
                assert space is not None, "the pattern matches the empty string too"
                stop = space.end()
            yield start, stop
            end = stop

    def replace(self, text: str, by: Callable[[str], str]) -> str:
        """Replace each special token with ``by(token)``."""
        parts = []
        end = 0
        for start, stop in self.spans(text):
            parts += [text[end:start], by(text[start:stop])]
            end = stop
        return "".join((*parts, text[end:])) if parts else text

    def pieces(self, text: str) -> Iterator[str]:
        """Split the text before and after each special token."""
        end = 0
        for start, stop in self.spans(text):
            if start > end:
                yield text[end:start]
            yield text[start:stop]
            end = stop
        if end < len(text):
            yield text[end:]

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Like ``finditer``, window by window."""
        at = 0
        while at < len(text):
            end = at + WINDOW
            match = self._pattern.search(text, at, end + self._longest)
            if match is None or match.start() >= end:
                at = end
            else:
                yield match
                at = match.end()

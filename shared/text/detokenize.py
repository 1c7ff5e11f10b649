"""Incremental detokenization, one token at a time.

Two kinds of decoder cover nearly every model, and both map a token to fixed bytes: GPT-2's
byte-level alphabet, and SentencePiece's (``▁`` for a space, ``<0xE2>`` for a byte). Their text is
an incremental UTF-8 decoding of the tokens' bytes: exact, and O(1) per token. With any other
decoder, a short window of tokens is decoded with and without the new one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# If a window still ends in U+FFFD after this many tokens, its bytes are invalid.
WINDOW = 8


class Detokenizer(Protocol):
    """The text of one growing sequence: its deltas add up to the text of all tokens."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty inside a multi-byte character."""

    def flush(self) -> str:
        """The remaining text; an incomplete character becomes U+FFFD."""


class TokenTexts:
    """The bytes of each token. Owned by a tokenizer, shared by all its detokenizers."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        self._bytes: dict[int, bytes] = {}
        self._ids: dict[frozenset[str], frozenset[int]] = {}  # ids, by sets of contents
        added_tokens = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, each in added_tokens.items() if each.special)
        self._added_texts = {token: each.content for token, each in added_tokens.items()}
        steps = _decoder_steps(raw)
        self.byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        self._replacements, self._byte_fallback, self.strip_left = _sentencepiece(steps)
        self.exact = self.byte_level or self._replacements is not None

    def detokenizer(
        self, *, skip_special_tokens: bool = True, keep: Collection[str] = ()
    ) -> Detokenizer:
        """A new detokenizer for one sequence. The special tokens in ``keep`` are never skipped."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        if skip and keep:
            skip = skip - self._ids_of(frozenset(keep))
        if self.exact:
            return _ByteDetokenizer(self, skip)
        return _WindowDetokenizer(self._raw, skip)

    def _ids_of(self, contents: frozenset[str]) -> frozenset[int]:
        ids = self._ids.get(contents)
        if ids is None:
            tokens = (self._raw.token_to_id(content) for content in contents)
            ids = self._ids[contents] = frozenset(token for token in tokens if token is not None)
        return ids

    def added_tokens(self, contents: Iterable[str]) -> dict[int, str]:
        """The texts in ``contents`` that are added tokens, by id. No other tokens spell them."""
        names = frozenset(contents)
        return {token: text for token, text in self._added_texts.items() if text in names}

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; empty for an unknown id."""
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._compute(token)
        return data

    def text_of(self, token: int) -> str:
        """The text of a single token; part of a character becomes U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def piece_of(self, token: int) -> str:
        """A token as the vocabulary spells it; empty for an unknown id."""
        return self._raw.id_to_token(token) or ""

    def _compute(self, token: int) -> bytes:
        piece = self._raw.id_to_token(token)
        if piece is None:
            return b""
        if self.byte_level:
            return _byte_level(piece)
        if self._replacements is None:
            return self._raw.decode([token], skip_special_tokens=False).encode()
        byte = BYTE_TOKEN.fullmatch(piece) if self._byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        for pattern, content in self._replacements:
            piece = piece.replace(pattern, content)
        return piece.encode()


class _ByteDetokenizer:
    def __init__(self, texts: TokenTexts, skip: frozenset[int]) -> None:
        self._bytes_of = texts.bytes_of
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = texts.strip_left

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        text = self._decode(self._bytes_of(token))
        return self._strip_left(text) if self._strip and text else text

    def flush(self) -> str:
        return self._decode(b"", True)

    def _strip_left(self, text: str) -> str:
        """Strip the space that SentencePiece prepends to a text."""
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text


class _WindowDetokenizer:
    """Decodes ``window[:context]`` and the whole window; the difference is new text."""

    def __init__(self, raw: RawTokenizer, skip: frozenset[int]) -> None:
        self._raw = raw
        self._skip = skip
        self._window: list[int] = []
        self._context = 0
        self._context_text = ""

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        self._window.append(token)
        text = self._text(self._window)
        new = text[len(self._context_text) :]
        if not new or (new.endswith(REPLACEMENT) and len(self._window) - self._context < WINDOW):
            return ""
        # The last tokens stay as context: decoders treat the first token of a text specially.
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._context_text = self._text(self._window)
        return new

    def flush(self) -> str:
        rest = self._text(self._window)[len(self._context_text) :]
        self._context_text += rest
        return rest

    def _text(self, tokens: list[int]) -> str:
        return self._raw.decode(tokens, skip_special_tokens=False)


def detokenize(
    texts: TokenTexts, tokens: Iterable[int], *, skip_special_tokens: bool = True
) -> str:
    """Decode a whole sequence, to the text that the deltas add up to."""
    detokenizer = texts.detokenizer(skip_special_tokens=skip_special_tokens)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


BYTE_LEVEL = _byte_level_alphabet()


def _byte_level(piece: str) -> bytes:
    """Decode a token; one outside the alphabet (an added token with a space) is literal."""
    try:
        return bytes(BYTE_LEVEL[character] for character in piece)
    except KeyError:
        return piece.encode()


def _decoder_steps(raw: RawTokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as a flat list of steps; without one, tokens are joined by spaces."""
    if raw.decoder is None:
        return [{"type": "Spaces"}]
    decoder = json.loads(raw.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _sentencepiece(
    steps: list[dict[str, Any]],
) -> tuple[list[tuple[str, str]] | None, bool, int]:
    """Return replacements, byte fallback, and spaces to strip on the left; replacements are
    ``None`` for other kinds of decoder."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                strip = start
            case _:
                return None, False, 0
    return replacements, byte_fallback, strip

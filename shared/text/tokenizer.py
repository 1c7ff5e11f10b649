"""A model folder's tokenizer: ``tokenizer.json`` with its configuration files.

Text that merely looks like a special token is text. Only the chat template can write a control
token: what a client wrote is guarded before rendering, see ``_Guard``.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from ..errors import ModelError, RequestError
from .chat_template import ChatTemplate
from .detokenize import Detokenizer, TokenTexts, detokenize
from .special_tokens import special_tokens

# A template's variables; a client's may be as deep as its JSON, which is too deep to walk through.
MAX_NESTING = 64


class Tokenizer:
    """Text in, text out. Encoding releases the GIL and may run in any thread."""

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        template: ChatTemplate | None = None,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._raw = raw
        self._literal: RawTokenizer | None = None
        self._literal_lock = threading.Lock()
        self.config = dict(config or {})
        self.generation_config = dict(generation_config or {})
        self.template = template
        self.texts = TokenTexts(raw)
        vocabulary = raw.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.base_vocab_size = raw.get_vocab_size(with_added_tokens=False)
        self._longest = max(map(len, vocabulary), default=1)
        self.special_tokens = special_tokens(self.config)
        self._special = _special_pattern(raw)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a model folder; a ``ModelError`` names the file that is wrong."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path}: no such file; a model folder needs a tokenizer.json")
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(f"{path}: not a tokenizer: {error}") from error
        # Truncation and padding are training settings; a prompt is never cut silently.
        raw.no_truncation()
        raw.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        return cls(
            raw,
            template=_read_template(folder, config),
            config=config,
            generation_config=_read_json(folder / "generation_config.json"),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Plain text to tokens; what looks like a special token is text too."""
        raw = self._literally() if self._special.search(text) else self._raw
        return _encode(raw, text, add_special_tokens)

    def fewest_tokens(self, characters: int) -> int:
        """No text of this length has fewer tokens: tells a hopeless prompt without encoding it."""
        return -(-characters // self._longest)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a chat, as text for people; ``encode_chat`` gives its tokens."""
        return self._template().render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt of a chat as tokens: control tokens come from the template alone."""
        guard = _Guard(self._special)
        rendered = self._template().render(
            guard.hide(messages),
            add_generation_prompt=add_generation_prompt,
            tools=guard.hide(tools),
            template_kwargs=guard.hide(template_kwargs),
        )
        if not guard.found(rendered):
            return _encode(self._raw, rendered, add_special_tokens)
        return self._encode_guarded(rendered, guard)

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Tokens to text, exactly what a ``detokenizer``'s deltas add up to."""
        return detokenize(self.texts, tokens, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """For one growing sequence."""
        return self.texts.detokenizer(skip_special_tokens=skip_special_tokens)

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise RequestError(
                "This model has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json); use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        return self.template

    def _literally(self) -> RawTokenizer:
        """A second tokenizer that knows no special tokens; made when first needed.

        Not a switch on the first one: another thread may be encoding with it.
        """
        with self._literal_lock:
            if self._literal is None:
                self._literal = RawTokenizer.from_str(self._raw.to_str())
                self._literal.encode_special_tokens = True
            return self._literal

    def _encode_guarded(self, rendered: str, guard: _Guard) -> list[int]:
        """Cut at the template's control tokens; stretches with guarded text are encoded as text."""
        tokens: list[int] = []
        plain = ""
        for piece in _pieces(self._special, rendered):
            if guard.found(piece):
                tokens += _encode(self._raw, plain, False)
                tokens += _encode(self._literally(), guard.reveal(piece), False)
                plain = ""
            else:
                plain += piece
        return tokens + _encode(self._raw, plain, False)


class _Guard:
    """Hides what looks like a special token in a client's strings while a template is rendered.

    Each is replaced by a mark that nobody can guess; after rendering, any special token in the text
    was written by the template, and the marks say where the client's were.
    """

    def __init__(self, special: re.Pattern[str]) -> None:
        self._special = special
        self._hidden: list[str] = []
        nonce = secrets.token_hex(8)
        self._form = f"\ue000{nonce}:%d\ue001"
        self._mark = re.compile(f"\ue000{nonce}:(\\d+)\ue001")

    def hide(self, value: Any, depth: int = 0) -> Any:
        """A copy of ``value`` whose strings, keys too, hold no special tokens.

        Raises ``RequestError`` for one that is nested too deeply.
        """
        if isinstance(value, str):
            return self._special.sub(self._hide_one, value)
        if depth > MAX_NESTING:
            raise RequestError(f"A template's variables may be nested {MAX_NESTING} levels deep.")
        if isinstance(value, Mapping):
            pairs = value.items()
            return {self.hide(key): self.hide(item, depth + 1) for key, item in pairs}
        if isinstance(value, (list, tuple)):
            return [self.hide(item, depth + 1) for item in value]
        return value

    def found(self, text: str) -> bool:
        return bool(self._hidden) and self._mark.search(text) is not None

    def reveal(self, text: str) -> str:
        return self._mark.sub(lambda mark: self._hidden[int(mark[1])], text)

    def _hide_one(self, match: re.Match[str]) -> str:
        self._hidden.append(match[0])
        return self._form % (len(self._hidden) - 1)


def _encode(raw: RawTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if not text and not add_special_tokens:
        return []
    # The batch call releases the GIL, the single one does not (seen with 0.23: 0.7 s a megabyte).
    try:
        encoded = raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except TypeError:  # what the library makes of a string that is not Unicode
        raise RequestError("The text has an unpaired surrogate, so it is not Unicode.") from None
    ids: list[int] = encoded[0].ids
    return ids


def _special_pattern(raw: RawTokenizer) -> re.Pattern[str]:
    """All special tokens, longest first, each with the white space that it swallows.

    White space before a token is tried from its first character alone: from each, a text of nothing
    but spaces would take the square of its length.
    """
    special = [t for t in raw.get_added_tokens_decoder().values() if t.special and t.content]
    special.sort(key=lambda token: -len(token.content))
    alternatives = [
        (r"(?:(?<!\s)\s+)?" if token.lstrip else "")
        + re.escape(token.content)
        + ("\\s*" if token.rstrip else "")
        for token in special
    ]
    return re.compile("|".join(alternatives) or "(?!)")


def _pieces(pattern: re.Pattern[str], text: str) -> Iterable[str]:
    """The text, cut before and after each match."""
    end = 0
    for match in pattern.finditer(text):
        if match.start() > end:
            yield text[end : match.start()]
        yield match[0]
        end = match.end()
    if end < len(text):
        yield text[end:]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8: {error}") from error


def _read_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    path = folder / "chat_template.jinja"
    source: Any = None
    if path.is_file():
        source = _read_text(path)
    else:
        path = folder / "tokenizer_config.json"
        source = config.get("chat_template")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, Mapping)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{path}: chat_template must be a string")
    return ChatTemplate(source, origin=str(path), tokens=special_tokens(config))

"""A model's tokenizer: a ``tokenizer.json``, or other files converted to one, and its
configuration.

In a plain text prompt, special tokens are encoded as such, as in transformers: its author may send
arbitrary token ids anyway. In a chat, only the template can write control tokens, since messages
may quote third parties: client strings are guarded before rendering, see ``_Guard``.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from ..errors import ModelError, RequestError
from .chat_template import ChatTemplate
from .detokenize import Detokenizer, TokenTexts, detokenize
from .fill_in_middle import fill_in_middle
from .literal_text import literal_tokenizer
from .pair_template import shows_pairs
from .prompts import NO_PROMPTS, TextPrompts, read_prompts
from .special_tokens import SpecialTokens, special_tokens
from .tokenizer_files import TemplateText, TokenizerFiles

# Levels in a template's variables; JSON from a client may be nested too deeply for recursion.
MAX_NESTING = 64
# A long text is rejected by the tokens of its beginning: this many characters for each allowed
# token, at least ``MIN_PREFIX``.
PREFIX_CHARACTERS = 16
MIN_PREFIX = 1 << 20
# A text that is truncated, or only counted, may be longer than the context, within limits: this
# many contexts, at least ``MIN_LIMIT`` tokens (documents whose beginning is embedded).
MAX_CONTEXTS = 4
MIN_LIMIT = 16_384


class TooManyTokensError(RequestError):
    """A prompt has at least ``tokens`` tokens, more than the limit."""

    def __init__(self, tokens: int, max_tokens: int) -> None:
        message = f"The prompt has at least {tokens} tokens; at most {max_tokens} are allowed."
        super().__init__(message, code="context_length_exceeded")
        self.tokens = tokens


def max_tokens_before_cut(context: int) -> int:
    """The token limit of a text that is truncated to a context, or only counted."""
    return max(MAX_CONTEXTS * context, MIN_LIMIT)


class Tokenizer:
    """Text in, text out. Encoding releases the GIL and may run in any thread."""

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        prompts: TextPrompts = NO_PROMPTS,
        named_templates: Mapping[str, TemplateText] | None = None,
    ) -> None:
        self._raw = raw
        self._named_templates = dict(named_templates or {})
        self._compiled_templates: dict[str, ChatTemplate] = {}
        self._literal: RawTokenizer | None = None
        self._literal_lock = threading.Lock()
        self.config = dict(config or {})
        self.generation_config = dict(generation_config or {})
        self.prompts = prompts
        self.template = template
        self.tool_template = tool_template or template
        self.pair_template = self._template_of_pairs()
        self.texts = TokenTexts(raw)
        vocabulary = raw.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.base_vocab_size = raw.get_vocab_size(with_added_tokens=False)
        self._longest = max(map(len, vocabulary), default=1)
        self.special_tokens = special_tokens(self.config)
        self._special = SpecialTokens(raw)
        self.fill_in_middle = fill_in_middle(vocabulary.get)

    @classmethod
    def load(cls, files: TokenizerFiles, vocab_size: int = 0) -> Tokenizer:
        """Build the tokenizer that the files describe. Raises ``ModelError`` for invalid ones, and
        for one with more tokens than the model's ``vocab_size``, unless that is 0 (unknown)."""
        try:
            raw = RawTokenizer.from_str(files.tokenizer)
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(f"{files.origin}: not a tokenizer: {error}") from error
        # Truncation and padding are training settings; a prompt is never cut silently.
        raw.no_truncation()
        raw.no_padding()
        # A few published models have special tokens beyond the embedding, which cannot be sampled.
        if vocab_size and (tokens := raw.get_vocab_size(with_added_tokens=False)) > vocab_size:
            raise ModelError(
                f"{files.origin} has {tokens} tokens, the model's vocab_size is {vocab_size}; it "
                "belongs to another model"
            )
        return cls(
            raw,
            template=_default_template(files.template, files.config),
            tool_template=_default_template(files.tool_template, files.config),
            config=files.config,
            generation_config=files.generation_config,
            prompts=read_prompts(files.sentence_config),
            named_templates=files.templates(),
        )

    def prepare(self) -> None:
        """Build the literal tokenizer in advance, which the first quoted special token needs."""
        self._literal_tokenizer()

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        literally: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encode text; with ``literally``, special tokens are encoded as plain text.

        Raises ``TooManyTokensError`` if there are more than ``max_tokens``.
        """
        raw = self._literal_tokenizer() if literally and self._special.within(text) else self._raw
        return _encode(raw, text, add_special_tokens, max_tokens)

    def encode_within(
        self,
        text: str,
        limit: int,
        *,
        add_special_tokens: bool = True,
        max_tokens: int,
        left: bool = False,
    ) -> list[int]:
        """Encode a text, truncated on the right or, with ``left``, on the left to ``limit`` tokens
        including special tokens.

        Raises ``TooManyTokensError`` if there are more than ``max_tokens``.
        """
        encoding = self._parts([text], max_tokens)[0]
        around = self._raw.num_special_tokens_to_add(False) if add_special_tokens else 0
        _truncate(encoding, limit - around, left=left)
        ids: list[int] = self._raw.post_process(encoding, None, add_special_tokens).ids
        return ids

    def encode_pair(
        self,
        first: str,
        second: str,
        *,
        limit: int | None = None,
        max_tokens: int,
        instruction: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], int]:
        """Encode two texts as a pair; return the tokens, and the start of the second segment or 0
        if there is only one. A model with a pair template renders it with the query, the document
        and the ``instruction``, by default the model's own prompt. With a ``limit``, the longer
        text is truncated on the right until the pair fits.

        Raises ``TooManyTokensError`` for more than ``max_tokens``, and ``RequestError`` for an
        instruction if the model has no pair template.
        """
        if self.pair_template is not None:
            opening = self.prompts.default if instruction is None else instruction
            pair = _TemplatePair(self, self.pair_template, opening, variables or {}, max_tokens)
            return pair.tokens(first, second, limit), 0
        if instruction:
            raise RequestError(
                "Invalid 'instruction': this model reads pairs without one, as it has no template "
                "of the roles query and document.",
                param="instruction",
            )
        one, other = self._parts([first, second], max_tokens)
        if limit is not None:
            around = self._raw.num_special_tokens_to_add(True)
            lengths = _longest_first(len(one), len(other), max(0, limit - around))
            _truncate(one, lengths[0])
            _truncate(other, lengths[1])
        encoding = self._raw.post_process(one, other, True)
        if len(encoding) > max_tokens:
            raise TooManyTokensError(len(encoding), max_tokens)
        kinds: list[int] = encoding.type_ids
        return encoding.ids, kinds.index(1) if 1 in kinds else 0

    def _parts(self, texts: list[str], max_tokens: int) -> list[Any]:
        """Encode texts without the special tokens around them."""
        parts = []
        for text in texts:
            _check_prefix(self._raw, text, max_tokens)
            encoding = _encode_raw(self._raw, text, False)
            if len(encoding) > max_tokens:
                raise TooManyTokensError(len(encoding), max_tokens)
            parts.append(encoding)
        return parts

    def encode_around_gap(
        self,
        before: str,
        after: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encode a fill-in-the-middle prompt.

        Raises ``RequestError`` if the model does not support it, and ``TooManyTokensError`` if
        either text has more than ``max_tokens``.
        """
        if self.fill_in_middle is None:
            message = "This model has no fill-in-the-middle tokens; leave 'suffix' out."
            raise RequestError(message, param="suffix", code="unsupported_parameter")

        def encode(text: str) -> list[int]:
            return self.encode(
                text, add_special_tokens=False, literally=True, max_tokens=max_tokens
            )

        opening = self.encode("", add_special_tokens=True) if add_special_tokens else []
        return self.fill_in_middle.prompt(before, after, encode, opening)

    @cached_property
    def around_a_text(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        encoding = self._raw.encode("x")
        mask = encoding.special_tokens_mask
        before = next((place for place, special in enumerate(mask) if not special), len(mask))
        after = next((n for n, special in enumerate(reversed(mask)) if not special), 0)
        ids: list[int] = encoding.ids
        return ids[:before], ids[len(ids) - after :]

    def fewest_tokens(self, characters: int) -> int:
        """A lower bound for any text of this length, to reject a prompt without encoding it."""
        return -(-characters // self._longest)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render the prompt of a chat as text; ``encode_chat`` gives its tokens."""
        template = self._template(tools)
        dialect = template.dialect(with_tools=bool(tools))
        return template.render(
            dialect.messages(messages),
            add_generation_prompt=add_generation_prompt,
            tools=dialect.tools(tools),
            template_kwargs=kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        continue_final_message: bool = False,
        template: ChatTemplate | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encode the prompt of a chat. Only the template writes control tokens; it defaults to the
        model's, and gets messages and tools in its own dialect (``dialect.py``).
        ``continue_final_message`` leaves out everything after the content of the final message.

        Raises ``TooManyTokensError`` if there are more than ``max_tokens``.
        """
        template = template or self._template(tools)
        dialect = template.dialect(with_tools=bool(tools))
        guard = _Guard(self._special)
        hidden = guard.hide(dialect.messages(messages))
        if continue_final_message:
            hidden = guard.mark_end(hidden)
        prompt = template.render(
            hidden,
            add_generation_prompt=add_generation_prompt,
            tools=guard.hide(dialect.tools(tools)),
            template_kwargs=guard.hide(template_kwargs),
        )
        if continue_final_message:
            prompt = guard.up_to_end(prompt)
        if not guard.has_marks(prompt):
            return _encode(self._raw, prompt, add_special_tokens, max_tokens)
        return self._encode_guarded(prompt, guard, max_tokens)

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode tokens to exactly the text that a ``detokenizer``'s deltas add up to."""
        return detokenize(self.texts, tokens, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, keep: Collection[str] = ()
    ) -> Detokenizer:
        """A detokenizer for one growing sequence. The special tokens to ``keep`` are never
        skipped, since a parser needs them."""
        return self.texts.detokenizer(skip_special_tokens=skip_special_tokens, keep=keep)

    def template_of(self, tools: Collection[Any] | None) -> ChatTemplate | None:
        """The template for a chat with these tools, if any."""
        return self.tool_template if tools else self.template

    def named_template(self, name: str) -> ChatTemplate | None:
        """One of the model's templates by its name. Raises ``ModelError`` if it does not
        compile."""
        if name not in self._compiled_templates and name in self._named_templates:
            template = _template(self._named_templates[name], self.config)
            assert template is not None
            self._compiled_templates[name] = template
        return self._compiled_templates.get(name)

    def _template_of_pairs(self) -> ChatTemplate | None:
        """The model's first template that renders pairs."""
        if self.template is not None and shows_pairs(self.template.source):
            return self.template
        others = (name for name, one in self._named_templates.items() if shows_pairs(one.source))
        name = next(others, None)
        return None if name is None else self.named_template(name)

    def _template(self, tools: Collection[Any] | None) -> ChatTemplate:
        template = self.template_of(tools)
        if template is None:
            raise RequestError(
                "This model has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json, nor a tekken.json of a version whose chats are known); use "
                "/v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        return template

    def _literal_tokenizer(self) -> RawTokenizer:
        """The tokenizer without special tokens, built on demand.

        A copy: switching the original would affect other threads that are encoding.
        """
        with self._literal_lock:
            if self._literal is None:
                self._literal = literal_tokenizer(self._raw)
            return self._literal

    def _encode_guarded(self, prompt: str, guard: _Guard, max_tokens: int | None) -> list[int]:
        """Split at the template's control tokens; pieces with guarded text are encoded as text."""
        tokens: list[int] = []

        def add(raw: RawTokenizer, text: str) -> None:
            tokens.extend(_encode(raw, text, False, max_tokens))
            if max_tokens is not None and len(tokens) > max_tokens:
                raise TooManyTokensError(len(tokens), max_tokens)

        plain: list[str] = []
        for piece in self._special.pieces(prompt):
            if guard.has_marks(piece):
                add(self._raw, "".join(plain))
                add(self._literal_tokenizer(), guard.reveal(piece))
                plain.clear()
            else:
                plain.append(piece)
        add(self._raw, "".join(plain))
        return tokens


class _TemplatePair:
    """Encodes pairs of a query and a document by a template, after an ``instruction`` unless it is
    empty. Prompts of more than ``max_tokens`` tokens are rejected."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        instruction: str,
        variables: Mapping[str, Any],
        max_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._opening = [{"role": "system", "content": instruction}] if instruction else []
        self._variables = {**variables, **({"instruction": instruction} if instruction else {})}
        self._max_tokens = max_tokens

    def tokens(self, query: str, document: str, limit: int | None) -> list[int]:
        """The tokens of a pair, with its texts truncated to fit ``limit``."""
        tokens = self._encode(query, document)
        if limit is None or len(tokens) <= limit:
            return tokens
        # The fast encoding leaves out the offsets of tokens.
        one, other = (
            self._tokenizer._raw.encode(text, add_special_tokens=False)
            for text in (query, document)
        )
        room = len(one) + len(other)
        # A truncated text may end in other tokens, and more of them.
        while room and len(tokens) > limit:
            room = max(0, room - (len(tokens) - limit))
            lengths = _longest_first(len(one), len(other), room)
            tokens = self._encode(_cut(query, one, lengths[0]), _cut(document, other, lengths[1]))
        if len(tokens) > limit:
            raise RequestError(
                f"Invalid value for 'truncate_prompt_tokens': the model's template alone has "
                f"{len(tokens)} tokens.",
                param="truncate_prompt_tokens",
            )
        return tokens

    def _encode(self, query: str, document: str) -> list[int]:
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        tokenizer = self._tokenizer
        guard = _Guard(tokenizer._special)
        prompt = self._template.render(
            guard.hide(self._opening + pair), template_kwargs=guard.hide(self._variables)
        )
        # A template writes the special tokens around a prompt, or leaves them to the tokenizer.
        around = "bos_token" not in self._template.source
        if not guard.has_marks(prompt):
            return _encode(tokenizer._raw, prompt, around, self._max_tokens)
        before, after = tokenizer.around_a_text if around else ([], [])
        return before + tokenizer._encode_guarded(prompt, guard, self._max_tokens) + after


def _cut(text: str, encoding: Any, tokens: int) -> str:
    """The beginning of a text that its first ``tokens`` tokens cover."""
    return (
        text
        if tokens >= len(encoding)
        else text[: encoding.offsets[tokens - 1][1]]
        if tokens
        else ""
    )


class _Guard:
    """Hides special tokens in a client's strings while a template is rendered.

    Each is replaced by an unguessable mark. After rendering, every special token in the text is the
    template's, and the marks stand for the client's.
    """

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special
        self._hidden: list[str] = []
        nonce = secrets.token_hex(8)
        self._form = f"\ue000{nonce}:%d\ue001"
        self._mark = re.compile(f"\ue000{nonce}:(\\d+)\ue001")
        self._end = f"\ue000{nonce}:end\ue001"

    def hide(self, value: Any, depth: int = 0) -> Any:
        """Copy ``value``, with special tokens replaced in all strings and keys.

        Raises ``RequestError`` if it is nested too deeply.
        """
        if isinstance(value, str):
            return self._special.replace(value, self._hide_one)
        if depth > MAX_NESTING:
            raise RequestError(
                f"A template's variables may be nested at most {MAX_NESTING} levels deep."
            )
        if isinstance(value, Mapping):
            pairs = value.items()
            return {self.hide(key): self.hide(item, depth + 1) for key, item in pairs}
        if isinstance(value, (list, tuple)):
            return [self.hide(item, depth + 1) for item in value]
        return value

    def mark_end(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Mark the end of the final message's content, for ``up_to_end``."""
        final = messages[-1]
        if not isinstance(content := final.get("content"), str):
            message = "Only a final message whose content is a text can be continued."
            raise RequestError(message, param="continue_final_message")
        return [*messages[:-1], final | {"content": content + self._end}]

    def up_to_end(self, prompt: str) -> str:
        """The text before the mark."""
        end = prompt.rfind(self._end)
        if end < 0:
            message = "The chat template omits the final message, so it cannot be continued."
            raise RequestError(message, param="continue_final_message")
        return prompt[:end].replace(self._end, "")

    def has_marks(self, text: str) -> bool:
        return bool(self._hidden) and self._mark.search(text) is not None

    def reveal(self, text: str) -> str:
        return self._mark.sub(lambda mark: self._hidden[int(mark[1])], text)

    def _hide_one(self, token: str) -> str:
        self._hidden.append(token)
        return self._form % (len(self._hidden) - 1)


def _encode(
    raw: RawTokenizer, text: str, add_special_tokens: bool, max_tokens: int | None = None
) -> list[int]:
    if not text and not add_special_tokens:
        return []
    if max_tokens is not None:
        _check_prefix(raw, text, max_tokens)
    encoding = _encode_raw(raw, text, add_special_tokens)
    # Before the ids become Python integers, of forty bytes each.
    if max_tokens is not None and len(encoding) > max_tokens:
        raise TooManyTokensError(len(encoding), max_tokens)
    ids: list[int] = encoding.ids
    return ids


def _truncate(encoding: Any, length: int, *, left: bool = False) -> None:
    encoding.truncate(max(0, length), direction="left" if left else "right")


def _longest_first(first: int, second: int, limit: int) -> tuple[int, int]:
    """The lengths of two texts that are truncated to ``limit`` tokens in all, as in transformers:
    the longer one until both are equal, then both."""
    if first + second <= limit:
        return first, second
    shorter = min(first, second, limit // 2)
    longer = min(max(first, second), limit - shorter)
    return (shorter, longer) if first <= second else (longer, shorter)


def _check_prefix(raw: RawTokenizer, text: str, max_tokens: int) -> None:
    """Raise ``TooManyTokensError`` if a prefix of a long text already has more than twice the
    allowed tokens. Cutting the text changes only the last few."""
    length = max(MIN_PREFIX, PREFIX_CHARACTERS * max_tokens)
    if len(text) > 2 * length:
        tokens = len(_encode_raw(raw, text[:length], False))
        if tokens > 2 * max_tokens:
            raise TooManyTokensError(tokens, max_tokens)


def _encode_raw(raw: RawTokenizer, text: str, add_special_tokens: bool) -> Any:
    # Unlike the single call, the batch call releases the GIL (0.7 s a megabyte with 0.23).
    try:
        return raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except TypeError:  # the string is not valid Unicode
        raise RequestError("The text has an unpaired surrogate, so it is not Unicode.") from None


def _default_template(text: TemplateText | None, config: Mapping[str, Any]) -> ChatTemplate | None:
    """Compile a template that chats need."""
    try:
        return _template(text, config)
    except ModelError as error:
        raise ModelError(f"{error}; correct it, or give another one by --chat-template") from None


def _template(text: TemplateText | None, config: Mapping[str, Any]) -> ChatTemplate | None:
    if text is None:
        return None
    return ChatTemplate(text.source, origin=text.origin, tokens=special_tokens(config))

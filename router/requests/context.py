"""Encode texts and chats, and check that they fit the model's context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from ...shared.config.sampling import RESERVED_VARIABLES
from ...shared.errors import RequestError
from ...shared.scoring import ROUTES
from ...shared.text.chat_template import ChatTemplate
from ...shared.text.tokenizer import TooManyTokensError, max_tokens_before_cut
from ..errors import invalid
from ..http.json_body import values_in
from ..served_model import ServedModel
from .tool_text import with_tools_as_text
from .truncation import Truncation

TemplateVariables = Annotated[dict[str, Any], Field(max_length=64)]

_CUT_IT = "Please shorten the text, or set 'truncate_prompt_tokens' to -1 to have it cut."


class ContextError(RequestError):
    """A prompt of ``length`` tokens, with ``requested`` more to generate, does not fit."""

    def __init__(self, message: str, *, param: str, length: int, requested: int) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.length = length
        self.requested = requested


def check_context(
    prompts: Sequence[int], max_tokens: int | None, model: ServedModel, *, param: str, default: int
) -> list[int]:
    """``max_tokens`` for each prompt, by the lengths of ``prompts``: as requested, or ``default``
    as far as the context allows. The operator's default and limit take precedence."""
    limit, defaults = model.max_model_len, model.defaults
    default = defaults.max_tokens or default
    granted = []
    for length in prompts:
        requested = 1 if max_tokens is None else max_tokens
        if length + requested > limit:
            raise over_context(length, requested, model, param=param)
        requested = min(default, limit - length) if max_tokens is None else max_tokens
        granted.append(defaults.within(requested))
    return granted


def over_context(length: int, requested: int, model: ServedModel, *, param: str) -> ContextError:
    """The error for a prompt of ``length`` tokens with ``requested`` more to generate. With 0, the
    client can also have it cut."""
    problem = (
        f"you requested {length + requested} tokens ({length} in the {param}, {requested} in the "
        f"completion). Please reduce the length of the {param} or completion."
        if requested
        else f"there are {length} tokens in the {param}. {_CUT_IT}"
    )
    return ContextError(
        f"This model's maximum context length is {model.max_model_len} tokens. However, {problem}",
        param=param,
        length=length,
        requested=requested,
    )


def _over_cut(length: int, model: ServedModel, param: str) -> ContextError:
    """The error for a text of at least ``length`` tokens, which is too long even to be cut."""
    return ContextError(
        f"A text that is cut may have at most {max_tokens_before_cut(model.max_model_len)} tokens. "
        f"However, there are {length} or more in the {param}. Please shorten the text.",
        param=param,
        length=length,
        requested=0,
    )


def check_length(
    characters: int,
    model: ServedModel,
    *,
    param: str,
    truncated: bool = False,
    requested: int = 1,
) -> None:
    """Reject a text before encoding it if it cannot fit; see ``over_context``."""
    minimum = model.tokenizer.fewest_tokens(characters)
    if minimum >= _max_tokens(model, truncated):
        cannot_be_cut = truncated or requested > 0
        raise ContextError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, there "
            f"are {characters} characters in your {param}, which are at least {minimum} tokens. "
            + (f"Please reduce the length of the {param}." if cannot_be_cut else _CUT_IT),
            param=param,
            length=minimum,
            requested=requested,
        )


def count_tokens(text: str, model: ServedModel) -> int:
    """The number of tokens of a text; a lower bound if the text is far too long."""
    try:
        limit = max_tokens_before_cut(model.max_model_len)
        return len(model.tokenizer.encode(text, add_special_tokens=False, max_tokens=limit))
    except TooManyTokensError as error:
        return error.tokens


def encode_text(
    text: str,
    model: ServedModel,
    *,
    param: str,
    add_special_tokens: bool = True,
    truncated: bool = False,
    requested: int = 1,
) -> list[int]:
    """The tokens of a text, with at least ``requested`` more to generate. A text that will be
    ``truncated`` may be longer than the context."""
    check_length(len(text), model, param=param, truncated=truncated, requested=requested)
    try:
        return model.tokenizer.encode(
            text, add_special_tokens=add_special_tokens, max_tokens=_max_tokens(model, truncated)
        )
    except TooManyTokensError as error:
        raise over_context(error.tokens, requested, model, param=param) from None


def encode_pair(
    first: str,
    second: str,
    model: ServedModel,
    *,
    param: str,
    limit: int | None,
    instruction: str | None = None,
) -> tuple[list[int], int]:
    """The tokens of a pair of texts, cut to ``limit``, and the position of the second text. Models
    with a template use the ``instruction``."""
    truncated = limit is not None
    for text in (first, second, instruction or ""):
        check_length(len(text), model, param=param, truncated=truncated, requested=0)
    try:
        return model.tokenizer.encode_pair(
            first,
            second,
            limit=limit,
            max_tokens=_max_tokens(model, truncated),
            instruction=instruction,
            variables=model.template_variables,
        )
    except TooManyTokensError as error:
        if truncated:
            raise _over_cut(error.tokens, model, param) from None
        raise over_context(error.tokens, 0, model, param=param) from None


def encode_one(
    text: str,
    model: ServedModel,
    cut: Truncation | None,
    *,
    param: str,
    add_special_tokens: bool = True,
) -> list[int]:
    """The tokens of a text to pool, cut inside of its special tokens."""
    if cut is None:
        special = add_special_tokens
        return encode_text(text, model, param=param, add_special_tokens=special, requested=0)
    check_length(len(text), model, param=param, truncated=True, requested=0)
    try:
        return model.tokenizer.encode_within(
            text,
            cut.tokens,
            add_special_tokens=add_special_tokens,
            max_tokens=_max_tokens(model, truncated=True),
            left=cut.left,
        )
    except TooManyTokensError as error:
        raise _over_cut(error.tokens, model, param) from None


def encode_around_gap(
    before: str, after: str, model: ServedModel, *, add_special_tokens: bool = True
) -> list[int]:
    """The tokens of a fill-in-the-middle prompt."""
    check_length(len(before) + len(after), model, param="prompt")
    try:
        return model.tokenizer.encode_around_gap(
            before, after, add_special_tokens=add_special_tokens, max_tokens=model.max_model_len
        )
    except TooManyTokensError as error:
        raise over_context(error.tokens, 1, model, param="prompt") from None


def encode_chat(
    messages: list[dict[str, Any]],
    model: ServedModel,
    *,
    variables: dict[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    continue_final_message: bool = False,
    template: ChatTemplate | None = None,
    truncated: bool = False,
) -> list[int]:
    """The tokens of messages and tools in the form that templates expect, with the template's
    ``variables``. A prompt that will be ``truncated``, or is only counted, may be longer than the
    context."""
    variables = model.template_variables | (variables or {})
    template = template or model.tokenizer.template_of(tools)
    if template is None and model.scoring in ROUTES:
        raise invalid(
            f"The model '{model.name}' has no chat template, as it is not for chats; use "
            f"{ROUTES[model.scoring]}.",
            "messages",
            "no_chat_template",
        )
    source = "" if template is None else template.source
    messages, tools = with_tools_as_text(messages, tools, source)
    characters = _characters_of([messages, variables])
    check_length(characters, model, param="messages", truncated=truncated)
    try:
        tokens = model.tokenizer.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            add_special_tokens=add_special_tokens,
            tools=tools,
            continue_final_message=continue_final_message,
            template=template,
            template_kwargs=variables,
            max_tokens=_max_tokens(model, truncated),
        )
    except TooManyTokensError as error:
        raise over_context(error.tokens, 1, model, param="messages") from None
    if not tokens:
        raise invalid("The messages make an empty prompt.", "messages")
    return tokens


def _max_tokens(model: ServedModel, truncated: bool) -> int:
    """The maximum number of tokens of a text."""
    return max_tokens_before_cut(model.max_model_len) if truncated else model.max_model_len


def _characters_of(value: Any) -> int:
    """The length of all strings in a JSON value, keys included."""
    return sum(len(item) for item in values_in(value) if isinstance(item, str))


def check_template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Reject variables of ``chat_template_kwargs`` that would replace the server's own."""
    for name in variables:
        if name in RESERVED_VARIABLES or name.startswith("_"):
            message = f"'chat_template_kwargs' must not set '{name[:64]}'."
            raise invalid(message, "chat_template_kwargs")
    return variables

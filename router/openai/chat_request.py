"""POST /v1/chat/completions: from the body to a ``GenerationRequest``."""

from __future__ import annotations

import uuid
from typing import Any

from ...shared.text.reasoning import NO_PARSER
from ...shared.text.tokenizer import TooManyTokensError
from ..errors import invalid
from ..generation import EncodedPrompt, GenerationRequest, new_tokens
from ..options import RouterOptions
from ..served_model import ServedModel
from .body_fields import Fields
from .chat_messages import characters_of, read_messages
from .request_fields import (
    COMMON_FIELDS,
    COMMON_UNSUPPORTED,
    MAX_LOGPROBS,
    check_context,
    check_length,
    check_min_tokens,
    read_shared,
    read_text_options,
    too_long,
)
from .response_size import ResponseSize

KNOWN = (
    COMMON_FIELDS
    | {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "add_generation_prompt",
        "chat_template_kwargs",
        "reasoning_effort",
        "include_reasoning",
    }
    # No effect without tools, predictions and storage.
    | {"parallel_tool_calls", "prediction", "store", "service_tier"}
)
UNSUPPORTED: dict[str, tuple[Any, ...]] = COMMON_UNSUPPORTED | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "continue_final_message": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_prompt_text": (False,),
}
# Template variables that clients must not set.
RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "chat_template"))


def parse_chat(body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
    """Check a body, render the chat template, tokenize. Raises ``RequestError``."""
    fields = Fields(body)
    fields.check_names(KNOWN, UNSUPPORTED)
    shared = read_shared(fields, model, options)
    text = read_text_options(fields, reasoning_parser=options.reasoning_parser)
    logprobs = _logprobs(fields)
    wanted = _max_tokens(fields)
    tokens = _encode(fields, model)
    granted = check_context(
        [len(tokens)], wanted, model, param="messages", default=model.max_model_len
    )
    size = ResponseSize(
        prompts=[len(tokens)],
        n=shared["sampling"].n,
        logprobs=logprobs,
        prompt_alternatives=shared["prompt_logprobs"],
        echoed=0,
        token_ids=shared["return_token_ids"],
        stream=shared["stream"],
        copies=1 if text.reasoning_parser == NO_PARSER else 2,  # reasoning has two names
    )
    if wanted is None:
        granted = size.fit(granted, options)
    size.check(granted, options)
    check_min_tokens(text.min_tokens, granted)
    return GenerationRequest(
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        prompts=[EncodedPrompt(new_tokens(tokens))],
        max_tokens=granted,
        text=text,
        logprobs=logprobs,
        ignored=fields.ignored,
        include_reasoning=_include_reasoning(fields, options),
        **shared,
    )


def _encode(fields: Fields, model: ServedModel) -> list[int]:
    messages = read_messages(fields, model)
    variables = _template_variables(fields)
    check_length(characters_of([messages, variables]), model, param="messages")
    try:
        tokens = model.tokenizer.encode_chat(
            messages,
            add_generation_prompt=fields.boolean("add_generation_prompt", True),
            add_special_tokens=fields.boolean("add_special_tokens", False),
            template_kwargs=variables,
            most=model.max_model_len,
        )
    except TooManyTokensError as error:
        raise too_long(error.tokens, 1, model, param="messages") from None
    if not tokens:
        raise invalid("The messages make an empty prompt.", "messages")
    return tokens


def _template_variables(fields: Fields) -> dict[str, Any]:
    given = fields.mapping("chat_template_kwargs", 64)
    for name in given:
        if name in RESERVED or name.startswith("_"):
            message = f"'chat_template_kwargs' must not set '{name[:64]}'."
            raise invalid(message, "chat_template_kwargs")
    effort = fields.string("reasoning_effort", "", 64)
    # As in vLLM; templates without these variables are not affected.
    own = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}
    return own | given


def _include_reasoning(fields: Fields, options: RouterOptions) -> bool:
    include = fields.boolean("include_reasoning", True)
    if not include and options.reasoning_parser == NO_PARSER:
        message = "'include_reasoning' needs a router with --reasoning-parser."
        raise invalid(message, "include_reasoning", "unsupported_value")
    return include


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.optional_integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        message = "'top_logprobs' is only allowed when 'logprobs' is enabled."
        raise invalid(message, "top_logprobs")
    return (top or 0) if wanted else None


def _max_tokens(fields: Fields) -> int | None:
    old = fields.optional_integer("max_tokens", 1, 2**31 - 1)
    new = fields.optional_integer("max_completion_tokens", 1, 2**31 - 1)
    if old is not None and new is not None and old != new:
        raise invalid(
            "'max_tokens' and 'max_completion_tokens' contradict each other; set one of them.",
            "max_tokens",
        )
    return old if new is None else new

"""POST /v1/chat/completions: from the body to a ``Generation``."""

from __future__ import annotations

import uuid
from typing import Any

from ..shared.text.chat_template import flatten_content
from . import sampling as read
from .errors import invalid
from .fields import Fields, wrong_type
from .generation import Generation, Prompt
from .model import ServedModel
from .options import RouterOptions

ROLES = ("system", "developer", "user", "assistant")
MAX_MESSAGES = 16_384
KNOWN = read.COMMON | {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "add_generation_prompt",
    "chat_template_kwargs",
}
UNSUPPORTED: dict[str, tuple[Any, ...]] = read.UNSUPPORTED | {
    "tools": (),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "mm_processor_kwargs": (),
}
MESSAGE_FIELDS = frozenset(("role", "content", "name", "reasoning_content"))
MESSAGE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
    "refusal": (),
    "annotations": ([],),
}
# Template variables that would not be the client's to set.
RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "chat_template"))


def parse_chat(body: Any, model: ServedModel, options: RouterOptions) -> Generation:
    """Check everything, render the template, count the tokens."""
    fields = Fields(body)
    fields.refuse_others(KNOWN, UNSUPPORTED)
    shared = read.read_shared(fields, model, options)
    text = read.read_text_options(fields)
    logprobs = _logprobs(fields)
    wanted = _max_tokens(fields)
    tokens = _encode(fields, model)
    granted = read.check_context(
        [len(tokens)], wanted, model, param="messages", default=model.max_model_len
    )
    read.check_min_tokens(text.min_tokens, granted)
    read.check_prompt_logprobs(len(tokens), 1, shared["prompt_logprobs"])
    return Generation(
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        prompts=[Prompt(tokens)],
        max_tokens=granted,
        text=text,
        logprobs=logprobs,
        **shared,
    )


def _encode(fields: Fields, model: ServedModel) -> list[int]:
    messages = _messages(fields, model)
    characters = sum(len(message["content"]) for message in messages)
    read.check_length(characters, model, param="messages")
    kwargs = fields.mapping("chat_template_kwargs", 64)
    for name in kwargs:
        if name in RESERVED or name.startswith("_"):
            message = f"'chat_template_kwargs' must not set '{name[:64]}'."
            raise invalid(message, "chat_template_kwargs")
    tokens = model.tokenizer.encode_chat(
        messages,
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
        add_special_tokens=fields.boolean("add_special_tokens", False),
        template_kwargs=kwargs,
    )
    if not tokens:
        raise invalid("The messages make an empty prompt.", "messages")
    return tokens


def _messages(fields: Fields, model: ServedModel) -> list[dict[str, Any]]:
    if "messages" not in fields:
        message = "Missing required parameter: 'messages'."
        raise invalid(message, "messages", "missing_required_parameter")
    messages = fields.array("messages", MAX_MESSAGES)
    if not messages:
        raise invalid(
            "Invalid 'messages': empty array; expected at least one message.",
            "messages",
            "empty_array",
        )
    return [_message(item, f"messages[{i}]", model) for i, item in enumerate(messages)]


def _message(item: Any, param: str, model: ServedModel) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    fields = Fields(item)
    role = fields.string("role", "", 64)
    if role in ("tool", "function"):
        message = f"'{param}.role': messages of role '{role}' are not supported by this server."
        raise invalid(message, f"{param}.role", "unsupported_value")
    if role not in ROLES:
        raise invalid(
            f"Invalid value for '{param}.role': '{role}'; supported values are: "
            f"{', '.join(ROLES)}.",
            f"{param}.role",
            "invalid_value",
        )
    fields.refuse_others(MESSAGE_FIELDS, MESSAGE_UNSUPPORTED)
    if "content" not in fields:
        message = f"Missing required parameter: '{param}.content'."
        raise invalid(message, f"{param}.content", "missing_required_parameter")
    made = {"role": _role(role, model)}
    made["content"] = flatten_content(fields.raw("content"), param=f"{param}.content")
    for name in ("name", "reasoning_content"):
        if name in fields:
            made[name] = fields.string(name, "", 1 << 20)
    return made


def _role(role: str, model: ServedModel) -> str:
    """OpenAI's newer name for the system role, for the templates that do not know it."""
    template = model.tokenizer.template
    if role == "developer" and template is not None and "developer" not in template.source:
        return "system"
    return role


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.optional_integer("top_logprobs", 0, read.MAX_LOGPROBS)
    if top is not None and not wanted:
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

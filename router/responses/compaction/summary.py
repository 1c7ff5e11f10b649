"""A summary of a conversation: the request for it, and what the model answers."""

from __future__ import annotations

from io import StringIO
from typing import Any

from ...errors import SERVER, ApiError, invalid
from ...generation import GenerationRequest
from ...openai.chat_request import parse_chat
from ...options import RouterOptions
from ...requests.renamed_errors import fields_renamed
from ...served_model import ServedModel
from ..chat_turns import Message, as_messages, told, with_alternating_turns
from ..input_items import Item
from ..response_request import FIELD_NAMES

# Of the context, for the summary; a request has to leave this much room.
SUMMARY_SHARE, MAX_SUMMARY = 8, 4096
ASK_FOR_SUMMARY = (
    "Write a summary of this conversation. Everything in it except for the user's messages is about"
    " to be removed, and the work goes on with your summary alone. State the task and its"
    " constraints, what was decided and why, what was done and found out, with names, paths,"
    " numbers and code exactly as they are, and what remains to be done. Answer with the summary"
    " only."
)


def parse_summary(
    sampling: dict[str, Any],
    instructions: str | None,
    items: list[Item],
    model: ServedModel,
    options: RouterOptions,
) -> GenerationRequest:
    """The chat completion that makes the summary: one more message asks for it. ``sampling`` has
    other fields of its body. Raises ``RequestError``."""
    if not items:
        message = "There is nothing to compact: 'input' or 'previous_response_id' is required."
        raise invalid(message, "input", "missing_required_parameter")
    messages = [*told(instructions), *as_messages(items)]
    return parse_summary_of(sampling, messages, model, options)


def parse_summary_of(
    sampling: dict[str, Any], messages: list[Message], model: ServedModel, options: RouterOptions
) -> GenerationRequest:
    """As ``parse_summary``, of the messages of a chat."""
    messages = [*messages, {"role": "user", "content": ASK_FOR_SUMMARY}]
    most = min(MAX_SUMMARY, model.max_model_len // SUMMARY_SHARE)
    limit = sampling.get("max_completion_tokens")
    fields = {
        "messages": with_alternating_turns(messages),
        "max_completion_tokens": most if limit is None else min(most, limit),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with fields_renamed(FIELD_NAMES):
        return parse_chat(sampling | fields, model, options)


def checked_summary(written: StringIO) -> str:
    """What the model wrote. Raises ``ApiError`` if that is nothing."""
    summary = written.getvalue().strip()
    if not summary:
        message = "The model wrote no summary; the conversation stays as it is."
        raise ApiError(500, message, kind=SERVER, code="empty_summary")
    return summary

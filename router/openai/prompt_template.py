"""The chat template of a request, and how the prompt ends."""

from __future__ import annotations

from typing import Protocol

from ...shared.errors import ModelError
from ...shared.text.chat_template import ChatTemplate
from ..errors import invalid
from ..options import RouterOptions
from ..served_model import ServedModel

MAX_TEMPLATE = 1 << 16


class _Chat(Protocol):
    @property
    def add_generation_prompt(self) -> bool: ...

    @property
    def continue_final_message(self) -> bool: ...

    @property
    def model_fields_set(self) -> set[str]: ...


def adds_generation_prompt(chat: _Chat) -> bool:
    """True if the prompt ends with the header of a new message. Raises ``RequestError`` if the
    final message is to be continued as well."""
    if not chat.continue_final_message:
        return chat.add_generation_prompt
    if chat.add_generation_prompt and "add_generation_prompt" in chat.model_fields_set:
        message = "'continue_final_message' and 'add_generation_prompt' exclude each other."
        raise invalid(message, "continue_final_message")
    return False


def read_template(
    source: str | None, model: ServedModel, options: RouterOptions
) -> ChatTemplate | None:
    """The chat template that a request brings, or names among the model's. Raises ``RequestError``,
    also if the router does not allow any."""
    if source is None:
        return None
    if not options.trust_request_chat_template:
        raise invalid(
            "'chat_template' is not allowed by this server, which runs without "
            "--trust-request-chat-template; leave it out.",
            "chat_template",
            "unsupported_parameter",
        )
    try:
        if (template := model.tokenizer.named_template(source)) is not None:
            return template
        return ChatTemplate(source, origin="'chat_template'", tokens=model.tokenizer.special_tokens)
    except ModelError as error:
        raise invalid(f"Invalid value for {error}.", "chat_template") from None

"""POST /v1/responses/input_tokens: count the tokens of a response's prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from ..errors import invalid
from ..mcp.chat import McpChat
from ..options import RouterOptions
from ..requests.body_errors import fields_renamed
from ..requests.body_model import DocumentedAs, ResponseModel
from ..served_model import ServedModel
from .chat_turns import as_messages, instruction_messages
from .continued_conversation import Conversations
from .request import FIELD_NAMES, CreateResponseRequest, chat_body, check_response
from .surface import parse_turns
from .tools import read_response_tools


class CountInputTokensRequest(CreateResponseRequest):
    """The body of POST /v1/responses/input_tokens, like that of a response. Fields that do not
    change the prompt have no effect."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CreateResponseRequest.unsupported,
        "personality": (),
    }

    input: Annotated[Any, DocumentedAs(str | list[dict[str, Any]])] = None


class InputTokenCount(ResponseModel):
    """The number of tokens of a prompt, rendered by the model's chat template."""

    object: Literal["response.input_tokens"]
    input_tokens: int


def input_token_counter(
    chat: McpChat, conversations: Conversations, options: RouterOptions
) -> Callable[[Any, ServedModel, set[str]], dict[str, Any]]:
    """A function that computes the response to a body. It raises ``RequestError`` or
    ``ApiError``."""

    def count(body: Any, model: ServedModel, ignored: set[str]) -> int:
        params = CountInputTokensRequest.read(body, ignored)
        check_response(params, ignored)
        tools = read_response_tools(params.tools, ignored)
        conversation = conversations.read(params.input, params.previous_response_id, ignored)
        if not conversation.all_items and not params.instructions:
            message = "Missing required parameter: 'input'."
            raise invalid(message, "input", "missing_required_parameter")
        if params.truncation == "auto":
            approvals = conversations.approvals_of(conversation)
            request = parse_turns(params, tools, conversation, chat, approvals, model, options)
            return request.prompt_tokens
        messages = [
            *instruction_messages(params.instructions),
            *as_messages(conversation.all_items),
        ]
        with fields_renamed(FIELD_NAMES), tools.places_in_errors():
            turns = chat_body(params, tools, messages, is_partial=conversation.is_partial)
            return chat.count_tokens(turns, model, options)

    return lambda body, model, ignored: {
        "object": "response.input_tokens",
        "input_tokens": count(body, model, ignored),
    }

"""POST /tokenize: a text, or the messages of a chat, as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...shared.text.tokenizer import max_tokens_before_cut
from ..generation import new_tokens
from ..http.encoding import EncodedArray
from ..openai.chat_messages import Messages, read_messages
from ..openai.prompt_template import adds_generation_prompt
from ..openai.tools.definitions import Tools, shown_tools
from ..requests.body_model import BodyModel, ResponseModel
from ..requests.context import TemplateVariables, check_template_variables
from ..requests.tool_text import with_tools_as_text
from ..served_model import ServedModel

# Tokens whose texts are encoded at once.
PIECE_TOKENS = 1024


class TokenizeTextRequest(BodyModel):
    """The body of POST /tokenize for a text."""

    model: Annotated[str, Field(max_length=1024)] = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(BodyModel):
    """The body of POST /tokenize for a chat."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    }

    model: Annotated[str, Field(max_length=1024)] = ""
    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    tools: Tools = Field(default_factory=list)


class TokenizeContentRequest(BodyModel):
    """The body of POST /tokenize as llama.cpp's clients send it."""

    model: Annotated[str, Field(max_length=1024)] = ""
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class TokenizeResponse(ResponseModel):
    """The tokens of a prompt; ``token_strs``, on request, are their texts in the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenPiece(ResponseModel):
    """A token and its text, or its bytes if they are a part of a character."""

    id: int
    piece: str | list[int]


class TokenizeContentResponse(ResponseModel):
    """The tokens of ``content``; with ``with_pieces``, each with its text."""

    tokens: list[int] | list[TokenPiece]


def tokenize(body: Any, model: ServedModel, ignored: set[str]) -> dict[str, Any]:
    """The response to a body. Raises ``RequestError``."""
    if isinstance(body, dict) and "content" in body and not body.keys() & {"prompt", "messages"}:
        return _tokenize_content(TokenizeContentRequest.read(body, ignored), model)
    is_chat = isinstance(body, dict) and "messages" in body
    request: TokenizeTextRequest | TokenizeChatRequest
    if is_chat:
        request = chat = TokenizeChatRequest.read(body, ignored)
        model.check_name(chat.model)
        tokens = _chat_tokens(chat, model, ignored)
    else:
        request = text = TokenizeTextRequest.read(body, ignored)
        model.check_name(text.model)
        tokens = model.tokenizer.encode(
            text.prompt,
            add_special_tokens=text.add_special_tokens,
            max_tokens=max_tokens_before_cut(model.max_model_len),
        )
    return {
        "count": len(tokens),
        "max_model_len": model.max_model_len,
        "tokens": new_tokens(tokens),
        "token_strs": _token_texts(tokens, model) if request.return_token_strs else None,
    }


def _chat_tokens(chat: TokenizeChatRequest, model: ServedModel, ignored: set[str]) -> list[int]:
    tools = shown_tools(chat.tools, ignored)
    template = model.tokenizer.template_of(tools)
    source = "" if template is None else template.source
    messages, tools = with_tools_as_text(read_messages(chat.messages, ignored), tools, source)
    return model.tokenizer.encode_chat(
        messages,
        add_generation_prompt=adds_generation_prompt(chat),
        continue_final_message=chat.continue_final_message,
        add_special_tokens=chat.add_special_tokens,
        template=template,
        tools=tools,
        template_kwargs=model.template_variables
        | check_template_variables(chat.chat_template_kwargs),
        max_tokens=max_tokens_before_cut(model.max_model_len),
    )


def _tokenize_content(request: TokenizeContentRequest, model: ServedModel) -> dict[str, Any]:
    model.check_name(request.model)
    tokens = model.tokenizer.encode(
        request.content,
        add_special_tokens=request.add_special,
        literally=not request.parse_special,
        max_tokens=max_tokens_before_cut(model.max_model_len),
    )
    if not request.with_pieces:
        return {"tokens": new_tokens(tokens)}
    pieces = EncodedArray()
    for start in range(0, len(tokens), PIECE_TOKENS):
        pieces.extend(_piece(token, model) for token in tokens[start : start + PIECE_TOKENS])
    return {"tokens": pieces}


def _piece(token: int, model: ServedModel) -> dict[str, Any]:
    text = model.tokenizer.texts.bytes_of(token)
    try:
        return {"id": token, "piece": text.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(text)}


def _token_texts(tokens: list[int], model: ServedModel) -> EncodedArray:
    texts = EncodedArray()
    for start in range(0, len(tokens), PIECE_TOKENS):
        texts.extend(map(model.tokenizer.texts.piece_of, tokens[start : start + PIECE_TOKENS]))
    return texts

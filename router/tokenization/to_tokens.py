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
from ..requests.template_variables import TemplateVariables, check_template_variables
from ..requests.written_tools import with_written_tools
from ..served_model import ServedModel

# Tokens that are looked up and encoded at once.
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
    """The tokens of a prompt; ``token_strs`` spells them as the vocabulary does, on demand."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenPiece(ResponseModel):
    """A token with its text, or with its bytes if they are part of a character."""

    id: int
    piece: str | list[int]


class TokenizeContentResponse(ResponseModel):
    """The tokens of a content; with ``with_pieces``, each with its text."""

    tokens: list[int] | list[TokenPiece]


def tokenize(body: Any, model: ServedModel, ignored: set[str]) -> dict[str, Any]:
    """The answer to a body. Raises ``RequestError``."""
    if isinstance(body, dict) and "content" in body and not body.keys() & {"prompt", "messages"}:
        return _tokenize_content(TokenizeContentRequest.read(body, ignored), model)
    is_chat = isinstance(body, dict) and "messages" in body
    asked: TokenizeTextRequest | TokenizeChatRequest
    if is_chat:
        asked = chat = TokenizeChatRequest.read(body, ignored)
        model.check_name(chat.model)
        tokens = _chat_tokens(chat, model, ignored)
    else:
        asked = text = TokenizeTextRequest.read(body, ignored)
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
        "token_strs": _spelled(tokens, model) if asked.return_token_strs else None,
    }


def _chat_tokens(chat: TokenizeChatRequest, model: ServedModel, ignored: set[str]) -> list[int]:
    tools = shown_tools(chat.tools, ignored)
    template = model.tokenizer.template_of(tools)
    source = "" if template is None else template.source
    messages, tools = with_written_tools(read_messages(chat.messages, ignored), tools, source)
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


def _tokenize_content(asked: TokenizeContentRequest, model: ServedModel) -> dict[str, Any]:
    model.check_name(asked.model)
    tokens = model.tokenizer.encode(
        asked.content,
        add_special_tokens=asked.add_special,
        literally=not asked.parse_special,
        max_tokens=max_tokens_before_cut(model.max_model_len),
    )
    if not asked.with_pieces:
        return {"tokens": new_tokens(tokens)}
    pieces = EncodedArray()
    for start in range(0, len(tokens), PIECE_TOKENS):
        pieces.extend(_piece(token, model) for token in tokens[start : start + PIECE_TOKENS])
    return {"tokens": pieces}


def _piece(token: int, model: ServedModel) -> dict[str, Any]:
    spelled = model.tokenizer.texts.bytes_of(token)
    try:
        return {"id": token, "piece": spelled.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(spelled)}


def _spelled(tokens: list[int], model: ServedModel) -> EncodedArray:
    spelled = EncodedArray()
    for start in range(0, len(tokens), PIECE_TOKENS):
        spelled.extend(map(model.tokenizer.texts.piece_of, tokens[start : start + PIECE_TOKENS]))
    return spelled

"""Bodies that are refused: a table of what clients read, and what every refusal holds to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tandem.router import app
from tandem.router.anthropic.request import MessagesRequest
from tandem.router.embeddings.embed_request import CreateEmbeddingRequest
from tandem.router.embeddings.score_request import RerankBody
from tandem.router.errors import to_api_error
from tandem.router.generation import GenerationRequest
from tandem.router.ollama.embeddings import OllamaEmbedRequest
from tandem.router.ollama.request import (
    OPENAI_NAMES,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OnlyLoadsError,
)
from tandem.router.ollama.surfaces import CHAT as OLLAMA_CHAT
from tandem.router.ollama.surfaces import GENERATE
from tandem.router.openai.chat_messages import ChatMessage
from tandem.router.openai.chat_request import ChatCompletionRequest
from tandem.router.openai.completion_request import CompletionRequest
from tandem.router.requests.body_model import BodyModel
from tandem.router.responses.request import CreateResponseRequest
from tandem.router.responses.surface import Responses
from tandem.router.surface import Surface
from tandem.shared.config.sampling_fields import NUMBERS
from tandem.shared.text.stop import StopStrings
from tandem.tests.router.in_process import CHAT, COMPLETIONS, HI, MESSAGES, InProcess
from tandem.tests.router.in_process_responses import InProcessResponses
from tandem.tests.router.support import CONTEXT

NO_STOP = StopStrings()
# By path: the model of its bodies, and a valid one.
BODIES: dict[str, tuple[type[BodyModel], dict[str, Any]]] = {
    CHAT.path: (ChatCompletionRequest, {"messages": [HI]}),
    COMPLETIONS.path: (CompletionRequest, {"prompt": "hi"}),
    MESSAGES.path: (MessagesRequest, {"model": "tiny", "max_tokens": 20, "messages": [HI]}),
    OLLAMA_CHAT.path: (OllamaChatRequest, {"model": "tiny", "messages": [HI]}),
    GENERATE.path: (OllamaGenerateRequest, {"model": "tiny", "prompt": "hi"}),
    Responses.path: (CreateResponseRequest, {"input": "hi"}),
    "/v1/embeddings": (CreateEmbeddingRequest, {"input": "hi"}),
    "/v1/rerank": (RerankBody, {"query": "a", "documents": ["b"]}),
    "/api/embed": (OllamaEmbedRequest, {"model": "tiny", "input": "a"}),
}
GENERATING = [CHAT.path, COMPLETIONS.path, MESSAGES.path, OLLAMA_CHAT.path, GENERATE.path]


@pytest.fixture(scope="module")
def components() -> Any:
    """Of the document about all paths."""
    return app._routes(app.APIS).openapi()["components"]


@pytest.fixture(scope="module")
def c() -> Iterator[InProcessResponses]:
    with InProcessResponses(pooling="last") as c:
        yield c


# ---- what clients read ---------------------------------------------------------------------------


def message_with(by: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [HI | by]}


CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
UNKNOWN_TOKEN = "keys are token ids from 0 to 319, since the vocabulary has 320."
TOO_LONG = "This model's maximum context length is 512 tokens. However, "
REFUSED: tuple[tuple[Surface, dict[str, Any], str, str | None, str], ...] = (
    # Types
    (
        CHAT,
        {"temperature": "x", "top_p": "x"},
        "temperature",
        "invalid_type",
        "Invalid type for 'temperature': expected a number, but got a string instead.",
    ),
    (
        CHAT,
        {"echo": 1},
        "echo",
        "invalid_type",
        "Invalid type for 'echo': expected a boolean, but got an integer instead.",
    ),
    (
        CHAT,
        {"best_of": 1.5},
        "best_of",
        "invalid_type",
        "Invalid type for 'best_of': expected an integer, but got a number instead.",
    ),
    (
        CHAT,
        {"allowed_token_ids": {}},
        "allowed_token_ids",
        "invalid_type",
        "Invalid type for 'allowed_token_ids': expected an array, but got an object instead.",
    ),
    (
        CHAT,
        {"bad_words": [None]},
        "bad_words[0]",
        "invalid_type",
        "Invalid type for 'bad_words[0]': expected a string, but got null instead.",
    ),
    (
        CHAT,
        {"logit_bias": {"1": "x"}},
        "logit_bias.1",
        "invalid_type",
        "Invalid type for 'logit_bias.1': expected a number, but got a string instead.",
    ),
    (
        COMPLETIONS,
        {"prompt": ["a", 1]},
        "prompt",
        "invalid_type",
        "Invalid type for 'prompt': an array must hold only strings, only token ids, or only "
        "arrays of token ids.",
    ),
    (
        CHAT,
        {"stop": [1]},
        "stop",
        "invalid_type",
        "Invalid type for 'stop': expected a string or an array of strings, but got an integer "
        "instead.",
    ),
    # Ranges
    (
        CHAT,
        {"n": 0},
        "n",
        "integer_below_min_value",
        "Invalid value for 'n': 0 is below the minimum of 1.",
    ),
    (
        CHAT,
        {"best_of": 10**400},
        "best_of",
        "integer_above_max_value",
        "Invalid value for 'best_of': a number of more than 30 digits is above the maximum of 128.",
    ),
    (
        CHAT,
        {"min_p": 2.0},
        "min_p",
        "decimal_above_max_value",
        "Invalid value for 'min_p': 2.0 is above the maximum of 1.",
    ),
    (
        CHAT,
        {"repetition_penalty": 0},
        "repetition_penalty",
        None,
        "Invalid value for 'repetition_penalty': must be above 0.",
    ),
    (
        COMPLETIONS,
        {"prompt": [[1], [10**30]]},
        "prompt[1][0]",
        "integer_above_max_value",
        "Invalid value for 'prompt[1][0]': a number of more than 30 digits is out of vocabulary; "
        "the model's token ids are 0 to 319.",
    ),
    (
        CHAT,
        {"logit_bias": {"-1": 1}},
        "logit_bias",
        None,
        f"Invalid keys in 'logit_bias': '-1'; {UNKNOWN_TOKEN}",
    ),
    (
        CHAT,
        {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        None,
        "Invalid value for 'truncate_prompt_tokens': 0; it must be -1 (as many as fit) or from 1 "
        "to 511, so that there is room for the completion.",
    ),
    # Lengths
    (
        CHAT,
        {"cache_salt": "x" * 1100},
        "cache_salt",
        "string_above_max_length",
        "'cache_salt' is too long: 1100 characters, the limit is 256.",
    ),
    (
        CHAT,
        {"stop": ["x"] * 65},
        "stop",
        "array_above_max_length",
        "'stop' is too long: 65 items, the limit is 64.",
    ),
    (
        CHAT,
        {"stop": ["x" * 1025]},
        "stop",
        None,
        "Invalid 'stop': each string must have 1 to 1024 characters, not 1025.",
    ),
    (
        CHAT,
        {"logit_bias": {str(token): 1 for token in range(1100)}},
        "logit_bias",
        None,
        "'logit_bias' has too many entries: 1100, the limit is 1024.",
    ),
    (
        CHAT,
        {"messages": []},
        "messages",
        "empty_array",
        "Invalid 'messages': empty array; expected at least one message.",
    ),
    (
        COMPLETIONS,
        {"prompt": ""},
        "prompt",
        "empty_string",
        "Invalid 'prompt': the prompt is empty.",
    ),
    (
        COMPLETIONS,
        {"prompt": ["x"] * 2000},
        "prompt",
        "array_above_max_length",
        "Invalid 'prompt': 2000 prompts, the limit is 1024.",
    ),
    (
        COMPLETIONS,
        {"prompt": ["x"] * 1000, "n": 100},
        "n",
        None,
        "1000 prompts with 'n' of 100 make 100000 choices; the limit is 4096.",
    ),
    (
        COMPLETIONS,
        {"n": 128, "max_tokens": 400, "logprobs": 20},
        "n",
        "response_too_large",
        "The response could have 1075200 logprobs; the limit is 524288. Lower 'n', 'max_tokens', "
        "'logprobs' or 'top_logprobs' or set 'stream'.",
    ),
    # The context
    (
        CHAT,
        {"max_tokens": CONTEXT},
        "messages",
        "context_length_exceeded",
        f"{TOO_LONG}you requested 531 tokens (19 in the messages, 512 in the completion). Please "
        "reduce the length of the messages or completion.",
    ),
    (
        COMPLETIONS,
        {"prompt": [1] * CONTEXT},
        "prompt",
        "context_length_exceeded",
        f"{TOO_LONG}you requested 513 tokens (512 in the prompt, 1 in the completion). Please "
        "reduce the length of the prompt or completion.",
    ),
    (
        COMPLETIONS,
        {"prompt": "word " * 2000},
        "prompt",
        "context_length_exceeded",
        f"{TOO_LONG}there are 10000 characters in your prompt, which are at least 1112 tokens. "
        "Please reduce the length of the prompt.",
    ),
    # What needs something else, or contradicts it
    (
        CHAT,
        {"messages": None},
        "messages",
        "missing_required_parameter",
        "Missing required parameter: 'messages'.",
    ),
    (
        CHAT,
        {"min_tokens": 30, "max_tokens": 20},
        "min_tokens",
        None,
        "'min_tokens' (30) must not exceed the tokens that may be generated (20).",
    ),
    (
        CHAT,
        {"max_tokens": 5, "max_completion_tokens": 6},
        "max_tokens",
        None,
        "'max_tokens' and 'max_completion_tokens' contradict each other; set one of them.",
    ),
    (
        CHAT,
        {"n": 3, "best_of": 2},
        "best_of",
        None,
        "'best_of' (2) must be at least 'n' (3).",
    ),
    (
        CHAT,
        {"stream_options": {"include_usage": True}},
        "stream_options",
        None,
        "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
    ),
    (
        CHAT,
        {"stream": True, "prompt_logprobs": 1},
        "prompt_logprobs",
        None,
        "'prompt_logprobs' is not available with 'stream'.",
    ),
    (
        COMPLETIONS,
        {"logprob_token_ids": [1]},
        "logprob_token_ids",
        None,
        "'logprob_token_ids' is only allowed with 'logprobs' and generated tokens.",
    ),
    (
        CHAT,
        {"function_call": "x"},
        "function_call",
        "missing_required_parameter",
        "When using 'function_call', 'functions' must be set.",
    ),
    (
        CHAT,
        {"length_penalty": 2.0},
        "length_penalty",
        None,
        "'length_penalty' is only allowed with 'use_beam_search'.",
    ),
    (
        CHAT,
        {"structured_outputs": {}},
        "structured_outputs",
        "invalid_value",
        "Invalid 'structured_outputs': exactly one of json, regex, choice, grammar, json_object, "
        "structural_tag is needed, and none is given.",
    ),
    # What this server or this model has not
    (
        CHAT,
        {"model": "x"},
        "model",
        "model_not_found",
        "The model 'x' does not exist; this server has 'tiny'.",
    ),
    (
        CHAT,
        {"audio": {}},
        "audio",
        "unsupported_parameter",
        "'audio' is not supported by this server; leave it out.",
    ),
    (
        CHAT,
        {"chat_template": "x"},
        "chat_template",
        "unsupported_parameter",
        "'chat_template' is not allowed by this server, which runs without "
        "--trust-request-chat-template; leave it out.",
    ),
    (
        CHAT,
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
        None,
        "'chat_template_kwargs' must not set 'messages'.",
    ),
    (
        CHAT,
        {"include_reasoning": False},
        "include_reasoning",
        "unsupported_value",
        "'include_reasoning' needs a router with --reasoning-parser.",
    ),
    (
        COMPLETIONS,
        {"suffix": "x"},
        "suffix",
        "unsupported_parameter",
        "This model has no fill-in-the-middle tokens; leave 'suffix' out.",
    ),
    # Messages
    (
        CHAT,
        message_with({"role": 5}),
        "role",
        "invalid_type",
        "Invalid type for 'role': expected a string, but got an integer instead.",
    ),
    (
        CHAT,
        message_with({"content": []}),
        "messages[0].content",
        None,
        "'messages[0].content' must be a string or a non-empty list of content parts.",
    ),
    (
        CHAT,
        message_with({"tool_calls": [CALL]}),
        "messages[0].tool_calls",
        "unsupported_value",
        "'messages[0].tool_calls': only messages of the role 'assistant' have tool calls.",
    ),
    (
        CHAT,
        message_with({"role": "assistant", "tool_calls": [CALL | {"function": {"name": 5}}]}),
        "messages[0].tool_calls[0]",
        "invalid_type",
        "'messages[0].tool_calls[0].function.name' must be a string.",
    ),
)


def test_refusals_are_those_of_the_table(c: InProcess) -> None:
    for surface, body, param, code, message in REFUSED:
        error_parts = refusal(c, surface.path, BODIES[surface.path][1] | body)
        status = 404 if code == "model_not_found" else 400
        assert error_parts == [status, message, param, code], body


def refusal(c: InProcess, path: str, body: Any) -> list[Any] | None:
    """Status, message, parameter and code; ``None`` if the body is taken."""
    try:
        read(c, path, body)
    except OnlyLoadsError:
        return None
    except Exception as error:
        failure = to_api_error(error, retry_after=1)
        assert failure is not None, (path, repr(error))
        return [failure.status, failure.message, failure.param, failure.code]
    return None


def read(c: InProcess, path: str, body: Any) -> GenerationRequest:
    return c.surfaces[path].parse(body, c.model, c.options)


# ---- what every refusal holds to -----------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *("x", "", "x" * 1100, "none"),
    *(-1, 0, 1, 2.0, 1.5, 25, 2**63, -(2**63) - 1, 10**400),
    *(True, False),
    *([], [1], [-1], [1.5], [True], ["x"], [""], [None], [{}]),
    *({}, {"x": 1}, {"1": 101}, {"999": 1}, {"type": "text"}),
    *([{"type": "text"}], [{"type": "function"}]),
)
# Fields of a message that are read as those that followed them.
NOW = {"function_call": "tool_calls"}
IN_MESSAGES = [*ChatMessage.model_fields, *ChatMessage.unsupported, "nonsense"]
IN_OPTIONS = [*OPENAI_NAMES, "mirostat", "num_ctx", "num_gpu", "nonsense", "repeat_last_n"]


# Taken although the document does not have them: 0 for false, objects that say nothing, and a
# format without effect.
LENIENT: tuple[tuple[str, Any], ...] = (
    ("early_stopping", 0),
    ("tool_choice", {}),
    ("thinking", {}),
    ("output_format", {"type": "text"}),
)


def changes(path: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each name that a body may have, at any depth, and the field that has it with the value."""
    model = BODIES[path][0]
    for name in sorted({*model.model_fields, *model.unsupported, "nonsense"}):
        yield name, {name: value}
    if path == CHAT.path:
        for name in IN_MESSAGES:
            yield name, message_with({name: value})
    if path in (OLLAMA_CHAT.path, GENERATE.path):
        for name in IN_OPTIONS:
            yield name, {"options": {name: value}}


@pytest.mark.parametrize("path", BODIES)
def test_values_outside_the_schema_are_refused_by_field(
    c: InProcess, path: str, components: dict[str, Any]
) -> None:
    model, valid = BODIES[path]
    schema = components["schemas"][model.__name__]
    documented = Draft202012Validator(schema | {"components": components})
    for value in VALUES:
        for name, changed in changes(path, value):
            body = valid | changed
            error_parts = refusal(c, path, body)
            about = (path, name, json.dumps(value)[:40], error_parts)
            if error_parts is None:
                assert documented.is_valid(body) or (name, value) in LENIENT, about
                continue
            status, message, param, code = error_parts
            assert status == (404 if f"{code}".endswith("_not_found") else 400), about
            assert 0 < len(message) < 500, about
            if code == "context_length_exceeded":  # by the prompt, whatever it has become
                assert param in ("messages", "prompt", "input", "num_ctx", "query"), about
            else:
                assert any(each in param for each in (name, NOW.get(name, name))), about


def comparable(request: GenerationRequest) -> dict[str, Any]:
    """All fields but the identifiers, to compare two requests."""
    text = replace(request.text, stop=NO_STOP)
    values = {each.name: getattr(request, each.name) for each in fields(request)}
    return values | {"request_id": "", "text": text, "stop": list(request.text.stop.texts)}


@pytest.mark.parametrize("path", GENERATING)
def test_null_is_the_same_as_nothing(c: InProcess, path: str) -> None:
    valid = BODIES[path][1]
    plain = read(c, path, valid)
    for name, changed in changes(path, None):
        if not changed.keys() <= valid.keys():
            assert comparable(read(c, path, valid | changed)) == comparable(plain), name


@pytest.mark.parametrize("path", [CHAT.path, COMPLETIONS.path])
def test_numbers_reach_the_node_within_their_range_only(c: InProcess, path: str) -> None:
    valid = BODIES[path][1]
    for name, number in NUMBERS.items():
        for value in (number.minimum, number.maximum, (number.minimum + number.maximum) / 2):
            value = number.kind(value)
            if number.above and value == number.minimum:
                assert refusal(c, path, valid | {name: value}) is not None
                continue
            sampling = read(c, path, valid | {name: value}).sampling
            expected = 0 if (name, value) == ("top_k", -1) else value
            assert getattr(sampling, name) == expected, name
        for value in (number.minimum - 1, number.maximum + 1):
            error_parts = refusal(c, path, valid | {name: value})
            assert error_parts is not None and error_parts[2] == name, (name, value)

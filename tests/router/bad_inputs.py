"""Invalid requests and the answers to them, kept in ``bad_inputs.json``.

``python -m tandem.tests.router.bad_inputs`` writes the file; read its diff before committing it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf.json_format import MessageToDict

from tandem.router.errors import to_api_error
from tandem.router.generation import GenerationRequest
from tandem.router.ollama.request import OPENAI_NAMES, OnlyLoadsError
from tandem.router.ollama.surfaces import CHAT, GENERATE
from tandem.router.openai.error_body import error_body
from tandem.router.openai.request_fields import OpenAIRequest
from tandem.router.openai.surfaces import ChatCompletions, Completions
from tandem.router.options import RouterOptions
from tandem.router.served_model import ServedModel
from tandem.router.surface import Surface
from tandem.shared.config.sampling_fields import NUMBERS
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.router.support import CONTEXT, Cluster, cluster, make_model

TABLE = Path(__file__).parent / "bad_inputs.json"
JSON = {"content-type": "application/json"}
KEPT_HEADERS = ("allow", "www-authenticate", "retry-after", "connection")

Table = dict[str, Any]


# ---- over HTTP -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BadInput:
    """One request to a router; ``server`` is one of ``SERVERS``."""

    name: str
    path: str
    method: str = "POST"
    content: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    server: str = "plain"


SERVERS: dict[str, dict[str, Any]] = {
    "plain": {"max_body_bytes": 200_000},
    "keys": {"api_key": "secret,other"},
    "without nodes": {"nodes": 0},
}
ROUTES = ("/v1/chat/completions", "/v1/completions")
BODIES = {
    "empty": b"",
    "brace": b"{",
    "array": b"[]",
    "number": b"5",
    "string": b'"x"',
    "null": b"null",
    "nan": b'{"prompt": "x", "messages": [], "temperature": NaN}',
    "infinity": b'{"prompt": "x", "messages": [], "temperature": Infinity}',
    "too large for a double": b'{"prompt": "x", "messages": [], "temperature": 1e999}',
    "half a pair": b'{"prompt": "\\ud800", "messages": []}',
    "not utf-8": b'{"prompt": "\xff", "messages": []}',
    "encoded surrogate": b'{"prompt": "\xed\xa0\x80", "messages": []}',
    "deep": b'{"prompt": ' + b"[" * 50_000,
    "deep and closed": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "long integer": b'{"prompt": "x", "messages": [], "seed": ' + b"9" * 10_000 + b"}",
    "over the limit": b" " * 200_001,
}
GETS = ("/", "/live", "/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tiny")
BAD_KEYS = {
    "none": {},
    "empty": {"authorization": "Bearer"},
    "wrong": {"authorization": "Bearer wrong"},
    "another scheme": {"authorization": "Digest secret"},
    "basic": {"authorization": "Basic !"},
}


def cases() -> Iterator[BadInput]:
    for path in ROUTES:
        for name, content in BODIES.items():
            yield BadInput(f"{path} {name}", path, content=content)
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
            yield BadInput(f"{method} {path}", path, method)
        yield BadInput(f"{path} without a content type", path, headers={})
        yield BadInput(f"{path} as text", path, headers={"content-type": "text/plain"})
        yield BadInput(f"{path} without nodes", path, server="without nodes")
        yield BadInput(f"{path}/", f"{path}/")
    for path in GETS:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            yield BadInput(f"{method} {path}", path, method)
        if path != "/":
            yield BadInput(f"{path}/", f"{path}/", "GET")
    for path in ("/nowhere", "/v1", "/v1/", "/v1/nowhere", "/V1/models", "//v1/models", "/x" * 300):
        yield BadInput(f"GET {path[:20]}", path, "GET")
        yield BadInput(f"POST {path[:20]}", path)
    for model in ("other", "a/b", "tiny/x", "x" * 300, "%2e%2e", "a%2Fb", ""):
        yield BadInput(f"model {model[:20]}", f"/v1/models/{model}", "GET")
    for path in ("/health", "/ready", "/v1/models", "/v1/models/tiny", "/v1/models/other"):
        yield BadInput(f"{path} without nodes", path, "GET", server="without nodes")
    for path in (*GETS, *ROUTES, "/nowhere"):
        for name, headers in BAD_KEYS.items():
            method = "POST" if path in ROUTES else "GET"
            yield BadInput(
                f"{path} key {name}", path, method, headers=JSON | headers, server="keys"
            )
    yield BadInput("DELETE /version without a key", "/version", "DELETE", server="keys")
    for path in ("/", "/v1/models", "/nowhere", "/metrics", "/v1/completions"):
        yield BadInput(f"{path} of another host", path, "GET", headers={"host": "evil.example"})


async def _ask(running: Cluster, case: BadInput) -> Any:
    response = await running.client.request(
        case.method, case.path, content=case.content, headers=case.headers
    )
    if response.status_code == 200:
        return 200
    kept = {name: response.headers[name] for name in KEPT_HEADERS if name in response.headers}
    return [response.status_code, _error(response.json()), *([kept] if kept else [])]


def _error(body: dict[str, Any]) -> list[Any]:
    """An error body of OpenAI's shape as a list."""
    assert [*body] == ["error"] and [*body["error"]] == ["message", "type", "param", "code"]
    return list(body["error"].values())


async def http_answers(folder: Path) -> Table:
    """The answer to each of ``cases``."""
    answers: Table = {}
    for server, options in SERVERS.items():
        async with cluster(folder / server, **options) as running:
            for case in cases():
                if case.server == server:
                    assert case.name not in answers, case.name
                    answers[case.name] = await _ask(running, case)
    return answers


# ---- fields of bodies ----------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    "x",
    "",
    "x" * 1100,
    -1,
    0,
    1,
    2.0,
    1.5,
    25,
    2**63,
    -(2**63) - 1,
    10**400,
    True,
    False,
    [],
    [1],
    [-1],
    ["x"],
    [""],
    [None],
    {},
    {"x": 1},
    {"1": 101},
    {"999": 1},
    {"type": "text"},
    "none",
    "medium",
)
OTHER_NAMES = """
add_generation_prompt add_special_tokens allowed_token_ids audio bad_words best_of cache_salt
chat_template chat_template_kwargs continue_final_message documents ec_transfer_params echo
function_call functions grammar guided_choice guided_grammar guided_json guided_regex ignore_eos
include_reasoning include_stop_str_in_output json_schema kv_transfer_params length_penalty
logit_bias logits_processors logprob_token_ids logprobs max_completion_tokens max_tokens
media_io_kwargs messages metadata min_tokens mm_processor_kwargs modalities model n nonsense
parallel_tool_calls prediction priority prompt prompt_cache_key prompt_cache_retention
prompt_embeds prompt_logprobs reasoning_effort repetition_detection response_format
return_prompt_text return_token_ids return_tokens_as_token_ids safety_identifier seed service_tier
skip_special_tokens spaces_between_special_tokens stop stop_token_ids store stream stream_options
structured_outputs suffix thinking_token_budget tool_choice tools top_logprobs
truncate_prompt_tokens use_beam_search user verbosity vllm_xargs watermarking web_search_options
""".split()  # noqa: SIM905
NAMES = sorted((*NUMBERS, *OTHER_NAMES))
OLLAMA_NAMES = """
context format images keep_alive logprobs messages model nonsense options prompt raw shift stream
suffix system template think tools top_logprobs truncate
""".split()  # noqa: SIM905
OTHER_OPTIONS = """
mirostat nonsense num_ctx num_gpu num_keep num_predict repeat_last_n tfs_z typical_p
""".split()  # noqa: SIM905
OLLAMA_OPTIONS = sorted((*OPENAI_NAMES, *OTHER_OPTIONS))
MESSAGE_NAMES = """
role content name reasoning_content reasoning tool_calls tool_call_id refusal annotations
function_call audio nonsense
""".split()  # noqa: SIM905
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
PAIRS: tuple[dict[str, Any], ...] = (
    {"stream": True, "stream_options": {"include_usage": 1}},
    {"stream": True, "stream_options": {"include_obfuscation": 1, "other": 2}},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    {"stream": True, "stream_options": {str(i): i for i in range(20)}},
    {"stream": True, "prompt_logprobs": 1},
    {"min_tokens": 30, "max_tokens": 20},
    {"max_tokens": 5, "max_completion_tokens": 6},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2, "best_of": 2},
    {"n": 3, "best_of": 2},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"max_tokens": CONTEXT},
    {"prompt": [1] * CONTEXT},
    {"prompt": ["a", 1]},
    {"prompt": [[1], [10**30]]},
    {"prompt": ["x"] * 2000},
    {"prompt": ["x"] * 1000, "n": 100},
    {"prompt": "word " * 2000},
    {"messages": [{"role": "user", "content": "word " * 2000}]},
    {"messages": []},
    {"chat_template_kwargs": {"messages": []}},
    {"chat_template_kwargs": {"_x": 1}},
    {"chat_template_kwargs": {str(i): i for i in range(70)}},
    {"stop": ["x"] * 65},
    {"stop": ["x" * 1025]},
    {"stop_token_ids": [1] * 300},
    {"logit_bias": {str(i): 1 for i in range(1100)}},
    {"logit_bias": {"1": "x"}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"²": 1}},
    {"temperature": "x", "top_p": "x"},
    {"n": 128, "max_tokens": 400, "logprobs": 20},
)


def bodies() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(group, the value that matters, changes to a valid body)."""
    for name in NAMES:
        for value in (*VALUES, None):
            yield name, value, {name: value}
    for name in MESSAGE_NAMES:
        for value in (*VALUES, None):
            message = {"role": "user", "content": "hi", name: value}
            yield f"messages[].{name}", value, {"messages": [message]}
    for calls in (
        [CALL],
        [CALL | {"function": {"name": 5}}],
        [CALL | {"function": {"name": "f", "arguments": "{"}}],
        [CALL | {"function": {"name": "f", "arguments": 5}}],
        [CALL] * 1025,
    ):
        calling = {"role": "assistant", "tool_calls": calls}
        yield "tool_calls", calls, {"messages": [calling]}
    bad: tuple[Any, ...] = ({}, {"role": "user"}, {"role": "assistant"}, {"content": "hi"}, 1, "x")
    for item in (*bad, None):
        yield "message", item, {"messages": [item]}
    for pair in PAIRS:
        yield "pairs", pair, pair


def ollama_bodies() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """As ``bodies``, of Ollama's API."""
    for name in OLLAMA_NAMES:
        for value in (*VALUES, None):
            yield name, value, {name: value}
    for name in OLLAMA_OPTIONS:
        for value in (*VALUES, None):
            yield f"options.{name}", value, {"options": {name: value}}


SURFACES: tuple[tuple[Surface, str, Callable[[], Iterator[tuple[str, Any, dict[str, Any]]]]], ...]
SURFACES = (
    (ChatCompletions(), "prompt", bodies),
    (Completions(), "messages", bodies),
    (CHAT, "prompt", ollama_bodies),
    (GENERATE, "messages", ollama_bodies),
)


def body_answers(folder: Path) -> Table:
    """For each surface and field, the answers and the values that get each of them."""
    tokenizer = Tokenizer.load(read_tokenizer_files(make_model(folder / "model")))
    model = ServedModel(
        name="tiny",
        max_model_len=CONTEXT,
        vocab_size=320,
        created=0,
        tokenizer=tokenizer,
        system_fingerprint="tandem-0-0",
    )
    valid = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    table: Table = {}
    for surface, absent, changed in SURFACES:
        plain = _described(surface.parse(valid, model, RouterOptions()))
        for group, shown, changes in changed():
            if absent in changes:
                continue
            try:
                parsed = surface.parse(valid | changes, model, RouterOptions())
                made = _described(parsed)
                answer: Any = {name: made[name] for name in made if made[name] != plain[name]}
            except OnlyLoadsError:
                answer = "loads the model"
            except Exception as error:
                failure = to_api_error(error, retry_after=1)
                assert failure is not None, (surface.path, shown, repr(error))
                answer = [failure.status, *_error(error_body(failure))]
            answers = table.setdefault(f"{surface.path} {group}", {})
            answers.setdefault(json.dumps(answer, ensure_ascii=False), []).append(_short(shown))
    return {
        group: [[json.loads(answer), " ".join(values)] for answer, values in answers.items()]
        for group, answers in table.items()
    }


def _described(request: GenerationRequest) -> dict[str, Any]:
    """The content of a request, as JSON."""
    assert isinstance(request, OpenAIRequest)
    return {
        "sampling": MessageToDict(request.sampling),
        "prompts": [len(prompt.tokens) for prompt in request.prompts],
        "max_tokens": request.max_tokens,
        "stop": list(request.text.stop.texts),
        "text": [
            request.text.include_stop,
            request.text.skip_special_tokens,
            request.text.min_tokens,
            request.text.echo,
            request.text.discard_output,
        ],
        "stream": [request.stream, request.include_usage],
        "logprobs": [request.logprobs, request.prompt_logprobs],
        "other": [
            request.return_token_ids,
            getattr(request, "include_reasoning", True),
            request.priority,
        ],
        "cache_salt": request.cache_salt,
        "ignored": sorted(request.ignored),
    }


def _short(value: Any) -> str:
    """A value without spaces; a long one by its beginning and its length."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if len(text) <= 60 else f"{text[:40]}...({len(text)})"


def _lines(table: Table) -> str:
    """A table with one line for each answer."""
    parts = []
    for part, entries in table.items():
        lines = [f"{_json(name)}: {_json(entry)}" for name, entry in entries.items()]
        parts.append(f"{_json(part)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{" + ",\n".join(parts) + "}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


async def answers() -> Table:
    """The whole table, as the code answers now."""
    with TemporaryDirectory() as folder:
        path = Path(folder)
        return {"http": await http_answers(path), "bodies": body_answers(path)}


def main() -> int:
    TABLE.write_text(_lines(asyncio.run(answers())))
    return 0


if __name__ == "__main__":
    sys.exit(main())

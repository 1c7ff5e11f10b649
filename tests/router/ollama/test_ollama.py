"""Ollama's API: chats, prompts, the list of models, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.anthropic.test_tool_use import CALL, OFFERING, ON
from tandem.tests.router.golden import check_golden
from tandem.tests.router.in_process import InProcess, tiny
from tandem.tests.router.openai.test_suffix import QWEN
from tandem.tests.router.support import CONTEXT, cluster

HI: dict[str, Any] = {"model": "tiny:latest", "messages": [{"role": "user", "content": "hi"}]}
ASK: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
WHOLE = {"stream": False}
BODIES = (("/api/chat", HI), ("/api/generate", ASK))


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_chat() -> None:
    c = InProcess(reply="<think>one</think>two", reasoning_parser="qwen3")
    stream = c.post("/api/chat", **HI).text
    check_golden("ollama_chat", stream)
    body = c.post("/api/chat", **HI | WHOLE).json()
    quiet = c.post("/api/chat", **HI | WHOLE | {"think": False}).json()
    assert [len(r.prompt) for r in c.node.requests] == [body["prompt_eval_count"]] * 3
    assert "".join(line["message"]["content"] for line in lines(stream)) == "two"
    assert body["message"] == {"role": "assistant", "content": "two", "thinking": "one"}
    assert body["model"] == "tiny:latest" and body["done"] and body["done_reason"] == "stop"
    assert quiet["message"] == {"role": "assistant", "content": "two"}


def test_a_prompt_and_its_options() -> None:
    options = {"temperature": 0.25, "top_k": 7, "seed": 5, "num_predict": 2, "repeat_penalty": 1.5}
    c = InProcess()
    cut = c.post("/api/generate", **ASK, options=options, raw=True).text
    check_golden("ollama_generate", cut)
    assert lines(cut)[-1]["done_reason"] == "length"
    assert list(c.node.requests[0].prompt) == c.encode("hi")
    sampling = c.node.requests[0].sampling
    expected = pb.Sampling(temperature=0.25, top_k=7, seed=5, max_tokens=2, repetition_penalty=1.5)
    for name in ("temperature", "top_k", "seed", "max_tokens", "repetition_penalty"):
        assert getattr(sampling, name) == getattr(expected, name)
    stopped = c.post("/api/generate", **STOPPED).json()
    assert stopped["response"] == "hello"


STOPPED = ASK | WHOLE | {"system": "one", "options": {"stop": [" wor"], "num_ctx": 4096}}


async def test_types_of_streams_and_of_bodies(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        stream = await c.client.post("/api/chat", json=HI)
        assert stream.headers["content-type"] == "application/x-ndjson"
        # As curl sends it without a header.
        form = {"content-type": "application/x-www-form-urlencoded"}
        content = json.dumps(STOPPED)
        response = await c.client.post("/api/generate", content=content, headers=form)
        assert response.json()["response"] == "hello"
        page = form | {"origin": "http://127.0.0.1"}
        rejection = await c.client.post("/api/generate", content=content, headers=page)
        assert rejection.status_code in (403, 415)


def test_tool_calls_are_not_split() -> None:
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
    tool_call = {"function": {"name": "ls", "arguments": {"at": "/a"}}}
    history = [
        *HI["messages"],
        {"role": "assistant", "content": "", "tool_calls": [tool_call]},
        {"role": "tool", "content": "file", "tool_name": "ls"},
    ]
    c = InProcess(tiny(OFFERING), reply=CALL, **ON)
    request = HI | {"tools": [tool], "messages": history}
    body = c.post("/api/chat", **request | WHOLE).json()
    stream = lines(c.post("/api/chat", **request).text)
    assert body["message"]["tool_calls"] == [tool_call]
    assert stream[-2]["message"]["tool_calls"] == [tool_call] and stream[-1]["done"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"format": "xml"}, "invalid format: 'xml'; expected \"json\" or a JSON schema"),
    ({"format": 5}, "invalid format: 5"),
    ({"keep_alive": 0}, "cannot unload its model"),
    ({"keep_alive": "0s"}, "cannot unload its model"),
    (
        {"keep_alive": "soon"},
        "invalid keep_alive: 'soon'; expected seconds or a duration such as '5m'",
    ),
    ({"shift": True}, "'shift' is not supported"),
    ({"top_logprobs": 2}, "only allowed when 'logprobs' is true"),
    ({"logprobs": True, "top_logprobs": 21}, "above the maximum of 20"),
    ({"options": {"num_ctx": 0}}, "below the minimum of 1"),
    (
        {"options": {"num_ctx": 2}, "truncate": False},
        "exceeds the context length of 2 tokens; shorten it",
    ),
    ({"images": ["x"]}, "'images' is not supported"),
    ({"think": True}, '" does not support thinking'),
    ({"options": {"mirostat": 1}}, "'options.mirostat' is not supported"),
    ({"options": {"temperature": 9}}, "'options.temperature': 9 is above the maximum of 2."),
    ({"stream": "x"}, "'stream': expected a boolean"),
]


def test_errors_are_a_message() -> None:
    c = InProcess()
    image = {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}
    for path, body in BODIES:
        for fields, message in WRONG:
            response = c.post(path, **body | fields)
            assert response.status_code == 400 and [*response.json()] == ["error"], fields
            assert message in response.json()["error"]
        other = c.post(path, **body | {"model": "other"})
        assert other.status_code == 404 and "'other' does not exist" in other.json()["error"]
    reply = c.post("/api/chat", **HI | image)
    assert "'messages[0].images' is not supported" in reply.json()["error"]


async def test_models_are_the_operators(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for method, path in (
            ("POST", "/api/pull"),
            ("POST", "/api/create"),
            ("DELETE", "/api/delete"),
        ):
            rejection = await c.client.request(method, path, json={"model": "x"})
            assert rejection.status_code == 501 and "cannot change it" in rejection.json()["error"]


def test_responses_follow_a_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    c = InProcess(reasoning_parser="qwen3")
    for path, body in BODIES:
        for form, field in (("json", "json_object"), (schema, "json"), ("", None)):
            request = body | WHOLE | {"format": form, "keep_alive": "5m"}
            assert c.post(path, **request).status_code == 200
            constraint = c.node.requests[-1].sampling.structured_outputs
            assert constraint.WhichOneof("constraint") == field
            assert (constraint.reasoning_end == "</think>") == (field is not None)
    assert json.loads(c.node.requests[1].sampling.structured_outputs.json) == schema


def test_logprobs() -> None:
    c = InProcess()
    for path, body in BODIES:
        request = body | {"logprobs": True, "top_logprobs": 2}
        whole = c.post(path, **request | WHOLE).json()["logprobs"]
        stream = lines(c.post(path, **request).text)
        assert [one for line in stream for one in line.get("logprobs", ())] == whole
        assert {len(one["top_logprobs"]) for one in whole} == {2}
        assert "".join(one["token"] for one in whole[:2]) == "hello world"


def test_whole_responses_are_as_long_as_they_may_be() -> None:
    c = InProcess(max_response_logprobs=60)
    for path, body in (("/api/chat", HI), ("/api/generate", ASK | {"raw": True})):
        request = body | WHOLE | {"logprobs": True, "top_logprobs": 2}
        for options in ({}, {"num_predict": 30}):
            response = c.post(path, **request | {"options": options})
            assert response.status_code == 200, response.text
            assert c.node.requests[-1].sampling.max_tokens == 20


def test_a_context_goes_on() -> None:
    c = InProcess()
    first = c.post("/api/generate", **ASK | WHOLE).json()["context"]
    assert first == [*c.node.requests[0].prompt, *c.encode("hello world"), 0]  # the end token
    request = ASK | {"context": first}
    stream = lines(c.post("/api/generate", **request).text)
    second = list(c.node.requests[1].prompt)
    assert second == [*first, *c.node.requests[0].prompt]
    assert stream[-1]["context"][: len(second)] == second
    wrong = c.post("/api/generate", **ASK, context=[99999])
    assert wrong.status_code == 400 and "context[0]" in wrong.json()["error"]
    assert "raw mode" in c.post("/api/generate", **request, raw=True).json()["error"]


def test_prompts_are_cut_to_the_context() -> None:
    """Of a chat, the oldest turns but system messages; of a prompt, its middle."""
    turns = [
        {"role": "system", "content": "fox"},
        *({"role": "user", "content": f"{number} stop here"} for number in ("one", "two")),
        {"role": "user", "content": "dog"},
    ]
    c = InProcess()

    def prompt(path: str, body: dict[str, Any], **options: Any) -> list[int]:
        response = c.post(path, **body | WHOLE | {"options": options})
        assert response.status_code == 200, response.text
        return list(c.node.requests[-1].prompt)

    whole = prompt("/api/chat", HI | {"messages": turns})
    assert c.node.requests[-1].sampling.max_tokens == CONTEXT - len(whole)
    cut = prompt("/api/chat", HI | {"messages": turns}, num_ctx=len(whole))
    assert c.node.requests[-1].sampling.max_tokens == len(whole) - len(cut)
    words = ("fox", "one", "two", "dog")
    assert [word in c.prompt() for word in words] == [True, False, True, True]
    raw = ASK | {"prompt": "one two " * 20, "raw": True}
    ids = prompt("/api/generate", raw)
    text = prompt("/api/generate", raw, num_ctx=12, num_keep=3)
    assert text == ids[:3] + ids[-8:] and c.node.requests[-1].sampling.max_tokens == 1
    prompt("/api/chat", HI, num_predict=10 * CONTEXT)
    assert c.node.requests[-1].sampling.max_tokens < CONTEXT


def test_a_gap_is_filled() -> None:
    request = ASK | WHOLE | {"suffix": " dog"}
    rejection = InProcess().post("/api/generate", **request)
    assert rejection.status_code == 400 and "fill-in-the-middle" in rejection.json()["error"]
    c = InProcess(tiny(special=QWEN))
    response = c.post("/api/generate", **request)
    assert response.status_code == 200 and "context" not in response.json()
    assert c.prompt() == "<|fim_prefix|>hi<|fim_suffix|> dog<|fim_middle|>"
    system = c.post("/api/generate", **request, system="x")
    assert "does not support template, system" in system.json()["error"]
    assert "insert" in c.post("/api/show", model="tiny").json()["capabilities"]


async def test_a_request_without_a_prompt_loads_the_model(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for path, body in (("/api/chat", HI | {"messages": []}), ("/api/generate", ASK)):
            fields = {name: value for name, value in body.items() if name != "prompt"}
            response = await c.client.post(path, json=fields)
            assert response.status_code == 200, response.text
            loaded = response.json()
            assert loaded["done"] and loaded["done_reason"] == "load"
            assert loaded["model"] == body["model"]
            other = await c.client.post(path, json=fields | {"model": "other"})
            assert other.status_code == 404
            unload = await c.client.post(path, json=fields | {"keep_alive": 0})
            assert unload.status_code == 400
        assert c.node.requests == []


def test_vectors() -> None:
    long = "one two " * CONTEXT
    c = InProcess()
    request = {"model": "tiny:latest", "input": ["one", long], "dimensions": 2}
    embedded = c.post("/api/embed", **request).json()
    assert embedded["model"] == "tiny:latest" and len(embedded["embeddings"]) == 2
    assert embedded["prompt_eval_count"] == CONTEXT + 1
    assert max(len(request.prompt) for request in c.node.requests) == CONTEXT
    embeds = [request.embed for request in c.node.requests]
    assert {(embed.normalize, embed.dimensions) for embed in embeds} == {(True, 2)}
    rejection = c.post("/api/embed", **request, truncate=False)
    assert "context length" in rejection.json()["error"]
    empty = c.post("/api/embed", **request | {"input": ""})
    assert empty.status_code == 400 and "the input is empty" in empty.json()["error"]
    older = c.post("/api/embeddings", **ASK).json()
    assert [*older] == ["embedding"] and older["embedding"]
    assert not c.node.requests[-1].embed.normalize


async def test_the_model_is_listed_and_shown(tmp_path: Path) -> None:
    async with cluster(tmp_path, reasoning_parser="qwen3") as c:
        (model,) = (await c.client.get("/api/tags")).json()["models"]
        (loaded,) = (await c.client.get("/api/ps")).json()["models"]
        version = (await c.client.get("/api/version")).json()["version"]
        details = (await c.client.post("/api/show", json={"model": model["model"]})).json()
        missing = await c.client.post("/api/show", json={"model": "other"})
    assert model["name"] == loaded["name"] == "tiny:latest"
    assert [int(part) for part in version.split(".")] > [0, 6, 4]
    assert details["capabilities"] == ["completion", "thinking"]
    family = details["model_info"]["general.architecture"]
    assert details["model_info"][f"{family}.context_length"] == loaded["context_length"] == CONTEXT
    assert missing.status_code == 404

"""Ollama's API: chats, prompts, the list of models, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.anthropic.test_tool_use import CALL, ON, offering
from tandem.tests.router.golden import check_golden
from tandem.tests.router.openai.test_suffix import QWEN
from tandem.tests.router.support import CONTEXT, cluster, make_model

HI: dict[str, Any] = {"model": "tiny:latest", "messages": [{"role": "user", "content": "hi"}]}
ASK: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
WHOLE = {"stream": False}


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_a_chat(tmp_path: Path) -> None:
    async with cluster(tmp_path, reasoning_parser="qwen3") as c:
        c.node.reply = c.encode("<think>one</think>two")
        stream = await c.client.post("/api/chat", json=HI)
        assert stream.headers["content-type"] == "application/x-ndjson"
        check_golden("ollama_chat", stream.text)
        body = (await c.client.post("/api/chat", json=HI | WHOLE)).json()
        quiet = (await c.client.post("/api/chat", json=HI | WHOLE | {"think": False})).json()
        assert [len(r.prompt) for r in c.node.requests] == [body["prompt_eval_count"]] * 3
    events = lines(stream.text)
    assert "".join(line["message"]["content"] for line in events) == "two"
    assert body["message"] == {"role": "assistant", "content": "two", "thinking": "one"}
    assert body["model"] == "tiny:latest" and body["done"] and body["done_reason"] == "stop"
    assert quiet["message"] == {"role": "assistant", "content": "two"}


async def test_a_prompt_and_its_options(tmp_path: Path) -> None:
    options = {"temperature": 0.25, "top_k": 7, "seed": 5, "num_predict": 2, "repeat_penalty": 1.5}
    async with cluster(tmp_path) as c:
        cut = await c.client.post("/api/generate", json=ASK | {"options": options, "raw": True})
        check_golden("ollama_generate", cut.text)
        sampling = c.node.requests[0].sampling
        assert list(c.node.requests[0].prompt) == c.encode("hi")
        stop = ASK | WHOLE | {"system": "one", "options": {"stop": [" wor"], "num_ctx": 4096}}
        # As curl sends it by default.
        form = {"content-type": "application/x-www-form-urlencoded"}
        response = await c.client.post("/api/generate", content=json.dumps(stop), headers=form)
        assert response.json()["response"] == "hello"
        page = form | {"origin": "http://127.0.0.1"}
        refused = await c.client.post("/api/generate", content=json.dumps(stop), headers=page)
        assert refused.status_code in (403, 415)
    assert lines(cut.text)[-1]["done_reason"] == "length"
    expected = pb.Sampling(temperature=0.25, top_k=7, seed=5, max_tokens=2, repetition_penalty=1.5)
    for name in ("temperature", "top_k", "seed", "max_tokens", "repetition_penalty"):
        assert getattr(sampling, name) == getattr(expected, name)


async def test_calls_of_tools_come_whole(tmp_path: Path) -> None:
    offering(tmp_path)
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
    call = {"function": {"name": "ls", "arguments": {"at": "/a"}}}
    history = [
        *HI["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "file", "tool_name": "ls"},
    ]
    async with cluster(tmp_path, **ON) as c:
        c.node.reply = c.encode(CALL)
        request = HI | {"tools": [tool], "messages": history}
        body = (await c.client.post("/api/chat", json=request | WHOLE)).json()
        stream = lines((await c.client.post("/api/chat", json=request)).text)
    assert body["message"]["tool_calls"] == [call]
    assert stream[-2]["message"]["tool_calls"] == [call] and stream[-1]["done"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"format": "xml"}, "invalid format: 'xml'"),
    ({"format": 5}, "invalid format: 5"),
    ({"keep_alive": 0}, "cannot unload its model"),
    ({"keep_alive": "0s"}, "cannot unload its model"),
    ({"keep_alive": "soon"}, "invalid keep_alive"),
    ({"shift": True}, "'shift' is not supported"),
    ({"top_logprobs": 2}, "only allowed when 'logprobs' is true"),
    ({"logprobs": True, "top_logprobs": 21}, "above the maximum of 20"),
    ({"options": {"num_ctx": 0}}, "below the minimum of 1"),
    ({"options": {"num_ctx": 2}, "truncate": False}, "exceeds the context length of 2 tokens"),
    ({"images": ["x"]}, "'images' is not supported"),
    ({"think": True}, "does not support thinking"),
    ({"options": {"mirostat": 1}}, "'options.mirostat' is not supported"),
    ({"options": {"temperature": 9}}, "'options.temperature': 9 is above the maximum of 2."),
    ({"stream": "x"}, "'stream': expected a boolean"),
]


async def test_errors_are_a_message(tmp_path: Path) -> None:
    image = {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}
    async with cluster(tmp_path) as c:
        for path, body in (("/api/chat", HI), ("/api/generate", ASK)):
            for fields, message in WRONG:
                response = await c.client.post(path, json=body | fields)
                assert response.status_code == 400 and [*response.json()] == ["error"], fields
                assert message in response.json()["error"]
            other = await c.client.post(path, json=body | {"model": "other"})
            assert other.status_code == 404 and "'other' does not exist" in other.json()["error"]
        rejected = await c.client.post("/api/chat", json=HI | image)
        assert "'messages[0].images' is not supported" in rejected.json()["error"]
        for method, path in (
            ("POST", "/api/pull"),
            ("POST", "/api/create"),
            ("DELETE", "/api/delete"),
        ):
            refused = await c.client.request(method, path, json={"model": "x"})
            assert refused.status_code == 501 and "cannot change it" in refused.json()["error"]


async def test_answers_follow_a_format(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with cluster(tmp_path, reasoning_parser="qwen3") as c:
        for path, body in (("/api/chat", HI), ("/api/generate", ASK)):
            for value, field in (("json", "json_object"), (schema, "json"), ("", None)):
                request = body | WHOLE | {"format": value, "keep_alive": "5m"}
                assert (await c.client.post(path, json=request)).status_code == 200
                outputs = c.node.requests[-1].sampling.structured_outputs
                assert outputs.WhichOneof("constraint") == field
                assert (outputs.reasoning_end == "</think>") == (field is not None)
        assert json.loads(c.node.requests[1].sampling.structured_outputs.json) == schema


async def test_logprobs(tmp_path: Path) -> None:
    fields = {"logprobs": True, "top_logprobs": 2}
    async with cluster(tmp_path) as c:
        for path, body in (("/api/chat", HI), ("/api/generate", ASK)):
            whole = (await c.client.post(path, json=body | fields | WHOLE)).json()["logprobs"]
            stream = lines((await c.client.post(path, json=body | fields)).text)
            assert [one for line in stream for one in line.get("logprobs", ())] == whole
            assert {len(one["top_logprobs"]) for one in whole} == {2}
            assert "".join(one["token"] for one in whole[:2]) == "hello world"


async def test_whole_responses_have_the_maximum_length(tmp_path: Path) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "stream": False}
    async with cluster(tmp_path, max_response_logprobs=60) as c:
        for path, body in (("/api/chat", HI), ("/api/generate", ASK | {"raw": True})):
            for options in ({}, {"num_predict": 30}):
                response = await c.client.post(path, json=body | fields | {"options": options})
                assert response.status_code == 200, response.text
                assert c.node.requests[-1].sampling.max_tokens == 20


async def test_a_context_goes_on(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        first = (await c.client.post("/api/generate", json=ASK | WHOLE)).json()["context"]
        assert first == [*c.node.requests[0].prompt, *c.encode("hello world"), 0]  # the end token
        body = ASK | {"context": first}
        stream = lines((await c.client.post("/api/generate", json=body)).text)
        second = list(c.node.requests[1].prompt)
        wrong = await c.client.post("/api/generate", json=ASK | {"context": [99999]})
        raw = await c.client.post("/api/generate", json=body | {"raw": True})
    assert second == [*first, *c.node.requests[0].prompt]
    assert stream[-1]["context"][: len(second)] == second
    assert wrong.status_code == 400 and "context[0]" in wrong.json()["error"]
    assert "raw mode" in raw.json()["error"]


async def test_prompts_are_cut_to_the_context(tmp_path: Path) -> None:
    """A chat loses its oldest turns except system messages, a prompt its middle."""
    messages = [{"role": "user", "content": f"{number} stop here"} for number in ("one", "two")]
    turns = [{"role": "system", "content": "fox"}, *messages, {"role": "user", "content": "dog"}]
    async with cluster(tmp_path) as c:

        async def prompt_of(path: str, body: dict[str, Any], **options: Any) -> list[int]:
            response = await c.client.post(path, json=body | WHOLE | {"options": options})
            assert response.status_code == 200, response.text
            return list(c.node.requests[-1].prompt)

        tokenizer = c.router.registry.model().tokenizer
        whole = await prompt_of("/api/chat", HI | {"messages": turns})
        assert c.node.requests[-1].sampling.max_tokens == CONTEXT - len(whole)
        cut = await prompt_of("/api/chat", HI | {"messages": turns}, num_ctx=len(whole))
        assert c.node.requests[-1].sampling.max_tokens == len(whole) - len(cut)
        decoded = tokenizer.decode(cut)
        assert [word in decoded for word in ("fox", "one", "two", "dog")] == [
            True,
            False,
            True,
            True,
        ]
        ids = await prompt_of("/api/generate", ASK | {"prompt": "one two " * 20, "raw": True})
        beginning = await prompt_of(
            "/api/generate", ASK | {"prompt": "one two " * 20, "raw": True}, num_ctx=12, num_keep=3
        )
        assert beginning == ids[:3] + ids[-8:] and c.node.requests[-1].sampling.max_tokens == 1
        await prompt_of("/api/chat", HI, num_predict=10 * CONTEXT)
        assert c.node.requests[-1].sampling.max_tokens < CONTEXT


async def test_a_gap_is_filled(tmp_path: Path) -> None:
    body = ASK | WHOLE | {"suffix": " dog"}
    async with cluster(tmp_path / "plain") as c:
        refused = await c.client.post("/api/generate", json=body)
        assert refused.status_code == 400 and "fill-in-the-middle" in refused.json()["error"]
    make_model(tmp_path / "model", special=QWEN)
    async with cluster(tmp_path) as c:
        response = await c.client.post("/api/generate", json=body)
        assert response.status_code == 200 and "context" not in response.json()
        prompt = c.router.registry.model().tokenizer.decode(
            c.node.requests[-1].prompt, skip_special_tokens=False
        )
        system = await c.client.post("/api/generate", json=body | {"system": "x"})
        details = (await c.client.post("/api/show", json={"model": "tiny"})).json()
    assert prompt == "<|fim_prefix|>hi<|fim_suffix|> dog<|fim_middle|>"
    assert "does not support template, system" in system.json()["error"]
    assert "insert" in details["capabilities"]


async def test_a_request_without_a_prompt_loads_the_model(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for path, body in (("/api/chat", HI | {"messages": []}), ("/api/generate", ASK)):
            request = {name: value for name, value in body.items() if name != "prompt"}
            response = await c.client.post(path, json=request)
            assert response.status_code == 200, response.text
            loaded = response.json()
            assert loaded["done"] and loaded["done_reason"] == "load"
            assert loaded["model"] == body["model"]
            other = await c.client.post(path, json=request | {"model": "other"})
            assert other.status_code == 404
            unload = await c.client.post(path, json=request | {"keep_alive": 0})
            assert unload.status_code == 400
        assert c.node.requests == []


async def test_vectors(tmp_path: Path) -> None:
    long = "one two " * CONTEXT
    async with cluster(tmp_path) as c:
        ask = {"model": "tiny:latest", "input": ["one", long], "dimensions": 2}
        created = (await c.client.post("/api/embed", json=ask)).json()
        embeds = [request.embed for request in c.node.requests]
        assert max(len(request.prompt) for request in c.node.requests) == CONTEXT
        refused = await c.client.post("/api/embed", json=ask | {"truncate": False})
        empty = await c.client.post("/api/embed", json=ask | {"input": ""})
        older = (await c.client.post("/api/embeddings", json=ASK)).json()
        assert not c.node.requests[-1].embed.normalize
    assert created["model"] == "tiny:latest" and len(created["embeddings"]) == 2
    assert created["prompt_eval_count"] == CONTEXT + 1
    assert {(embed.normalize, embed.dimensions) for embed in embeds} == {(True, 2)}
    assert "context length" in refused.json()["error"]
    assert empty.status_code == 400 and "the input is empty" in empty.json()["error"]
    assert [*older] == ["embedding"] and older["embedding"]


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

"""Chat completions, against a fake decode node: OpenAI's shapes, streamed and whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.tests.router.in_process import InProcess
from tandem.tests.router.support import cluster, events


def test_a_chat_response_has_openais_shape() -> None:
    c = InProcess()
    response = c.chat("hi")
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    choice = body["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hello world",
        "refusal": None,
        "annotations": [],
    }
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    prompt = c.encode("<|start|>user\nhi<|end|>\n<|start|>assistant\n")
    assert list(c.node.requests[0].prompt) == prompt
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == len(c.node.reply) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


def test_a_stream_has_the_role_first_and_one_finish_reason() -> None:
    c = InProcess()
    response = c.chat(stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events(response.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "hello world"


@pytest.mark.parametrize("chunk", [1, 2, 7])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"stop": "wor"}, {"stop": ["o w", "zz"]}, {"logprobs": True}]
)
def test_deltas_add_up_to_the_unary_response(chunk: int, fields: dict[str, Any]) -> None:
    c = InProcess(reply="hello wörld 🙂 日本 the end")
    c.node.chunk = chunk
    whole = c.chat(**fields).json()["choices"]
    chunks = events(c.chat(stream=True, **fields).text)[:-1]
    for choice in whole:
        deltas = [x["choices"][0] for x in chunks if x["choices"][0]["index"] == choice["index"]]
        text = "".join(x["delta"].get("content", "") for x in deltas)
        assert text == choice["message"]["content"]
        tokens = [token for x in deltas if x["logprobs"] for token in x["logprobs"]["content"]]
        assert tokens == ((choice["logprobs"] or {}).get("content") or [])
        assert [x["finish_reason"] for x in deltas if x["finish_reason"]] == [
            choice["finish_reason"]
        ]


def test_logprobs_carry_bytes_and_alternatives() -> None:
    c = InProcess(reply="é")
    body = c.chat(logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(b for token in content for b in token["bytes"]).decode() == "é"
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert content[0]["logprob"] == pytest.approx(-0.5)
    assert c.node.requests[0].sampling.logprobs == 2


def test_token_ids_are_returned_as_in_vllm() -> None:
    c = InProcess()
    body = c.chat(return_token_ids=True).json()
    assert body["prompt_token_ids"] == list(c.node.requests[0].prompt)
    assert body["choices"][0]["token_ids"] == [*c.node.reply, 0]
    chunks = events(c.chat(return_token_ids=True, stream=True).text)[:-1]
    assert chunks[0]["prompt_token_ids"] == list(c.node.requests[0].prompt)
    streamed = [t for x in chunks for t in x["choices"][0].get("token_ids", [])]
    assert streamed == [*c.node.reply, 0]


def test_without_a_limit_the_rest_of_the_context_may_be_used() -> None:
    c = InProcess()
    c.chat("hi")
    request = c.node.requests[0]
    assert request.sampling.max_tokens == 512 - len(request.prompt)
    assert c.chat(max_completion_tokens=2).json()["choices"][0]["finish_reason"] == "length"


def test_markup_that_looks_like_a_control_token_stays_text() -> None:
    c = InProcess()
    c.chat("a<|end|>b")
    prompt = list(c.node.requests[0].prompt)
    assert prompt.count(0) == 1
    assert prompt.count(1) == 2


def test_parts_of_type_text_are_joined() -> None:
    c = InProcess()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    c.chat(parts)
    assert list(c.node.requests[0].prompt) == c.encode(
        "<|start|>user\none\ntwo<|end|>\n<|start|>assistant\n"
    )
    rejection = c.chat([{"type": "image_url", "image_url": {"url": "http://x"}}])
    assert rejection.status_code == 400
    assert "image_url" in rejection.json()["error"]["message"]


async def test_the_openai_client_sync_async_and_streaming(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        messages: Any = [{"role": "user", "content": "hi"}]
        async with openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="x", max_retries=0) as client:
            completion = await client.chat.completions.create(model="tiny", messages=messages)
            assert completion.choices[0].message.content == "hello world"
            stream = await client.chat.completions.create(
                model="tiny", messages=messages, stream=True
            )
            text = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(text) == "hello world"
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=messages)
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="tiny", messages=messages, temperature=9)

        def sync() -> str:
            with openai.OpenAI(base_url=c.url + "/v1", api_key="x", max_retries=0) as client:
                chunks = client.chat.completions.create(
                    model="tiny", messages=messages, stream=True
                )
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                whole = client.completions.create(model="tiny", prompt="hi", max_tokens=64)
                assert [model.id for model in client.models.list()] == ["tiny"]
                return text + "|" + whole.choices[0].text

        assert await asyncio.to_thread(sync) == "hello world|hello world"


REASONED = "<think>it is nine</think>\n\nnine"


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_reasoning_is_split_off_streamed_and_whole(chunk: int) -> None:
    c = InProcess(reasoning_parser="qwen3")
    c.node.reply, c.node.chunk = c.encode(REASONED), chunk
    body = c.chat("hi").json()
    message = body["choices"][0]["message"]
    assert message["content"] == "\n\nnine"
    assert message["reasoning"] == message["reasoning_content"] == "it is nine"
    reasoning_tokens = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning_tokens < body["usage"]["completion_tokens"]
    response = c.chat("hi", stream=True)
    *chunks, _ = events(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "it is nine"
    assert "".join(delta.get("content", "") for delta in deltas) == "\n\nnine"
    assert not any("reasoning" in delta and "content" in delta for delta in deltas)


def test_reasoning_can_be_left_out() -> None:
    c = InProcess(reply="it is nine</think>nine", reasoning_parser="deepseek_r1")
    message = c.chat("hi", include_reasoning=False).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("nine", None)
    response = c.chat("hi", stream=True, include_reasoning=False)
    *chunks, _ = events(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "nine"
    assert not any("reasoning" in delta for delta in deltas)


def test_a_router_without_a_parser_refuses_to_leave_reasoning_out() -> None:
    c = InProcess()
    response = c.chat("hi", include_reasoning=False)
    assert response.status_code == 400
    assert "--reasoning-parser" in response.json()["error"]["message"]

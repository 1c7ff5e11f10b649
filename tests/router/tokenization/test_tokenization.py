"""POST /tokenize and /detokenize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.tests.router.support import CONTEXT, TEMPLATE, cluster, held_briefly

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_a_text(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        response = await c.client.post("/tokenize", json={"prompt": "hello world"})
        tokens = c.encode("hello world")
        assert response.json() == {
            "count": len(tokens),
            "max_model_len": CONTEXT,
            "tokens": tokens,
            "token_strs": None,
        }
        body = {"prompt": "hello world", "return_token_strs": True}
        response = await c.client.post("/tokenize", json=body)
        assert response.json()["token_strs"] == ["hello", "Ġworld"]
        empty = await c.client.post("/tokenize", json={"prompt": ""})
        assert (empty.json()["count"], empty.json()["tokens"]) == (0, [])


async def test_a_chat_has_the_tokens_of_its_prompt(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        response = await c.client.post("/tokenize", json={"model": "tiny", "messages": MESSAGES})
        await c.client.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert response.json()["tokens"] == list(c.node.requests[0].prompt)
        without = {"messages": MESSAGES, "add_generation_prompt": False}
        fewer = await c.client.post("/tokenize", json=without)
        assert fewer.json()["count"] < response.json()["count"]


async def test_tokens_become_text_again(tmp_path: Path) -> None:
    text = "hello wörld, 一"
    async with cluster(tmp_path) as c:
        tokens = (await c.client.post("/tokenize", json={"prompt": text})).json()["tokens"]
        response = await c.client.post("/detokenize", json={"tokens": tokens})
        assert response.json() == {"prompt": text, "content": text}
        of_vllm = await c.client.post("/detokenize", json={"tokens": tokens, "model": "tiny"})
        assert of_vllm.json() == {"prompt": text}
        special = await c.client.post("/detokenize", json={"tokens": [1, 0]})
        assert special.json()["prompt"] == "<|start|><|end|>"
        empty = await c.client.post("/detokenize", json={"tokens": []})
        assert empty.json() == {"prompt": "", "content": ""}
        wrong = (await c.client.post("/detokenize", json={"tokens": [1, 320]})).json()["error"]
        assert (wrong["param"], wrong["code"]) == ("tokens[1]", "integer_above_max_value")
        assert "320 is out of vocabulary; the model's token ids are 0 to 319" in wrong["message"]


async def test_a_text_as_llama_cpp_asks_for_it(tmp_path: Path) -> None:
    async def tokens(content: str, **fields: Any) -> Any:
        body = {"content": content} | fields
        response = await c.client.post("/tokenize", json=body)
        return response.json()["tokens"] if response.status_code == 200 else response.status_code

    async with cluster(tmp_path) as c:
        assert await tokens("hello world") == c.encode("hello world")
        assert await tokens("<|end|>") == [0]
        assert len(await tokens("<|end|>", parse_special=False)) > 1
        assert await tokens("hello", add_special=True) == c.encode("hello")
        pieces = await tokens("hello wörld, 一🤗", with_pieces=True)
        assert [piece["id"] for piece in pieces] == await tokens("hello wörld, 一🤗")
        texts = [piece["piece"] for piece in pieces]
        parts = [text.encode() if isinstance(text, str) else bytes(text) for text in texts]
        assert b"".join(parts).decode() == "hello wörld, 一🤗"
        assert any(isinstance(text, list) for text in texts) and texts[0] == "hello"
        assert await tokens("hello", model="other") == 404
        assert await tokens(" world" * (40 * CONTEXT)) == 400


async def test_a_text_longer_than_the_context_is_counted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        response = await c.client.post("/tokenize", json={"prompt": " world" * (CONTEXT + 1)})
        assert response.json()["count"] > response.json()["max_model_len"]
        far = await c.client.post("/tokenize", json={"prompt": " world" * (40 * CONTEXT)})
        assert (far.status_code, far.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_the_tokenizer_is_shown_on_demand(tmp_path: Path) -> None:
    async with cluster(tmp_path, enable_tokenizer_info_endpoint=True) as c:
        info = (await c.client.get("/tokenizer_info")).json()
        assert info["eos_token"] == "<|end|>" and info["chat_template"] == TEMPLATE
        assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    async with cluster(tmp_path) as c:
        response = await c.client.get("/tokenizer_info")
        assert response.status_code == 404
        assert "--enable-tokenizer-info-endpoint" in response.json()["error"]["message"]


WRONG: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
    ("/tokenize", {"prompt": "x", "add_special_tokens": "x"}, 400, "add_special_tokens"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, 400, "tools[0].type"),
    ("/tokenize", {"messages": MESSAGES, "model": "other"}, 404, "model"),
    (
        "/tokenize",
        {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}},
        400,
        "chat_template_kwargs",
    ),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ("/detokenize", {"tokens": [1, 320]}, 400, "tokens[1]"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [1.0]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [], "model": "other"}, 404, "model"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG)
async def test_an_invalid_request(
    tmp_path: Path, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    async with cluster(tmp_path) as c:
        response = await c.client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_a_long_text_does_not_hold_the_loop(tmp_path: Path) -> None:
    async with cluster(tmp_path, context=100_000) as c:
        body = {"prompt": " world" * 90_000, "return_token_strs": True}
        response = await held_briefly(
            lambda: httpx.post(f"{c.url}/tokenize", json=body, timeout=60, verify=False)
        )
        assert response.json()["count"] == 90_000


async def test_requests_are_counted_and_responses_are_bounded(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_concurrent_requests=0) as c:
        assert (await c.client.post("/tokenize", json={"prompt": "x"})).status_code == 503
    async with cluster(tmp_path, max_held_response_bytes=20) as c:
        assert (await c.client.post("/tokenize", json={"prompt": "x"})).status_code == 503
        assert c.router.app.handler.responses.used == c.router.app.handler.active == 0

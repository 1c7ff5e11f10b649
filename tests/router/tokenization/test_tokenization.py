"""POST /tokenize and /detokenize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.tests.router.in_process import InProcess
from tandem.tests.router.support import CONTEXT, TEMPLATE, cluster, held_briefly

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def c() -> InProcess:
    return InProcess()


def test_a_text(c: InProcess) -> None:
    tokens = c.encode("hello world")
    assert c.post("/tokenize", prompt="hello world").json() == {
        "count": len(tokens),
        "max_model_len": CONTEXT,
        "tokens": tokens,
        "token_strs": None,
    }
    token_body = c.post("/tokenize", prompt="hello world", return_token_strs=True).json()
    assert token_body["token_strs"] == ["hello", "Ġworld"]
    empty = c.post("/tokenize", prompt="").json()
    assert (empty["count"], empty["tokens"]) == (0, [])


def test_a_chat_has_the_tokens_of_its_prompt(c: InProcess) -> None:
    response = c.post("/tokenize", model="tiny", messages=MESSAGES).json()
    c.chat("hello")
    assert response["tokens"] == list(c.node.requests[0].prompt)
    fewer = c.post("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()
    assert fewer["count"] < response["count"]


def test_tokens_become_text_again(c: InProcess) -> None:
    text = "hello wörld, 一"
    tokens = c.post("/tokenize", prompt=text).json()["tokens"]
    assert c.post("/detokenize", tokens=tokens).json() == {"prompt": text, "content": text}
    # As vLLM's clients send it.
    assert c.post("/detokenize", tokens=tokens, model="tiny").json() == {"prompt": text}
    assert c.post("/detokenize", tokens=[1, 0]).json()["prompt"] == "<|start|><|end|>"
    assert c.post("/detokenize", tokens=[]).json() == {"prompt": "", "content": ""}
    error = c.post("/detokenize", tokens=[1, 320]).json()["error"]
    assert (error["param"], error["code"]) == ("tokens[1]", "integer_above_max_value")
    assert "320 is out of vocabulary; the model's token ids are 0 to 319" in error["message"]


def test_the_request_format_of_llama_cpp_is_accepted(c: InProcess) -> None:
    def tokens(content: str, **fields: Any) -> Any:
        response = c.post("/tokenize", content=content, **fields)
        return response.json()["tokens"] if response.status_code == 200 else response.status_code

    assert tokens("hello world") == c.encode("hello world")
    assert tokens("<|end|>") == [0]
    assert len(tokens("<|end|>", parse_special=False)) > 1
    assert tokens("hello", add_special=True) == c.encode("hello")
    pieces = tokens("hello wörld, 一🤗", with_pieces=True)
    assert [piece["id"] for piece in pieces] == tokens("hello wörld, 一🤗")
    texts = [piece["piece"] for piece in pieces]
    parts = [text.encode() if isinstance(text, str) else bytes(text) for text in texts]
    assert b"".join(parts).decode() == "hello wörld, 一🤗"
    assert any(isinstance(text, list) for text in texts) and texts[0] == "hello"
    assert tokens("hello", model="other") == 404
    assert tokens(" world" * (40 * CONTEXT)) == 400


def test_a_text_longer_than_the_context_is_counted(c: InProcess) -> None:
    count = c.post("/tokenize", prompt=" world" * (CONTEXT + 1)).json()
    assert count["count"] > count["max_model_len"]
    far = c.post("/tokenize", prompt=" world" * (40 * CONTEXT))
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


def test_invalid_bodies_name_their_field(c: InProcess) -> None:
    for path, body, status, param in WRONG:
        response = c.post(path, **body)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), body


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

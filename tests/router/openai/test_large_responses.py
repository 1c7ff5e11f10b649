"""The largest permitted responses are correct and hold the event loop for 0.1 s; larger ones are
rejected before anything is generated."""

from __future__ import annotations

import json
from array import array
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.http.encoding import NUMBERS_AT_ONCE, EncodedArray, dump
from tandem.router.options import RouterOptions
from tandem.router.requests.response_size import ResponseSize
from tandem.tests.router.in_process import COMPLETIONS, InProcess
from tandem.tests.router.openai.openai_errors import check
from tandem.tests.router.support import (
    HELD_BY_LARGEST,
    Cluster,
    cluster,
    events,
    held_briefly,
    until,
)

CONTEXT = 131_072
LARGE: dict[str, dict[str, Any]] = {
    "logprobs": {"prompt": "hi", "n": 32, "max_tokens": 300, "logprobs": 20},
    "prompt logprobs": {"prompt": [5] * 12_000, "max_tokens": 1, "prompt_logprobs": 20},
    "echo with logprobs": {"prompt": [5] * 60_000, "max_tokens": 1, "echo": True, "logprobs": 1},
    "token ids": {
        "prompt": [[5] * 16_384] * 8,
        "n": 32,
        "max_tokens": 1,
        "echo": True,
        "return_token_ids": True,
    },
    "stop strings": {
        "prompt": "hi",
        "n": 128,
        "max_tokens": 4,
        "stop": ["a" * 1023 + chr(200 + i) for i in range(64)],
    },
    "choices": {"prompt": [[5]] * 250, "n": 16, "max_tokens": 1},
}


@pytest.mark.parametrize("case", LARGE)
async def test_a_large_response_does_not_block_the_loop(tmp_path: Path, case: str) -> None:
    async with cluster(tmp_path, context=CONTEXT) as c:
        c.node.reply = c.encode("hello world ") * 100
        c.node.chunk = 10
        response = await held_briefly(
            lambda: httpx.post(
                f"{c.url}/v1/completions", json=LARGE[case], timeout=120, verify=False
            ),
            HELD_BY_LARGEST,
        )
        assert response.status_code == 200, response.text
        _check_response(response.json(), LARGE[case], c)


def _check_response(body: dict[str, Any], request: dict[str, Any], c: Cluster) -> None:
    prompts = request["prompt"] if isinstance(request["prompt"][0], list) else [request["prompt"]]
    n = request.get("n", 1)
    assert [choice["index"] for choice in body["choices"]] == list(range(len(prompts) * n))
    for choice in body["choices"]:
        ids = prompts[choice["index"] // n]
        if request.get("return_token_ids"):
            assert choice["prompt_token_ids"] == ids
        if "prompt_logprobs" in request:
            assert len(choice["prompt_logprobs"]) == len(ids)
            assert len(choice["prompt_logprobs"][-1]) >= request["prompt_logprobs"]
        if "logprobs" in request:
            echoed = len(ids) if request.get("echo") else 0
            lengths = {len(values) for values in choice["logprobs"].values()}
            assert lengths == {echoed + request["max_tokens"]}
            logprobs = choice["logprobs"]
            for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
                assert choice["text"][offset:].startswith(token)


def test_an_echo_is_streamed_in_pieces() -> None:
    c = InProcess(context=CONTEXT)
    fields = {"max_tokens": 1, "echo": True, "logprobs": 1, "stream": True}
    response = c.complete("one two " * 1000, **fields)
    chunks = [chunk["choices"][0] for chunk in events(response.text)[:-1]]
    text = "".join(chunk["text"] for chunk in chunks)
    assert text == "one two " * 1000 + "hello"[: len(text) - 8000]
    assert max(len(chunk["text"]) for chunk in chunks) < 1000
    offsets = [o for x in chunks if x["logprobs"] for o in x["logprobs"]["text_offset"]]
    tokens = [t for x in chunks if x["logprobs"] for t in x["logprobs"]["tokens"]]
    assert all(text[o:].startswith(t) for o, t in zip(offsets, tokens, strict=True))


# ---- bounds --------------------------------------------------------------------------------------

TOO_LARGE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "logprobs": ({"n": 128, "max_tokens": 4096, "logprobs": 20}, ["'n'", "'max_tokens'", "stream"]),
    "tokens": ({"n": 128, "max_tokens": 131_000}, ["'n'", "'max_tokens'"]),
    "token ids": (
        {"prompt": [[5] * 60_000] * 4, "n": 128, "max_tokens": 1, "return_token_ids": True},
        ["the number of prompts", "leave out 'return_token_ids'"],
    ),
    "echo": (
        {"prompt": ["<|end|>" * 9000] * 16, "n": 128, "max_tokens": 1, "echo": True},
        ["what 'echo' repeats"],
    ),
    "prompt logprobs": ({"prompt": [5] * 30_000, "prompt_logprobs": 20}, ["'prompt_logprobs'"]),
    "streamed echo": (
        {"prompt": [5] * 30_000, "echo": True, "logprobs": 20, "stream": True},
        ["what 'echo' repeats"],
    ),
}


def test_a_request_for_an_oversized_response_is_refused() -> None:
    c = InProcess(context=CONTEXT)
    for case, (fields, words) in TOO_LARGE.items():
        error = check(c.respond(COMPLETIONS, {"prompt": "x"} | fields), 400)
        assert error["code"] == "response_too_large", case
        assert all(word in error["message"] for word in words), error["message"]
        assert str(1 << 19) in error["message"] or str(64 << 20) in error["message"]
    error = check(c.chat(logprobs=True, top_logprobs=20, max_tokens=130_000), 400)
    assert "'max_tokens'" in error["message"]
    assert not c.node.requests
    fields = TOO_LARGE["logprobs"][0] | {"stream": True}
    assert c.respond(COMPLETIONS, {"prompt": "x"} | fields).status_code == 200


def test_a_default_limit_is_cut_to_what_fits() -> None:
    c = InProcess(context=CONTEXT)
    assert c.chat(logprobs=True, top_logprobs=20).status_code == 200
    assert c.node.requests[-1].sampling.max_tokens == (1 << 19) // 21
    assert c.chat(logprobs=True, top_logprobs=20, stream=True).status_code == 200
    assert c.node.requests[-1].sampling.max_tokens > 131_000


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    st.integers(1, 128),
    st.none() | st.integers(0, 20),
    st.none() | st.integers(0, 20),
    st.booleans(),
)
def test_what_was_cut_fits_or_nothing_does(
    prompts: list[int], n: int, logprobs: int | None, scored: int | None, ids: bool
) -> None:
    size = ResponseSize(
        prompts=prompts,
        n=n,
        logprobs=logprobs,
        prompt_alternatives=scored,
        echoed=0,
        token_ids=ids,
        stream=False,
    )
    options = RouterOptions()

    def fits(granted: list[int]) -> bool:
        try:
            size.check(granted, options)
        except Exception:
            return False
        return True

    cut = size.fit([131_072] * len(prompts), options)
    assert all(1 <= tokens <= 131_072 for tokens in cut)
    assert fits(cut) or not fits([1] * len(prompts))


async def test_prompts_and_responses_are_bounded_together(tmp_path: Path) -> None:
    async with cluster(tmp_path, context=CONTEXT, max_held_prompt_tokens=1000) as c:
        error = check(await c.complete([5] * 1001), 503)
        assert "prompt tokens of all requests together" in error["message"]
        assert (await c.complete([5] * 1000)).status_code == 200
        await until(lambda: c.router.app.handler.prompts.used == 0)
    async with cluster(tmp_path, max_held_response_bytes=2000) as c:
        c.node.reply = c.encode("hello world ") * 60
        error = check(await c.complete(max_tokens=200, n=2), 503)
        assert "bytes of responses" in error["message"]
        await until(lambda: c.node.active == 0)
        await until(lambda: c.router.app.handler.responses.used == 0)
        assert (await c.complete(max_tokens=200, n=2, stream=True)).status_code == 200


# ---- encoding ------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES, st.lists(st.lists(VALUES, max_size=3), max_size=4), st.lists(st.integers(0, 9)))
def test_what_was_encoded_before_is_part_of_the_json(
    value: Any, parts: list[list[Any]], ids: list[int]
) -> None:
    encoded = EncodedArray()
    for part in parts:
        encoded.extend(part)
    whole: dict[str, Any] = {
        "value": value,
        "parts": encoded,
        "ids": array("I", ids),
        "none": EncodedArray(),
    }
    whole["text"] = StringIO("text")
    decoded = json.loads(dump(whole))
    items = [item for part in parts for item in part]
    assert decoded == {"value": value, "parts": items, "ids": ids, "none": [], "text": "text"}


def test_long_arrays_of_numbers_are_whole() -> None:
    for count in (NUMBERS_AT_ONCE, 3 * NUMBERS_AT_ONCE + 1):
        assert json.loads(dump(array("I", range(count)))) == list(range(count))
    with pytest.raises(TypeError, match="no JSON"):
        dump([object()])

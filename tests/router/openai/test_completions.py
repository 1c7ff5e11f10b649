"""Text completions: prompts of every form, batches, echo, logprobs, stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.in_process import InProcess
from tandem.tests.router.support import (
    Script,
    admitted,
    cluster,
    events,
    finished,
    logprobs,
    tokens_event,
    until,
)


@pytest.mark.parametrize("form", ["text", "ids", "texts", "lists"])
def test_prompts_of_every_form(form: str) -> None:
    c = InProcess()
    ids = c.encode("one two")
    prompt: Any = {"text": "one two", "ids": ids, "texts": ["one two"] * 2, "lists": [ids] * 2}
    body = c.complete(prompt[form]).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    count = 2 if form in ("texts", "lists") else 1
    assert [choice["index"] for choice in body["choices"]] == list(range(count))
    assert {choice["text"] for choice in body["choices"]} == {"hello world"}
    assert all(list(request.prompt) == ids for request in c.node.requests)
    assert body["usage"]["prompt_tokens"] == count * len(ids)
    assert c.node.requests[0].sampling.max_tokens == 16


def test_choices_of_a_batch_are_numbered_prompt_by_prompt() -> None:
    c = InProcess()

    async def say_prompt(request: Any, context: Any) -> Any:
        yield admitted()
        for index in range(request.sampling.n):
            yield tokens_event(index, list(request.prompt) + c.encode(str(index)))
            yield finished(index)

    c.node.script = say_prompt
    prompts = [f"p{i} " for i in range(100)]
    body = c.complete(prompts, n=3).json()
    expected = [f"p{i} {k}" for i in range(100) for k in range(3)]
    assert [choice["text"] for choice in body["choices"]] == expected
    streamed = [""] * 300
    for chunk in events(c.complete(prompts, n=3, stream=True).text)[:-1]:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == expected


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_the_prompt(stream: bool) -> None:
    c = InProcess()
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "n": 2, "stream": stream}
    response = c.complete("one two ", **fields)
    ids = c.encode("one two ")
    for index in range(2):
        text, all_logprobs = _text_and_logprobs(response, index, stream)
        assert text == "one two hello world"
        assert stream or response.json()["choices"][index]["prompt_logprobs"] is None
        assert len(all_logprobs["tokens"]) == len(ids) + len(c.node.reply)
        assert all_logprobs["token_logprobs"][0] is None and all_logprobs["top_logprobs"][0] is None
        assert all_logprobs["token_logprobs"][1] == pytest.approx(-0.5)
        for token, offset in zip(all_logprobs["tokens"], all_logprobs["text_offset"], strict=True):
            assert text[offset:].startswith(token)


def _text_and_logprobs(response: Any, index: int, stream: bool) -> tuple[str, dict[str, list[Any]]]:
    if not stream:
        choice = response.json()["choices"][index]
        return choice["text"], choice["logprobs"]
    chunks = [chunk["choices"][0] for chunk in events(response.text)[:-1]]
    parts = [choice for choice in chunks if choice["index"] == index]
    all_logprobs: dict[str, list[Any]] = {}
    for choice in parts:
        for name, values in (choice["logprobs"] or {}).items():
            all_logprobs.setdefault(name, []).extend(values)
    return "".join(choice["text"] for choice in parts), all_logprobs


def test_a_prompt_is_scored_without_generating() -> None:
    c = InProcess()
    body = c.complete("one two", echo=True, max_tokens=0, logprobs=1).json()
    choice = body["choices"][0]
    assert choice["text"] == "one two" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(c.encode("one two"))
    assert body["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_as_in_vllm() -> None:
    c = InProcess()
    body = c.complete("one two", prompt_logprobs=1).json()
    ids = c.encode("one two")
    entries = body["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(ids)
    assert entries[1][str(ids[1])]["rank"] == 1
    assert c.complete("x", prompt_logprobs=1, stream=True).status_code == 400


def _endless(ids: list[int]) -> Script:
    async def script(request: Any, context: Any) -> Any:
        yield admitted()
        while True:
            for index in range(request.sampling.n):
                yield tokens_event(index, ids)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cancels_the_request_on_the_node(tmp_path: Path, stream: bool) -> None:
    async with cluster(tmp_path) as c:
        c.node.script = _endless(c.encode("one two "))
        response = await c.complete("x", stop=["wo o"], n=2, stream=stream, max_tokens=400)
        if stream:
            chunks = [chunk["choices"][0] for chunk in events(response.text)[:-1]]
            texts = ["".join(x["text"] for x in chunks if x["index"] == i) for i in range(2)]
            assert [x["stop_reason"] for x in chunks if x["finish_reason"]] == ["wo o"] * 2
        else:
            texts = [choice["text"] for choice in response.json()["choices"]]
        assert texts == ["one t", "one t"]
        await until(lambda: c.node.active == 0)


async def test_a_stop_string_ends_its_choice_on_the_node_while_others_go_on(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:

        async def script(request: Any, context: Any) -> Any:
            yield admitted()
            for index, text in enumerate(("hello", "one two ", "hello")):
                yield tokens_event(index, c.encode(text))
            await until(lambda: bool(c.node.ended))
            yield tokens_event(1, c.encode("three"))  # already on its way from the node
            for index in (2, 0):
                yield finished(index, pb.FINISH_REASON_LENGTH)

        c.node.script = script
        body = (await c.complete("x", stop="wo", n=3)).json()
        assert [choice["text"] for choice in body["choices"]] == ["hello", "one t", "hello"]
        assert c.node.ended == [(c.node.requests[0].internal_id, 1)] and c.node.ended[0][0]
        (node,) = c.router.nodes
        await until(lambda: not node._connection._ending)


def test_a_stop_string_can_be_included() -> None:
    c = InProcess()
    c.node.script = _endless(c.encode("one two "))
    body = c.complete("x", stop="two", include_stop_str_in_output=True).json()
    assert body["choices"][0]["text"] == "one two"
    assert body["choices"][0]["stop_reason"] == "two"


def test_stop_strings_wait_for_min_tokens() -> None:
    c = InProcess()
    c.node.script = _endless(c.encode("one two "))
    count = len(c.encode("one two "))
    body = c.complete("x", stop="two", min_tokens=count + 1, max_tokens=100).json()
    assert body["choices"][0]["text"] == "one two one "


def test_an_echo_of_token_ids_spells_special_tokens() -> None:
    c = InProcess()
    ids = [1, *c.encode("one two"), 0]
    body = c.complete(ids, echo=True, logprobs=1, max_tokens=1).json()
    [choice] = body["choices"]
    assert choice["text"].startswith("<|start|>one two<|end|>")
    assert choice["logprobs"]["text_offset"][:2] == [0, len("<|start|>")]
    text = c.complete("one two", echo=True, max_tokens=1).json()["choices"][0]["text"]
    assert text.startswith("one two")


def test_a_stop_token_is_named() -> None:
    c = InProcess()

    async def script(request: Any, context: Any) -> Any:
        yield admitted()
        yield finished(0, stop_token=7, stop_logprobs=logprobs(7, 1))

    c.node.script = script
    body = c.complete("x", stop_token_ids=[7], logprobs=1).json()
    [choice] = body["choices"]
    assert (choice["stop_reason"], choice["finish_reason"]) == (7, "stop")
    assert choice["logprobs"]["token_logprobs"] == [-0.5]
    assert choice["logprobs"]["text_offset"] == [0]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_is_text_where_stop_strings_are(include: bool, stream: bool) -> None:
    c = InProcess()
    hello, (end,) = c.encode("hello"), c.encode("!")

    async def script(request: Any, context: Any) -> Any:
        yield admitted()
        yield tokens_event(0, hello)
        # The model's end token is a special token, which is not shown.
        yield finished(0, stop_token=end if request.sampling.stop_token_ids else 0)

    c.node.script = script
    for ids, expected in (([end], "hello!" if include else "hello"), ([], "hello")):
        response = c.complete(
            "x", stop_token_ids=ids, include_stop_str_in_output=include, stream=stream
        )
        chunks = events(response.text)[:-1] if stream else [response.json()]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


def test_parameters_reach_the_node() -> None:
    c = InProcess()
    c.complete(
        "x",
        temperature=0.5,
        top_k=-1,
        top_p=0.25,
        min_p=0.125,
        seed=-(2**63),
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": -100},
        stop_token_ids=[3],
        ignore_eos=True,
        min_tokens=2,
        priority=-3,
        cache_salt="mine",
        user="somebody",
    )
    request = c.node.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 0, 0.25)
    assert (sampling.min_p, sampling.seed) == (0.125, -(2**63))
    assert sampling.repetition_penalty == 1.5
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 2)
    assert dict(sampling.logit_bias) == {5: -100}
    assert list(sampling.stop_token_ids) == [3]
    assert sampling.ignore_eos and sampling.min_tokens == 2
    assert (request.priority, request.cache_salt) == (-3, "mine")
    assert not sampling.HasField("logprobs")

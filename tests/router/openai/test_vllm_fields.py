"""Fields that vLLM adds to OpenAI's API, against a fake decode node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.served_model import system_fingerprint
from tandem.router.surface import Surface
from tandem.shared.version import version
from tandem.tests.router.in_process import CHAT, COMPLETIONS, InProcess
from tandem.tests.router.support import (
    CONTEXT,
    admitted,
    cluster,
    events,
    finished,
    logprobs,
    tokens_event,
    usage,
)

MESSAGE = {"role": "user", "content": "hi"}
VOCABULARY = 320  # of the fake nodes' model
TIMES = (*("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "tokens_per_second"),)
BEGUN = {"role": "assistant", "content": "one two "}


@pytest.fixture
def c() -> InProcess:
    return InProcess(trust_request_chat_template=True)


def prompt(c: InProcess) -> list[int]:
    """The prompt that the node got last."""
    return list(c.node.requests[-1].prompt)


def test_a_prompt_is_truncated_on_either_side(c: InProcess) -> None:
    ids = list(range(40))
    for value in (ids, [ids, ids]):
        for side, expected in (("left", ids[-4:]), ("right", ids[:4])):
            fields = {"truncate_prompt_tokens": 4, "truncation_side": side}
            response = c.complete(value, return_token_ids=True, **fields)
            assert response.json()["choices"][-1]["prompt_token_ids"] == expected
            assert prompt(c) == expected


def test_a_prompt_over_the_context_is_truncated_to_what_fits(c: InProcess) -> None:
    long = "one two " * CONTEXT
    response = c.complete(long, truncate_prompt_tokens=-1, max_tokens=10, echo=True)
    assert response.status_code == 200, response.text
    assert len(prompt(c)) == CONTEXT - 10
    assert prompt(c) == c.encode(long)[10 - CONTEXT :]
    assert response.json()["choices"][0]["text"].endswith("two hello world")
    response = c.chat(long, truncate_prompt_tokens=20)
    assert response.status_code == 200 and len(prompt(c)) == 20
    assert c.complete("one " * 100_000, truncate_prompt_tokens=-1).status_code == 400


def test_logprobs_name_tokens_by_their_ids(c: InProcess) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = c.complete(logprobs=1, **fields).json()["choices"]
    names = [f"token_id:{token}" for token in c.node.reply]
    assert choice["logprobs"]["tokens"] == names == list(map(_name, choice["token_ids"][:-1]))
    assert names[0] in choice["logprobs"]["top_logprobs"][0]
    [choice] = c.chat(logprobs=True, top_logprobs=1, **fields).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [token["token"] for token in content] == names
    assert content[0]["top_logprobs"][0]["token"].startswith("token_id:")
    assert bytes(b for token in content for b in token["bytes"]) == b"hello world"


def test_unary_responses_and_final_chunks_have_a_system_fingerprint(c: InProcess) -> None:
    expected = c.model.system_fingerprint
    assert expected == system_fingerprint("tiny", "layers=2")
    assert expected.startswith(f"tandem-{version()}-")
    assert expected != system_fingerprint("tiny", "layers=9")
    for send in (c.chat, c.complete):
        assert send().json()["system_fingerprint"] == expected
        streamed = send(n=2, stream=True, stream_options={"include_usage": True})
        for chunk in events(streamed.text)[:-1]:
            ends = not chunk["choices"] or chunk["choices"][0]["finish_reason"]
            assert chunk.get("system_fingerprint") == (expected if ends else None)


def test_a_server_may_name_all_tokens_by_their_ids() -> None:
    c = InProcess(return_tokens_as_token_ids=True)
    [choice] = c.complete(logprobs=1).json()["choices"]
    assert choice["logprobs"]["tokens"] == list(map(_name, c.node.reply))


def _name(token: int) -> str:
    return f"token_id:{token}"


@pytest.mark.parametrize("surface", [CHAT, COMPLETIONS])
def test_every_chunk_has_the_usage_so_far(c: InProcess, surface: Surface) -> None:
    c.node.reply = c.encode("hello world, the end")
    body: dict[str, Any] = {"messages": [MESSAGE]} if surface is CHAT else {"prompt": "hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"stream": True, "n": 2, "stream_options": options}
    *chunks, last, _ = events(c.respond(surface, body).text)
    for index in range(2):
        mine = [x["usage"] for x in chunks if x["choices"][0]["index"] == index]
        counts = [one["completion_tokens"] for one in mine]
        assert counts == sorted(counts) and counts[-1] == len(c.node.reply) + 1
        assert {one["total_tokens"] - one["completion_tokens"] for one in mine} == {len(prompt(c))}
    assert last["usage"]["completion_tokens"] == 2 * counts[-1]
    body["stream_options"] = options | {"include_usage": False}
    chunks = events(c.respond(surface, body).text)[:-1]
    assert not any("usage" in chunk for chunk in chunks)


def test_a_final_message_is_continued_and_echoed(c: InProcess) -> None:
    beginning = c.encode("<|start|>user\nhi<|end|>\n<|start|>assistant\none two ")
    body: dict[str, Any] = {"messages": [MESSAGE, BEGUN], "continue_final_message": True}
    for fields, text in (({}, "hello world"), ({"echo": True}, "one two hello world")):
        response = c.respond(CHAT, {**body, **fields})
        assert prompt(c) == beginning
        assert response.json()["choices"][0]["message"]["content"] == text
        response = c.respond(CHAT, {**body, **fields, "stream": True})
        deltas = [x["choices"][0]["delta"] for x in events(response.text)[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == text
    tokens = c.post("/tokenize", **body).json()["tokens"]
    assert tokens == beginning


def test_without_generation_prompt_the_role_is_that_of_the_last_message(c: InProcess) -> None:
    fields = {"add_generation_prompt": False, "echo": True}
    message = c.chat(**fields).json()["choices"][0]["message"]
    assert message["role"] == "user" and message["content"] == "hihello world"
    assert prompt(c) == c.encode("<|start|>user\nhi<|end|>\n")
    message = c.chat(echo=True).json()["choices"][0]["message"]
    assert message["role"] == "assistant" and message["content"] == "hello world"


def test_a_prompt_of_one_text_may_have_special_tokens(c: InProcess) -> None:
    text = "<|start|>user\nhi<|end|>\n"
    response = c.complete(text, add_special_tokens=False)
    assert response.status_code == 200 and prompt(c) == c.encode(text)
    count = c.post("/tokenize", prompt=text, add_special_tokens=False)
    assert count.json()["tokens"] == c.encode(text)


def test_a_request_brings_its_own_template_and_documents(c: InProcess) -> None:
    template = "{% for d in documents %}{{ d.text }}|{% endfor %}{{ messages[0].content }}<|end|>"
    documents = [{"title": "a", "text": "one"}, {"text": "<|end|>"}]
    response = c.chat(chat_template=template, documents=documents)
    assert response.status_code == 200, response.text
    special = c.encode("<|end|>")
    assert prompt(c)[-1:] == special and prompt(c).count(special[0]) == 1  # the client's is text
    assert c.chat(chat_template="default").status_code == 200  # the model's, by its name
    by_name = prompt(c)
    assert c.chat().status_code == 200 and prompt(c) == by_name
    bad = c.chat(chat_template="{% for")
    assert bad.status_code == 400 and "does not compile" in bad.json()["error"]["message"]
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    assert "stopped" in c.chat(chat_template=endless).json()["error"]["message"]
    untrusting = InProcess()
    error = untrusting.chat(chat_template=template).json()["error"]
    assert "--trust-request-chat-template" in error["message"]


def test_messages_of_any_role_and_form_are_accepted(c: InProcess) -> None:
    messages = [
        {"role": "king", "content": ["a", {"type": "input_text", "text": "b"}]},
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    response = c.respond(CHAT, {"messages": messages})
    assert response.status_code == 200, response.text
    text = "".join(
        f"<|start|>{role}\n{content}<|end|>\n"
        for role, content in [("king", "a\nb"), ("user", ""), ("user", ""), ("assistant", "no")]
    )
    assert prompt(c) == c.encode(text + "<|start|>assistant\n")


def test_the_best_of_several_choices_are_returned(c: InProcess) -> None:
    async def script(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateEvent]:
        assert request.sampling.n == 3 and request.sampling.logprobs == 0
        yield admitted()
        yield usage(request)
        for index, value in enumerate((-3.0, -1.0, -2.0)):
            scored = logprobs(index + 60, 0)
            scored.chosen.logprob = value
            event = pb.Tokens(index=index, tokens=[index + 60] * 2, logprobs=[scored] * 2)
            yield pb.GenerateEvent(tokens=event)
            yield finished(index)

    c.node.script = script
    body = c.complete(["a", "b"], best_of=3, n=2, return_token_ids=True).json()
    assert [choice["token_ids"][0] for choice in body["choices"]] == [61, 62, 61, 62]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["choices"][0]["logprobs"] is None
    assert body["choices"][1]["prompt_token_ids"] == c.encode("a")
    assert body["usage"]["completion_tokens"] == 12


def test_bad_words_are_sent_as_tokens_with_and_without_a_space(c: InProcess) -> None:
    assert c.chat(bad_words=["fox", " dog"]).status_code == 200
    words = [list(word.ids) for word in c.node.requests[-1].sampling.bad_words]
    assert words == [c.encode(text) for text in ("fox", " fox", " dog")]
    for bad in (["x" * 257], [" "], ["x"] * 257, "x"):
        assert c.complete(bad_words=bad).status_code == 400


def test_logprobs_of_given_tokens_need_logprobs(c: InProcess) -> None:
    assert c.chat(logprobs=True, logprob_token_ids=[5, 6]).status_code == 200
    sampling = c.node.requests[-1].sampling
    assert list(sampling.logprob_token_ids) == [5, 6] and sampling.logprobs == 0
    assert c.chat(logprob_token_ids=[5]).status_code == 400
    for fields in ({}, {"logprobs": 1, "echo": True, "max_tokens": 0}):
        assert c.complete(logprob_token_ids=[5], **fields).status_code == 400
    assert c.complete(logprob_token_ids=[320], logprobs=1).status_code == 400


def test_logprobs_that_cannot_be_read_are_the_nodes_failure(c: InProcess) -> None:
    async def script(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateEvent]:
        event = tokens_event(0, [5], 2)
        event.tokens.logprobs[0].packed_top += b"."
        yield admitted()
        yield event

    c.node.script = script
    assert c.complete(logprobs=2).status_code == 500
    c.node.script = None
    assert c.complete(logprobs=2).status_code == 200


def test_more_logprobs_than_the_server_lists_are_rejected() -> None:
    c = InProcess(max_logprobs=3)
    for name, value, side in (
        ("logprobs", 4, "above_max"),
        ("prompt_logprobs", 4, "above_max"),
        ("logprobs", -1, "below_min"),
    ):
        error = c.complete(**{name: value}).json()["error"]
        assert (error["param"], error["code"]) == (name, f"integer_{side}_value")
    assert c.complete(logprobs=3, prompt_logprobs=3).status_code == 200
    assert c.chat(logprobs=True, top_logprobs=4).status_code == 400


def test_the_text_of_a_prompt_is_returned_on_demand(c: InProcess) -> None:
    text = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert c.chat(return_prompt_text=True).json()["prompt_text"] == text
    assert c.chat().json()["prompt_text"] is None
    chunks = events(c.chat(return_prompt_text=True, stream=True, n=2).text)[:-1]
    assert [chunk.get("prompt_text") for chunk in chunks] == [text] + [None] * (len(chunks) - 1)


def test_unknown_fields_are_rejected_on_demand() -> None:
    c = InProcess(strict_parameters=True)
    for body in ({"colour": 1}, {"messages": [{**MESSAGE, "colour": 1}]}):
        response = c.respond(CHAT, {"messages": [MESSAGE], **body})
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "unknown_parameter"
        assert "colour" in error["param"]
    assert c.chat(temperature=0).status_code == 200
    response = c.post("/tokenize", prompt="hi", colour=1)
    assert response.status_code == 400 and response.json()["error"]["param"] == "colour"


async def test_a_model_has_several_names(tmp_path: Path) -> None:
    async with cluster(tmp_path, served_model_name="one,org/two") as c:
        models = (await c.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in models] == [
            ("one", "one"),
            ("org/two", "one"),
        ]
        assert (await c.client.get("/v1/models/org/two")).json()["id"] == "org/two"
        for name in ("one", "org/two"):
            assert (await c.chat(model=name)).json()["model"] == "one"
        assert (await c.chat(model="three")).status_code == 404


@pytest.mark.parametrize("surface", [CHAT, COMPLETIONS])
def test_a_response_has_the_times_of_its_request(surface: Surface) -> None:
    body: dict[str, Any] = {"messages": [MESSAGE]} if surface is CHAT else {"prompt": "hi"}
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    c = InProcess(enable_per_request_metrics=True)
    times = c.respond(surface, body).json()["metrics"]
    assert sorted(times) == sorted((*TIMES, "mean_itl_ms"))
    assert all(value >= 0 for value in times.values()) and times["tokens_per_second"] > 0
    *chunks, last, _ = events(c.respond(surface, streamed).text)
    assert set(last["metrics"]) == set(times) and not last["choices"]
    assert not any("metrics" in chunk for chunk in chunks)
    without = events(c.respond(surface, body | {"stream": True}).text)[:-1]
    assert not any("metrics" in chunk for chunk in without)
    c.node.reply = []  # but for the token that ends it
    times = c.respond(surface, body).json()["metrics"]
    assert sorted(times) == sorted(TIMES)
    c = InProcess()
    assert "metrics" not in c.respond(surface, body).json()

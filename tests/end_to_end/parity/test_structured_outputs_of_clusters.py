"""Random schemas on real clusters: every answer is valid JSON, however the cluster is built and
whatever happens to it. ``TANDEM_TEST_EXTENT=full`` tries 500 of them, and more clusters."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandem.tests.end_to_end.support.clients import prompt, stream_lines
from tandem.tests.end_to_end.support.cluster import TestCluster, node_metric, running, until
from tandem.tests.shared.engine.structured.schemas import schemas
from tandem.tests.support.extent import FULL, selected

COUNT = 500 if FULL else 8
AT_ONCE = 16
# One that is not finished by then, though its values are short, repeats itself.
FIELDS: dict[str, Any] = {"max_tokens": 450, "temperature": 1.0}
full_only = pytest.mark.asked_for("TANDEM_TEST_EXTENT")


def texts(cluster: TestCluster, number: int, schema: dict[str, Any]) -> list[str]:
    """The outputs for one schema: streamed, alone, or several at once."""
    constraint = {"json": schema, "disable_any_whitespace": True}
    fields = FIELDS | {"seed": number, "structured_outputs": constraint}
    tokens = prompt(number, 20)
    if number % 3 == 0:
        lines = stream_lines(cluster, tokens, **fields)
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        choices = [choice for event in events for choice in event["choices"]]
        assert choices[-1]["finish_reason"] == "stop", schema
        return ["".join(choice["text"] for choice in choices)]
    outputs = cluster.complete(tokens, n=1 + number % 2, **fields)["choices"]
    assert {choice["finish_reason"] for choice in outputs} == {"stop"}, schema
    return [choice["text"] for choice in outputs]


def check(cluster: TestCluster, count: int = COUNT) -> None:
    """Have ``count`` schemas followed, many at once."""

    def follow(numbered: tuple[int, dict[str, Any]]) -> None:
        for text in texts(cluster, *numbered):
            jsonschema.validate(json.loads(text), numbered[1])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert len(list(pool.map(follow, enumerate(schemas(count))))) == count


def test_on_one_node(aggregated: TestCluster) -> None:
    check(aggregated)


# What tokens are allowed does not depend on how KV moves.
@pytest.mark.parametrize("disaggregated", selected(["shared_memory"], full=["tcp"]), indirect=True)
def test_with_prompts_that_are_prefilled_elsewhere(disaggregated: TestCluster) -> None:
    check(disaggregated)


@full_only
def test_on_two_ranks_of_each_kind(tmp_path: Path, tiny_model: str) -> None:
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        ranks = "--tensor-parallel-size=2"
        cluster.start_nodes(("prefill-node", ranks), ("decode-node", ranks))
        cluster.wait_nodes(decode=1, prefill=1)
        check(cluster)


@full_only
def test_after_the_death_of_a_node(tmp_path: Path, tiny_model: str) -> None:
    """Outputs of which nothing was sent restart on the other node."""
    count = 64
    with running(tmp_path, tiny_model) as cluster, ThreadPoolExecutor(count) as pool:
        cluster.start_router()
        dies, lives = cluster.start_nodes(
            *(("decode-node", f"--node-id={name}") for name in ("decode-a", "decode-b"))
        )
        cluster.wait_nodes(decode=2, prefill=0)
        unary = [(n, schema) for n, schema in enumerate(schemas(count)) if n % 3]
        futures = [pool.submit(texts, cluster, *one) for one in unary]
        until(lambda: node_metric(dies, "tandem_sequences_running") > 4, "requests on both")
        dies.kill()
        for (_, schema), future in zip(unary, futures, strict=True):
            for text in future.result():
                jsonschema.validate(json.loads(text), schema)
        until(lambda: node_metric(lives, "tandem_sequences_running") == 0, "the end")


@full_only
def test_reasoning_has_its_budget_whatever_follows(tmp_path: Path, tiny_model: str) -> None:
    """Of each choice, streamed or not, with prompts that are prefilled elsewhere."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    follows = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": follows,
        "thinking_token_budget": 9,
        "max_tokens": 200,
        "seed": 3,
    }
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router("--reasoning-parser=deepseek_r1")
        cluster.start_nodes(("prefill-node",), ("decode-node",))
        cluster.wait_nodes(decode=1, prefill=1)
        status, whole = cluster.post("/v1/chat/completions", body | {"n": 3})
        assert status == 200, whole
        for choice in whole["choices"]:
            message = choice["message"]
            assert message["reasoning"]
            assert "</think>" not in message["reasoning"] + message["content"]
            jsonschema.validate(json.loads(message["content"]), schema)
        # Each token is a byte: the budget, the rest of a character, and the marker.
        reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert reasoning <= 3 * (9 + 3 + len("</think>"))
        status, plain = cluster.post(
            "/v1/chat/completions", body | {"response_format": None, "thinking_token_budget": 0}
        )
        assert status == 200 and not plain["choices"][0]["message"]["reasoning"]


# Every second choice comes to a place where its grammar allows no token.
DEAD_END = """
from itertools import count
from tandem.shared.engine.structured import llguidance_backend as backend
numbers, mask, init = count(), backend.LLGuidanceMatcher.mask, backend.LLGuidanceMatcher.__init__
def numbered(self, *args):
    init(self, *args)
    self.calls, self.ends = 0, next(numbers) % 2
def cut(self):
    self.calls += 1
    return bytearray(len(mask(self))) if self.ends and self.calls > 5 else mask(self)
backend.LLGuidanceMatcher.__init__, backend.LLGuidanceMatcher.mask = numbered, cut
"""


def test_a_choice_whose_grammar_fails_ends_alone(tmp_path: Path, tiny_model: str) -> None:
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        node = cluster.launch_node("decode-node", prelude=DEAD_END)
        node.wait_ready()
        cluster.wait_nodes(decode=1, prefill=0)
        fields = {"max_tokens": 40, "structured_outputs": {"regex": "[a-z]{30}"}}
        choices = cluster.complete(prompt(1, 20), n=4, **fields)["choices"]
        ends = [(choice["finish_reason"], len(choice["text"])) for choice in choices]
        assert sorted(ends) == [("error", 5)] * 2 + [("stop", 30)] * 2
        alone = [
            cluster.post("/v1/completions", {"prompt": prompt(1, 20), **fields}) for _ in range(2)
        ]
        (failed,) = [body["error"] for status, body in alone if status == 400]
        assert failed["code"] == "grammar_unfollowable"
        assert failed["param"] == "structured_outputs.regex"
        cluster.wait_idle(node)

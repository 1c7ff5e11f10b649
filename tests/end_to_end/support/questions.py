"""Questions to published models, answered as transformers answers them."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.tests.end_to_end.support.cluster import TestCluster

QUESTIONS = (
    "What is the capital of France?",
    "List three prime numbers above 100.",
    "Who wrote Don Quixote?",
)


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def assert_answers(cluster: TestCluster, tokens: int, expected: Sequence[str]) -> None:
    for question, answer in zip(QUESTIONS, expected, strict=True):
        body = {"messages": messages(question), "max_tokens": tokens, "temperature": 0}
        status, response = cluster.post("/v1/chat/completions", body, timeout=300.0)
        assert status == 200, response
        assert response["choices"][0]["message"]["content"] == answer

"""Questions to published models, compared with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tandem.tests.end_to_end.support.cluster import TestCluster

QUESTIONS = (
    "What is the capital of France?",
    "List three prime numbers above 100.",
    "Who wrote Don Quixote?",
)


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def assert_outputs(cluster: TestCluster, tokens: int, expected: Sequence[str]) -> None:
    """All questions at once: a step costs hardly more for three sequences than for one."""

    def reply(question: str) -> str:
        body = {"messages": messages(question), "max_tokens": tokens, "temperature": 0}
        status, response = cluster.post("/v1/chat/completions", body, timeout=300.0)
        assert status == 200, response
        return str(response["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        assert list(pool.map(reply, QUESTIONS)) == list(expected)

"""``tandem complete``: sources of prompts, and results in their order."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.client.complete import CompletionError, run_complete
from tandem.shared.config.client import CompleteConfig, RequestConfig
from tandem.shared.errors import UsageError
from tandem.tests.client.fake_openai import FakeOpenAI, words


def upper(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The prompt in capitals."""
    if "messages" in body:
        yield from words(body["messages"][-1]["content"].upper())
        return
    yield {"choices": [{"index": 0, "text": str(body["prompt"]).upper(), "finish_reason": None}]}
    yield {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}


def complete(fake: FakeOpenAI, config: dict[str, Any], **request: Any) -> None:
    run_complete(fake.server(), CompleteConfig(**config), RequestConfig(**request))


def test_prompts_of_the_command_line_are_completed_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeOpenAI(upper)
    complete(fake, {"prompts": "one | two|  | three", "max_concurrency": 2}, temperature=0.0)
    words_printed = capsys.readouterr().out.split()
    assert words_printed == ["[1]", "one", "ONE", "[2]", "two", "TWO", "[3]", "three", "THREE"]
    assert {body["temperature"] for body in fake.bodies} == {0.0}
    assert fake.paths.count("/v1/completions") == 3


def test_one_prompt_has_no_title(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(FakeOpenAI(upper), {"quick": "a | b"})
    monkeypatch.setattr(sys, "stdin", io.StringIO("of stdin\n"))
    complete(FakeOpenAI(upper), {"chat": True})
    assert capsys.readouterr().out == "A | B\nOF STDIN \n"


def test_lines_of_jsonl_become_lines_of_jsonl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        '"plain"',
        "",
        '{"prompt": "with", "max_tokens": 3, "custom_id": "c"}',
        '{"messages": [{"role": "user", "content": "chat"}], "id": 7}',
        '{"prompt": [1, 2]}',
        '"\\ud800"',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    fake = FakeOpenAI(upper)
    files = {"input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl")}
    complete(fake, files, max_tokens=9)
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["text"] for line in results] == ["PLAIN", "WITH", "CHAT ", "[1, 2]", "\ud800"]
    assert (results[1]["custom_id"], results[2]["id"], results[0]["index"]) == ("c", 7, 0)
    assert results[0]["finish_reason"] == "length" and results[2]["usage"]["completion_tokens"] == 1
    assert sorted(body["max_tokens"] for body in fake.bodies) == [3, 9, 9, 9, 9]
    assert capsys.readouterr().out == "" and len(list(tmp_path.iterdir())) == 2


def test_an_error_is_part_of_the_results_and_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    def reply(body: dict[str, Any]) -> Any:
        if body["prompt"] == "bad":
            return httpx.Response(400, json={"error": {"message": "no"}})
        return upper(body)

    with pytest.raises(CompletionError, match="1 of 2 completions are missing or incomplete"):
        complete(FakeOpenAI(reply), {"prompts": "bad | good", "json": True})
    captured = capsys.readouterr()
    first, second = (json.loads(line) for line in captured.out.splitlines())
    assert "400: no" in first["error"] and second["text"] == "GOOD"
    assert "tandem: prompt 1: " in captured.err


def test_wrong_prompts(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    for content, problem in (("{", "is not JSON"), ("3", "must be a string, or an object")):
        file.write_text('"fine"\n' + content)
        with pytest.raises(UsageError, match=rf"x\.jsonl:2 {problem}"):
            complete(FakeOpenAI(upper), {"input": str(file), "json": True})
    (tmp_path / "bytes").write_bytes(b'"\xff"')
    for config, problem in (
        ({"prompts": "a", "quick": "b"}, "--prompts and --quick are two sources"),
        ({"prompts": " | "}, "no prompt in --prompts"),
        ({"input": str(tmp_path / "bytes")}, "bytes is not UTF-8"),
        ({"input": str(tmp_path / "none")}, "--input .*none: No such file"),
        ({"quick": "a", "output": "/none/x"}, "--output /none/x: the folder does not"),
        ({"quick": "a", "output": str(tmp_path)}, "is a folder; give the name of a file"),
    ):
        with pytest.raises(UsageError, match=problem):
            complete(FakeOpenAI(upper), config)


def test_a_failed_run_leaves_the_former_output(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('"a"\n{')
    (tmp_path / "out").write_text("former")
    files = {"input": str(tmp_path / "in"), "output": str(tmp_path / "out")}
    with pytest.raises(UsageError):
        complete(FakeOpenAI(upper), files)
    assert (tmp_path / "out").read_text() == "former"
    assert len(list(tmp_path.iterdir())) == 2

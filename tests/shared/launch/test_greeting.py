"""The lines that ``tandem serve`` prints once it serves."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.shared.config import RouterConfig
from tandem.shared.launch.greeting import greeting
from tandem.shared.scoring import Scoring


def lines(
    prefill_nodes: bool = True, scoring: Scoring | None = None, **options: Any
) -> dict[str, str]:
    front = RouterConfig(**{"model": "builtin"} | options)
    output = greeting(
        "http://127.0.0.1:1",
        ["127.0.0.1:2"],
        front,
        Path("/logs"),
        scoring,
        prefill_nodes=prefill_nodes,
    )
    return {line.split(":")[0].split(",")[0]: line for line in output}


@pytest.mark.parametrize("with_key", [True, False])
def test_the_commands_name_a_key_where_one_is_needed(with_key: bool) -> None:
    output = lines(api_key="secret") if with_key else lines()
    assert ("-H 'authorization: Bearer KEY'" in output["Try"]) == with_key
    assert ("TANDEM_API_KEY=KEY" in output["Prefill apart"]) == with_key
    assert "secret" not in "".join(output.values())


def test_the_request_to_try_is_bounded_streamed_and_names_the_model() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "tandem-builtin"),
        ({"served_model_name": "it's,b"}, "it's"),
        ({"model": "Qwen/Qwen3-0.6B"}, "Qwen/Qwen3-0.6B"),
    ]
    for options, name in cases:
        words = shlex.split(lines(**options)["Try"])
        body = json.loads(words[words.index("-d") + 1])
        assert body["model"] == name
        assert body["max_tokens"] <= 100 and body["stream"] and "-N" in words


def test_addresses_survive_a_shell() -> None:
    front, logs = RouterConfig(), Path("/")
    output = greeting("http://[::1]:1", ["[::1]:2"], front, logs, None, prefill_nodes=True)
    commands = [line for line in output if line.startswith(("Try", "Prefill", "Parts", "Check"))]
    assert len(commands) == 4 and all("'http://[::1]:1'" in c or "'[::1]:2'" in c for c in commands)


@pytest.mark.parametrize(
    ("scoring", "route"),
    [("pair", "/v1/rerank"), ("labels", "/classify"), ("vectors", "/v1/embeddings")],
)
def test_a_model_without_chat_is_shown_with_its_own_route(scoring: Scoring, route: str) -> None:
    output = lines(scoring=scoring)
    assert f"http://127.0.0.1:1{route} " in output["Try"]
    assert "chat" not in "".join(output.values()) and "Prefill apart" not in output


def test_a_long_prompt_is_shown_where_one_is_prefilled_apart() -> None:
    assert "Prefill apart" in lines() and "Prefill apart" not in lines(prefill_nodes=False)


@pytest.mark.parametrize(
    ("path", "called", "expected"),
    [
        ("/usr/bin/tandem", ".venv/bin/tandem", "tandem"),
        (None, ".venv/bin/tandem", ".venv/bin/tandem"),
        (None, "/my tools/tandem", "'/my tools/tandem'"),
        (None, "/src/__main__.py", f"{sys.executable} -m tandem"),
    ],
)
def test_commands_are_spelled_as_the_shell_finds_them(
    path: str | None, called: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: path)
    monkeypatch.setattr(sys, "argv", [called])
    assert lines()["Parts"] == f"Parts: {expected} nodes --router 127.0.0.1:2"

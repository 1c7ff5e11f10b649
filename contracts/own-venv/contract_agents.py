# mypy: ignore-errors
"""Coding agents without a terminal, against the scripted server: each reads a file with its own
tool and reports the content."""

from __future__ import annotations

import json

import pytest
from agents import KEY, MODEL, NOTE, URL, program

CLAUDE_CODE = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_AUTH_TOKEN": KEY,
    "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
CODEX = f"""
model = "{MODEL}"
model_provider = "tandem"
sandbox_mode = "danger-full-access"

[model_providers.tandem]
name = "Tandem"
base_url = "{URL}/v1"
env_key = "TANDEM_KEY"
wire_api = "responses"
"""
OPENCODE_APIS = ("openai-compatible", "anthropic", "openai")


@pytest.fixture
def claude(run):
    binary = program("@anthropic-ai/claude-code-*/claude")
    return lambda *arguments: run(binary, *arguments, **CLAUDE_CODE)


@pytest.fixture
def codex(run, tmp_path):
    (run.home / "config.toml").write_text(CODEX)
    binary = program("@openai/codex-*/vendor/*/bin/codex")
    more = {"CODEX_HOME": str(run.home), "TANDEM_KEY": KEY}
    return lambda *arguments: run(binary, "exec", *arguments, "--skip-git-repo-check", **more)


def test_claude_code_runs_tools(claude, run):
    arguments = {"file_path": str(run.project / "made.txt"), "content": "made"}
    orders = f'[[Write {json.dumps(arguments)}]] [[Bash {{"command": "cat note.txt"}}]]'
    assert NOTE in claude("-p", orders, "--allowedTools", "Bash,Write")
    assert (run.project / "made.txt").read_text() == "made"


def test_claude_code_continues_streams_and_counts(claude):
    claude("-p", "hello")
    streamed = claude(
        *("-p", "more", "--continue", "--output-format", "stream-json", "--verbose"),
        "--include-partial-messages",
    )
    last = json.loads(streamed.splitlines()[-1])
    assert (last["subtype"], last["result"]) == ("success", "Done: hello")
    assert "Context Usage" in claude("-p", "/context")


def test_codex_runs_tools_and_continues(codex):
    assert NOTE in codex('[[exec_command {"cmd": "cat note.txt"}]]')
    agent = '[[multi_agent_v1__spawn_agent {"message": "hello"}]]'
    assert "agent_id" in codex("resume", "--last", agent)


def test_codex_asks_for_a_format(codex, tmp_path):
    properties = {"count": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["count"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    output = codex("hello", "--output-schema", str(tmp_path / "schema.json"))
    assert isinstance(json.loads(output)["count"], int)


@pytest.mark.parametrize("api", OPENCODE_APIS)
def test_opencode_runs_tools(run, api):
    options = {"baseURL": f"{URL}/v1", "apiKey": KEY}
    provider = {"npm": f"@ai-sdk/{api}", "options": options, "models": {MODEL: {"name": MODEL}}}
    config = {"provider": {"tandem": provider}, "permission": {"bash": "allow"}}
    (run.project / "opencode.json").write_text(json.dumps(config))
    order = '[[bash {"command": "cat note.txt", "description": "reads"}]]'
    binary = program("opencode-*/bin/opencode")
    assert NOTE in run(binary, "run", "-m", f"tandem/{MODEL}", stdin=order)

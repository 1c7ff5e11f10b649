# mypy: ignore-errors
"""llm-comply's tests of OpenAI's chats, Open Responses and Anthropic's messages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

URL, KEY, MODEL = (os.environ[f"TARGET_{name}"] for name in ("URL", "KEY", "MODEL"))
FORMATS = {
    "openai-chat": (),
    "open-responses": (),
    "anthropic": ("--auth-header", "x-api-key", "--no-bearer"),
}


def results(form):
    """The tester's result for each of its tests."""
    arguments = ("-u", f"{URL}/v1", "-k", KEY, "-m", MODEL, "--format", form, "--timeout", "120")
    command = [shutil.which("llm-comply"), "run", "--json", *arguments, *FORMATS[form]]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)["results"]


def pytest_generate_tests(metafunc):
    cases = [(form, result) for form in FORMATS for result in results(form)]
    names = [f"{form}-{result['id']}" for form, result in cases]
    metafunc.parametrize("result", [result for _, result in cases], ids=names)


def test_complies(result):
    if result["status"] == "skipped":
        pytest.skip(str(result.get("warnings")))
    assert result["status"] == "passed", "; ".join(result["errors"])

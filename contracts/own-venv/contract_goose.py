# mypy: ignore-errors
"""Goose without a terminal, against the scripted server: it runs a shell command."""

from __future__ import annotations

import pytest
from agents import KEY, MODEL, NOTE, URL, program

PROVIDERS = {
    "openai": {"OPENAI_HOST": URL, "OPENAI_API_KEY": KEY},
    "anthropic": {"ANTHROPIC_HOST": URL, "ANTHROPIC_API_KEY": KEY},
}
SETTINGS = {"GOOSE_MODEL": MODEL, "GOOSE_MODE": "auto", "GOOSE_DISABLE_KEYRING": "1"}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_goose_runs_its_shell(run, provider):
    order = '[[shell {"command": "cat note.txt"}]]'
    output = run(
        program("@aaif/goose-binary-*/bin/goose"),
        *("run", "--no-session", "--with-builtin", "developer", "--text", order),
        **SETTINGS,
        **PROVIDERS[provider],
        GOOSE_PROVIDER=provider,
    )
    assert f"Done: {NOTE}" in output

# mypy: ignore-errors
"""aider without a terminal, against the scripted server: it applies the model's edit to a file."""

from __future__ import annotations

import json
import shutil

import pytest
from agents import KEY, MODEL, URL

WHOLE = "note.txt\n```\nthe answer is 43\n```\n"
DIFF = """note.txt
```
<<<<<<< SEARCH
the answer is 42
=======
the answer is 43
>>>>>>> REPLACE
```
"""
PROVIDERS = {
    "openai": {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": KEY},
    "anthropic": {"ANTHROPIC_API_BASE": URL, "ANTHROPIC_API_KEY": KEY},
}
QUIET = (
    *("--no-git", "--no-check-update", "--no-show-model-warnings", "--analytics-disable"),
    *("--no-pretty", "--yes-always", "--no-show-release-notes", "--no-auto-lint"),
)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("form", "edit"), [("whole", WHOLE), ("diff", DIFF)], ids=("whole", "diff")
)
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_aider_edits(run, provider, form, edit, stream):
    order = f"[[say {json.dumps({'text': edit})}]]"
    output = run(
        *(shutil.which("aider"), f"--model={provider}/{MODEL}", f"--edit-format={form}"),
        *(stream, *QUIET, f"--message={order}", "note.txt"),
        **PROVIDERS[provider],
    )
    assert "Applied edit to note.txt" in output
    assert (run.project / "note.txt").read_text().strip() == "the answer is 43"

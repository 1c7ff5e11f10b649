# mypy: ignore-errors
from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path):
    """Runs an agent in a new project that contains a note, with its own home folder."""
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    home.mkdir()
    (project / "note.txt").write_text("the answer is 42")

    def run_binary(binary: Path, *arguments: str, stdin: str = "", **environment: str) -> str:
        process = subprocess.run(
            [binary, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=project,
            env=os.environ | {"HOME": str(home), "PWD": str(project)} | environment,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    run_binary.home, run_binary.project = home, project
    return run_binary

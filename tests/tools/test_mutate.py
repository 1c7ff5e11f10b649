"""Mutations: what they change, which are sampled, and what becomes of a worktree."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tandem.tools.mutate import CAUGHT, HEART, MISSED, ROOT, mutations, prove, read, sample, table

SOURCE = '''"""Numbers 1 and 2 in texts stay."""

LIMIT = 3


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def take(self, é: int, most: int = 4) -> bool:
        assert most > 0
        if "é" and é <= most and not (é is most):
            self.seen += 1
            print(é)
        return (
            self.seen
            # not in the comment
            not in (most,)
        )
'''


def changed_lines(source: str) -> list[str]:
    """The line of each mutation, as it becomes."""
    names = []
    for one in mutations("counter.py", source.encode()):
        mutated = one.apply(source.encode()).decode()
        ast.parse(mutated)
        [line] = set(mutated.splitlines()) - set(source.splitlines())
        names.append(line.strip())
    return names


def test_each_mutation_changes_one_thing_in_a_function() -> None:
    assert changed_lines(SOURCE) == [
        'if "é" or é <= most and not (é is most):',
        'if "é" and é < most and not (é is most):',
        'if "é" and é <= most and not (é is not most):',
        "pass",
        "self.seen += 2",
        "pass",
        "in (most,)",
    ]


def test_every_mutation_of_the_heart_can_be_parsed() -> None:
    mutations = sample(ROOT, HEART, 300, seed=1)
    assert len(mutations) == 300 and len({one.file for one, _ in mutations}) > 30
    for one, tests in mutations:
        ast.parse(one.apply((ROOT / one.file).read_bytes()))
        assert all((ROOT / each).is_dir() for each in tests)


def test_a_seed_chooses_the_same_of_code_that_has_moved(tmp_path: Path) -> None:
    def of(name: str, source: str, seed: int) -> list[tuple[str, str]]:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "a.py").write_text(source)
        return [(one.text, one.after) for one, _ in sample(tmp_path, {f"{name}/*.py": ()}, 3, seed)]

    assert of("old", SOURCE, 1) == of("new", f"# Above.\n\n{SOURCE}", 1) != of("old", SOURCE, 2)


@pytest.fixture
def worktree(tmp_path: Path) -> Path:
    """Two functions, one of which is tested, beside a test that fails."""
    folder = tmp_path / "worktree"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "heart.py").write_text("def held():\n    return 1\n\ndef free():\n    return 2\n")
    (folder / "tests" / "test_heart.py").write_text(
        "from tandem.heart import held\n\n"
        "def test_held():\n    assert held() == 1\n\n"
        "def test_broken():\n    assert False\n"
    )
    (folder / ".gitignore").write_text("__pycache__\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a commit -qm a"):
        subprocess.run(["git", "-C", str(folder), *command.split()], check=True)
    return folder


def test_results_are_kept_and_the_worktree_is_as_before(worktree: Path, tmp_path: Path) -> None:
    out, heart = tmp_path / "out.jsonl", {"heart.py": ("tests",)}
    before = (worktree / "heart.py").read_bytes()
    prove(worktree, heart, out, count=1, seed=1)
    prove(worktree, heart, out, count=2, seed=1)  # goes on
    assert (worktree / "heart.py").read_bytes() == before
    rows = read(out)
    assert [row["tests"] for row in rows if "tests" in row] == ["tests"]
    judged = {row["function"]: (row["result"], row["by"]) for row in rows if "key" in row}
    assert judged == {
        "held": (CAUGHT, "tests/test_heart.py::test_held"),
        "free": (MISSED, ""),
    }
    report = table(rows)
    assert "| heart.py:5 | `2` becomes `3` | missed |  |" in report
    assert "2 mutations, of which 1 are missed." in report
    assert "fails without a mutation: tests/test_heart.py::test_broken." in report


def test_only_a_worktree_without_changes_is_mutated(worktree: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the checkout that this runs from"):
        prove(ROOT, HEART, tmp_path / "out", count=1, seed=1)
    (worktree / "heart.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match=r"has changes.*\n M heart.py"):
        prove(worktree, HEART, tmp_path / "out", count=1, seed=1)

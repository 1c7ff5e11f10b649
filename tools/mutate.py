"""Mutation testing of the core modules: small mutations, and the tests that should catch them.

    git worktree add --detach /tmp/mutated
    python -m tandem.tools.mutate /tmp/mutated --out mutations.jsonl [--count 40] [--seed 29]

A mutation flips a comparison, adds one to a number, drops a statement or swaps ``and`` and ``or``
in a function. The seed ranks mutations by function and text of the line, so it selects the same
ones in another version of the code where they still exist. Results are appended to the file
immediately, and a repeated run continues after the last one; ``--table`` only prints them. Tests
that fail without any mutation are excluded.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CAUGHT, MISSED, TOO_LONG = "caught", "missed", "too long"
# Timeout of one test, for mutations that make it hang.
TEST_SECONDS = 300
PARITY = "tests/end_to_end/parity"
# Files, and their tests, which run in order until one fails.
HEART: Mapping[str, tuple[str, ...]] = {
    "shared/engine/scheduling/*.py": (
        *("tests/shared/engine/scheduling", "tests/shared/engine", PARITY),
    ),
    "shared/engine/rank/*.py": ("tests/shared/engine/rank", "tests/shared/engine", PARITY),
    "shared/engine/core.py": ("tests/shared/engine", "tests/decode_node", PARITY),
    "shared/engine/sequence.py": ("tests/shared/engine", "tests/decode_node", PARITY),
    "shared/kv/*.py": ("tests/shared/kv", "tests/shared/engine", PARITY),
    "shared/handoff/plane/*.py": ("tests/shared/handoff/plane", "tests/decode_node", PARITY),
    "decode_node/**/*.py": ("tests/decode_node", PARITY),
    "prefill_node/*.py": ("tests/prefill_node", "tests/decode_node", PARITY),
    "router/*.py": ("tests/router/openai", "tests/router"),
    "router/node_streams/*.py": (
        "tests/router/node_streams",
        "tests/router/openai",
        "tests/router",
    ),
}
FLIPPED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_COMPARISON = re.compile(rb"[<>=!]=|<|>|\bis\s+not\b|\bnot\s+in\b|\bis\b|\bin\b")
_AND_OR = re.compile(rb"\b(and|or)\b")


@dataclass(frozen=True, slots=True)
class Mutation:
    """At byte ``start`` of a file, ``before`` becomes ``after``."""

    file: str
    line: int
    function: str
    text: str  # of the line
    start: int
    before: str
    after: str

    def key(self, seed: int) -> str:
        """The rank of a mutation under a seed, independent of the file and the surrounding
        lines."""
        what = (seed, self.function, self.text, self.before, self.after)
        return sha256(repr(what).encode()).hexdigest()[:16]

    def apply(self, source: bytes) -> bytes:
        end = self.start + len(self.before.encode())
        return source[: self.start] + self.after.encode() + source[end:]


def mutations(file: str, source: bytes) -> Iterator[Mutation]:
    """All mutations of a file, outside constructors and assertions."""
    lines = source.splitlines(keepends=True)
    starts = list(accumulate(map(len, lines), initial=0))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name == "__init__":
            continue
        for statement in node.body:
            for start, end, after in _edits(statement, starts, source):
                line = source.count(b"\n", 0, start)
                text, before = lines[line].decode().strip(), source[start:end].decode()
                yield Mutation(file, line + 1, node.name, text, start, before, after)


def _edits(node: ast.AST, starts: Sequence[int], source: bytes) -> Iterator[tuple[int, int, str]]:
    """Possible edits of a statement: first and last byte, and the replacement."""

    def at(line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return starts[line - 1] + column

    def operator(left: ast.expr, right: ast.expr, pattern: re.Pattern[bytes]) -> tuple[int, int]:
        begin = at(left.end_lineno, left.end_col_offset)
        text = source[begin : at(right.lineno, right.col_offset)]
        match = pattern.search(re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), text))
        assert match is not None
        return begin + match.start(), begin + match.end()

    if isinstance(node, ast.Assert | ast.FunctionDef | ast.AsyncFunctionDef):
        return  # functions inside have their own turn
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, kind, right in zip(operands, node.ops, node.comparators, strict=False):
            yield *operator(left, right, _COMPARISON), FLIPPED[type(kind)]
    elif isinstance(node, ast.BoolOp):
        other = "and" if isinstance(node.op, ast.Or) else "or"
        yield *operator(node.values[0], node.values[1], _AND_OR), other
    elif isinstance(node, ast.Constant | ast.stmt) and (after := _instead(node)):
        end = at(node.end_lineno, node.end_col_offset)
        yield at(node.lineno, node.col_offset), end, after
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name != "annotation":
                yield from _edits(child, starts, source)


def _instead(node: ast.Constant | ast.stmt) -> str:
    """Replacements of a node: the next number, or an empty text for a statement whose removal
    leaves no name undefined; none for other nodes."""
    match node:
        case ast.Constant(value=bool()):
            return ""
        case ast.Constant(value=int() | float() as number):
            return repr(number + 1)
        case ast.Assign(targets=targets):
            kinds = ast.Attribute | ast.Subscript
            return "pass" if all(isinstance(each, kinds) for each in targets) else ""
        case ast.Expr(value=ast.Call() | ast.Await()):
            return "pass"
        case ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            return "pass"
    return ""


def sample(
    worktree: Path, heart: Mapping[str, tuple[str, ...]], count: int, seed: int
) -> list[tuple[Mutation, tuple[str, ...]]]:
    """Select mutations, each with the tests to run."""
    by_key: dict[str, tuple[Mutation, tuple[str, ...]]] = {}
    for pattern, tests in heart.items():
        for path in sorted(worktree.glob(pattern)):
            for one in mutations(str(path.relative_to(worktree)), path.read_bytes()):
                by_key.setdefault(one.key(seed), (one, tests))
    return [by_key[key] for key in sorted(by_key)[:count]]


class Proof:
    """Runs the tests of a worktree. ``folder`` gives it its name, under which it is imported."""

    def __init__(self, worktree: Path, out: Path, folder: Path) -> None:
        (folder / "tandem").symlink_to(worktree)
        self._worktree = worktree
        self._out = out
        self._log = folder / "log"
        self._environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
        self._unmutated = {row["tests"]: row for row in read(out) if "tests" in row}

    def judge(self, one: Mutation, key: str, tests: Sequence[str]) -> None:
        """Run the tests with a mutation, and append the result."""
        for each in tests:
            if each not in self._unmutated:
                start = time.monotonic()
                _, failing = self._pytest(each, [], None)
                row = {"tests": each, "failing": failing, "seconds": time.monotonic() - start}
                self._unmutated[each] = row
                self._append(row)
        path = self._worktree / one.file
        original, start = path.read_bytes(), time.monotonic()
        try:
            _write(path, one.apply(original))
            result, by = self._noticed(tests)
        finally:
            _write(path, original)
        seconds = round(time.monotonic() - start, 1)
        self._append({"key": key, "result": result, "by": by, "seconds": seconds, **asdict(one)})

    def _noticed(self, tests: Sequence[str]) -> tuple[str, str]:
        """The result, and the test that noticed the mutation."""
        for each in tests:
            before = self._unmutated[each]
            arguments = ["-x", *(f"--deselect={name}" for name in before["failing"])]
            status, failing = self._pytest(each, arguments, 60 + 5 * before["seconds"])
            if status is None:
                return TOO_LONG, each
            if status:
                return CAUGHT, ", ".join(failing) or f"{each}: status {status}"
        return MISSED, ""

    def _pytest(
        self, tests: str, arguments: Sequence[str], seconds: float | None
    ) -> tuple[int | None, list[str]]:
        """Run pytest; returns its status (``None`` on timeout) and the names of the failed
        tests."""
        options = ["-q", f"--timeout={TEST_SECONDS}", "-p", "no:cacheprovider", *arguments]
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, tests],
                cwd=self._worktree,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None = None
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):  # also what it has left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = self._log.read_text(errors="replace")
        failing = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.M)
        return status, failing

    def _append(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        with self._out.open("a") as file:
            file.write(f"{line}\n")


def _write(path: Path, content: bytes) -> None:
    """Write a file and delete its bytecode, which would stay valid within the same second."""
    path.write_bytes(content)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def read(out: Path) -> list[dict[str, Any]]:
    """The results in a file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Results as a Markdown table with a summary."""
    lines = ["| place | mutation | result | by |", "|---|---|---|---|"]
    judged = [row for row in rows if "key" in row]
    for row in sorted(judged, key=lambda row: (row["result"], row["file"], row["line"])):
        change = " ".join(f"`{row['before']}` becomes `{row['after']}`".split()).replace("|", "\\|")
        lines.append(f"| {row['file']}:{row['line']} | {change} | {row['result']} | {row['by']} |")
    num_missed = sum(row["result"] == MISSED for row in judged)
    lines += ["", f"{len(judged)} mutations, of which {num_missed} are missed."]
    failing = {name for row in rows for name in row.get("failing", ())}
    lines += [f"Left out, for it fails without a mutation: {name}." for name in sorted(failing)]
    return "\n".join(lines) + "\n"


def prove(
    worktree: Path, heart: Mapping[str, tuple[str, ...]], out: Path, *, count: int, seed: int
) -> None:
    """Judge the mutations without a result in the file. Raises ``SystemExit`` for a worktree with
    changes and for the checkout of this program."""
    worktree = worktree.resolve()
    if worktree == ROOT:
        sys.exit(f"{worktree} is the checkout that this runs from; give it another worktree")
    status = ["git", "-C", str(worktree), "status", "--porcelain", "--untracked-files=no"]
    if changes := subprocess.run(status, capture_output=True, text=True, check=True).stdout:
        sys.exit(f"{worktree} has changes, which `git checkout .` discards:\n{changes}")
    done_keys = {row.get("key") for row in read(out)}
    with tempfile.TemporaryDirectory() as folder:
        proof = Proof(worktree, out.resolve(), Path(folder))
        for one, tests in sample(worktree, heart, count, seed):
            if (key := one.key(seed)) not in done_keys:
                proof.judge(one, key, tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("worktree", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--table", action="store_true", help="only print what the file has")
    options = parser.parse_args()
    if not options.table:
        prove(options.worktree, HEART, options.out, count=options.count, seed=options.seed)
    print(table(read(options.out)))


if __name__ == "__main__":
    main()

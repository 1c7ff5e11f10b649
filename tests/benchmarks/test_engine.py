"""The benchmarks of the engine, as they are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tandem.benchmarks.engine import against_commit
from tandem.benchmarks.engine.__main__ import commands, startup_result

pytestmark = pytest.mark.usefixtures("forked_ranks")


def run(name: str, *arguments: str, out: Path) -> dict[str, Any]:
    """The result that a benchmark of the built-in model prints and writes."""
    command = [name, "builtin", "--threads=1", f"--output-json={out}", *arguments]
    done = CliRunner().invoke(commands(), command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(out.read_text())
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(result)
    return result


def test_latency_has_vllms_names(tmp_path: Path) -> None:
    batches = ("--num-iters=3", "--num-iters-warmup=1", "--output-len=2", "--batch-size=2")
    report = run("latency", *batches, out=tmp_path / "latency.json")
    assert list(report) == ["avg_latency", "std_latency", "latencies", "percentiles"]
    assert len(report["latencies"]) == 3 and report["avg_latency"] > 0
    assert list(report["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_throughput_counts_requests_and_tokens(tmp_path: Path) -> None:
    sizes = ("--num-prompts=3", "--random-input-len=5", "--random-output-len=2", "--n=2")
    report = run("throughput", *sizes, out=tmp_path / "throughput.json")
    assert list(report)[:5] == [
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
    ]
    assert (report["num_requests"], report["total_num_tokens"]) == (3, 3 * 5 + 3 * 2 * 2)


def test_starts_are_told_apart() -> None:
    assert list(startup_result("cold", [1.0])) == [
        "avg_cold_startup_time",
        "cold_startup_times",
        "cold_startup_percentiles",
    ]


def test_a_revision_that_does_not_exist_is_named() -> None:
    with (
        pytest.raises(SystemExit, match="'no-such-revision' is no commit of"),
        against_commit.checkout("no-such-revision"),
    ):
        pass

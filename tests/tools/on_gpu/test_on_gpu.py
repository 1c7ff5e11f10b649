"""The run on a GPU: the parts have limits, each and together, none stops the next, and a table
comes last, however the run ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tandem.benchmarks.node import gpu_engine
from tandem.benchmarks.support import gpu_predictions, report
from tandem.benchmarks.support.report import RESULTS
from tandem.tests.end_to_end.support.cluster import until
from tandem.tests.tools.on_gpu.parts import BAD, GOOD, LONG, PART
from tandem.tools.on_gpu import __main__ as on_gpu
from tandem.tools.on_gpu.__main__ import GpuPart, Outcome, Run, main

LACKING = GpuPart("lacking", PART, (), ("zmq_of_nowhere", "torch"), 60)
PROBE_REPORT = GpuPart("machine", PART, ("answers", "{out}"), (), 60)
FILES = {"GPU.md", "all.tgz", "on_gpu.json"}
BARE = Path(__file__).with_name("bare")


def results(out: Path) -> dict[str, tuple[str, str]]:
    rows = json.loads((out / "on_gpu.json").read_text())
    return {row["part"]: (row["result"], row["detail"]) for row in rows}


def has_ended(process: str) -> bool:
    """A container may have no process to reap it."""
    number = int(process)
    return not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_no_part_stops_the_next_and_the_table_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (BAD, LONG, LACKING, GOOD)
    assert main(["--out", str(tmp_path), "--device", "emulation"], parts) == 1
    captured = capsys.readouterr()
    child = re.search(r"^child (\d+)$", captured.out, re.M)
    assert child is not None and has_ended(child[1])  # a part's children end with it
    assert results(tmp_path) == {
        "bad": ("failed", "exit status 3; it fails"),
        "long": ("too long", f"over 5 s; child {child[1]}"),
        "lacking": ("not run", "first: pip install zmq_of_nowhere"),
        "good": ("passed", "it passes"),
    }
    assert captured.out.rstrip().endswith((tmp_path / "GPU.md").read_text().rstrip())
    assert "not passed: bad, long;" in captured.err
    assert {file.name for file in tmp_path.iterdir()} == FILES
    with tarfile.open(tmp_path / "all.tgz") as archive:
        assert archive.getnames() == ["bad.log", "good.log", "long.log"]
        log = archive.extractfile("good.log")
        assert log is not None and log.read() == b"it passes\n"


def test_what_could_not_run_is_no_failure(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--device", "emulation"], (GOOD, LACKING)) == 0


def test_a_part_that_the_machine_does_not_allow_is_left_out(tmp_path: Path) -> None:
    rejected = replace(GOOD, name="refused", probes=("good", "bad"))
    allowed = replace(GOOD, name="allowed", probes=("good", "not answered"))
    parts = (PROBE_REPORT, rejected, allowed)
    assert main(["--out", str(tmp_path), "--device", "emulation"], parts) == 0
    reported = results(tmp_path)
    assert reported["refused"] == ("not run", "the machine does not allow it: bad")
    assert reported["allowed"] == ("passed", "it passes")


def test_the_time_of_all_parts_is_shared_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "RESERVE_SECONDS", 0.0)
    monkeypatch.setattr(on_gpu, "MIN_SECONDS", 0.1)
    parts = (replace(LONG, seconds=300), GOOD)
    assert main(["--out", str(tmp_path), "--device", "emulation", "--seconds", "3"], parts) == 1
    reported = results(tmp_path)
    assert reported["long"][0] == "too long" and reported["long"][1].startswith("over 3 s")
    assert reported["good"] == ("not run", "no time is left")


def test_a_run_that_is_ended_still_writes_its_table(tmp_path: Path) -> None:
    script = (
        f"import sys; from tandem.tests.tools.on_gpu.parts import *; "
        f"sys.exit(main({['--out', str(tmp_path), '--device', 'emulation']!r}, "
        f"(GOOD, replace(LONG, seconds=300), BAD)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        output = ""
        while "child" not in output:  # each line comes at once
            output += (line := process.stdout.readline())
            assert line, output
        assert results(tmp_path) == {"good": ("passed", "it passes")}  # already
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=60)
    child = output.rpartition("child ")[2].strip()
    assert process.returncode == 1 and "not passed: long;" in errors
    assert results(tmp_path) == {
        "good": ("passed", "it passes"),
        "long": ("ended", f"with the run; child {child}"),
        "bad": ("not run", "the run was ended"),
    }
    assert rest.rstrip().endswith((tmp_path / "GPU.md").read_text().rstrip())
    assert {file.name for file in tmp_path.iterdir()} == FILES
    until(lambda: has_ended(child), "the part's child to end")


def test_without_a_device_no_part_runs_and_each_reports_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "has_cuda", lambda: False)
    assert main(["--out", str(tmp_path)]) == 1
    reported = results(tmp_path)
    assert set(reported) == {part.name for part in on_gpu.PARTS}
    assert set(reported.values()) == {("not run", "no CUDA device")}
    assert capsys.readouterr().err.count("\n") == 1


def test_a_machine_with_torch_and_few_other_packages_is_enough(tmp_path: Path) -> None:
    """Of the real parts, those that need no more packages; and the others say what they need."""
    command = [sys.executable, "-P", "-m", "tandem.tools.on_gpu", "--device", "emulation"]
    only = ("machine", "engine 0.6B", "driver", "cuda ipc", "handoff", "cluster")
    environment = os.environ | {"PYTHONPATH": str(BARE)}
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--only", *only],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    reported = results(tmp_path)
    assert {name for name, (result, _) in reported.items() if result == "passed"} == {*only[:3]}
    for name in only[3:]:
        assert reported[name][0] == "not run" and "first: pip install pyzmq" in reported[name][1]
    assert "probe ipc: yes" in done.stdout and "API: " in done.stdout


def test_what_a_machine_lacks_can_be_fetched_with_all_that_it_needs() -> None:
    names = {each.partition("==")[0] for each in on_gpu.lacking(on_gpu.PARTS, "3.12")}
    assert {"pyzmq", "pydantic", "pydantic-core", "starlette", "grpcio", "protobuf"} <= names
    assert not names & (on_gpu.there() - {"grpcio", "protobuf"})
    command = on_gpu.download(on_gpu.PARTS, "3.12")
    assert " --no-deps " in command and "pyzmq==" in command and "\n" not in command


def test_what_serving_needs_is_there_or_fetched() -> None:
    pyproject = tomllib.loads((on_gpu.ROOT / "pyproject.toml").read_text())
    needs = {
        re.split(r"[<>=;\[ ]", each)[0].replace("_", "-")
        for each in pyproject["project"]["optional-dependencies"]["serve"]
    }
    fetched = {each.partition("==")[0] for each in on_gpu.lacking(on_gpu.PARTS, "3.12")}
    assert needs <= on_gpu.there() | fetched


def test_the_parts_fit_a_command_of_ten_minutes_and_packages_are_named_as_pip_does() -> None:
    assert max(part.seconds for part in on_gpu.PARTS) <= 180
    assert on_gpu.PARTS[0].name == "machine"
    assert on_gpu.missing(["torch", "zmq_"]) == ["zmq_"]
    assert on_gpu._DISTRIBUTIONS["zmq"] == "pyzmq"


def test_a_part_that_had_no_time_is_in_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_gpu, "MIN_SECONDS", 1e6)
    parts = (replace(GOOD, name="good one", seconds=1e7), LACKING)
    assert main(["--out", str(tmp_path), "--device", "emulation"], parts) == 0
    assert capsys.readouterr().out.endswith("--out DIR --only 'good one'\n")


@pytest.mark.skipif(not (on_gpu.ROOT / ".git").exists(), reason="not a checkout")
def test_what_is_to_be_carried_is_small_enough() -> None:
    checkout = re.search(r"ignore, (\d+) MiB", on_gpu.carried())
    assert checkout is not None and int(checkout[1]) < 40  # of 64, with the packages


def test_predictions_are_in_the_results() -> None:
    assert gpu_predictions.predicted_table() in (RESULTS / "GPU.md").read_text()


def test_predictions_of_the_engine_are_those_of_figures_that_are_measured() -> None:
    measured = set()
    for shape in gpu_engine.SHAPES.values():
        steps = [f"decode {rows} x {context}" for rows, context in shape.decodes]
        steps += [f"prefill {length}" for length in shape.prompts]
        kinds = ("step", "between steps", "of a product", "of the roofline")
        measured |= {f"{shape.name} {step}: {kind}" for step in steps for kind in kinds}
        measured |= {f"{shape.name} {rows} x {tokens}: API" for rows, _, tokens in shape.api}
        measured.add(f"{shape.name}: capture of graphs")
    predicted = {
        metric
        for metric in gpu_predictions.PREDICTIONS
        if metric.startswith(tuple(gpu_engine.SHAPES)) and metric != gpu_predictions.HTTP
    }
    assert predicted - {gpu_predictions.EXPOSED} <= measured


def test_figures_of_all_benchmarks_are_beside_bars_and_predictions(tmp_path: Path) -> None:
    step = {"metric": "Qwen3-0.6B decode 1 x 128: step", "value": 1.5, "unit": "ms"}
    gain = {"metric": gpu_predictions.FP8_GAIN.format("64 x 4096"), "value": 1.7, "unit": "x"}
    product = {"metric": "product Q4_0, 8 rows", "value": 17.4, "unit": "us", "share": 0.64}
    for name, row in (("gpu_engine", step), ("gpu_attention", gain), ("gpu_products", product)):
        (tmp_path / f"{name}.json").write_text(json.dumps([row | {"device": "NVIDIA H200"}]))
    run = Run(tmp_path, tmp_path, "emulation", 10)
    run.outcomes.append(Outcome("engine", "passed", 3.0, "well"))
    text = run.report()
    assert text.startswith("# Measured on NVIDIA H200\n")
    assert "| 1.5 ms | <=1.2 | **no** | 0.6 to 0.9 ms |  |" in text
    assert "| 1.7 x | >=1.6 | yes |  |  |" in text
    assert "| product Q4_0, 8 rows | 17.4 us |  |  |  | 0.64 |" in text
    assert "| Qwen3-0.6B 256 x 1024: API | not measured | >=30000 |" in text
    assert "engine  passed  3        well" in text


def test_a_bar_is_not_above_what_is_predicted() -> None:
    for device in ("H100", "H200"):
        for one in gpu_predictions.predictions_for(device).values():
            if one.bar and one.low is not None and one.high is not None:
                ends = (one.low, one.high)
                assert any(report.holds(one.bar, end) for end in ends), one


def test_the_time_between_steps_is_the_usual_longest_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engine, "PROFILED", 4)
    spans = [(float(step), step + 0.7) for step in range(4)]
    spans += [(step + 0.72, step + 0.8) for step in range(4)]
    assert gpu_engine.longest_gap(spans) == pytest.approx(0.2)
    assert gpu_engine.longest_gap([]) == 0


def test_limits_are_those_of_published_sizes() -> None:
    qwen, llama, experts = gpu_engine.SHAPES.values()
    assert qwen.weight_bytes(1) == pytest.approx(1.19e9, rel=0.01)
    assert llama.weight_bytes(64) == pytest.approx(15.0e9, rel=0.01)
    assert (qwen.kv_bytes, llama.kv_bytes) == (114_688, 131_072)
    # 3.3 thousand million parameters of the whole model compute a token.
    assert 4 * experts.weight_bytes(1) == pytest.approx(2 * (3.3e9 + 3 * 0.31e9), rel=0.1)
    assert llama.prompt_operations(8192) == pytest.approx(1.32e14, rel=0.01)

"""The run on a GPU: each part has a limit, none stops the next, and a table comes last."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tandem.tests import on_gpu
from tandem.tests.benchmarks.node import gpu_engine
from tandem.tests.benchmarks.support import gpu_predictions
from tandem.tests.benchmarks.support.report import RESULTS
from tandem.tests.on_gpu import GpuPart, main

# What these do is in the module that they run.
GOOD = GpuPart("good", "tandem.tests.gpu.on_gpu_part", ("passes",), ("torch",))
BAD = GpuPart("bad", "tandem.tests.gpu.on_gpu_part", ("fails",), ())
LONG = GpuPart("long", "tandem.tests.gpu.on_gpu_part", ("hangs", "{out}"), (), 5.0)
LACKING = GpuPart("lacking", "tandem.tests.gpu.on_gpu_part", (), ("zmq_of_nowhere", "torch"))


def results(out: Path) -> dict[str, tuple[str, str]]:
    rows = json.loads((out / "on_gpu.json").read_text())
    return {row["part"]: (row["result"], row["detail"]) for row in rows}


def test_no_part_stops_the_next_and_the_table_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (BAD, LONG, LACKING, GOOD)
    assert main(["--out", str(tmp_path), "--device", "emulation"], parts) == 1
    assert results(tmp_path) == {
        "bad": ("failed", "exit status 3; it fails"),
        "long": ("too long", "over 5 s; it hangs"),
        "lacking": ("not run", "first: pip install zmq_of_nowhere"),
        "good": ("passed", "it passes"),
    }
    told = capsys.readouterr()
    assert told.out.rstrip().endswith((tmp_path / "on_gpu.txt").read_text().rstrip())
    assert "not passed: bad, long;" in told.err
    child = int((tmp_path / "child").read_text())
    # A part's children end with it; a container may have no process to reap them.
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_what_could_not_run_is_no_failure(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--device", "emulation"], (GOOD, LACKING)) == 0


def test_without_a_device_no_part_runs_and_each_reports_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "has_cuda", lambda: False)
    assert main(["--out", str(tmp_path)]) == 1
    found = results(tmp_path)
    assert set(found) == {part.name for part in on_gpu.PARTS}
    assert set(found.values()) == {("not run", "no CUDA device")}
    assert capsys.readouterr().err.count("\n") == 1


def test_the_limits_fit_into_half_an_hour_by_far_and_packages_are_named_as_pip_does() -> None:
    assert max(part.seconds for part in on_gpu.PARTS) <= 480
    assert on_gpu.missing(["torch", "zmq_"]) == ["zmq_"]
    assert on_gpu._DISTRIBUTIONS["zmq"] == "pyzmq"


def test_the_predictions_are_those_of_figures_that_are_measured() -> None:
    measured = {
        f"{shape.name} {kind}: {side}"
        for shape in gpu_engine.shapes(small=False)
        for side in ("step", "API")
        for kind in (
            *(f"decode {rows} x {context}" for rows, context in gpu_engine.ON_GPU.decodes),
            *(f"prefill {length}" for length in gpu_engine.ON_GPU.prompts),
        )
    }
    others = {"copy on the GPU, read and written", "bfloat16 product of 8192 x 8192"}
    others.add(gpu_predictions.CARRIER)
    assert set(gpu_predictions.PREDICTIONS) - measured == others


def test_the_table_of_predictions_is_up_to_date() -> None:
    """Until it has been filled on a GPU, after which its predictions still stand there."""
    written = (RESULTS / "GPU.md").read_text()
    for line in gpu_predictions.table({}).splitlines():
        assert line.removesuffix(f"{gpu_predictions.UNMEASURED} |") in written


def test_figures_of_all_benchmarks_are_beside_the_predictions(tmp_path: Path) -> None:
    limit = {"metric": "Llama-3-8B decode 1 x 128: API", "value": 140.0, "unit": "tok/s"}
    alone = {"metric": "carrier alone: out of the ring", "value": 300.0, "ratio": 0.125}
    (tmp_path / "gpu_engine.json").write_text(json.dumps([limit]))
    (tmp_path / "handoff_cuda_ipc.json").write_text(json.dumps([alone]))
    text = on_gpu.figures(tmp_path)
    assert "| 130 to 145 tok/s | 200 tok/s | 140 tok/s |" in text
    assert "| 0.1 to 0.15 |  | 0.125 |" in text


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    text = gpu_predictions.table({"Qwen3-0.6B decode 1 x 128: API": 170.26, "something else": 3.0})
    assert "| 155 to 220 tok/s | 2,500 tok/s | 170.3 tok/s |" in text
    assert "| something else | | | 3 |" in text


def test_limits_are_those_of_published_sizes() -> None:
    qwen, llama = gpu_engine.shapes(small=False)
    assert qwen.weight_bytes == pytest.approx(1.19e9, rel=0.01)
    assert llama.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert (qwen.kv_bytes, llama.kv_bytes) == (114_688, 131_072)

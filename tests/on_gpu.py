"""All that only a CUDA device can show, in one go and with the interpreter that runs it:

    python -m tandem.tests.on_gpu --out DIR

Every part is a process of its own with a time limit, and the next one runs whatever became of it.
Parts whose packages are not installed are left out, with the reason. A table comes last, and is in
``DIR`` with each part's output. From a checkout that is not installed:

    mkdir -p P && ln -s "$PWD" P/tandem && PYTHONPATH=P python -m tandem.tests.on_gpu --out DIR

Packages that a machine lacks and cannot download may be brought along, for the same version of
Python: ``pip install --target P PACKAGE ...`` with those that the table names.

``--device emulation`` tries the parts without a GPU, over stand-ins; that measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from tandem.tests.benchmarks.support import gpu_predictions as predictions
from tandem.tests.benchmarks.support.gpu_predictions import CARRIER

ROOT = Path(__file__).parent.parent
DEVICES = ("cuda", "emulation")
_PYTEST = ("pytest", "torch")
_PLANE = ("zmq", "msgpack", "xxhash")
# Where a package is installed by another name than it is imported by.
_DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "grpc": "grpcio",
    "prometheus_client": "prometheus-client",
}


@dataclass(frozen=True)
class GpuPart:
    """One process: a module that is run with arguments, in which ``{out}`` and ``{device}`` stand
    for this run's own. ``needs`` are packages beside the interpreter's."""

    name: str
    module: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    seconds: float = 300.0


def tests(name: str, *files: str, needs: tuple[str, ...] = (), seconds: float = 300.0) -> GpuPart:
    """A part of test files. Plugins that are missing leave settings in pyproject.toml that pytest
    does not know."""
    options = ("-q", "-c", "{root}/pyproject.toml", "-p", "no:cacheprovider")
    harmless = ("-W", "ignore::pytest.PytestConfigWarning")
    paths = tuple(f"{{root}}/{file}" for file in files)
    return GpuPart(name, "pytest", (*options, *harmless, *paths), (*_PYTEST, *needs), seconds)


PARTS = (
    GpuPart("machine", "tandem.tests.gpu.machine", (), ("torch",), 60.0),
    tests(
        "kernels",
        "tests/kernels/test_row_sums.py",
        "tests/kernels/test_paged_decode.py",
        needs=("triton",),
    ),
    tests(
        "models",
        "tests/shared/models/test_on_device.py",
        needs=("triton", "transformers", "safetensors", "msgpack"),
    ),
    tests("driver", "tests/shared/handoff/carriers/test_cuda_driver.py"),
    tests("device", "tests/shared/handoff/carriers/test_gpu.py", needs=_PLANE),
    tests(
        "cuda ipc",
        "tests/shared/handoff/carriers/test_cuda_ipc.py",
        "tests/shared/handoff/carriers/test_cuda_ipc_caches.py",
        needs=(*_PLANE, "hypothesis"),
    ),
    tests(
        "cluster",
        "tests/end_to_end/parity/test_cuda_ipc.py",
        needs=(
            *_PLANE,
            "fastapi",
            "grpc",
            "uvicorn",
            "httptools",
            "prometheus_client",
            "rich",
            "transformers",
        ),
        seconds=420.0,
    ),
    GpuPart(
        "engine",
        "tandem.tests.benchmarks.node.gpu_engine",
        ("--out", "{out}", "--device", "{device}"),
        ("torch", "triton", "safetensors"),
        480.0,
    ),
    GpuPart(
        "handoff",
        "tandem.tests.benchmarks.handoff_cuda_ipc",
        ("--out", "{out}", "--device", "{device}"),
        ("torch", *_PLANE),
        300.0,
    ),
)


BAD = ("failed", "too long")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part: ``passed``, ``not run`` or one of ``BAD``."""

    part: str
    result: str
    seconds: float
    detail: str


def missing(packages: Iterable[str]) -> list[str]:
    """Those that are not installed, by the names that pip knows."""
    absent = [name for name in dict.fromkeys(packages) if find_spec(name) is None]
    return [_DISTRIBUTIONS.get(name, name) for name in absent]


def run(part: GpuPart, out: Path, device: str) -> Outcome:
    """Run a part to its end or its limit; its output goes to a file of its own."""
    if absent := missing(part.needs):
        return Outcome(part.name, "not run", 0.0, f"first: pip install {' '.join(absent)}")
    values = {"out": out, "device": device, "root": ROOT}
    arguments = [each.format(**values) for each in part.arguments]
    log = out / f"{part.name.replace(' ', '_')}.log"
    begun = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", part.module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    spent = time.monotonic() - begun
    last = _last_line(log)
    if status is None:
        return Outcome(part.name, "too long", spent, f"over {part.seconds:g} s; {last}")
    if status:
        return Outcome(part.name, "failed", spent, f"exit status {status}; {last}")
    return Outcome(part.name, "passed", spent, last)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = next((line for line in reversed(lines) if line), "no output")
    return re.sub(r"^=+ | =+$", "", said)[:160]


def table(outcomes: Sequence[Outcome]) -> str:
    """Outcomes in columns."""
    rows = [("part", "result", "seconds", "detail")]
    rows += [(o.part, o.result, f"{o.seconds:.0f}", o.detail) for o in outcomes]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]).rstrip())
    return "\n".join(lines) + "\n"


def has_cuda() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def figures(out: Path) -> str:
    """The benchmarks' figures next to the predictions; empty if they have not run."""
    measured = {}
    for name in ("gpu_engine", "handoff_cuda_ipc"):
        file = out / f"{name}.json"
        for row in json.loads(file.read_text()) if file.is_file() else ():
            measured[row["metric"]] = row["value"]
            if row["metric"] == CARRIER.partition(",")[0]:
                measured[CARRIER] = row["ratio"]
    return predictions.table(measured) if measured else ""


def main(arguments: Sequence[str] | None = None, parts: Sequence[GpuPart] = PARTS) -> int:
    parser = argparse.ArgumentParser(
        "on_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is written")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    names = [part.name for part in parts]
    parser.add_argument("--only", choices=names, nargs="+", help="these parts alone")
    options = parser.parse_args(arguments)
    chosen = [part for part in parts if part.name in (options.only or names)]
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    here = options.device == "emulation" or has_cuda()
    outcomes = []
    for part in chosen:
        if here:
            print(f"== {part.name}", flush=True)
            outcome = run(part, out, options.device)
        else:
            outcome = Outcome(part.name, "not run", 0.0, "no CUDA device")
        outcomes.append(outcome)
        (out / "on_gpu.json").write_text(json.dumps([asdict(o) for o in outcomes], indent=2))
    text = table(outcomes)
    if measured := figures(out):
        (out / "GPU.md").write_text(measured)
        text += f"\n{measured}"
    (out / "on_gpu.txt").write_text(text)
    print(text, flush=True)
    if not here:
        print("on_gpu: there is no CUDA device here; see --device emulation", file=sys.stderr)
        return 1
    bad = [outcome.part for outcome in outcomes if outcome.result in BAD]
    if bad:
        print(f"on_gpu: not passed: {', '.join(bad)}; see {out}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

"""All checks and benchmarks that need a CUDA device, in one run of this interpreter:

    python -m tandem.tools.on_gpu --out DIR [--seconds 540]

The first part probes the machine, and parts that it does not support are skipped. Each part is a
process with a time limit, and a failure does not stop the run. The most valuable parts come first,
and together they take at most ``--seconds``; the last line is the command for those that had no
time. Output is forwarded immediately. ``DIR`` gets three files, rewritten after each part and on
SIGTERM: ``GPU.md`` with figures beside bars and predictions, ``on_gpu.json`` with the outcomes, and
``all.tgz`` with the parts' output. The table is printed at the end. From a checkout that is not
installed:

    mkdir -p P && ln -s "$PWD" P/tandem && PYTHONPATH=P python -m tandem.tools.on_gpu --out DIR

Parts whose packages are missing are skipped, with the reason. For a machine without network access,
``--wheels 3.12``, run elsewhere, prints the command that downloads the packages and their
dependencies for that version of Python, and what has to be carried there.

``--device emulation`` runs the parts without a GPU as a smoke test; it measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import FrameType
from typing import IO, Any

from tandem.benchmarks.support import gpu_predictions as predictions
from tandem.benchmarks.support.gpu_predictions import EXPERTS, LLAMA, QWEN
from tandem.tests.support.emulation import ENVIRONMENT as EMULATION

ROOT = Path(__file__).parents[2]
PACKAGES = Path(__file__).with_name("packages.txt")
WHEELS = ".whl"
MIB = 1 << 20
DEVICES = ("cuda", "emulation")
_PYTEST = ("pytest", "torch")
_PLANE = ("zmq", "msgpack", "xxhash")
_CLUSTER = (
    *_PLANE,
    "msgspec",
    *("fastapi", "grpc", "uvicorn", "httptools", "prometheus_client", "rich", "pydantic"),
    *("transformers", "pytest_asyncio", "llguidance", "limits", "cryptography", "click", "yaml"),
    "python_multipart",
)
# Distributions whose name is not that of their module.
_DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "grpc": "grpcio",
    "yaml": "pyyaml",
    "prometheus_client": "prometheus-client",
    "pytest_asyncio": "pytest-asyncio",
    "python_multipart": "python-multipart",
    "xdist": "pytest-xdist",
}
# Generated stubs require these at the versions installed here.
_AS_NEW = ("grpcio", "protobuf")
_PLATFORMS = tuple(
    f"--platform manylinux{kind}_x86_64"
    for kind in ("_2_35", "_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")
)
# Part of ``--seconds`` reserved for the table.
RESERVE_SECONDS = 5.0
# Minimum time left to start a part.
MIN_SECONDS = 8.0
# How many times its limit a part may take in emulation.
EMULATED_TIMES = 4
# As in ranks, so that results are the same.
ENVIRONMENT = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TRITON_DEFAULT_FP_FUSION": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class GpuPart:
    """One process: a module and its arguments, with ``{out}``, ``{device}`` and ``{root}`` as
    placeholders. ``needs`` are the required packages, ``probes`` the required probes of the first
    part. ``under`` is a program that runs the interpreter on a GPU; ``emulated`` are more arguments
    for an emulated one."""

    name: str
    module: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    seconds: float
    probes: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()


def tests(
    name: str,
    *files: str,
    seconds: float,
    needs: tuple[str, ...] = (),
    probes: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    under: tuple[str, ...] = (),
    emulated: tuple[str, ...] = (),
) -> GpuPart:
    """A part that runs test files. Warnings are no errors here, because library versions differ,
    and missing plugins leave settings unknown to pytest."""
    usual = ("-q", "-c", "{root}/pyproject.toml", "-p", "no:cacheprovider", "-W", "default")
    paths = tuple(f"{{root}}/{file}" for file in files)
    arguments = (*usual, *options, *paths)
    needs = (*_PYTEST, *needs)
    return GpuPart(name, "pytest", arguments, needs, seconds, probes, under, emulated)


def benchmark(
    name: str,
    module: str,
    *needs: str,
    seconds: float,
    probes: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> GpuPart:
    """A part that runs a benchmark."""
    arguments = ("--out", "{out}", "--device", "{device}", *options)
    return GpuPart(name, f"tandem.{module}", arguments, ("torch", *needs), seconds, probes)


_KERNELS = (
    "tests/kernels/test_paged_decode.py",
    "tests/kernels/test_chunk_attention.py",
    "tests/kernels/test_fused.py",
    "tests/kernels/test_step_inputs.py",
    "tests/kernels/test_latent_on_gpu.py",
    "tests/kernels/test_quantized_on_gpu.py",
    "tests/kernels/test_experts_on_gpu.py",
    "tests/kernels/test_scaled_linear.py",
    "tests/kernels/test_routing_on_gpu.py",
    "tests/shared/engine/rank/test_gpu_sampler.py",
)
_IPC = ("memfd", "ipc")
_TRITON = ("triton",)
# Tests of what is tried at a start, which launch each kernel once.
_TRIALS = ("-k", "trial or tries")


def engine(name: str, shape: str, *, seconds: float) -> GpuPart:
    """The engine with a model of this shape."""
    module, needs = "benchmarks.node.gpu_engine", ("triton", "safetensors", "tokenizers")
    options = ("--shape", shape)
    return benchmark(name, module, *needs, seconds=seconds, probes=_TRITON, options=options)


# Most valuable first: what is wrong, then how fast one engine is, then several together, then what
# was measured before.
PARTS = (
    benchmark("machine", "tools.on_gpu.machine", seconds=45),
    tests(
        "kernels",
        *_KERNELS,
        "tests/kernels/test_row_sums.py",
        "tests/kernels/test_frame_copy.py",
        needs=("triton", "xdist", "gguf"),
        probes=_TRITON,
        options=("-n", "8"),
        emulated=_TRIALS,
        seconds=100,
    ),
    tests(
        "models",
        "tests/shared/models/test_on_device.py",
        needs=("triton", "transformers", "safetensors", "msgspec", "xdist"),
        probes=_TRITON,
        options=("-n", "8"),
        seconds=100,
    ),
    benchmark("fused", "benchmarks.node.gpu_fused", "triton", seconds=60, probes=_TRITON),
    engine("engine 0.6B", QWEN, seconds=130),
    engine("engine 8B", LLAMA, seconds=110),
    benchmark("attention", "benchmarks.node.gpu_attention", "triton", seconds=60, probes=_TRITON),
    engine("engine experts", EXPERTS, seconds=60),
    benchmark("handoff", "benchmarks.handoff_cuda_ipc", *_PLANE, seconds=45, probes=_IPC),
    tests(
        "cluster",
        "tests/end_to_end/parity/test_cuda_ipc.py",
        needs=_CLUSTER,
        probes=(*_IPC, "triton"),
        seconds=60,
    ),
    benchmark("serving", "benchmarks.gpu_serving", *_CLUSTER, seconds=130, probes=_TRITON),
    tests(
        "sanitizer",
        *_KERNELS,
        needs=("triton",),
        probes=_TRITON,
        options=_TRIALS,
        emulated=("--collect-only",),  # as "kernels"
        seconds=60,
        under=("compute-sanitizer", "--error-exitcode", "9"),
    ),
    tests("driver", "tests/shared/handoff/carriers/test_cuda_driver.py", seconds=30),
    tests(
        "device",
        "tests/shared/handoff/carriers/test_gpu.py",
        needs=_PLANE,
        seconds=20,
    ),
    tests(
        "cuda ipc",
        "tests/shared/handoff/carriers/test_cuda_ipc.py",
        "tests/shared/handoff/carriers/test_cuda_ipc_caches.py",
        needs=(*_PLANE, "hypothesis"),
        probes=_IPC,
        seconds=45,
    ),
    benchmark(
        "sweep",
        "benchmarks.node.gpu_attention",
        "triton",
        seconds=60,
        probes=_TRITON,
        options=("--sweep",),
    ),
    benchmark("products", "benchmarks.node.gpu_products", "triton", seconds=110, probes=_TRITON),
)


PASSED, FAILED, TOO_LONG, ENDED, NOT_RUN = "passed", "failed", "too long", "ended", "not run"
BAD = (FAILED, TOO_LONG, ENDED)
NO_TIME = "no time is left"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part: ``passed``, ``not run`` or one of ``BAD``."""

    part: str
    result: str
    seconds: float
    detail: str


class RunEndedError(BaseException):
    """The run received SIGTERM."""


def missing(packages: Iterable[str]) -> list[str]:
    """The packages that are not installed, by their names on PyPI."""
    absent = [name for name in dict.fromkeys(packages) if find_spec(name) is None]
    return [_DISTRIBUTIONS.get(name, name) for name in absent]


class Run:
    """A sequential run of parts. Their output and figures go to ``folder``, the three files to
    ``out``."""

    def __init__(self, out: Path, folder: Path, device: str, seconds: float) -> None:
        self._out = out
        self._folder = folder
        self._device = device
        self._end = time.monotonic() + seconds - RESERVE_SECONDS
        self.outcomes: list[Outcome] = []

    def run(self, parts: Sequence[GpuPart]) -> None:
        """Run all parts, or until SIGTERM."""
        remaining = list(parts)
        try:
            while remaining:
                print(f"== {remaining[0].name}", flush=True)
                outcome = self._one(remaining[0])
                self._note(outcome)
                remaining.pop(0)
        except RunEndedError:
            first, *rest = remaining
            self._note(Outcome(first.name, ENDED, 0.0, f"with the run; {self._last_line(first)}"))
            for part in rest:
                self._note(Outcome(part.name, NOT_RUN, 0.0, "the run was ended"))

    def leave_out(self, parts: Sequence[GpuPart], reason: str) -> None:
        """Record all parts as not run."""
        for part in parts:
            self._note(Outcome(part.name, NOT_RUN, 0.0, reason))

    def _one(self, part: GpuPart) -> Outcome:
        """Run a part to its end or its time limit, or skip it if a requirement is missing."""
        if reason := self._unfit(part):
            return Outcome(part.name, NOT_RUN, 0.0, reason)
        remaining = self._end - time.monotonic()
        allowed = part.seconds * (EMULATED_TIMES if self._device == "emulation" else 1)
        if remaining < min(allowed, MIN_SECONDS):
            return Outcome(part.name, NOT_RUN, 0.0, NO_TIME)
        limit, start = min(allowed, remaining), time.monotonic()
        status = self._process(part, limit)
        elapsed, last = time.monotonic() - start, self._last_line(part)
        if status is None:
            return Outcome(part.name, TOO_LONG, elapsed, f"over {limit:.0f} s; {last}")
        if status:
            return Outcome(part.name, FAILED, elapsed, f"exit status {status}; {last}")
        return Outcome(part.name, PASSED, elapsed, last)

    def _unfit(self, part: GpuPart) -> str:
        if absent := missing(part.needs):
            return f"first: pip install {' '.join(absent)}"
        if self._under(part) and which(part.under[0]) is None:
            return f"there is no {part.under[0]}"
        results = self._json("machine.json") or {}
        failed = [name for name in part.probes if results.get(name) is False]
        return f"the machine does not allow it: {', '.join(failed)}" if failed else ""

    def _under(self, part: GpuPart) -> tuple[str, ...]:
        return () if self._device == "emulation" else part.under

    def _process(self, part: GpuPart, limit: float) -> int | None:
        """Run the process; returns its exit status, or ``None`` at the time limit."""
        values = {"out": self._folder, "device": self._device, "root": ROOT}
        emulated = self._device == "emulation"
        arguments = [each.format(**values) for each in part.arguments]
        arguments += part.emulated if emulated else ()
        emulation = {EMULATION: "1"} if emulated else {}
        deadline = time.monotonic() + limit
        with self._log(part).open("wb") as log:
            process = subprocess.Popen(
                [*self._under(part), sys.executable, "-m", part.module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=ENVIRONMENT | os.environ | emulation,
            )
            try:
                assert process.stdout is not None
                _pass_on(process.stdout, log, deadline)
                return process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)

    def _note(self, outcome: Outcome) -> None:
        """Record an outcome and rewrite the files, because the run may end at any time."""
        self.outcomes.append(outcome)
        rows = json.dumps([asdict(each) for each in self.outcomes], indent=2)
        _replace(self._out / "on_gpu.json", rows.encode())
        _replace(self._out / "GPU.md", self.report().encode())
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for file in sorted(self._folder.iterdir()):
                archive.add(file, arcname=file.name)
        _replace(self._out / "all.tgz", packed.getvalue())

    def report(self) -> str:
        """Figures beside bars and predictions, and the outcomes."""
        files = (self._folder / f"{name}.json" for name in self._figures())
        rows = [row for file in files for row in json.loads(file.read_text())]
        measured = {row["metric"]: row for row in rows}  # limits are of the last process
        device = next((row["device"] for row in rows), "nothing")
        figures = predictions.table(list(measured.values()), device)
        return f"{figures}\n```\n{table(self.outcomes)}```\n"

    def _figures(self) -> list[str]:
        """The names of the files with figures, in the order of the parts."""
        files = [file for file in self._folder.glob("gpu_*.json") if file.stat().st_size]
        return [file.stem for file in sorted(files, key=lambda file: file.stat().st_mtime)]

    def rest(self) -> list[str]:
        """The parts that had no time."""
        return [each.part for each in self.outcomes if each.detail == NO_TIME]

    def _json(self, name: str) -> Any:
        file = self._folder / name
        return json.loads(file.read_text()) if file.is_file() else None

    def _log(self, part: GpuPart) -> Path:
        return self._folder / f"{part.name.replace(' ', '_')}.log"

    def _last_line(self, part: GpuPart) -> str:
        log = self._log(part)
        text = log.read_text(errors="replace") if log.is_file() else ""
        lines = [line.strip() for line in text.splitlines()]
        last_line = next((line for line in reversed(lines) if line), "no output")
        return re.sub(r"^=+ | =+$", "", last_line)[:160]


def _pass_on(source: IO[bytes], log: IO[bytes], deadline: float) -> None:
    """Copy a part's output to its log and to stdout until it ends or its time is up."""
    while (remaining := deadline - time.monotonic()) > 0:
        if not select.select([source], [], [], remaining)[0]:
            return
        data = os.read(source.fileno(), 1 << 16)
        if not data:
            return
        log.write(data)
        log.flush()
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _replace(file: Path, content: bytes) -> None:
    """Replace a file atomically: a kill leaves the old or the new version."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
        new.write(content)
    os.chmod(new.name, 0o644)
    os.replace(new.name, file)


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


# ---- packages that a machine lacks ---------------------------------------------------------------


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def there() -> set[str]:
    """The packages of a typical machine."""
    lines = PACKAGES.read_text().splitlines()
    return {name for line in lines if not line.startswith("#") for name in line.split()}


def lacking(parts: Sequence[GpuPart], python: str) -> list[str]:
    """Packages needed beyond those of a typical machine, with their dependencies, at the versions
    installed here."""
    from packaging.requirements import Requirement

    has = there()
    distributions = [_DISTRIBUTIONS.get(name, name) for part in parts for name in part.needs]
    remaining = [*_AS_NEW, *(name for name in distributions if _normal(name) not in has)]
    versions: dict[str, str] = {}
    while remaining:
        name = _normal(remaining.pop())
        if name in versions:
            continue
        package = importlib.metadata.distribution(name)
        versions[name] = package.version
        needs = [Requirement(each) for each in package.requires or ()]
        environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
        remaining += [
            each.name
            for each in needs
            if _normal(each.name) not in has
            and (each.marker is None or each.marker.evaluate(environment))
        ]
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def download(parts: Sequence[GpuPart], python: str) -> str:
    """The command that downloads the missing packages."""
    lines = [
        f"python3 -m pip download --no-deps --only-binary=:all: --python-version {python}",
        "--implementation cp",
        *_PLATFORMS,
        f"-d {WHEELS}",
        *lacking(parts, python),
    ]
    return " ".join(lines)


def carried() -> str:
    """What has to be copied to the machine: the checkout without what git ignores, of which nothing
    is needed there, and the packages."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    listed = subprocess.run(
        [*command, "--exclude-standard"], capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    checkout = sum(file.stat().st_size for file in files if file.is_file())
    wheels = sum(file.stat().st_size for file in (ROOT / WHEELS).glob("*.whl"))
    return (
        f"To carry: the files that git does not ignore, {checkout / MIB:.0f} MiB, and {WHEELS}/, "
        f"{wheels / MIB:.0f} MiB so far. There:\n"
        f"python3 -m pip install -q --no-index --no-deps --target /tmp/site {WHEELS}/*.whl && "
        f'mkdir -p /tmp/P && ln -sfn "$PWD" /tmp/P/tandem && '
        f"PYTHONPATH=/tmp/site:/tmp/P python3 -m tandem.tools.on_gpu --out DIR"
    )


def main(arguments: Sequence[str] | None = None, parts: Sequence[GpuPart] = PARTS) -> int:
    parser = argparse.ArgumentParser(
        "on_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the three files")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--seconds", type=float, default=540.0, help="of all parts (default: 540)")
    names = [part.name for part in parts]
    parser.add_argument("--only", choices=names, nargs="+", help="these parts alone")
    parser.add_argument("--wheels", metavar="PYTHON", help="print how to fetch what is missing")
    options = parser.parse_args(arguments)
    selected = [part for part in parts if part.name in (options.only or names)]
    if options.wheels:
        print(download(selected, options.wheels))
        print(carried())
        return 0
    if options.out is None:
        parser.error("--out: which folder?")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    here = options.device == "emulation" or has_cuda()
    with tempfile.TemporaryDirectory(prefix="on-gpu-") as folder:
        run = Run(out, Path(folder), options.device, options.seconds)
        before = signal.signal(signal.SIGTERM, _on_terminate)
        try:
            if here:
                run.run(selected)
            else:
                run.leave_out(selected, "no CUDA device")
        finally:
            signal.signal(signal.SIGTERM, before)
        print(run.report(), flush=True)
        if run.rest():
            rest = shlex.join(run.rest())
            print(f"next: python -m tandem.tools.on_gpu --out DIR --only {rest}", flush=True)
    if not here:
        print("on_gpu: there is no CUDA device here; see --device emulation", file=sys.stderr)
        return 1
    bad = [outcome.part for outcome in run.outcomes if outcome.result in BAD]
    if bad:
        print(f"on_gpu: not passed: {', '.join(bad)}; see {out}", file=sys.stderr)
    return int(bool(bad))


def _on_terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once
    raise RunEndedError


if __name__ == "__main__":
    sys.exit(main())

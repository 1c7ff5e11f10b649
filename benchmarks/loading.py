"""Loading of weights compared with reading their files, and its memory use.

    python -m tandem.benchmarks.loading [--only bf16 Q8_0 Q4_K_M q4k]

Each 1.2 GB model is loaded and packed for CPU matrix products in its own process with a rank's
environment. Loads and reads alternate and the ratio is the median over the pairs, because the
machine is shared. A read copies every byte of the file into new memory with the same number of
threads: once from disk and once from the page cache. A first load compiles the kernels and is
discarded; imports are reported separately. The host of a virtual machine takes back memory that is
free, so memory is touched before each measurement. q4k is the bf16 model under ``--isq q4k``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tandem.benchmarks.support.report import benchmark_parser, publish

KINDS = ("bf16", "Q8_0", "Q4_K_M", "q4k")
ISQ = "q4k"
# More bytes than a load or a read takes, with the page cache.
_TOUCHED = 4 << 30


def measure(kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the report for one kind of model."""
    from tandem.shared.engine.executor import ENVIRONMENT

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = _write(kind, Path(folder))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tandem.benchmarks.loading", "--load", str(model)),
                *("--only", kind, f"--threads={options.threads}", f"--rounds={options.rounds}"),
            ],
            env=ENVIRONMENT | os.environ,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    report = json.loads(done.stdout.splitlines()[-1])
    size = report["bytes"] / 1e9
    goal = "<=30" if kind == ISQ else "<=1.5"
    return [
        _row(kind, f"load of {kind} from the disk, {size:.2f} GB", report["cold"], goal),
        _row(kind, f"load of {kind} from the page cache", report["warm"], None),
        {
            "metric": f"CPU time of that, {kind}",
            "value": statistics.median(load for load, _ in report["cpu"]),
            "unit": "s",
            "against": f"reading ({statistics.median(read for _, read in report['cpu']):.2f} s)",
            "ratio": statistics.median(load / read for load, read in report["cpu"]),
        },
        {
            "metric": f"peak of memory above the loaded model, {kind}",
            "value": report["above"] / 1e6,
            "unit": "MB",
        },
        {"metric": f"loaded model, {kind}", "value": report["kept"] / 1e6, "unit": "MB"},
        {"metric": f"imports before, {kind}", "value": report["imports"], "unit": "s"},
    ]


def _row(
    kind: str, metric: str, pairs: list[tuple[float, float]], goal: str | None
) -> dict[str, Any]:
    loads, reads = zip(*pairs, strict=True)
    row: dict[str, Any] = {
        "metric": metric,
        "value": statistics.median(loads),
        "unit": "s",
        "against": f"reading ({statistics.median(reads):.2f} s)",
    }
    if kind != ISQ:  # its goal is in seconds
        row["ratio"] = statistics.median(load / read for load, read in pairs)
    return row | ({"goal": goal} if goal else {})


def _write(kind: str, folder: Path) -> Path:
    from tandem.benchmarks.support.random_gguf import Shape, write_random_gguf
    from tandem.benchmarks.support.random_model import QWEN3_600M, write_random_model

    if kind in ("bf16", ISQ):
        write_random_model(folder, QWEN3_600M)
        return folder
    shape = Shape(
        architecture="qwen3",
        hidden=2048,
        layers=16 if kind == "Q8_0" else 30,
        heads=16,
        kv_heads=8,
        ffn=6144,
    )
    file = folder / "model.gguf"
    write_random_gguf(file, shape, kind, QWEN3_600M.vocab)
    return file


def load_and_read(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Pairs of load and read seconds, and peak memory in bytes, in this process."""
    start = time.perf_counter()
    import torch

    torch.set_num_threads(options.threads)
    from tandem.shared.engine.device import operators_for
    from tandem.shared.weights.load import load_model

    operators = operators_for(torch.device("cpu"), cpu_kernels="compiled")
    imports = time.perf_counter() - start
    isq = ISQ if options.only == [ISQ] else None
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))

    def load() -> object:
        return load_model(model, operators=operators, isq=isq)

    load()

    def read() -> None:
        _read(files, options.threads)

    cold, warm, cpu = [], [], []
    for _ in range(options.rounds):
        (cold_load, _), (cold_read, _) = (_seconds(each, files) for each in (load, read))
        cold.append((cold_load, cold_read))
        loaded, was_read = _seconds(load), _seconds(read)
        warm.append((loaded[0], was_read[0]))
        cpu.append((loaded[1], was_read[1]))
    _free()
    before = _memory("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    weights = load()
    after = _memory("VmRSS")
    return {
        "cold": cold,
        "warm": warm,
        "cpu": cpu,
        "bytes": sum(file.stat().st_size for file in files),
        "imports": imports,
        "above": _memory("VmHWM") - after,
        "kept": _memory("RssAnon") - before if weights else 0,
    }


def _free() -> None:
    """Return freed memory to the system, so that each load starts as in a fresh process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _touch() -> None:
    import torch

    torch.ones(_TOUCHED, dtype=torch.uint8)


def _seconds(work: Callable[[], object], cold: Sequence[Path] = ()) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a load, after evicting some files from the page cache."""
    _free()
    for file in cold:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    _touch()
    start, before = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - before


def _read(files: list[Path], threads: int) -> None:
    import torch

    def part(file: Path, into: Any, first: int) -> None:
        with file.open("rb", buffering=0) as opened:
            opened.seek(first)
            while into:
                into = into[opened.readinto(into) :]

    for file in files:
        size = file.stat().st_size
        data = torch.empty(size, dtype=torch.uint8).numpy().data
        ends = [size * number // threads for number in range(threads + 1)]
        readers = [
            threading.Thread(target=part, args=(file, data[first:end], first))
            for first, end in pairwise(ends)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=7)
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", help="where models are written (default: the temporary one)")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load_and_read(Path(options.load), options)))
        return
    rows = [row for kind in options.only for row in measure(kind, options)]
    publish("loading", rows, dry=options.dry)


if __name__ == "__main__":
    main()

"""Reports of benchmarks: measurements and goals."""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def holds(goal: str, figure: float) -> bool | None:
    """True if a figure meets a goal such as ">=0.7"; ``None`` without a goal."""
    if not goal:
        return None
    for sign in (">=", "<=", ">", "<"):
        if goal.startswith(sign):
            return bool(_COMPARE[sign](figure, float(goal.removeprefix(sign))))
    raise ValueError(f"goal {goal!r} does not begin with one of {', '.join(_COMPARE)}")


def write(name: str, rows: Sequence[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write ``<name>.json`` into a folder; the name may begin with a sub-folder's.

    A row has metric, value and unit; goal, against (the baseline) and ratio are optional. The goal
    applies to the ratio if there is one, else to the value.
    """
    where = {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    full = []
    for row in rows:
        ratio = row.get("ratio")
        goal = row.get("goal", "")
        full.append(
            {
                "metric": row["metric"],
                "value": row["value"],
                "unit": row["unit"],
                "goal": goal,
                "holds": holds(goal, row["value"] if ratio is None else ratio),
                "against": row.get("against", ""),
                "ratio": ratio,
                **where,
            }
        )
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(full, indent=2) + "\n")
    return path


def publish(name: str, rows: Sequence[dict[str, Any]], *, dry: bool = False) -> None:
    """Print the rows, and write them unless the run is ``dry``."""
    for row in rows:
        figures = [f"{row['value']:.4g} {row['unit']}"]
        figures += [f"{key} {row[key]}" for key in ("goal", "against") if row.get(key)]
        if row.get("ratio") is not None:
            figures.append(f"ratio {row['ratio']:.3f}")
        print(f"{row['metric']}: {', '.join(figures)}")
    if not dry:
        print(write(name, rows))


def load_parser(
    description: str | None, *, streams: int, tokens: int, rounds: int
) -> argparse.ArgumentParser:
    """Parser for the options of a load benchmark, with these defaults."""
    parser = benchmark_parser(description, rounds=rounds)
    parser.add_argument("--streams", type=int, default=streams)
    parser.add_argument("--tokens", type=int, default=tokens, help="of each stream")
    return parser


def benchmark_parser(
    description: str | None, *, rounds: int | None = None
) -> argparse.ArgumentParser:
    """The options that benchmarks have: that of ``publish``, and where there are rounds, how
    many. The description is a module's, of which the first paragraph is shown."""
    summary = (description or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    add_dry(parser)
    return parser


def add_dry(parser: argparse.ArgumentParser) -> None:
    """Add the ``--dry`` option for ``publish``."""
    parser.add_argument("--dry", action="store_true", help="print, and write no results")


def machine() -> str:
    """Processor, cores that this process may use, and the accelerator if torch is loaded. Virtual
    machines often leave the model's number out; what it can multiply says more."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        fields = {name.strip(): value.split() for name, _, value in lines}
        model = " ".join(fields.get("model name", [model]))
        extensions = [
            name for name in ("avx512f", "avx512_bf16") if name in fields.get("flags", [])
        ]
        model = " ".join([model, *extensions])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{model}, {cores} cores"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        text += f", {torch.cuda.get_device_name()}"
    return text

"""Figures of benchmarks on a GPU, printed and written as they are measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tandem.benchmarks.support.gpu_predictions import COPY, PRODUCT, predictions_for

Figure = dict[str, Any]
NO_GPU = "nothing: emulated, no figure means anything"


def figure(metric: str, value: float, unit: str, share: float | None = None) -> Figure:
    """A figure with its bar. ``share`` is that of what the same run's copy or product allows."""
    row: Figure = {"metric": metric, "value": value, "unit": unit, "device": device_name()}
    if share is not None:
        row["share"] = share
    if (predicted := predictions_for(device_name()).get(metric)) is not None:
        row |= {"bar": predicted.bar, "predicted": str(predicted)}
    return row


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options of all benchmarks of a GPU."""
    options = argparse.ArgumentParser(
        name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, help="folder for the figures")
    options.add_argument("--device", choices=("cuda", "emulation"), default="cuda")
    return options


def run(name: str, options: argparse.Namespace, figures: Iterable[Figure]) -> int:
    """Print each figure at once, and write all so far to ``<name>.json``: a crash loses none."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"{name}: there is no CUDA device here, so there is nothing to measure")
        return 1
    rows = []
    for row in figures:
        rows.append(row)
        print(line(row), flush=True)
        if options.out is not None:
            (options.out / f"{name}.json").write_text(json.dumps(rows))
    return 0


def line(row: Figure) -> str:
    """A figure in a line."""
    parts = [f"{row['metric']}: {row['value']:.4g} {row['unit']}".rstrip()]
    parts += [f"{key} {row[key]}" for key in ("bar", "predicted") if row.get(key)]
    if "share" in row:
        parts.append(f"share {row['share']:.3f}")
    return ", ".join(parts)


def limits_of_run() -> Iterator[Figure]:
    """What the GPU of this run does, to which shares refer."""
    from tandem.benchmarks.support.gpu_timing import limits

    yield figure(COPY, limits().copy / 1e12, "TB/s")
    yield figure(PRODUCT, limits().product / 1e12, "TFLOP/s")

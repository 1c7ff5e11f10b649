"""`tandem bench startup`: the time from an engine's creation until it takes requests.

Each start has a process of its own. Cold ones have empty folders for compiled kernels; weights come
from wherever the system has them, so the first start may also read them from a disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ...shared.config import EngineConfig
from ...shared.errors import BenchmarkError
from ..progress_bar import progress_bar
from ..report.figures import mean
from ..report.result_file import check_writable, write_result
from .engine_latency import percentiles_by_word
from .engine_options import engine_config

PHASES = ("cold", "warm")


def run_startup(values: Mapping[str, Any]) -> None:
    """The whole command."""
    check_writable(values["output_json"])
    config = engine_config(values)
    counts = {
        "cold": values["num_iters_cold"],
        "warm-up": values["num_iters_warmup"],
        "warm": values["num_iters_warm"],
    }
    times: dict[str, list[float]] = {phase: [] for phase in counts}
    with progress_bar("Starts", sum(counts.values()), hidden=values["disable_tqdm"]) as advance:
        for phase, count in counts.items():
            for _ in range(count):
                times[phase].append(_cold(config) if phase == "cold" else _start(config, {}))
                advance()
    result: dict[str, Any] = {}
    for phase in PHASES:
        result |= startup_result(phase, times[phase])
        _print(phase, times[phase])
    if values["output_json"]:
        write_result(Path(values["output_json"]), result)


def startup_result(phase: str, seconds: list[float]) -> dict[str, Any]:
    """The figures under vLLM's names, but for those of compilation, which is no phase here."""
    return {
        f"avg_{phase}_startup_time": mean(seconds),
        f"{phase}_startup_times": seconds,
        f"{phase}_startup_percentiles": percentiles_by_word(seconds),
    }


def _print(phase: str, seconds: list[float]) -> None:
    if seconds:
        click.echo(f"\n{phase.upper()} STARTUP:")
        click.echo(f"Avg startup time: {mean(seconds):.2f} seconds")
        click.echo("Startup time percentiles:")
        for percent, value in percentiles_by_word(seconds).items():
            click.echo(f"  {percent}%: {value:.2f} seconds")


def _cold(config: EngineConfig) -> float:
    """A start without compiled kernels. Models of the hub stay where they are."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    models = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    with tempfile.TemporaryDirectory(prefix="tandem-cold-") as empty:
        return _start(
            config,
            {"XDG_CACHE_HOME": empty, "TRITON_CACHE_DIR": f"{empty}/triton", "HF_HOME": models},
        )


def _start(config: EngineConfig, environment: Mapping[str, str]) -> float:
    """Seconds that an engine took to start in a process of its own. Raises ``BenchmarkError``."""
    limit = config.start_timeout
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", f"{__package__}.engine_start"],
            input=json.dumps(asdict(config)),
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
        return float(done.stdout)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"the engine did not start within {limit:g} s") from None
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        raise BenchmarkError(f"the engine did not start: {last or done.returncode}") from None

"""The list of benchmarks that ``make bench`` runs."""

from __future__ import annotations

from importlib.util import find_spec

from tandem.benchmarks.run import BENCHMARKS


def test_every_listed_benchmark_exists() -> None:
    missing = [
        name for name, module in BENCHMARKS.items() if not find_spec(f"tandem.benchmarks.{module}")
    ]
    assert not missing

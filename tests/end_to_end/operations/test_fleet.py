"""The benchmark of many nodes, with few of them."""

from __future__ import annotations

from tandem.benchmarks.fleet import measure, parse, rows


def test_a_small_fleet_keeps_its_nodes() -> None:
    options = parse(["--nodes=4", "--seconds=1.5", "--keys=64"])
    report = measure(options)
    assert report["listed"] == 4
    assert not report["dropped"] and not report["joined again"] and not report["failed probes"]
    assert len(rows(options, report)) == len(report)

"""The benchmark of many nodes, with few of them."""

from __future__ import annotations

from tandem.benchmarks.fleet import measure, parse, rows


def test_a_small_fleet_keeps_its_nodes() -> None:
    options = parse(["--nodes=4", "--seconds=1.5", "--keys=64"])
    found = measure(options)
    assert found["listed"] == 4
    assert not found["dropped"] and not found["joined again"] and not found["failed probes"]
    assert len(rows(options, found)) == len(found)

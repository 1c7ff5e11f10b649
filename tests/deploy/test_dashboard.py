"""The dashboard asks for series that routers and nodes show, by labels that they have."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tandem.tests.support.metrics import families_of_nodes, registries

from .deployment import DEPLOY

DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "tandem.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SERIES = re.compile(r"((?:vllm:|tandem_)\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"by \(([^)]*)\)")
WIDTH = 24


def known_series() -> dict[str, set[str]]:
    """Every series by name, with its labels."""
    series: dict[str, set[str]] = {}
    for _, registry, added in registries():
        families = {
            name: set(getattr(collector, "_labelnames", ()))
            for name, collector in registry._names_to_collectors.items()
        }
        for name, labels in families.items():
            series[name] = labels | added | ({"le"} if name.endswith("_bucket") else set())
        for family in registry.collect():
            for sample in family.samples:
                series[sample.name] = series.get(sample.name, set()) | set(sample.labels) | added
    for family in families_of_nodes():
        for sample in family.samples:
            series[sample.name] = series.get(sample.name, set()) | set(sample.labels)
    return series


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    return known_series()


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_asks_for_what_there_is(panel: dict[str, Any], series: dict[str, set[str]]) -> None:
    assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        expression = target["expr"]
        selectors = SERIES.findall(expression)
        assert selectors, f"no series of ours in {expression}"
        for name, selector in selectors:
            assert name in series, f"{name} is not in /metrics"
            selected = set(re.findall(r"(\w+)\s*[=!]~?", selector))
            grouped = {label.strip() for by in BY.findall(expression) for label in by.split(",")}
            assert selected | grouped <= series[name], f"{name} has no such label: {expression}"
        placeholders = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert placeholders <= {
            label.strip() for by in BY.findall(expression) for label in by.split(",")
        }


def test_variables_are_declared_and_ask_for_what_there_is(series: dict[str, set[str]]) -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    references = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert references - {"__rate_interval"} == variables.keys()
    for variable in variables.values():
        if variable["type"] == "query":
            query = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["definition"])
            assert query
            name, label = query.groups()
            assert label in series[name]


def test_panels_lie_side_by_side() -> None:
    occupied: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & occupied and max(x for x, _ in cells) < WIDTH, panel["title"]
        occupied |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_what_should_stay_at_zero_has_every_door_and_every_loss() -> None:
    (panel,) = [panel for panel in PANELS if panel["title"] == "What should stay at zero"]
    names = {name for target in panel["targets"] for name, _ in SERIES.findall(target["expr"])}
    assert names >= {
        "tandem_requests_refused_total",
        "tandem_registry_requests_refused_total",
        "tandem_nodes_lost_total",
        "tandem_nodes_refused_total",
        "tandem_engine_steps_failed_total",
    }


def test_series_that_every_router_has_of_all_nodes_are_not_summed() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            if re.search(r"\btandem_nodes?_?\w*\b(?<!_total)", target["expr"]):
                assert target["expr"].startswith("max by")

"""``deploy/monitoring``: alert rules parse, their series exist, and they lead to the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.router.doctor.findings import NEVER_REMOTE
from tandem.router.options import RouterOptions
from tandem.shared.telemetry.prefill_origin import LocalReason
from tandem.tests.support.metrics import registries

from . import deployment as d
from .test_dashboard import known_series

MONITORING = d.DEPLOY / "monitoring"
(RULE_FILE,) = d.documents(MONITORING / "rules.yaml")
RULES = [rule for group in RULE_FILE["spec"]["groups"] for rule in group["rules"]]
# What Prometheus itself, or pod-monitor.yaml, gives every series.
TARGET = {"job", "instance", "namespace", "pod", "container", "endpoint", "tandem"}


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    return known_series() | {"up": set()}


def selectors(expression: Any) -> Iterator[Any]:
    """Every vector selector within a parsed expression."""
    import promql_parser as promql

    if isinstance(expression, promql.VectorSelector):
        yield expression
    elif isinstance(expression, promql.MatrixSelector):
        yield expression.vector_selector
    elif isinstance(expression, promql.BinaryExpr):
        yield from selectors(expression.lhs)
        yield from selectors(expression.rhs)
    elif isinstance(expression, promql.Call):
        for argument in expression.args:
            yield from selectors(argument)
    elif hasattr(expression, "expr"):
        yield from selectors(expression.expr)


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_asks_for_what_there_is(rule: d.Object, series: dict[str, set[str]]) -> None:
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    queried = list(selectors(promql.parse(rule["expr"])))
    assert queried
    for each in queried:
        assert each.name in series, f"{each.name} is on no /metrics page"
        labels = {matcher.name for matcher in each.matchers.matchers}
        assert labels <= series[each.name] | TARGET, f"{each.name} has no such label"
    grouped = re.findall(r"by \(([^)]*)\)", rule["expr"])
    by = {label.strip() for some in grouped for label in some.split(",")}
    label_names = set().union(*(series[each.name] for each in queried)) | TARGET
    placeholders = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert by | placeholders <= label_names


def events(expression: Any) -> Iterator[Any]:
    """The selectors of counters of which a single increase fires: ``increase(...) > 0``."""
    import promql_parser as promql

    if not isinstance(expression, promql.BinaryExpr):
        return
    is_increase = isinstance(expression.lhs, promql.Call) and expression.lhs.func.name == "increase"
    if is_increase and isinstance(expression.rhs, promql.NumberLiteral) and expression.rhs.val == 0:
        yield from selectors(expression.lhs)
    else:
        yield from events(expression.lhs)
        yield from events(expression.rhs)


def picks(selector: Any, sample: Any) -> bool:
    """Whether a selector of names and labels that are equal or match picks a sample."""
    matchers = [(m.name, str(m.op), m.value) for m in selector.matchers.matchers]
    assert {op for _, op, _ in matchers} <= {"MatchOp.Equal", "MatchOp.Re"}
    return selector.name == sample.name and all(
        re.fullmatch(value if op == "MatchOp.Re" else re.escape(value), sample.labels[name])
        for name, op, value in matchers
    )


def test_a_first_event_is_an_increase() -> None:
    """A series that appears with its first event has no increase, and its alert does not fire."""
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    counters = [each for rule in RULES for each in events(promql.parse(rule["expr"]))]
    names = {each.name for each in counters}
    assert {"tandem_canaries_total", "tandem_requests_refused_total"} <= names
    # Its alert compares a share, but a router may fail from its first request on.
    counters.append(promql.parse('tandem_request_errors_total{status=~"5.."}'))
    fresh = [
        sample
        for _, registry, _ in registries()
        for family in registry.collect()
        for sample in family.samples
    ]
    for each in counters:
        values = [sample.value for sample in fresh if picks(each, sample)]
        assert values and not any(values), f"{each} is on no page of a new process"


def test_heartbeats_are_late_before_their_node_is_lost() -> None:
    """The series of a node go after --node-timeout: no age stays above the alert's limit."""
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    (rule,) = [rule for rule in RULES if rule["alert"] == "TandemHeartbeatLate"]
    parsed, options = promql.parse(rule["expr"]), RouterOptions()
    assert options.heartbeat_period < parsed.rhs.val < options.node_timeout
    ages = parsed.lhs.expr
    assert ages.func.name == "max_over_time"
    # Late once is late in all windows of a range; the alert is for more than that.
    assert promql.parse_duration(rule["for"]) > ages.args[0].range
    series_values = re.findall(
        r"tandem_node_heartbeat_age_seconds.*?values: \"(.*?)\"",
        Path(__file__).with_name("alerts.yaml").read_text(),
        re.S,
    )
    samples = [each.partition("x")[0] for values in series_values for each in values.split()]
    assert samples and all(each == "_" or float(each) <= options.node_timeout for each in samples)


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_every_alert_links_to_the_runbook(rule: d.Object) -> None:
    text = (d.DEPLOY / "runbook.md").read_text()
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    (section,) = [
        s for s in sections if s.lower().startswith(rule["annotations"]["runbook"].lower())
    ]
    assert rule["alert"] in section, "the section does not name its alert"
    assert rule["labels"]["severity"] in ("warning", "critical")
    placeholders = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    groupings = re.findall(r"by \(([^)]*)\)", rule["expr"])
    if groupings:
        assert placeholders <= {label.strip() for label in groupings[0].split(",")}


def test_the_runbook_speaks_of_alerts_that_exist() -> None:
    alerts = set(re.findall(r"\bTandem[A-Z]\w+", (d.DEPLOY / "runbook.md").read_text()))
    assert alerts == {rule["alert"] for rule in RULES}


def test_bounds_that_rules_select_by_are_those_of_buckets() -> None:
    """A rule that selects by one that never comes never fires."""
    from tandem.router.telemetry import vllm_series

    bounds = {
        f'le="{float(bound):g}"' for bound in (*vllm_series.FIRST_TOKEN, *vllm_series.BETWEEN)
    }
    buckets = {match for rule in RULES for match in re.findall(r'\ble="[^"]*"', rule["expr"])}
    assert buckets <= bounds


def test_prompts_that_stay_local_by_choice_are_no_alarm() -> None:
    """As for the doctor, and where the decode node is faster."""
    (rule,) = [rule for rule in RULES if rule["alert"] == "TandemPrefilledLocally"]
    (excluded,) = re.findall(r'reason!~"([^"]*)"', rule["expr"])
    assert set(excluded.split("|")) == NEVER_REMOTE | {LocalReason.FASTER_HERE}


@pytest.mark.skipif(not d.KUBECTL, reason=d.NO_KUBECTL)
def test_prometheus_scrapes_every_page_and_may_connect() -> None:
    (monitor,) = d.documents(MONITORING / "pod-monitor.yaml")
    (policy,) = d.documents(MONITORING / "network-policy.yaml")
    endpoints = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    admitted = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    for name in d.OVERLAYS:
        objects = d.build(d.DEPLOY / name)
        for workload in d.servers(objects):
            assert d.matches(monitor["spec"]["selector"], d.labels(workload))
            assert d.matches(policy["spec"]["podSelector"], d.labels(workload))
            for container in d.pod(workload)["containers"]:
                pages = {n: p for n, p in d.ports(container).items() if n in endpoints}
                assert len(pages) == 1 and {*pages.values()} <= admitted
    assert 'job="tandem"' in str(RULES)
    assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/name"


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULE_FILE["spec"]))
    shutil.copy(Path(__file__).with_name("alerts.yaml"), tmp_path)
    for arguments in (["check", "rules", "rules.yaml"], ["test", "rules", "alerts.yaml"]):
        done = subprocess.run(
            [promtool, *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr

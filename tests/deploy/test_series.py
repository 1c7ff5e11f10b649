"""The series that the operator's table names are on the pages, with the labels that it names."""

from __future__ import annotations

import re

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.node_table import NodeTable
from tandem.router.telemetry.metrics import Metrics

from .deployment import DEPLOY, ROOT
from .test_dashboard import known_series

ROW = re.compile(r"^\| ((?:`[\w:{},]+`(?:, )?)+) \| (R|N|R N|R, N) \|", re.M)
NAME = re.compile(r"`([\w:]+)(?:\{([\w,]+)\})?`")
NAMED = [
    (name, set(labels.split(",")) - {""})
    for row in ROW.finditer((DEPLOY / "README.md").read_text())
    for name, labels in NAME.findall(row[1])
]
REFERENCE = ROOT / "docs" / "metrics.md"
# The labels of these are known with the first sample only.
UNSEEN = {"tandem_prompts_recent"}


def test_the_table_is_read() -> None:
    assert len(NAMED) > 25


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    return known_series()


@pytest.mark.parametrize(("name", "labels"), NAMED, ids=[name for name, _ in NAMED])
def test_what_the_table_names_is_shown(
    name: str, labels: set[str], series: dict[str, set[str]]
) -> None:
    histogram = f"{name}_bucket"
    if name not in UNSEEN:
        assert labels <= series[name if name in series else histogram]


def test_the_reference_of_metrics_has_every_series_of_a_router_with_nodes() -> None:
    nodes = NodeTable(1.0)
    nodes.join(pb.JoinRequest(node_id="d", role=pb.ROLE_DECODE), "127.0.0.1:1")
    page = Metrics(nodes).render().decode()
    exported = set(re.findall(r"^# TYPE (\S+) ", page, re.M))
    documented = set(re.findall(r"^\| `(\S+)` \|", REFERENCE.read_text(), re.M))
    assert {name for name in exported - documented if not name.endswith("_created")} == set()

"""The output of ``tandem doctor``: a survey of a cluster and its findings, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToDict
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...proto import tandem_pb2 as pb
from ...proto.roles import role_name
from ...shared.errors import UsageError
from ...shared.host_port import bracketed
from .findings import Finding
from .survey import Survey, SurveyedNode

WIDTH = 200
# A node's status without its model and metrics.
_SHOWN = ("ready", "draining", "load", "refused", "version", "capabilities")


def as_json(survey: Survey, findings: Sequence[Finding]) -> str:
    """A JSON object with every field."""
    report = {
        "healthy": not any(finding.wrong for finding in findings),
        "findings": [
            {name: getattr(finding, name) for name in ("wrong", "subject", "problem", "remedy")}
            for finding in findings
        ],
        "router": {"url": survey.url, "registry": survey.registry},
        "nodes": [_node_fields(node) for node in survey.nodes],
        "pairs": [{"decode_node": decode, **_fields(pair)} for decode, pair in survey.reports()],
    }
    return json.dumps(report, indent=2)


def host_of(url: str) -> str:
    """The host of a router's URL, as in an address. Raises ``UsageError``."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.hostname is None:
        raise UsageError(f"{url!r} is not a router's address, such as http://127.0.0.1:8000")
    return bracketed(parts.hostname)


def as_text(survey: Survey, findings: Sequence[Finding]) -> str:
    """Tables of nodes and pairs, then the findings."""
    # A file or a pipe needs no folding.
    terminal = Console()
    console = Console(width=None if terminal.is_terminal else WIDTH)
    with console.capture() as capture:
        _show(survey, findings, console)
    return capture.get().rstrip("\n")


def _show(survey: Survey, findings: Sequence[Finding], console: Console) -> None:
    if survey.nodes:
        console.print(_nodes(survey))
    if survey.pairs:
        console.print(_pairs(survey))
    for finding in findings:
        mark = "[red]wrong[/]" if finding.wrong else "[yellow]note[/]"
        text = f"{finding.subject}: {finding.problem}. What to do: {finding.remedy}."
        console.print(f"{mark} {escape(text)}", soft_wrap=True)
    if not any(finding.wrong for finding in findings):
        count = len(survey.nodes)
        console.print(f"All well: the router and {count} node{'s' * (count != 1)}.")


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table with narrow gaps, for terminals of 80 columns."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _nodes(survey: Survey) -> Table:
    versions = {node.info.version for node in survey.nodes}
    one_version = versions.pop() if len(versions) == 1 else ""
    title = f"Nodes, all of version {escape(one_version)}" if one_version else "Nodes"
    texts = ["node", "role", "state", *(() if one_version else ("version",)), "address"]
    numbers = ("heartbeat\ns", "reply\nms", "free\nblocks", "leases", "trans-\nfers")
    table = _table(title, texts, numbers)
    for node in survey.nodes:
        info, load = node.info, node.info.load
        table.add_row(
            escape(info.node_id),
            role_name(info.role),
            _state(node),
            *(() if one_version else (escape(info.version),)),
            escape(info.address),
            f"{info.heartbeat_age_seconds:.1f}",
            f"{node.status.seconds * 1000:.0f}",
            f"{load.free_blocks}/{load.total_blocks}",
            str(load.leases),
            str(load.transfers),
        )
    return table


def _pairs(survey: Survey) -> Table:
    table = _table(
        "KV paths, each tested just now; MB/s is the rate of past transfers",
        ("from", "to", "carrier", "canary"),
        ("canary\nms", "round\ntrip ms", "KV\nMB/s"),
    )
    for decode, pair in survey.reports():
        table.add_row(escape(pair.node_id), escape(decode), *_measured(pair))
    return table


def _measured(pair: pb.PairReport) -> tuple[str, ...]:
    rate = pair.tokens_per_second * pair.bytes_per_token / 1e6
    return (
        pair.carrier or "-",
        "failed" if pair.problem else "passed",
        "-" if pair.problem else f"{pair.canary_seconds * 1000:.0f}",
        f"{pair.round_trip_seconds * 1000:.1f}" if pair.round_trip_seconds else "-",
        f"{rate:.0f}" if rate else "unknown",
    )


def _state(node: SurveyedNode) -> str:
    if node.status.reply is None:
        return "silent"
    if node.info.draining:
        return "draining"
    if node.info.unreachable:
        return "unreachable"
    return "ready" if node.status.reply.ready else "starting"


def _node_fields(node: SurveyedNode) -> dict[str, Any]:
    fields = {"reply_seconds": node.status.seconds, "problem": node.status.problem}
    status = _fields(node.status.reply) if node.status.reply is not None else {}
    return {**_fields(node.info), **fields, "status": {n: status[n] for n in _SHOWN if n in status}}


def _fields(message: Any) -> dict[str, Any]:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )

"""Findings: surveys with one problem each."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.absent_nodes import MAX_ABSENT, RETENTION_SECONDS, AbsentNodes
from tandem.router.doctor.findings import Finding, findings
from tandem.router.doctor.report import as_json, as_text
from tandem.router.doctor.survey import MAX_PAIRS, RpcResult, Survey, SurveyedNode, plan_pairs
from tandem.shared.telemetry.process_metrics import EXPIRY
from tandem.shared.telemetry.prompt_metrics import PROMPTS, RECENT

LOAD = pb.Load(free_blocks=5, total_blocks=9)
CARD = pb.ModelCard(fingerprint="layers=2")


def node(role: pb.Role, name: str, **status: Any) -> SurveyedNode:
    info = pb.NodeInfo(
        node_id=name, epoch=7, role=role, address=f"{name}:1", version="1", load=LOAD
    )
    values: dict[str, Any] = {
        "node_id": name,
        "epoch": 7,
        "ready": True,
        "load": LOAD,
        "model": CARD,
    } | status
    return SurveyedNode(info, RpcResult(0.01, pb.StatusReply(**values)))


def unreachable(surveyed: SurveyedNode) -> SurveyedNode:
    surveyed.info.unreachable = "the router cannot reach it: no route"
    return surveyed


def examined(**fields: Any) -> dict[str, RpcResult]:
    pair = pb.PairReport(node_id="p", address="p:1", **fields)
    return {"d": RpcResult(0.1, pb.ExamineReply(pairs=[pair]))}


def many(left_out: int) -> dict[str, RpcResult]:
    """The results of a decode node that left out some pairs."""
    results = examined(carrier="tcp")
    results["d"].reply.left_out = left_out
    return results


def healthy(**changes: Any) -> Survey:
    well = Survey(
        url="http://r:8000",
        registry="r:8001",
        health=RpcResult(0.01, {}),
        ready=RpcResult(0.01, {}),
        listing=RpcResult(0.01, pb.ListReply(version="1")),
        nodes=[node(pb.ROLE_PREFILL, "p"), node(pb.ROLE_DECODE, "d")],
        pairs=examined(carrier="tcp", canary_seconds=0.02),
        encrypted=True,
    )
    return replace(well, **changes)


def with_node(surveyed: SurveyedNode) -> Survey:
    """The healthy cluster with another prefill node."""
    return healthy(nodes=[surveyed, node(pb.ROLE_DECODE, "d")])


def late(surveyed: SurveyedNode) -> SurveyedNode:
    surveyed.info.heartbeat_age_seconds = 2.5
    return surveyed


def at_one_host(carrier: str) -> Survey:
    survey = healthy(pairs=examined(carrier=carrier))
    for each in survey.nodes:
        each.info.address = f"p:{each.info.role}"
    return survey


def absent(**fields: Any) -> Survey:
    entry = pb.AbsentNode(node_id="gone", role=pb.ROLE_PREFILL, address="g:1", **fields)
    return healthy(listing=RpcResult(0.01, pb.ListReply(version="1", absent=[entry])))


def metric(name: str, value: float, **labels: str) -> pb.Metric:
    return pb.Metric(name=name, value=value, labels=labels)


def test_lateness_depends_on_the_routers_heartbeat_period() -> None:
    seldom = RpcResult(0.01, pb.ListReply(version="1", heartbeat_seconds=5.0))
    assert findings(replace(with_node(late(node(PREFILL, "p"))), listing=seldom)) == []


@pytest.mark.parametrize(
    ("decode", "prefill", "each"),
    [(0, 5, 0), (3, 0, 0), (2, 3, 3), (1, 500, 64), (500, 500, 4), (2000, 7, 1), (3000, 3000, 1)],
)
def test_each_node_is_examined_as_often_as_another(decode: int, prefill: int, each: int) -> None:
    plan = plan_pairs(decode, prefill, turn=3)
    assert {len(indices) for indices in plan} <= {each}
    assert all(len(set(indices)) == len(indices) for indices in plan)
    assert len(plan) * each <= MAX_PAIRS
    if plan:
        assert len(plan) == min(decode, MAX_PAIRS)
        counts = Counter(at for indices in plan for at in indices)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert len(counts) == min(prefill, len(plan) * each)


def test_a_healthy_cluster_has_no_findings() -> None:
    assert findings(healthy()) == []
    assert findings(at_one_host("shared_memory")) == []


PREFILL = pb.ROLE_PREFILL
SLOTS = "tandem_data_plane_staging_slots"


@pytest.mark.parametrize(
    ("survey", "problem", "remedy"),
    [
        (
            healthy(health=RpcResult(3, problem="refused")),
            "does not answer at http",
            "tandem router",
        ),
        (healthy(ready=RpcResult(0, problem="stopping")), "is not ready: stopping", "log"),
        (
            healthy(listing=RpcResult(3, problem="x"), nodes=[]),
            "registry does not answer",
            "--router",
        ),
        (healthy(nodes=[node(PREFILL, "p")], pairs={}), "no decode node", "tandem decode-node"),
        (absent(refused=True, reason="layers is 2"), "rejected 0 s ago: layers is 2", "the model"),
        (absent(reason="was silent for 3 s"), "silent for 3 s and was dropped", "stopped"),
        (absent(reason="rank 0 ended", failed=True), "left 0 s ago: rank 0 ended", "its log"),
        (
            with_node(unreachable(node(PREFILL, "p"))),
            "the router cannot reach it: no route",
            "between the router's machine",
        ),
        (with_node(node(PREFILL, "p", epoch=8)), "another process", "--advertise"),
        (
            with_node(SurveyedNode(node(PREFILL, "p").info, RpcResult(3, problem="no answer"))),
            "does not answer at p:1: no answer",
            "--port",
        ),
        (
            with_node(node(PREFILL, "p", model=pb.ModelCard(fingerprint="layers=3"))),
            "runs another model than p",
            "same model",
        ),
        (
            healthy(pairs=examined(problem="other KV", cause="canary")),
            "KV cannot move: other KV",
            "same weights",
        ),
        (
            healthy(pairs=examined(problem="no bytes", cause="timeout_greet")),
            "KV cannot move: no bytes",
            "--kv-port",
        ),
        (healthy(pairs=examined(problem="?", cause="news")), "KV cannot move", "logs of both"),
        (
            healthy(pairs=examined(problem="?", cause="peer_lost", round_trip_seconds=0.012)),
            "KV cannot move",
            "in 12 ms, so unless it is overloaded (see its log), large packets are lost",
        ),
        (
            healthy(pairs={"d": RpcResult(9, problem="slow")}),
            "could not be examined: slow",
            "again",
        ),
    ],
)
def test_problems_are_reported_with_a_remedy(survey: Survey, problem: str, remedy: str) -> None:
    [finding] = findings(survey)
    assert finding.wrong and problem in finding.problem and remedy in finding.remedy
    assert f"wrong {finding.subject}: {finding.problem}" in as_text(survey, [finding])
    assert json.loads(as_json(survey, [finding]))["healthy"] is False


def prefilled(*prompts: tuple[str, str, int], series: str = RECENT) -> Survey:
    """A survey in which the decode node recently prefilled these prompts: side, reason, count."""
    series_metrics = [
        metric(series, count, where=where, reason=why) for where, why, count in prompts
    ]
    return healthy(nodes=[node(PREFILL, "p"), node(pb.ROLE_DECODE, "d", metrics=series_metrics)])


@pytest.mark.parametrize(
    ("reason", "wrong"),
    [
        ("failed: peer_lost", True),
        ("all prefill nodes refused", True),
        ("faster here", False),
        ("no prefill node", False),
    ],
)
def test_prefill_nodes_without_prompts_are_reported(reason: str, wrong: bool) -> None:
    survey = prefilled(("local", reason, 7), ("local", "below threshold", 100))
    [finding] = findings(survey)
    assert finding.wrong is wrong
    assert "received no prompt in the last 5 minutes" in finding.problem
    assert f"prefilled 7 themselves that were long enough ({reason}: 7)" in finding.problem


def test_prefill_nodes_that_never_got_a_prompt_are_reported_where_there_are_few() -> None:
    [finding] = findings(prefilled(("local", "failed: peer_lost", 5), series=PROMPTS))
    assert finding.wrong and "no prompt since the decode nodes started" in finding.problem
    once = prefilled(("local", "failed: peer_lost", 500), ("remote", "", 1), series=PROMPTS)
    assert findings(once) == []


@pytest.mark.parametrize(
    "prompts",
    [
        [("local", "below threshold", 100), ("local", "nothing missing", 100)],
        [("local", "pooling", 100), ("local", "prompt logprobs", 100)],
        [("local", "failed: peer_lost", 4)],
        [("local", "failed: peer_lost", 40), ("remote", "", 1)],
    ],
)
def test_prefill_nodes_without_prompts_are_not_reported_if_none_were_long(
    prompts: list[Any],
) -> None:
    assert findings(prefilled(*prompts)) == []
    without = prefilled(("local", "failed: peer_lost", 7))
    assert "received no prompt" not in repr(findings(replace(without, nodes=without.nodes[1:])))


@pytest.mark.parametrize(
    ("files", "judged"), [(100, None), (800, None), (801, False), (950, False), (951, True)]
)
def test_a_process_with_few_files_left_is_reported(files: int, judged: bool | None) -> None:
    counts = metric("process_open_fds", files), metric("process_max_fds", 1000)
    of_router = pb.ListReply(version="1", open_files=files, open_file_limit=1000)
    for subject, survey in (
        ("prefill node p", with_node(node(PREFILL, "p", metrics=counts))),
        ("router", healthy(listing=RpcResult(0.01, of_router))),
    ):
        results = findings(survey)
        assert [one.wrong for one in results] == ([] if judged is None else [judged])
        for one in results:
            assert one.subject == subject and f"{files} of the 1000 files" in one.problem
            assert "ulimit" in one.remedy and "LimitNOFILE" in one.remedy


@pytest.mark.parametrize(
    ("days", "problem"), [(15, ""), (3, "--tls-cert ends in 3 days"), (-1, "--tls-cert has ended")]
)
def test_certificates_that_expire_soon_are_reported(days: int, problem: str) -> None:
    ends = metric(EXPIRY, 1000.0 + 86400 * days, file="--tls-cert")
    results = findings(replace(with_node(node(PREFILL, "p", metrics=[ends])), timestamp=1000.0))
    assert [problem in one.problem and one.wrong == (days < 0) for one in results] == (
        [True] if problem else []
    )


@pytest.mark.parametrize(
    ("survey", "problem"),
    [
        (healthy(nodes=[node(pb.ROLE_DECODE, "d")], pairs={}), "no prefill node"),
        (with_node(node(PREFILL, "p", draining=True)), "drains"),
        (
            healthy(unexamined=99),
            "of 100 pairs of a prefill and a decode node 1 were examined",
        ),
        (healthy(pairs=many(left_out=36)), "of 37 pairs of a prefill and a decode node 1"),
        (with_node(late(node(PREFILL, "p"))), "last heartbeat is 2.5 s old"),
        (with_node(node(PREFILL, "p", load=pb.Load(total_blocks=9))), "none of its 9 KV blocks"),
        (
            healthy(listing=RpcResult(0, pb.ListReply(version="2"))),
            "the router runs 2, but: p 1, d 1",
        ),
        (
            with_node(
                node(
                    PREFILL,
                    "p",
                    metrics=[metric("tandem_data_plane_checksum_failures_total", 2, rank="0")],
                )
            ),
            "2 frames of KV",
        ),
        (
            with_node(
                node(
                    PREFILL,
                    "p",
                    metrics=[metric(SLOTS, 8, state="held"), metric(SLOTS, 0, state="free")],
                )
            ),
            "all 8 slots",
        ),
        (healthy(encrypted=False), "no TLS: p:1, d:1"),
        (at_one_host("tcp"), "over TCP, although both"),
    ],
)
def test_advice_does_not_make_a_cluster_unhealthy(survey: Survey, problem: str) -> None:
    [finding] = findings(survey)
    assert not finding.wrong and problem in finding.problem
    assert json.loads(as_json(survey, [finding]))["healthy"] is True
    assert "All well" in as_text(survey, [finding])


def test_rates_are_shown_as_what_they_are() -> None:
    survey = healthy(
        pairs=examined(
            carrier="tcp",
            canary_seconds=0.02,
            round_trip_seconds=0.004,
            bytes_per_token=1000,
            tokens_per_second=50_000,
        )
    )
    [row] = [line for line in as_text(survey, []).splitlines() if "passed" in line]
    assert row.split() == ["p", "d", "tcp", "passed", "20", "4.0", "50"]
    assert "unknown" in as_text(healthy(), [])


def test_tables_fit_100_columns_and_show_versions_that_differ() -> None:
    survey = healthy()
    for one in survey.nodes:
        one.info.node_id = f"{one.info.node_id}efill-vm-a201b4"
        one.info.address = "127.0.0.1:43419"
        one.info.load.free_blocks = one.info.load.total_blocks = 32768
    lines = as_text(survey, []).splitlines()
    assert max(map(len, lines)) <= 100
    assert "all of version" in lines[0] and "version" not in "".join(lines[1:])
    survey.nodes[0].info.version = "0.2"
    assert "version" not in as_text(survey, []).splitlines()[0]
    assert "0.2" in as_text(survey, [])


def test_markup_in_text_from_nodes_is_not_interpreted() -> None:
    text = as_text(healthy(), [Finding("[red]x", "[/] [bold]y", "z")])
    assert "[red]x: [/] [bold]y" in text


def test_absent_nodes_are_few_recent_and_forgotten_when_they_come() -> None:
    now = [0.0]
    nodes = AbsentNodes(lambda: now[0])
    for number in range(2 * MAX_ABSENT):
        nodes.add(pb.AbsentNode(node_id=str(number), reason="silent"))
    assert len(nodes.all()) == MAX_ABSENT
    now[0] = 5.0
    nodes.add(pb.AbsentNode(node_id=str(MAX_ABSENT), reason="refused"))
    nodes.add(pb.AbsentNode(node_id="b", refused=True))
    nodes.mark_returned("b")
    nodes.mark_returned(str(2 * MAX_ABSENT - 1))
    *others, back, newest = nodes.all()
    assert (newest.reason, newest.seconds_ago) == ("refused", 0)
    assert back.returned and not any(node.returned for node in others)
    assert len(others) == MAX_ABSENT - 3 and {node.seconds_ago for node in others} == {5.0}
    now[0] = RETENTION_SECONDS
    assert nodes.all() == [newest]


def test_of_many_absent_nodes_the_earlier_ones_are_counted() -> None:
    absent_nodes = [
        pb.AbsentNode(node_id=f"n{n}", reason="was silent", refused=n < 5) for n in range(300)
    ]
    survey = healthy(listing=RpcResult(0.01, pb.ListReply(version="1", absent=absent_nodes)))
    *listed_findings, rest = findings(survey)
    assert [finding.subject.split()[-1] for finding in listed_findings] == [
        f"n{n}" for n in range(236, 300)
    ]
    assert "236 more are absent" in rest.problem
    assert "231 were dropped, 5 rejected" in rest.problem


def test_a_node_that_has_returned_is_a_note_and_hides_no_problem() -> None:
    [note] = findings(absent(reason="rank 0 ended", failed=True, returned=True))
    assert not note.wrong and "has returned since" in note.problem
    unready = healthy(nodes=[node(pb.ROLE_DECODE, "d")], pairs={})
    results = findings(replace(unready, ready=RpcResult(0, problem="it can reach no node")))
    assert [each.wrong for each in results] == [True, False]
    assert "is not ready: it can reach no node" in results[0].problem

"""One request through three processes: one trace, one id in every log, and none of its words."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import (
    DecodeStub,
    PrefillServicer,
    RegistryStub,
    add_PrefillServicer_to_server,
)
from tandem.router.cluster.admin import list_nodes
from tandem.tests.end_to_end.support.cluster import Part, TestCluster, node_metric, running, until
from tandem.tests.end_to_end.support.collector import Collector, Seen, collecting

KEY = "sk-never-to-be-logged"
WORDS = "Rumpelstiltskin"
TRACE = "5ca1ab1e" * 4
PARENT = f"00-{TRACE}-{'c0' * 8}-01"
ID = "their-id/1"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, collector: Collector
) -> Iterator[TestCluster]:
    """A router and two nodes that tell everything; which one is which follows from the order."""
    flags = ("--log-format=json", f"--otlp-endpoint={collector.url}")
    with running(tmp_path_factory.mktemp("telemetry"), tiny_model) as nodes:
        nodes.start_router(f"--api-key={KEY}", *flags)
        nodes.start_nodes(
            ("prefill-node", "--node-id=z-prefill", *flags),
            ("decode-node", "--node-id=decode", "--no-enable-prefix-caching", *flags),
        )
        until(lambda: len(list_nodes(nodes.registry).nodes) == 2, "two nodes at the router")
        yield nodes


def ask(cluster: TestCluster, body: Any, **headers: str) -> tuple[int, str, bytes]:
    """Status, request id and body of the response."""
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=60)
    base = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    extra = {key.replace("_", "-"): value for key, value in headers.items()}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), base | extra)
        response = connection.getresponse()
        return response.status, response.headers["x-request-id"], response.read()
    finally:
        connection.close()


def lines(part: Part) -> list[dict[str, Any]]:
    return [json.loads(line) for line in part.log.read_text().splitlines()]


class ShortLived(PrefillServicer):
    """A prefill node as long as its router looks."""

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        return pb.StatusReply(node_id="a-dead", epoch=9)


def join_a_dead_prefill_node(cluster: TestCluster, decode: Part) -> None:
    """The router prefers it, and nothing listens at its address any more."""
    with grpc.insecure_channel(decode.details["address"]) as channel:
        model = DecodeStub(channel).Status(pb.StatusRequest(), timeout=10).model
    server = grpc.server(ThreadPoolExecutor(1))
    add_PrefillServicer_to_server(ShortLived(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    dead = pb.JoinRequest(
        node_id="a-dead", epoch=9, role=pb.ROLE_PREFILL, address=address, model=model
    )
    try:
        with grpc.insecure_channel(cluster.registry) as channel:
            RegistryStub(channel).Join(dead, timeout=10)
    finally:
        server.stop(grace=None).wait()


def test_a_request_that_fails_over_is_one_trace_across_three_processes(
    cluster: TestCluster, collector: Collector
) -> None:
    _, prefill, decode = cluster.parts
    join_a_dead_prefill_node(cluster, decode)
    body = {"prompt": f"{WORDS} was here", "max_tokens": 4, "ignore_eos": True}
    status, request_id, _ = ask(cluster, body, traceparent=PARENT, x_request_id=ID)
    assert (status, request_id) == (200, ID)

    def one(name: str) -> Seen:
        [span] = collector.spans_of(name, TRACE)
        return span

    ends = ("request", "Decode.Stream", "stream", "Prefill.Open")
    until(lambda: all(collector.spans_of(name, TRACE) for name in ends), "the spans")
    request, node_request, generate = one("request"), one("request_to_node"), one("Decode.Stream")
    assert request.parent == "c0" * 8
    assert [one(name).parent for name in ("placement", "request_to_node")] == [request.id] * 2
    assert (generate.parent, node_request.attributes["node"]) == (node_request.id, "decode")
    for span in (request, generate):
        assert "first token" in span.events and span.attributes["request_id"] == ID

    timings = {key: value for key, value in request.attributes.items() if "first_token" in key}
    assert {"first_token_router", "first_token_prefill", "first_token_failed"} <= timings.keys()
    first, second = sorted(
        collector.spans_of("transfer", TRACE), key=lambda span: span.attributes["attempt"]
    )
    assert [span.parent for span in (first, second)] == [generate.id] * 2
    assert (first.attributes["node"], first.attributes["cause"]) == ("a-dead", "peer_lost")
    assert "does not answer" in first.error and not second.error
    assert second.attributes["node"] == "z-prefill"
    assert (second.attributes["outcome"], second.attributes["carrier"]) == (
        "committed",
        "shared_memory",
    )
    assert second.attributes["bytes"] > 0
    states = ["greeted", "opening", "receiving", "verifying", "committed"]
    assert list(second.events) == states

    def opens() -> list[Seen]:
        """Without the first attempt's, whose node was dead: it may be told before."""
        return [s for s in collector.spans_of("Prefill.Open", TRACE) if s.parent == second.id]

    until(lambda: bool(opens()), "the span of the second attempt")
    assert [span.attributes["outcome"] for span in opens()] == ["done"]
    for name in ("queue", "compute", "stream"):
        assert opens()[0].id in {span.parent for span in collector.spans_of(name, TRACE)}
    for node, labels in (
        (decode, 'attempt="1",cause="peer_lost",carrier="none",outcome="failed"'),
        (decode, 'attempt="2",cause="",carrier="shared_memory",outcome="committed"'),
        (prefill, 'attempt="2",cause="",carrier="shared_memory",outcome="done"'),
    ):
        assert node_metric(node, f"tandem_transfers_total{{{labels}}}") == 1, labels
    services = {span.service for span in collector.spans if span.trace == TRACE}
    assert services == {"tandem-router", "tandem-decode-node", "tandem-prefill-node"}


def test_the_access_log_splits_the_time_to_first_token(cluster: TestCluster) -> None:
    """The request above, whose first attempt at a transfer failed."""
    router = cluster.parts[0]

    def log_lines() -> list[dict[str, Any]]:
        return [line for line in lines(router) if line["logger"] == "tandem.access"]

    until(lambda: any(line["request_id"] == ID for line in log_lines()), "the line")
    [line] = [line for line in log_lines() if line["request_id"] == ID]
    assert (line["status"], line["path"], line["output_tokens"]) == (200, "/v1/completions", 4)
    assert (line["decode_nodes"], line["prefill_nodes"]) == (["decode"], ["z-prefill"])
    assert line["prefilled"] == "remote" and line["finish_reason"] == "length"
    phases = line["first_token"]
    assert {"router", "greet", "prefill", "step", "failed"} <= phases.keys()
    assert sum(phases.values()) == pytest.approx(line["ttft_seconds"], abs=0.01)


def test_every_log_names_the_request_the_node_and_the_trace(cluster: TestCluster) -> None:
    router, prefill, decode = cluster.parts
    failed = [line for line in lines(decode) if "does not answer" in line["message"]]
    assert failed[0]["request_id"] == ID and failed[0]["trace_id"] == TRACE
    assert failed[0]["transfer_id"] in failed[0]["message"]
    for part, role, node in (
        (router, "router", None),
        (prefill, "prefill-node", "z-prefill"),
        (decode, "decode-node", "decode"),
    ):
        for line in lines(part):
            assert line["role"] == role and line["node_id"] == (node or line["node_id"])
            assert {"time", "level", "logger", "message"} <= line.keys()


def test_a_trace_shows_local_prefill_with_its_reason(
    cluster: TestCluster, collector: Collector
) -> None:
    trace = "10ca1" * 6 + "00"
    parent = f"00-{trace}-{'c0' * 8}-01"
    assert ask(cluster, {"prompt": [5], "max_tokens": 1}, traceparent=parent)[0] == 200
    until(lambda: bool(collector.spans_of("Decode.Stream", trace)), "the spans")
    [generate] = collector.spans_of("Decode.Stream", trace)
    [local] = collector.spans_of("local prefill", trace)
    assert (local.parent, local.attributes["reason"]) == (generate.id, "nothing missing")
    assert generate.attributes["generated_tokens"] == 1


def test_a_client_without_an_id_gets_one_and_a_strange_one_is_not_taken(
    cluster: TestCluster,
) -> None:
    trace_ids = {
        ask(cluster, {"prompt": [1, 2, 3], "max_tokens": 1})[1],
        ask(cluster, {"prompt": [1, 2, 3], "max_tokens": 1}, x_request_id='{"a": 1}')[1],
        ask(cluster, {"prompt": 7}, x_request_id="")[1],
    }
    assert len(trace_ids) == 3 and all(len(trace_id) == 32 for trace_id in trace_ids)


def test_no_log_and_no_span_has_a_prompt_or_a_key(
    cluster: TestCluster, collector: Collector
) -> None:
    wrong = [
        {"prompt": WORDS, "max_tokens": 10**9},
        {"prompt": WORDS * 1000},
        {"prompt": WORDS, "stop": [WORDS] * 9999},
        {"prompt": {"text": WORDS}},
        {"model": WORDS, "prompt": WORDS},
    ]
    assert {ask(cluster, body)[0] for body in wrong} <= {400, 404}
    assert ask(cluster, {"prompt": WORDS}, authorization=f"Bearer {KEY}x")[0] == 401
    assert ask(cluster, {"prompt": WORDS, "max_tokens": 2})[0] == 200
    for part in cluster.parts:
        text = part.log.read_text()
        assert WORDS not in text and KEY not in text
    assert WORDS not in repr(collector.spans) and KEY not in repr(collector.spans)


def test_what_has_ended_is_exported_before_a_drained_process_goes(
    tmp_path: Path, tiny_model: str, collector: Collector
) -> None:
    trace = f"{random.Random(5).getrandbits(128):032x}"
    with running(tmp_path, tiny_model) as short:
        short.start_router(f"--otlp-endpoint={collector.url}")
        status, _, _ = ask(short, {"prompt": "x"}, traceparent=f"00-{trace}-{'c0' * 8}-01")
        assert status == 503
    assert len(collector.spans_of("request", trace)) == 1

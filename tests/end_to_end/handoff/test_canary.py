"""Two trainings of one shape have equal greetings; the canary distinguishes them."""

from __future__ import annotations

from pathlib import Path

import grpc

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import DecodeStub
from tandem.tests.end_to_end.support.clients import greedy
from tandem.tests.end_to_end.support.cluster import (
    Part,
    TestCluster,
    committed_transfers,
    node_metric,
    running,
)
from tandem.tests.support.checkpoints import tiny_models


def status(node: Part) -> pb.StatusReply:
    with grpc.insecure_channel(node.details["address"]) as channel:
        return DecodeStub(channel).Status(pb.StatusRequest(), timeout=10)


def examined(decode: Part, prefill: Part) -> pb.PairReport:
    candidate = pb.PrefillCandidate(address=prefill.details["address"])
    with grpc.insecure_channel(decode.details["address"]) as channel:
        request = pb.ExamineRequest(prefill=[candidate])
        [pair] = DecodeStub(channel).Examine(request, timeout=30).pairs
        return pair


def outputs(cluster: TestCluster) -> list[list[int]]:
    return [greedy(cluster, seed) for seed in range(3)]


def test_a_prefill_node_with_other_weights_is_never_used_and_the_reason_is_shown(
    tmp_path: Path, tiny_model: str
) -> None:
    tiny_models.build("qwen3", tmp_path / "other", seed=1)
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        decode = cluster.start_node("decode-node", "--no-enable-prefix-caching")
        cluster.wait_nodes(decode=1, prefill=0)
        want = outputs(cluster)

        cluster.model = str(tmp_path / "other")
        other = cluster.start_node("prefill-node")
        cluster.wait_nodes(decode=1, prefill=1)
        assert outputs(cluster) == want
        assert committed_transfers(decode) == 0
        assert node_metric(decode, 'tandem_canaries_total{outcome="mismatch"}') == 1
        # Nor does an examination make the pair usable.
        report = examined(decode, other)
        assert report.cause == "canary" and "computes different KV than this node" in report.problem
        [rejected] = status(decode).refused
        assert rejected.address == other.details["address"]
        for message in (rejected.reason, decode.log.read_text()):
            assert "computes different KV than this node" in message
            assert "of layer" in message and "differs by" in message and "float32 allows" in message
        cluster.wait_idle(decode, other)

        # A node with the right weights is used beside it.
        cluster.model = tiny_model
        right = cluster.start_node("prefill-node")
        cluster.wait_nodes(decode=1, prefill=2)
        assert outputs(cluster) == want
        assert committed_transfers(decode) == 3
        assert node_metric(decode, 'tandem_canaries_total{outcome="passed"}') == 1
        cluster.wait_idle(decode, other, right)

"""Joins: nodes that the registry admits or refuses."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.shared.errors import PeerRefusedError
from tandem.tests.router.support import FakeDecodeNode, cluster, until


def refusal(caught: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[grpc.StatusCode, str]:
    return caught.value.code(), caught.value.details() or ""


async def test_a_node_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        stranger = FakeDecodeNode("decode-9", [])
        stranger.port = 9
        request = stranger.join_request(c.model, "layers=3")
        request.model.name = "another"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.registry.Join(request)
        code, details = refusal(caught)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "layers is '2' in the cluster and '3' on the node ('another')" in details


async def test_a_folder_that_cannot_be_read_keeps_out_its_node_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        node = FakeDecodeNode("decode-0", c.encode("hello"))
        await node.start()
        c.nodes.append(node)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await c.registry.Join(node.join_request(Path("/" + "x" * 300)))
            code, details = refusal(caught)
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert "the router cannot use the model's tokenizer" in details
            assert "File name too long" in details
        refusals = [r for r in caplog.records if "is refused" in r.getMessage()]
        assert len(refusals) == 1, "once, however often it asks"
        await c.registry.Join(node.join_request(c.model))
        assert (await c.chat()).status_code == 200


async def test_a_bug_in_the_loading_of_a_tokenizer_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> None:
        raise MemoryError

    async with cluster(tmp_path, nodes=0) as c:
        with monkeypatch.context() as patch:
            patch.setattr("tandem.shared.text.tokenizer.Tokenizer.load", broken)
            with pytest.raises(grpc.aio.AioRpcError):
                await c.add()
        await c.add()
        assert (await c.chat()).status_code == 200


async def test_two_versions_serve_side_by_side_and_are_never_paired(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for name, version in (("prefill-old", "layers=2"), ("prefill-new", "layers=3")):
            node = FakeDecodeNode(name, [])
            node.port = 9
            await c.enter(node.join_request(c.model, version, role=pb.ROLE_PREFILL))
        new = FakeDecodeNode("decode-new", c.encode("new"))
        await new.start()
        c.nodes.append(new)
        await c.registry.Join(new.join_request(c.model, "layers=3"))
        for index in range(8):
            assert (await c.complete(f"{index} " * 90)).status_code == 200
        for node, partner in ((c.node, "prefill-old"), (new, "prefill-new")):
            candidates = [candidate.node_id for r in node.requests for candidate in r.prefill]
            assert candidates and set(candidates) == {partner}


async def test_a_prefill_node_that_was_named_must_fit_the_decode_nodes_of_today(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, pd_url="127.0.0.1:9") as c:
        static_node = FakeDecodeNode("p", [])
        static_node.port = 9
        request = static_node.join_request(c.model, "layers=3", role=pb.ROLE_PREFILL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.registry.Join(request)
        assert "layers is '2' in the cluster and '3'" in refusal(caught)[1]
        await c.registry.Join(static_node.join_request(c.model, role=pb.ROLE_PREFILL))


async def test_a_tokenizer_of_another_model_is_refused_with_both_sizes(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        request = FakeDecodeNode("decode-0", []).join_request(c.model)
        request.address = "127.0.0.1:9"
        request.model.vocab_size = 100
        with pytest.raises(PeerRefusedError, match=r"tokenizer.json.* vocab_size is 100"):
            await c.enter(request)


async def test_another_model_may_come_when_all_nodes_have_gone(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0, node_timeout=0.3) as c:
        node = FakeDecodeNode("a", c.encode("hello"))
        await node.start()
        c.nodes.append(node)
        await c.registry.Join(node.join_request(c.model, "layers=2"))
        await until(lambda: len(c.router.nodes) == 0)
        await c.registry.Join(node.join_request(c.model, "layers=3"))
        assert (await c.chat()).status_code == 200


async def test_joins_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0, max_nodes=1) as c:
        node = FakeDecodeNode("a", [])
        node.port = 9
        good = node.join_request(c.model)
        bad = []
        for change in (
            {"node_id": ""},
            {"node_id": "a\n\x1b[2J"},
            {"role": 0},
            {"address": "x"},
            {"address": "x:0"},
            {"address": "0.0.0.0:9"},
            {"address": "[::]:9"},
            {"address": "x\x1b[2J:9"},
        ):
            request = pb.JoinRequest()
            request.CopyFrom(good)
            for name, value in change.items():
                setattr(request, name, value)
            bad.append(request)
        for request in bad:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await c.registry.Join(request)
            assert refusal(caught)[0] == grpc.StatusCode.INVALID_ARGUMENT
        missing = node.join_request(tmp_path / "nowhere")
        with pytest.raises(PeerRefusedError, match=r"tokenizer.json"):
            await c.enter(missing)
        await c.enter(good)
        second = FakeDecodeNode("b", [])
        second.port = 9
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.registry.Join(second.join_request(c.model))
        assert "at most 1" in refusal(caught)[1]

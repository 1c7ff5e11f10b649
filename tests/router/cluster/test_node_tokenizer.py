"""A router without the model's folder fetches the tokenizer and template from a node."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from tandem.decode_node.service import DecodeService
from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster import node_tokenizer
from tandem.shared.models.fingerprint import text_fields
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.router.support import Cluster, FakeDecodeNode, cluster
from tandem.tests.support.fake_node import FakeNode


class GivingNode(FakeDecodeNode):
    """A decode node that sends its tokenizer like a real one."""

    folder = Path()
    requests_served = 0

    async def Tokenizer(
        self, request: pb.TokenizerRequest, context: Any
    ) -> AsyncIterator[pb.TokenizerPart]:
        self.requests_served += 1
        node = FakeNode("d", 1, model_path=self.folder)
        nothing = cast(Any, None)
        service = DecodeService(node.engine, node.identity, nothing, nothing, nothing)
        async for part in service.Tokenizer(request, context):
            yield part


async def join(
    c: Cluster, folder: Path, path: str = "/only/on/the/node", name: str = "decode-0", **text: str
) -> GivingNode:
    """A node with this folder, which announces ``path``, and a fingerprint whose ``text`` fields
    differ from the folder's."""
    node = GivingNode(name, c.encode("hello world"))
    node.folder = folder
    await node.start()
    c.nodes.append(node)
    fields = {"layers": "2", **text_fields(read_tokenizer_files(c.model)), **text}
    request = node.join_request(Path(path))
    request.model.fingerprint = "\n".join(f"{k}={v}" for k, v in fields.items())
    await c.registry.Join(request)
    return node


async def refusal(c: Cluster, folder: Path, **others: str) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await join(c, folder, **others)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    details = caught.value.details() or ""
    assert "\n" not in details
    return details


async def test_a_router_on_another_machine_takes_it_from_the_first_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.decode_node.service.TOKENIZER_PART", 1000)
    async with cluster(tmp_path, nodes=0) as c:
        first = await join(c, c.model)
        second = await join(c, c.model, name="decode-1")
        assert (first.requests_served, second.requests_served) == (1, 0)
        response = await c.chat("hi")
        assert response.status_code == 200
        assert response.json()["choices"][0]["message"]["content"] == "hello world"
        (request,) = first.requests + second.requests
        assert set(c.encode("hi")) <= set(request.prompt)


async def test_a_folder_of_another_model_at_the_same_path_is_not_used(tmp_path: Path) -> None:
    other = tmp_path / "other"
    async with cluster(tmp_path, nodes=0) as c:
        shutil.copytree(c.model, other)
        (other / "chat_template.jinja").write_text("another template")
        node = await join(c, c.model, path=str(other))
        assert node.requests_served == 1
        assert (await c.chat()).status_code == 200
        same = await join(c, c.model, path=str(c.model), name="decode-1")
        assert same.requests_served == 0


async def test_nodes_with_another_template_are_refused_in_one_line(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        await join(c, c.model)
        reason = await refusal(c, c.model, name="decode-1", chat_template="other")
        assert "another vocabulary or chat template of 'tiny': chat_template is " in reason


async def test_what_a_node_gives_must_be_what_it_announces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        reason = await refusal(c, c.model, vocabulary="other")
        assert "the node sent another tokenizer than it announced (vocabulary)" in reason
        reason = await refusal(c, tmp_path / "nowhere")
        assert "/only/on/the/node/tokenizer.json does not exist" in reason
        assert "fetching it from the node failed: " in reason and "nowhere" in reason
        monkeypatch.setattr(node_tokenizer, "MAX_BYTES", 100)
        assert "the node's tokenizer is larger than 100 bytes" in await refusal(c, c.model)
        monkeypatch.undo()
        await join(c, c.model)
        assert (await c.chat()).status_code == 200


async def test_bytes_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    class Lying(GivingNode):
        async def Tokenizer(
            self, request: pb.TokenizerRequest, context: Any
        ) -> AsyncIterator[pb.TokenizerPart]:
            yield pb.TokenizerPart(content=json.dumps({"tokenizer": 7}).encode())

    async with cluster(tmp_path, nodes=0) as c:
        node = Lying("decode-0", [])
        await node.start()
        c.nodes.append(node)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.registry.Join(node.join_request(Path("/nowhere")))
        assert "it is not a tokenizer" in (caught.value.details() or "")

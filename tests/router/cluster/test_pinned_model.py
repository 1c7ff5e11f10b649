"""A router with --model rejects nodes of other models, even as the first."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.pinned_model import read_pinned
from tandem.router.options import RouterOptions
from tandem.router.server import Router
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.errors import ModelError
from tandem.tests.router.support import Cluster, FakeDecodeNode, cluster


async def join(c: Cluster, card: pb.ModelCard, node_id: str = "decode-0") -> FakeDecodeNode:
    """The join of a node with this model, in a folder that the router lacks."""
    node = FakeDecodeNode(node_id, [20, 21, 22])
    await node.start()
    c.nodes.append(node)
    request = node.join_request(Path("/nowhere"))
    request.model.MergeFrom(card)
    request.model.path = "/only/on/the/node"
    await c.registry.Join(request)
    return node


async def pinned_card() -> pb.ModelCard:
    pinned = await read_pinned(RouterOptions(model="builtin"))
    assert pinned is not None
    return pinned.card


async def test_a_nodes_folder_name_does_not_matter(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0, model="builtin") as c:
        node = await join(c, await pinned_card())
        assert (await c.chat()).status_code == 200
        assert node.requests
        models = (await c.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["tandem-builtin"]


@pytest.mark.parametrize("first", [True, False])
async def test_a_node_of_another_model_is_refused_even_when_it_comes_first(
    tmp_path: Path, first: bool
) -> None:
    ours = await pinned_card()
    stray = pb.ModelCard(name="stray", vocab_size=8, fingerprint="layers=3")
    async with cluster(tmp_path, nodes=0, model="builtin") as c:
        if not first:
            await join(c, ours)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await join(c, stray, "stray")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "different models: " in (caught.value.details() or "")
        if first:
            assert (await c.client.get("/ready")).status_code == 503
            await join(c, ours)
        assert (await c.chat()).status_code == 200


async def test_a_new_version_of_the_model_may_come_before_the_old_one(tmp_path: Path) -> None:
    version = await pinned_card()
    version.fingerprint = version.fingerprint.replace("norm_eps=", "norm_eps=1")
    async with cluster(tmp_path, nodes=0, model="builtin") as c:
        await join(c, version)
        assert (await c.chat()).status_code == 200


async def test_a_model_that_cannot_be_read_is_known_at_the_start(tmp_path: Path) -> None:
    for model, words in (
        (str(tmp_path / "none"), "does not exist"),
        (str(tmp_path), "config.json"),
    ):
        with pytest.raises(ModelError, match=words):
            await Router(RouterOptions(port=0, registry_port=0, model=model)).start()


async def test_no_weights_are_needed_to_pin_a_model(tmp_path: Path) -> None:
    for file in builtin_model_path().glob("*.json"):
        shutil.copy(file, tmp_path)
    pinned = await read_pinned(RouterOptions(model=str(tmp_path), served_model_name="m"))
    assert pinned is not None and pinned.card.name == "m"
    assert pinned.card.fingerprint == (await pinned_card()).fingerprint

"""Limits on the address, name and numbers that a node may report."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf, nan
from pathlib import Path

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.reported_load import MAX_COUNT, clamp_load
from tandem.tests.router.support import Cluster, FakeDecodeNode, cluster

REFUSED = grpc.StatusCode.FAILED_PRECONDITION
INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def join_error(c: Cluster, request: pb.JoinRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await c.registry.Join(request)
    return caught.value.code(), caught.value.details() or ""


ADDRESSES = (
    "unix:/run/x.sock?q:80",
    "dns://1.2.3.4:53/h:80",
    "vsock:2:80",
    "unix-abstract:x:80",
    "h:0",
)


async def test_an_address_of_another_shape_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for address in ADDRESSES:
            for role in (pb.ROLE_DECODE, pb.ROLE_PREFILL):
                request = FakeDecodeNode("n", []).join_request(c.model, role=role, address=address)
                code, details = await join_error(c, request)
                assert code is INVALID and "address must be host:port" in details, address


@asynccontextmanager
async def living(c: Cluster, epoch: int, port: int = 0) -> AsyncIterator[FakeDecodeNode]:
    node = FakeDecodeNode("same", c.encode("hello"))
    node.epoch = epoch
    await node.start(port)
    try:
        yield node
    finally:
        await node.stop()


async def test_two_nodes_of_one_name_are_refused_by_name_while_both_live(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c, living(c, 1) as old, living(c, 2) as new:
        await c.registry.Join(old.join_request(c.model))
        code, details = await join_error(c, new.join_request(c.model))
        assert code is REFUSED
        assert f"two nodes are called 'same': one at 127.0.0.1:{old.port}" in details
        assert "--node-id" in details
        assert (await c.chat()).status_code == 200 and old.requests and not new.requests
        listing = await c.registry.List(pb.ListRequest())
        assert [node.reason for node in listing.absent] == [details]


async def test_a_restart_elsewhere_replaces_a_node_that_is_gone(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        async with living(c, 1) as old:
            await c.registry.Join(old.join_request(c.model))
        async with living(c, 2) as new:
            await c.registry.Join(new.join_request(c.model))
            assert (await c.chat()).status_code == 200 and new.requests


async def test_a_restart_elsewhere_replaces_a_node_whose_port_another_process_has(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        async with living(c, 1) as old:
            await c.registry.Join(old.join_request(c.model))
        async with living(c, 3, old.port), living(c, 2) as new:
            await c.registry.Join(new.join_request(c.model))
            assert (await c.chat()).status_code == 200 and new.requests


async def test_a_restart_at_the_same_address_or_after_a_leave_replaces_at_once(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, nodes=0) as c, living(c, 1) as old, living(c, 3) as elsewhere:
        await c.registry.Join(old.join_request(c.model))
        old.epoch = 2
        await c.registry.Join(old.join_request(c.model))
        assert [node.epoch for node in c.router.nodes] == [2]
        await c.registry.Leave(pb.LeaveRequest(node_id="same", epoch=2))
        await c.registry.Join(elsewhere.join_request(c.model))
        assert [node.epoch for node in c.router.nodes] == [3]


async def test_numbers_that_are_none_change_nothing_for_requests(tmp_path: Path) -> None:
    worst = 2**32 - 1
    async with cluster(tmp_path) as c:
        for rate in (nan, inf, -1.0):
            load = pb.Load(
                running=worst,
                waiting=worst,
                free_blocks=worst,
                total_blocks=worst,
                queued_prefill_tokens=worst,
                block_size=worst,
                prefill_tokens_per_second=rate,
                link_rates=[pb.LinkRate(node_id="p", tokens_per_second=rate)],
            )
            c.load = load
            prefill = FakeDecodeNode("p", [])
            prefill.port = 9
            request = prefill.join_request(c.model, role=pb.ROLE_PREFILL, load=load)
            await c.enter(request)
            beat = pb.HeartbeatRequest(node_id=c.node.node_id, epoch=c.node.epoch, load=load)
            await c.registry.Heartbeat(beat)
            for length in (1, 90):
                assert (await c.complete("one " * length)).status_code == 200
        (candidate,) = c.node.requests[-1].prefill
        assert MAX_COUNT <= candidate.queued_prefill_tokens < 2 * MAX_COUNT


def test_values_within_bounds_are_unchanged() -> None:
    load = pb.Load(
        running=3,
        prefill_tokens_per_second=1e5,
        link_rates=[pb.LinkRate(node_id="p", tokens_per_second=2.5)],
    )
    same = pb.Load.FromString(load.SerializeToString())
    clamp_load(same)
    assert same == load

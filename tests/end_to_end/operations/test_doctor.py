"""``tandem doctor`` against a real cluster, while one thing after another goes wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import (
    DecodeStub,
    RegistryStub,
    add_PrefillServicer_to_server,
)
from tandem.tests.decode_node.fake_prefill import FakePrefill
from tandem.tests.end_to_end.support.cluster import TestCluster, running, tandem
from tandem.tests.support.grpc_server import served


async def doctor(cluster: TestCluster, *flags: str) -> tuple[int, str]:
    """Exit status and output."""
    assert cluster.router is not None
    registry = f"--router=127.0.0.1:{cluster.router.details['registry']}"
    return await run("doctor", cluster.url, registry, *flags)


async def run(*arguments: str) -> tuple[int, str]:
    done = await asyncio.to_thread(tandem, *arguments)
    return done.returncode, done.stdout + done.stderr


class Walled(FakePrefill):
    """A prefill node that greets, but whose data ports are closed."""

    def __init__(self, join: pb.JoinRequest) -> None:
        super().__init__(join.epoch)
        self.join = join

    async def Hello(self, request: pb.Introduction, context: Any) -> pb.HelloReply:
        reply = await super().Hello(request, context)
        reply.node.node_id, reply.node.kv_dtype = self.join.node_id, "float32"
        return reply

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        join = self.join
        return pb.StatusReply(
            node_id=join.node_id,
            epoch=join.epoch,
            ready=True,
            model=join.model,
            load=pb.Load(free_blocks=1, total_blocks=1),
        )


@contextlib.asynccontextmanager
async def joined(cluster: TestCluster, node: Walled) -> AsyncIterator[None]:
    """The node is there, and alive, for as long as the block runs."""
    assert cluster.router is not None
    registry = f"127.0.0.1:{cluster.router.details['registry']}"
    async with (
        served(add_PrefillServicer_to_server, node) as node.join.address,
        grpc.aio.insecure_channel(registry) as channel,
    ):
        stub = RegistryStub(channel)
        await stub.Join(node.join)

        async def beat() -> None:
            while True:
                await stub.Heartbeat(pb.HeartbeatRequest(node_id=node.join.node_id, epoch=3))
                await asyncio.sleep(0.2)

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            await stub.Leave(pb.LeaveRequest(node_id=node.join.node_id, epoch=3))


async def test_the_doctor_distinguishes_healthy_and_unhealthy_clusters(
    tmp_path: Path, tiny_model: str
) -> None:
    with running(tmp_path, tiny_model) as cluster:
        router = cluster.start_router()
        prefill, decode = cluster.start_nodes(
            ("prefill-node", "--node-id=prefill-1"), ("decode-node", "--node-id=decode-1")
        )
        cluster.wait_nodes(decode=1, prefill=1)
        status, output = await doctor(cluster)
        assert (status, "All well: the router and 2 nodes." in output) == (0, True), output
        status, report = await doctor(cluster, "--json")
        [pair] = json.loads(report)["pairs"]
        assert status == 0 and pair["carrier"] == "shared_memory" and not pair["problem"]
        assert pair["canary_seconds"] > 0 and pair["round_trip_seconds"] > 0
        cluster.wait_idle(prefill, decode)

        with grpc.insecure_channel(decode.details["address"]) as channel:
            card = DecodeStub(channel).Status(pb.StatusRequest(), timeout=10).model
        walled = pb.JoinRequest(node_id="walled", epoch=3, role=pb.ROLE_PREFILL, model=card)
        async with joined(cluster, Walled(walled)):
            status, output = await doctor(cluster)
            assert status == 1
            assert (
                "walled to decode-1: KV cannot move: its data port 127.0.0.1:1 cannot be" in output
            )
            assert "open the prefill node's data ports to the decode node (--kv-port" in output
            assert "prefill-1 to decode-1" not in output

        stranger = pb.JoinRequest(
            node_id="stranger", epoch=4, role=pb.ROLE_PREFILL, address="127.0.0.1:9", model=card
        )
        stranger.model.fingerprint = card.fingerprint.replace("10000.0", "5000.0")
        stranger.model.name = "another"  # under the same name it would be a new version
        with (
            grpc.insecure_channel(f"127.0.0.1:{router.details['registry']}") as channel,
            contextlib.suppress(grpc.RpcError),
        ):
            RegistryStub(channel).Join(stranger, timeout=10)
        status, output = await doctor(cluster)
        assert status == 1
        assert "prefill node stranger: was rejected" in output
        assert "'10000.0' in the cluster and '5000.0' on the node" in output
        assert "if it is the model, start it with the one that the cluster serves" in output

        prefill.process.send_signal(signal.SIGSTOP)
        status, output = await doctor(cluster)
        assert status == 1
        silent = "does not answer at" in output or "was silent for 3 s and was dropped" in output
        assert "prefill node prefill-1: " in output and silent
        assert "see whether the process is stopped" in output
        prefill.kill()


async def test_a_router_that_is_not_there_is_wrong_and_no_address_is_wrong_usage() -> None:
    status, output = await run("doctor", "http://127.0.0.1:1", "--router=127.0.0.1:1")
    assert status == 1
    assert "router: does not answer at http://127.0.0.1:1" in output
    assert "its registry does not answer at 127.0.0.1:1" in output and "--router" in output
    for wrong in (["127.0.0.1:8000"], ["http://[::1"], ["http://h:1", "--router=h"]):
        status, output = await run("doctor", *wrong)
        assert (status, output.count("\n")) == (2, 1), output

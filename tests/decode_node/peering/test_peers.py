"""Greetings, canaries, refusals and leases, with a scripted prefill node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tandem.decode_node.peering import canary_runs
from tandem.decode_node.peering import peers as module
from tandem.decode_node.peering.peer import Peer, PeerLostError
from tandem.decode_node.peering.peers import Peers
from tandem.decode_node.peering.prefill_backoff import BackedOffError
from tandem.proto import tandem_pb2 as pb
from tandem.shared.causes import Cause
from tandem.shared.errors import PeerRefusedError, TransferError
from tandem.shared.handoff.plane.messages import PeerLost
from tandem.tests.decode_node.fake_prefill import FakePrefill, prefill
from tandem.tests.support.fake_node import RANKS, FakeNode
from tandem.tests.support.waiting import until

KEY = "HKdmGwHfyOUqeFHhjEcTtgQqORXJJdEZWwwHUP-X"


class Vet:
    """A canary that passes at once by default."""

    def __init__(self) -> None:
        self.num_canaries = 0
        self.error: TransferError | None = None
        self.ready = asyncio.Event()
        self.ready.set()

    async def __call__(self, peer: Peer) -> None:
        self.num_canaries += 1
        await self.ready.wait()
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def peers_of_node(
    max_peers: int = 1024, **engine: Any
) -> AsyncIterator[tuple[Peers, Vet, FakeNode]]:
    node, vet = FakeNode("d", 7, **engine), Vet()
    peers = Peers(node.engine, node.identity, vet, node.metrics, max_peers=max_peers)
    loops = [asyncio.create_task(peers.keep_leases()), asyncio.create_task(peers.reconcile())]
    try:
        yield peers, vet, node
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await peers.close()


async def test_many_requests_share_one_greeting_and_one_canary() -> None:
    async with peers_of_node() as (peers, vet, node), prefill() as fake:
        peers_met = await asyncio.gather(*(peers.meet(fake.candidate) for _ in range(5)))
        assert len(set(peers_met)) == 1
        assert (fake.hellos, vet.num_canaries) == (1, 1)
        assert node.metric("tandem_canaries_total", outcome="passed") == 1


async def test_a_backed_off_node_is_not_greeted_until_it_restarts() -> None:
    async with peers_of_node() as (peers, _, _), prefill() as fake:
        peers.prefill_backoff.add(fake.address, fake.epoch, "silent")
        with pytest.raises(TransferError, match=r"not contacted for .* silent"):
            await peers.meet(fake.candidate)
        assert fake.hellos == 0
        assert (await peers.meet(fake.candidate, at_once=True)).epoch == fake.epoch
        assert await peers.ping(fake.candidate) > 0
        silent = pb.PrefillCandidate(node_id="p", epoch=fake.epoch, address="127.0.0.1:1")
        assert await peers.ping(silent) == 0
        fake.epoch += 1
        assert (await peers.meet(fake.candidate)).epoch == fake.epoch


def lost(fake: FakePrefill, cause: Cause = Cause.PEER_LOST) -> PeerLost:
    return PeerLost(
        node_id=fake.node_id, epoch=fake.epoch, rank=0, reason="the connection ended", cause=cause
    )


async def test_a_peer_whose_data_plane_is_lost_is_backed_off_from_and_greeted_afresh() -> None:
    async with peers_of_node() as (peers, _, _), prefill() as fake:
        first = await peers.meet(fake.candidate)
        first.trust.begin(1)
        peers.lost(lost(fake))
        peers.lost(lost(fake))  # another rank
        with pytest.raises(BackedOffError, match="the connection ended") as caught:
            await peers.meet(fake.candidate)
        assert caught.value.cause is Cause.PEER_LOST and fake.hellos == 1
        # Its transfers end by themselves, for which the control plane may have the reason.
        assert peers.at(fake.candidate) is first
        await first.stub.Live(pb.LiveRequest())

        peers.prefill_backoff.end(fake.address)
        second = await peers.meet(fake.candidate)
        assert second is not first and fake.hellos == 2
        assert await peers.meet(fake.candidate) is second


async def test_a_lost_peer_is_greeted_at_once_after_a_restart() -> None:
    async with peers_of_node() as (peers, _, _), prefill() as fake:
        await peers.meet(fake.candidate)
        peers.lost(lost(fake))
        fake.epoch += 1
        assert (await peers.meet(fake.candidate)).epoch == fake.epoch


@pytest.mark.parametrize("cause", [Cause.REFUSED, Cause.NO_PLACE])
async def test_a_peer_that_refuses_a_connection_is_not_lost(cause: Cause) -> None:
    async with peers_of_node() as (peers, _, _), prefill() as fake:
        peer = await peers.meet(fake.candidate)
        peers.lost(lost(fake, cause))
        assert await peers.meet(fake.candidate) is peer


async def test_the_loss_of_a_former_start_or_of_another_node_is_ignored() -> None:
    async with peers_of_node() as (peers, _, _), prefill() as fake:
        before = lost(fake)
        fake.epoch += 1
        peer = await peers.meet(fake.candidate)
        peers.lost(before)
        peers.lost(replace(lost(fake), node_id="another"))
        assert await peers.meet(fake.candidate) is peer


async def test_a_canary_is_not_repeated_for_the_same_pair_of_epochs() -> None:
    async with peers_of_node() as (peers, vet, _), prefill() as fake:
        await peers.forget(await peers.meet(fake.candidate))
        await peers.meet(fake.candidate)
        assert (fake.hellos, vet.num_canaries) == (2, 1)
        fake.epoch = 4
        assert (await peers.meet(fake.candidate)).epoch == 4
        assert (fake.hellos, vet.num_canaries) == (3, 2)


async def test_a_peer_is_not_used_before_its_canary_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canary_runs, "WAIT_SECONDS", 0.05)
    async with peers_of_node() as (peers, vet, _), prefill() as fake:
        vet.ready.clear()
        for _ in range(3):
            with pytest.raises(TransferError, match="still under way"):
                await peers.meet(fake.candidate)
        monkeypatch.setattr(canary_runs, "WAIT_SECONDS", 10.0)
        vet.ready.set()
        await peers.meet(fake.candidate)
        assert (fake.hellos, vet.num_canaries) == (1, 1)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Cause.TIMEOUT_GREET, Cause.TIMEOUT_GREET),
        (Cause.PEER_LOST, Cause.PEER_LOST),
        (Cause.NO_PLACE, Cause.NO_PLACE),
        (Cause.NO_BLOCKS, Cause.CANARY),
        (Cause.COMPUTE, Cause.CANARY),
    ],
)
async def test_a_canary_that_failed_for_silence_says_so(cause: Cause, expected: Cause) -> None:
    """Otherwise each request would wait again for unreachable ports."""
    async with peers_of_node() as (peers, vet, _), prefill() as fake:
        vet.error = TransferError("no", cause=cause)
        with pytest.raises(TransferError) as caught:
            await peers.meet(fake.candidate)
        assert caught.value.cause is expected


async def test_whether_a_process_has_ended() -> None:
    async with peers_of_node() as (peers, _, _):
        async with prefill() as fake:
            assert not await peers.has_ended(fake.candidate)
            before, fake.epoch = fake.candidate, 4
            assert await peers.has_ended(before)
        assert await peers.has_ended(fake.candidate)


async def test_a_mismatch_refuses_this_start_of_the_peer_alone() -> None:
    async with peers_of_node() as (peers, vet, node), prefill() as fake:
        vet.error = PeerRefusedError("layer 2 differs")
        assert not peers.refuses(fake.candidate)
        with pytest.raises(PeerRefusedError, match="layer 2 differs"):
            await peers.meet(fake.candidate)
        assert peers.refuses(fake.candidate)
        [rejected] = peers.refused
        assert (rejected.address, rejected.node_id, rejected.epoch) == (fake.address, "p", 3)
        assert rejected.reason == "layer 2 differs"
        assert node.metric("tandem_canaries_total", outcome="mismatch") == 1

        # A router that does not know the epoch learns it from the greeting.
        unknown = fake.candidate
        unknown.epoch = 0
        with pytest.raises(PeerRefusedError, match="layer 2 differs"):
            await peers.meet(unknown)
        assert vet.num_canaries == 1
        assert not peers.refuses(unknown) and peers.refuses(fake.candidate)

        fake.epoch, vet.error = 4, None
        assert not peers.refuses(fake.candidate)
        await peers.meet(fake.candidate)


async def test_a_canary_that_could_not_be_done_is_tried_again() -> None:
    async with peers_of_node() as (peers, vet, node), prefill() as fake:
        vet.error = TransferError("no free blocks")
        results = await asyncio.gather(
            *(peers.meet(fake.candidate) for _ in range(3)), return_exceptions=True
        )
        assert [str(error) for error in results] == ["no free blocks"] * 3
        assert not peers.refuses(fake.candidate)
        vet.error = None
        await peers.meet(fake.candidate)
        assert vet.num_canaries == 2
        assert node.metric("tandem_canaries_total", outcome="failed") == 1


async def test_another_model_is_refused_at_the_greeting_and_remembered() -> None:
    async with peers_of_node() as (peers, vet, _), prefill() as fake:
        fake.refuses = "different models: layers"
        with pytest.raises(PeerRefusedError, match="different models: layers"):
            await peers.meet(fake.candidate)
        assert peers.refuses(fake.candidate)
        assert vet.num_canaries == 0


async def test_a_node_without_a_place_is_no_refusal() -> None:
    async with peers_of_node() as (peers, _, _), prefill() as fake:
        fake.full = "1 decode nodes have greeted, which is the limit; see --max-peers"
        with pytest.raises(TransferError, match=r"has no place .* --max-peers") as caught:
            await peers.meet(fake.candidate)
        assert caught.value.cause is Cause.NO_PLACE
        assert not peers.refuses(fake.candidate)
        fake.full = ""
        await peers.meet(fake.candidate)


async def test_a_node_that_is_not_there_is_no_refusal() -> None:
    async with peers_of_node() as (peers, _, _):
        async with prefill() as fake:
            pass
        with pytest.raises(TransferError, match="does not answer"):
            await peers.meet(fake.candidate)
        assert peers.refused == []


async def test_leases_are_renewed_in_one_call_at_the_holders_pace() -> None:
    async with peers_of_node() as (peers, _, _), prefill() as fake:
        fake.lease_seconds, fake.live_ids = 0.3, [1, 2]
        peer = await peers.meet(fake.candidate)
        for transfer_id in (1, 2, 3):
            peer.trust.begin(transfer_id)
        await until(lambda: peer.trust.remaining(3) < 0)
        assert fake.renewed[0] == [1, 2, 3]
        assert peer.trust.remaining(1) > 0 and peer.trust.remaining(2) > 0


async def test_an_unresponsive_peer_with_long_leases_delays_no_other_renewals() -> None:
    async with peers_of_node() as (peers, _, _), prefill() as stuck, prefill() as fine:
        stuck.lease_seconds, fine.lease_seconds = 60.0, 0.3
        for fake in (stuck, fine):
            fake.live_ids = [1]
        stuck.may_reply.clear()
        for fake in (stuck, fine):
            (await peers.meet(fake.candidate)).trust.begin(1)
        peer = await peers.meet(fine.candidate)
        await until(lambda: len(fine.renewed) > 5)
        assert peer.trust.remaining(1) > 0


async def test_the_leases_of_a_peer_that_was_forgotten_and_met_again_are_renewed() -> None:
    async with peers_of_node() as (peers, _, _), prefill() as fake:
        fake.lease_seconds, fake.live_ids = 0.3, [1, 2]
        for transfer_id in (1, 2):
            peer = await peers.meet(fake.candidate)
            peer.trust.begin(transfer_id)
            await until(lambda: len(fake.renewed) > 1)
            await peers.forget(peer)
            fake.renewed.clear()
        peer = await peers.meet(fake.candidate)
        peer.trust.begin(2)
        await until(lambda: len(fake.renewed) > 1)
        assert set(map(tuple, fake.renewed)) == {(2,)}


async def test_a_channel_closed_under_a_renewal_harms_no_other_peer() -> None:
    async with peers_of_node() as (peers, _, _), prefill() as stuck, prefill() as fine:
        for fake in (stuck, fine):
            fake.lease_seconds, fake.live_ids = 0.3, [1]
        stuck.may_reply.clear()
        lost = await peers.meet(stuck.candidate)
        lost.trust.begin(1)
        await until(lambda: bool(stuck.renewed))
        await peers.forget(lost)
        other = await peers.meet(fine.candidate)
        other.trust.begin(1)
        await until(lambda: len(fine.renewed) > 1)


async def test_what_only_the_peer_holds_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECONCILE_SECONDS", 0.02)
    async with peers_of_node() as (peers, _, _), prefill() as fake:
        fake.live_ids = [1, 2]
        peer = await peers.meet(fake.candidate)
        peer.trust.begin(1)
        await until(lambda: bool(fake.released))
        assert set(fake.released) == {2}


async def test_a_peer_that_has_dismissed_this_node_is_greeted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RECONCILE_SECONDS", 0.02)
    async with peers_of_node() as (peers, vet, _), prefill() as fake:
        await peers.meet(fake.candidate)
        fake.greet_again = True
        await until(lambda: not peers._peers)
        fake.greet_again = False
        await peers.meet(fake.candidate)
        assert (fake.hellos, vet.num_canaries) == (2, 1)


async def test_a_locked_node_dials_with_the_keys_of_the_greeting() -> None:
    async with peers_of_node(curve_keys=["ours"] * RANKS) as (peers, _, _), prefill() as fake:
        fake.curve_keys = [KEY, KEY.swapcase()]
        peer = await peers.meet(fake.candidate)
        assert [end.key for end in peer.endpoints] == fake.curve_keys


@pytest.mark.parametrize(("ours", "theirs"), [([KEY] * RANKS, []), ([], [KEY] * RANKS)])
async def test_a_peer_that_is_not_locked_as_this_node_is_is_refused(
    ours: list[str], theirs: list[str]
) -> None:
    async with peers_of_node(curve_keys=ours) as (peers, _, _), prefill() as fake:
        fake.curve_keys = theirs
        with pytest.raises(PeerRefusedError, match=f"{len(theirs)} CURVE keys, and {len(ours)}"):
            await peers.meet(fake.candidate)
        assert peers.refuses(fake.candidate)


async def test_a_candidate_from_before_a_restart_uses_the_new_process() -> None:
    async with peers_of_node() as (peers, vet, _), prefill() as fake:
        stale = fake.candidate
        fake.epoch += 1
        peer = await peers.meet(fake.candidate)
        assert await peers.meet(stale) is peer
        assert await peers.live_transfers(peer) == []
        assert (fake.hellos, vet.num_canaries) == (2, 1)


async def test_a_peer_that_has_gone_is_forgotten_once_nothing_of_ours_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RECONCILE_SECONDS", 0.02)
    async with peers_of_node() as (peers, _, _), prefill() as fake:
        peer = await peers.meet(fake.candidate)
        peer.trust.begin(1)
        attempts = 0

        async def lost(peer: Peer) -> pb.TransferIds:
            nonlocal attempts
            attempts += 1
            raise PeerLostError("nobody there")

        monkeypatch.setattr(peers, "_live", lost)
        await until(lambda: attempts > 2)
        assert list(peers._peers.values()) == [peer]
        peer.trust.end(1)
        await until(lambda: not peers._peers)


async def test_no_more_nodes_are_met_than_max_peers() -> None:
    async with peers_of_node(max_peers=1) as (peers, _, _), prefill() as one, prefill() as other:
        peer = await peers.greet(one.candidate)
        with pytest.raises(TransferError, match=r"1 prefill nodes are known.*--max-peers"):
            await peers.greet(other.candidate)
        assert other.hellos == 0
        await peers.forget(peer)
        await peers.greet(other.candidate)


async def test_the_number_of_remembered_canaries_is_bounded() -> None:
    async with peers_of_node(max_peers=1) as (peers, vet, _), prefill() as one, prefill() as other:
        other.node_id = "q"
        for fake in (one, other, one):
            await peers.forget(await peers.meet(fake.candidate))
        assert vet.num_canaries == 3 and len(peers._canaries._passed) == 1

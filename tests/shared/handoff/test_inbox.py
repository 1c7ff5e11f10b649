"""The proof that a cancelled attempt is over, after which the head may reuse its blocks."""

from __future__ import annotations

import asyncio

import pytest

from tandem.shared.handoff import inbox as module
from tandem.shared.handoff.inbox import ExpectedAttempt, Inbox
from tandem.shared.handoff.plane.messages import CancelExpect, Cancelled, Expect, PeerLost
from tandem.shared.handoff.wire.head_parts import HeadRun
from tandem.tests.support.clock import pausing

RANKS = 2
EXPECT = Expect(
    transfer_id=1,
    attempt=0,
    peer_node="p",
    peer_epoch=3,
    peer_rank=0,
    bulk="",
    control="",
    block_table=(0,),
    first_token=0,
    end_token=1,
    heads=(HeadRun(1, 0, 1),),
)


class Head:
    """An inbox, its commands to the ranks, and the reason why it gave up the node."""

    def __init__(self) -> None:
        self.told: list[tuple[int, object]] = []
        self.lost: list[str] = []
        self.inbox = Inbox(
            lambda rank, command: self.told.append((rank, command)), self.lost.append
        )

    def expecting(self) -> ExpectedAttempt:
        attempt = self.inbox.open(1, 0)
        for rank in range(RANKS):
            self.inbox.command(attempt, rank, EXPECT)
        return attempt

    def confirm(self, rank: int) -> None:
        self.inbox.on_event(rank, Cancelled(transfer_id=1, attempt=0, side="receive"))


async def test_an_attempt_is_over_when_each_rank_has_confirmed() -> None:
    head = Head()
    closing = asyncio.create_task(head.inbox.close(head.expecting(), sending=False))
    for rank in range(RANKS):
        await asyncio.sleep(0)
        assert not closing.done()
        head.confirm(rank)
    await asyncio.wait_for(closing, 10)
    cancel = CancelExpect(transfer_id=1, attempt=0)
    assert head.told[RANKS:] == [(rank, cancel) for rank in range(RANKS)]
    assert head.lost == []


async def test_a_rank_that_does_not_confirm_takes_its_node_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    head = Head()
    attempt = head.expecting()
    head.confirm(0)
    await head.inbox.close(attempt, sending=False)
    [reason] = head.lost
    assert "did not confirm within 0.05 s that transfer 1 is cancelled" in reason


async def test_a_head_that_stood_still_reads_what_its_ranks_have_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pause, head = pausing(monkeypatch), Head()
    closing = asyncio.create_task(head.inbox.close(head.expecting(), sending=False))
    await asyncio.sleep(0)
    pause(60.0)
    for _ in range(50):
        await asyncio.sleep(0)
    for rank in range(RANKS):
        head.confirm(rank)
    await asyncio.wait_for(closing, 10)
    assert head.lost == []


def test_the_loss_of_a_peer_is_passed_on() -> None:
    head, events = Head(), list[PeerLost]()
    lost = PeerLost(node_id="p", epoch=3, rank=0, reason="the connection ended", cause="peer_lost")
    head.inbox.on_event(0, lost)  # nobody listens
    head.inbox.on_lost = events.append
    head.inbox.on_event(1, lost)
    assert events == [lost]

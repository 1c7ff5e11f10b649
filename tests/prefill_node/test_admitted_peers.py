"""Decode nodes whose CURVE keys a prefill node's ranks admit, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from tandem.prefill_node import admitted_peers as module
from tandem.prefill_node.admitted_peers import AdmittedPeers
from tandem.shared.errors import OverloadedError, TransferError
from tandem.shared.handoff.inbox import Inbox
from tandem.shared.handoff.lease import Tenant
from tandem.shared.handoff.plane.messages import AdmitKeys, Command, KeysAdmitted


class ConfirmingRanks:
    """Two ranks that confirm a list at once, unless ``silent``."""

    def __init__(self, max_peers: int = 1024) -> None:
        self.now = 0.0
        self.silent: set[int] = set()
        self.keys: dict[int, tuple[str, ...]] = {}
        self.inbox = Inbox(self._take, lambda reason: None)
        self.admitted_peers = AdmittedPeers(self.inbox, 2, lambda: self.now, max_peers=max_peers)

    def _take(self, rank: int, command: Command) -> None:
        assert isinstance(command, AdmitKeys)
        self.keys[rank] = command.keys
        if rank not in self.silent:
            self.inbox.on_event(rank, KeysAdmitted(version=command.version))


@pytest.fixture
def ranks() -> ConfirmingRanks:
    return ConfirmingRanks()


async def test_every_rank_has_the_keys_before_the_greeting_gets_its_reply(
    ranks: ConfirmingRanks,
) -> None:
    await ranks.admitted_peers.admit(Tenant("a", 1), ["a0", "a1"])
    await ranks.admitted_peers.admit(Tenant("b", 1), ["b0"])
    assert ranks.keys == {0: ("a0", "a1", "b0"), 1: ("a0", "a1", "b0")}


async def test_a_new_start_of_a_node_takes_the_place_of_the_old(ranks: ConfirmingRanks) -> None:
    await ranks.admitted_peers.admit(Tenant("a", 1), ["old"])
    await ranks.admitted_peers.admit(Tenant("a", 2), ["new"])
    assert ranks.keys[0] == ("new",)
    assert ranks.admitted_peers.note_alive(Tenant("a", 2)) and not ranks.admitted_peers.note_alive(
        Tenant("a", 1)
    )


async def test_silent_tenants_are_removed_and_others_stay(ranks: ConfirmingRanks) -> None:
    for name in ("a", "b"):
        await ranks.admitted_peers.admit(Tenant(name, 1), [name])
    ranks.now = module.SILENCE_SECONDS
    assert ranks.admitted_peers.note_alive(Tenant("b", 1))
    assert ranks.admitted_peers.remove_silent() == []
    ranks.now += 1
    assert ranks.admitted_peers.remove_silent() == ["a"]
    assert ranks.keys == {0: ("b",), 1: ("b",)}
    assert not ranks.admitted_peers.note_alive(Tenant("a", 1))


async def test_a_rank_that_does_not_confirm_is_named(
    ranks: ConfirmingRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONFIRM_SECONDS", 0.05)
    ranks.silent = {1}
    with pytest.raises(TransferError, match=r"ranks \[1\] have not confirmed the CURVE keys"):
        await ranks.admitted_peers.admit(Tenant("a", 1), ["a"])
    ranks.silent = set()
    await asyncio.gather(
        *(ranks.admitted_peers.admit(Tenant(f"n{i}", 1), [str(i)]) for i in range(5))
    )
    assert set(ranks.keys[1]) == {"a", "0", "1", "2", "3", "4"}


async def test_there_is_a_limit() -> None:
    ranks = ConfirmingRanks(max_peers=1)
    await ranks.admitted_peers.admit(Tenant("a", 1), ["a"])
    with pytest.raises(OverloadedError, match=r"1 decode nodes .*--max-peers"):
        await ranks.admitted_peers.admit(Tenant("b", 1), ["b"])
    await ranks.admitted_peers.admit(Tenant("a", 2), ["c"])

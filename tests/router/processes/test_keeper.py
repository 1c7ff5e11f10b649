"""What a keeper needs of its machine, and tells its workers."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.options import RouterOptions
from tandem.router.processes import keeper as module
from tandem.router.processes.keeper import MAX_FOLDER, Keeper
from tandem.router.processes.process_link import ANSWER_SECONDS, LinkClosedError, Topic
from tandem.router.processes.worker import share_of
from tandem.shared.errors import StartupError
from tandem.shared.security.credentials import INSECURE
from tandem.tests.support.waiting import until


@pytest.mark.parametrize("folder", ["missing", "l" * MAX_FOLDER])
async def test_a_folder_that_cannot_hold_sockets_is_reported(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder != "missing":
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    options = RouterOptions(port=0, registry_port=0, router_workers=2, drain_timeout=0.0)
    keeper = Keeper(options, lambda: None, INSECURE)
    with pytest.raises(StartupError, match="TMPDIR"):
        await keeper.start()
    await keeper.stop()


def test_limits_are_divided_among_workers_but_one_request_has_room() -> None:
    options = RouterOptions(
        router_workers=3, max_connections=10, max_body_bytes=5000, max_held_body_bytes=9000
    )
    share = share_of(options)
    assert (share.max_connections, share.max_held_body_bytes) == (4, 5000)
    assert share_of(RouterOptions(max_connections=10)).max_connections == 10


class NotingLink:
    """A link to a worker that notes what it is told, and answers questions unless it ``hangs``."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.told: list[tuple[Topic, bytes]] = []
        self.waited = 0.0
        self._hangs = hangs

    def tell(self, topic: Topic, body: bytes = b"") -> None:
        self.told.append((topic, body))

    async def drained(self) -> None:
        """All has been read."""

    async def ask(self, topic: Topic, body: bytes = b"", seconds: float = ANSWER_SECONDS) -> bytes:
        self.waited = seconds
        if self._hangs:
            raise LinkClosedError("does not answer")
        return b"{}"

    def absent(self) -> list[list[str]]:
        """The names of absent nodes, by message."""
        lists = [pb.ListReply.FromString(b) for topic, b in self.told if topic is Topic.ABSENT]
        return [[node.node_id for node in each.absent] for each in lists]


def keeper_of(*links: NotingLink) -> Keeper:
    keeper = Keeper(RouterOptions(router_workers=2), lambda: None, INSECURE)
    workers: Any = [SimpleNamespace(number=n, link=link) for n, link in enumerate(links)]
    keeper._workers = workers
    return keeper


def refuse(keeper: Keeper, name: str) -> None:
    keeper.nodes.absent.add(
        pb.AbsentNode(node_id=name, role=pb.ROLE_DECODE, refused=True, reason="another model")
    )


async def test_a_worker_that_starts_is_told_of_absent_nodes() -> None:
    link: Any = NotingLink()
    keeper = keeper_of()
    refuse(keeper, "a")
    await keeper._introduce_all(link)
    assert link.absent() == [["a"]]
    assert link.told[-1][0] is Topic.SYNCED


async def test_absent_nodes_are_told_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker forgets those that it is not told of."""
    monkeypatch.setattr(module, "ABSENT_SECONDS", 0.0)
    monkeypatch.setattr(module, "ABSENT_AGAIN_SECONDS", 0.0)
    link = NotingLink()
    keeper = keeper_of(link)
    telling = asyncio.create_task(keeper._publish_absent())
    refuse(keeper, "a")
    await until(lambda: link.absent().count(["a"]) > 1)
    telling.cancel()


async def test_absent_nodes_are_told_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused node that tries again changes nothing."""
    monkeypatch.setattr(module, "ABSENT_SECONDS", 0.0)
    link = NotingLink()
    keeper = keeper_of(link)
    telling = asyncio.create_task(keeper._publish_absent())
    refuse(keeper, "a")
    refuse(keeper, "b")
    await until(lambda: bool(link.told))
    refuse(keeper, "a")
    for _ in range(5):
        await asyncio.sleep(0)
    refuse(keeper, "c")
    await until(lambda: len(link.told) > 1)
    assert link.absent() == [["a", "b"], ["b", "a", "c"]]
    telling.cancel()


async def test_a_worker_that_hangs_delays_no_answer_beyond_its_deadline() -> None:
    """A worker that asks waits for ``ANSWER_SECONDS``, since before the keeper asks the others."""
    answering, hanging = NotingLink(), NotingLink(hangs=True)
    keeper = keeper_of(answering, hanging)
    assert await keeper._gather_by_number(Topic.SERIES) == {0: b"{}"}
    assert answering.waited == hanging.waited <= ANSWER_SECONDS / 2

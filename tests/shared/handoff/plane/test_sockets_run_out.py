"""A process has a limit of sockets: connections beyond it are refused, and no others."""

from __future__ import annotations

import zmq

from tandem.shared.handoff.plane.messages import Received, ReceiveFailed
from tandem.tests.shared.handoff.support.by_hand import World
from tandem.tests.shared.handoff.support.plane_pair import BLOCKS, END, expect

WHOLE = {"first_token": 0, "end_token": END}
# Room for one connection, which takes six, and for a part of another.
SOCKETS = range(6, 12)


def test_a_peer_for_which_there_is_no_socket_fails_its_attempt_alone() -> None:
    for sockets in SOCKETS:
        with World("tcp") as world:
            decode = world.rank("d", listen_host=None)
            decode._context.set(zmq.MAX_SOCKETS, sockets)
            first, second = world.rank("p1", seed=1), world.rank("p2", seed=2)
            world.transfer(first, decode, 1, BLOCKS, **WHOLE)
            world.until(lambda log=decode.log: bool(log.of(Received)))  # type: ignore[misc]

            decode.plane.submit(expect(second, 2, BLOCKS, **WHOLE))
            world.until(lambda log=decode.log: bool(log.of(ReceiveFailed)))  # type: ignore[misc]
            [failed] = decode.log.of(ReceiveFailed)
            assert failed.transfer_id == 2 and failed.retriable
            assert "no socket for it: Too many open files" in failed.reason

            world.transfer(first, decode, 3, BLOCKS, **WHOLE)
            world.until(lambda log=decode.log: len(log.of(Received)) == 2)  # type: ignore[misc]

"""What the router makes of a node's reports."""

from __future__ import annotations

from tandem.proto import tandem_pb2 as pb
from tandem.router.nodes import Node
from tandem.router.prefixes import PromptKeys
from tandem.shared.lock import OPEN

NOBODY = "127.0.0.1:1"


async def test_a_report_from_before_a_call_has_ended_tells_of_no_other_routers_calls() -> None:
    node = Node(pb.JoinRequest(node_id="d", role=pb.ROLE_DECODE), NOBODY, 0.0, OPEN)

    def sequences(running: int) -> int:
        node.report(pb.Load(running=running), pb.Prefixes())
        return node.view(PromptKeys([1, 2, 3], "")).sequences

    call = node.generate(pb.GenerateRequest(sampling=pb.Sampling(n=2)), 1.0, ())
    assert sequences(running=2) == 2  # ours
    assert sequences(running=3) == 3
    node.done(call)
    assert sequences(running=2) == 0  # written before it had ended
    assert sequences(running=2) == 2  # so these are of others
    await node.close()

"""Parameters of sequences from the message of a router."""

from __future__ import annotations

import pytest

from tandem.decode_node.generate_request import sampling_params
from tandem.proto import tandem_pb2 as pb
from tandem.shared.engine.structured.thinking_budget import ThinkingBudget
from tandem.shared.errors import RequestError


def test_a_thinking_budget_arrives() -> None:
    param = "thinking.budget_tokens"
    message = pb.ThinkingBudget(tokens=3, end="</think>", calls=["<tool_call>"], param=param)
    thinking = sampling_params(pb.Sampling(max_tokens=5, n=1, thinking=message)).thinking
    expected = ThinkingBudget(
        tokens=3, start="", end="</think>", calls=("<tool_call>",), param=param
    )
    assert thinking == expected
    assert sampling_params(pb.Sampling(max_tokens=5, n=1)).thinking is None
    with pytest.raises(RequestError, match="no closing marker"):
        sampling_params(pb.Sampling(max_tokens=5, thinking=pb.ThinkingBudget(tokens=3)))

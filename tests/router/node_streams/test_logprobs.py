"""Checks of the logprobs that a node sends."""

from __future__ import annotations

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.packed_logprobs import ENTRY_BYTES
from tandem.router.errors import NodeError
from tandem.router.node_streams.logprobs import check_logprobs

POSITION = pb.PositionLogprobs(packed_top=bytes(2 * ENTRY_BYTES))


@pytest.mark.parametrize(("positions", "tokens"), [(0, 3), (3, 3), (3, None)])
def test_every_token_or_none_has_logprobs(positions: int, tokens: int | None) -> None:
    check_logprobs([POSITION] * positions, tokens)


@pytest.mark.parametrize("positions", [2, 4])
def test_logprobs_of_another_number_of_tokens_are_refused(positions: int) -> None:
    with pytest.raises(NodeError, match=f"3 tokens with the logprobs of {positions}"):
        check_logprobs([POSITION] * positions, 3)


def test_logprobs_that_are_cut_off_are_refused() -> None:
    with pytest.raises(NodeError, match="invalid length"):
        check_logprobs([POSITION, pb.PositionLogprobs(packed_top=bytes(ENTRY_BYTES - 1))])

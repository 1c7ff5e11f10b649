"""Logprobs in eight bytes each, packed by ranks and unpacked by routers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import tandem_pb2 as pb
from tandem.proto.packed_logprobs import ENTRY_BYTES, pack_logprobs, unpack_logprobs
from tandem.router.errors import NodeError
from tandem.router.node_streams.logprobs import alternatives, check_logprobs, count_alternatives
from tandem.shared.engine.rank.logprobs import logprobs_of, position_logprobs

ENTRIES = st.lists(st.tuples(st.integers(0, (1 << 32) - 1), st.floats(width=32, allow_nan=False)))


@given(ENTRIES)
def test_entries_arrive_as_they_were_sent(entries: list[tuple[int, float]]) -> None:
    assert unpack_logprobs(pack_logprobs(entries)) == entries


@given(st.binary(max_size=40))
def test_bytes_of_a_node_are_entries_or_its_error(data: bytes) -> None:
    position = pb.PositionLogprobs(packed_top=data)
    if len(data) % ENTRY_BYTES:
        with pytest.raises(NodeError, match="invalid length"):
            check_logprobs([pb.PositionLogprobs(), position])
    else:
        check_logprobs([position])
        assert (
            len(alternatives(position)) == count_alternatives(position) == len(data) // ENTRY_BYTES
        )


def test_a_rank_packs_what_the_router_reads() -> None:
    logits = torch.randn(3, 99)
    logits[1, 5] = float("-inf")
    values = logits.log_softmax(dim=-1)
    for top in (0, 1, 20, 99, 200):
        for row, logprobs in enumerate(position_logprobs(logits, [4, 5, 6], top)):
            want = sorted(enumerate(values[row].tolist()), key=lambda entry: -entry[1])[:top]
            assert logprobs.top == want
    assert position_logprobs(logits[:0], [], 5) == []
    logits[1, 7] = float("nan")
    first, broken, last = position_logprobs(logits, [4, 5, 6], 20)
    assert (len(first.top), len(broken.top), len(last.top)) == (20, 0, 20)
    assert unpack_logprobs(logprobs_of(logits[0], [7, 3])) == [
        (token, values[0, token].item()) for token in (7, 3)
    ]

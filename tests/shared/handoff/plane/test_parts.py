"""Unequal numbers of ranks: every head from one holder, over real sockets."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.handoff.plane.messages import (
    Cancelled,
    CancelSend,
    Received,
    SendFailed,
    SendFinished,
)
from tandem.shared.handoff.wire.head_parts import HeadPart, HeadRun, parts_of
from tandem.shared.models.spec import AttentionSpec
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCK,
    HEAD_BYTES,
    LAYERS,
    PlaneRank,
    every_layer,
    make_cache,
    until,
)

END = 50
BLOCKS = tuple(range(-(-END // BLOCK)))
pytestmark = pytest.mark.usefixtures("every_carrier")


def head_ranges(kv_heads: int, ranks: int) -> list[range]:
    kv = AttentionSpec(num_heads=16, num_kv_heads=kv_heads, head_dim=8).kv
    return [kv.heads_of(rank, ranks) for rank in range(ranks)]


def by_layer(*layers: list[range]) -> list[tuple[range, ...]]:
    """The heads on each rank, layer by layer, from those of each layer, rank by rank."""
    return list(zip(*layers, strict=True))


SIZES = st.sampled_from([1, 2, 4, 8])


@given(st.lists(SIZES, min_size=1, max_size=5), SIZES, SIZES)
def test_every_receiver_gets_each_of_its_heads_of_each_layer_once_from_a_holder(
    kv_heads: list[int], receivers: int, senders: int
) -> None:
    here = by_layer(*(head_ranges(heads, receivers) for heads in kv_heads))
    there = by_layer(*(head_ranges(heads, senders) for heads in kv_heads))
    parts = parts_of(here, there)
    assert len({(part.receiver, part.sender) for part in parts}) == len(parts)
    for rank, expected in enumerate(here):
        mine = [part for part in parts if part.receiver == rank]
        for layer in range(len(kv_heads)):
            runs = {part.sender: heads_of(part, layer) for part in mine}
            assert sorted(head for run in runs.values() for head in run) == list(expected[layer])
            assert all(set(run) <= set(there[sender][layer]) for sender, run in runs.items())


def heads_of(part: HeadPart, layer: int) -> range:
    runs = [run for run in part.heads for _ in range(run.layers)]
    return range(runs[layer].first_head, runs[layer].end_head)


def test_receivers_are_spread_over_the_holders_of_a_head() -> None:
    one = (HeadRun(1, 0, 1),)
    parts = parts_of(by_layer(head_ranges(1, 4)), by_layer(head_ranges(1, 2)))
    assert parts == [HeadPart(receiver, receiver // 2, one) for receiver in range(4)]


def test_layers_that_differ_take_no_more_pairs_of_ranks_than_one_of_them() -> None:
    """A latent, and eight heads: a rank gets the latent from a rank that it gets heads from."""
    parts = parts_of(
        by_layer(head_ranges(8, 2), head_ranges(1, 2)),
        by_layer(head_ranges(8, 4), head_ranges(1, 4)),
    )
    assert [(part.receiver, part.sender) for part in parts] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_a_head_without_a_holder_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sending rank holds head 1"):
        parts_of([(range(2),)], [(range(1),)])


def value(layer: int, token: int, plane: int) -> bytes:
    """The content of a head: 16 bytes that name layer, token, and head of K or V."""
    return bytes([layer, token, plane, 7] * (HEAD_BYTES // 4))


def ranks(stack: ExitStack, name: str, heads: list[range], **config: Any) -> list[PlaneRank]:
    """One data plane for each entry, which are the heads that it holds."""
    return [
        stack.enter_context(
            PlaneRank(
                name,
                epoch=ord(name),
                cache=make_cache(heads=own),
                rank=rank,
                tp_size=len(heads),
                **config,
            )
        )
        for rank, own in enumerate(heads)
    ]


@pytest.mark.parametrize(("receivers", "senders"), [(1, 2), (2, 1), (1, 4), (4, 2), (2, 4)])
def test_unequal_sides_hand_over_every_head(receivers: int, senders: int) -> None:
    heads = 4
    here, there = head_ranges(heads, receivers), head_ranges(heads, senders)
    with ExitStack() as stack:
        prefill = ranks(stack, "p", there)
        decode = ranks(stack, "d", here, listen_host=None)
        for rank, own in zip(prefill, there, strict=True):
            for layer in range(LAYERS):
                for token in range(END):
                    row = rank.cache.row(BLOCKS, token)
                    planes = [*own, *(heads + head for head in own)]
                    rank.cache.layers[layer][row] = b"".join(
                        value(layer, token, plane) for plane in planes
                    )
        parts = parts_of(*(by_layer(*[side] * LAYERS) for side in (here, there)))
        fields = {"first_token": 0, "end_token": END}
        for part in parts:
            span = {"heads": part.heads, **fields}
            decode[part.receiver].expect(prefill[part.sender], 1, BLOCKS, **span)
            prefill[part.sender].open(decode[part.receiver], 1, BLOCKS, **span)
        for rank in prefill:
            rank.compute(1, 0, END, chunk=17)
        for number, rank in enumerate(decode):
            expected = sum(part.receiver == number for part in parts)
            until(lambda rank=rank, expected=expected: len(rank.log.of(Received)) == expected)  # type: ignore[misc]
            for layer in range(LAYERS):
                for token in range(END):
                    planes = [*here[number], *(heads + head for head in here[number])]
                    result = bytes(rank.cache.layers[layer][rank.cache.row(BLOCKS, token)])
                    assert result == b"".join(value(layer, token, plane) for plane in planes)
        for number, rank in enumerate(prefill):
            expected = sum(part.sender == number for part in parts)
            until(lambda rank=rank, expected=expected: len(rank.log.of(SendFinished)) == expected)  # type: ignore[misc]


def test_a_cancel_ends_all_parts_of_a_transfer() -> None:
    with ExitStack() as stack:
        prefill = stack.enter_context(PlaneRank("p", epoch=1, seed=1))
        decode = ranks(stack, "d", head_ranges(2, 2), listen_host=None)
        for number, rank in enumerate(decode):
            span = {"heads": every_layer(range(number, number + 1))}
            rank.expect(prefill, 1, BLOCKS, first_token=0, end_token=END, **span)
            prefill.open(rank, 1, BLOCKS, first_token=0, end_token=END, **span)
        prefill.compute(1, 0, 20, chunk=20)
        prefill.plane.submit(CancelSend(transfer_id=1, attempt=1))
        prefill.log.wait(Cancelled, 1)
        until(lambda: prefill.plane.stats().active_sends == 0)
        until(lambda: all(rank.plane.stats().active_receives == 0 for rank in decode))
        assert prefill.plane.stats().cancelled == 2


def test_heads_that_a_rank_does_not_hold_are_refused() -> None:
    with PlaneRank("p", seed=1) as prefill:
        span = {"first_token": 0, "end_token": END, "heads": every_layer(range(3))}
        prefill.open(PlaneRank("d"), 1, BLOCKS, **span)
        assert "heads [0, 3) of layer 0 are not here" in prefill.log.wait(SendFailed, 1).reason

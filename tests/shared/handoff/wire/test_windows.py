"""Layers with a window: just what the decode node will see, by the spec and on the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.handoff.plane.messages import Received, ReceiveFailed, SendFailed, SendFinished
from tandem.shared.handoff.wire.layer_windows import first_tokens
from tandem.shared.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
)
from tandem.tests.shared.handoff.support.plane_pair import CELL, LAYERS, PlaneRank, expect, rows

END = 100
HERE, THERE = tuple(range(13)), tuple(range(20, 33))
ON_EACH_CARRIER = pytest.mark.usefixtures("each_carrier")


def spec_of(*windows: int | None) -> DecoderSpec:
    attention = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=4)
    return DecoderSpec(
        vocab_size=8,
        hidden_size=8,
        layers=tuple(
            LayerSpec(
                attention=replace(attention, sliding_window=window), mlp=DenseSpec(intermediate=8)
            )
            for window in windows
        ),
        norm_eps=1e-6,
        tie_embeddings=True,
        max_position=1000,
    )


WINDOWS = st.one_of(st.none(), st.integers(1, 50))


@given(st.lists(WINDOWS, min_size=1, max_size=4), st.integers(0, 40), st.integers(1, 40), st.data())
def test_a_layer_begins_where_the_first_token_to_compute_begins_to_see(
    windows: list[int | None], first: int, count: int, data: st.DataObject
) -> None:
    end = first + count
    resume = data.draw(st.integers(first, end))
    firsts = first_tokens(spec_of(*windows), first, end, resume)
    for window, start in zip(windows, firsts, strict=True):
        # As the attention's mask has it: token > query - window.
        visible = [t for t in range(first, end) if window is None or t > resume - window]
        assert list(range(start, end)) == (visible or [end - 1])


@pytest.mark.parametrize(
    ("prompt", "first"), [(22, 0), (23, 0), (24, 0), (25, 1), (26, 2), (300, 276)]
)
def test_the_border_of_a_window_of_25(prompt: int, first: int) -> None:
    """Token 24 and the 24 before it fill the window; token 25 sees token 0 no more."""
    assert first_tokens(spec_of(25, None), 0, prompt, prompt) == (first, 0)


def test_resuming_at_0_needs_every_token() -> None:
    assert first_tokens(spec_of(3, None, 9), 16, 80, 0) == (16, 16, 16)


@ON_EACH_CARRIER
@pytest.mark.parametrize("firsts", [(0, 77, 0), (60, 60, 99), (0, 99, 50)], ids=str)
def test_what_a_window_leaves_out_is_not_sent_and_not_waited_for(
    firsts: tuple[int, ...],
) -> None:
    cells = sum(END - first for first in firsts)
    span = {"first_token": 0, "end_token": END, "first_tokens": firsts}
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", seed=2, listen_host=None) as decode:
        before = rows(decode.cache, THERE, 0, END)
        decode.expect(prefill, 1, THERE, **span)
        prefill.open(decode, 1, HERE, **span)
        prefill.compute(1, 0, END, chunk=33)
        received, finished = decode.log.wait(Received, 1), prefill.log.wait(SendFinished, 1)
        assert received.bytes == finished.bytes == cells * CELL
        assert prefill.plane.stats().bytes_sent == cells * CELL
        source, target = rows(prefill.cache, HERE, 0, END), rows(decode.cache, THERE, 0, END)
        for layer, first in enumerate(firsts):
            border = layer * END + first
            assert target[border : (layer + 1) * END] == source[border : (layer + 1) * END]
            assert target[layer * END : border] == before[layer * END : border]


def test_a_sender_that_sends_more_than_the_window_is_refused() -> None:
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        firsts = {"first_token": 0, "end_token": END, "first_tokens": (0, 90, 0)}
        decode.expect(prefill, 1, THERE, **firsts)
        prefill.open(decode, 1, HERE, first_token=0, end_token=END)
        prefill.compute(1, 0, END, chunk=END)
        assert "from 0 or 90, by layer" in decode.log.wait(ReceiveFailed, 1).reason
        assert "from 0 or 90, by layer" in prefill.log.wait(SendFailed, 1).reason


@pytest.mark.parametrize("firsts", [(0, 0), (0, 0, END), (0, 3, 9, 9)], ids=str)
def test_first_tokens_that_do_not_fit_are_refused(firsts: tuple[int, ...]) -> None:
    span = {"first_token": 0, "end_token": END, "first_tokens": firsts}
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        prefill.open(decode, 1, HERE, **span)
        assert f"do not fit {LAYERS} layers" in prefill.log.wait(SendFailed, 1).reason
        decode.plane.submit(expect(prefill, 1, THERE, **span))
        assert f"do not fit {LAYERS} layers" in decode.log.wait(ReceiveFailed, 1).reason

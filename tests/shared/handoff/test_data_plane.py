"""Whole transfers over real sockets."""

from __future__ import annotations

import random

import pytest

from tandem.shared.handoff.messages import Received, SendFinished

from .plane_pair import BLOCK, CELL, LAYERS, Rank, rows


def _table(source: random.Random, tokens: int, blocks: int = 64) -> tuple[int, ...]:
    return tuple(source.sample(range(blocks), -(-tokens // BLOCK)))


@pytest.mark.parametrize(
    ("first", "end", "chunk"), [(0, 1, 1), (0, 19, 7), (5, 99, 40), (17, 18, 5), (1, 200, 200)]
)
def test_transfer_of_odd_size_arrives_whole_and_touches_nothing_else(first, end, chunk):
    source = random.Random(end)
    with Rank("p", seed=1) as prefill, Rank("d", seed=2, listen_host=None) as decode:
        there, here = _table(source, end), _table(source, end)
        untouched = rows(decode.cache, range(64), 0, 64 * BLOCK)
        decode.expect(prefill, 7, here, first_token=first, end_token=end)
        prefill.open(decode, 7, there, first_token=first, end_token=end)
        # The prefill node computes the whole prompt; only what is missing there may travel.
        prefill.compute(7, 0, end, chunk=chunk)
        received = decode.log.wait(Received, 7)
        finished = prefill.log.wait(SendFinished, 7)
        missing = LAYERS * (end - first) * CELL
        assert received.bytes == finished.bytes == missing
        assert prefill.plane.stats().bytes_sent == decode.plane.stats().bytes_received == missing
        assert 0 <= finished.exposed_seconds < 5
        assert rows(decode.cache, here, first, end) == rows(prefill.cache, there, first, end)
        changed = sum(
            a != b
            for a, b in zip(untouched, rows(decode.cache, range(64), 0, 64 * BLOCK), strict=True)
        )
        assert changed == LAYERS * (end - first)

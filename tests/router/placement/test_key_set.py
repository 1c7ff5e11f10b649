"""The compact set of keys behaves like a set."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.placement import key_set
from tandem.router.placement.key_set import KeySet

KEYS = st.integers(0, 30) | st.integers(2**64 - 4, 2**64 - 1)
SOME = st.lists(KEYS, max_size=8, unique=True)


@given(first=SOME, steps=st.lists(st.tuples(SOME, SOME), max_size=12), limit=st.integers(0, 6))
def test_it_holds_what_a_set_would(
    first: list[int], steps: list[tuple[list[int], list[int]]], limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_set, "MAX_CHANGES", limit)
        keys, model = KeySet(first), set(first)
        for added, removed in steps:
            keys.update(added, removed)
            model = (model - set(removed)) | set(added)
            assert {key for key in [*range(31), 2**64 - 1] if key in keys} == {
                key for key in [*range(31), 2**64 - 1] if key in model
            }
        assert len(keys) == len(model)
        assert list(keys) == keys.all().tolist() == sorted(model)


def test_a_key_takes_little_more_than_its_eight_bytes() -> None:
    random = Random(5)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        keys = KeySet(random.getrandbits(64) for _ in range(16384))
        keys.update([random.getrandbits(64) for _ in range(2000)], [])
        assert tracemalloc.get_traced_memory()[0] - before < 10 * 18384
    finally:
        tracemalloc.stop()
    assert len(keys) == 18384

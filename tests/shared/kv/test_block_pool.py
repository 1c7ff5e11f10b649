"""Conservation and reuse in the block pool, and what its prefix index may match."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.shared.kv.block_pool import BlockPool, OutOfBlocksError
from tandem.shared.kv.prefix_keys import chain_keys


def test_consecutive_blocks_are_preferred() -> None:
    pool = BlockPool(8, 4)
    first = pool.allocate(2)
    assert pool.allocate(2, after=first[-1]) == [2, 3]


def test_nothing_is_taken_when_there_is_too_little() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(3)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.counts().free == 1
    pool.release(blocks)
    pool.check()


def test_released_prefix_is_matched_again_until_evicted() -> None:
    pool = BlockPool(4, 2)
    keys = chain_keys([1, 2, 3, 4], 2)
    blocks = pool.allocate(2)
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.counts().cached == 2
    assert pool.match(keys) == blocks
    pool.release(blocks)
    pool.allocate(3)
    # The tail went first: the head alone can still be matched.
    assert pool.peek(keys) == 1
    pool.check()


def test_salts_do_not_share() -> None:
    assert chain_keys([1, 2], 2, "a") != chain_keys([1, 2], 2, "b")


def test_keys_depend_on_everything_before() -> None:
    assert chain_keys([1, 2, 3, 4], 2)[1] != chain_keys([9, 2, 3, 4], 2)[1]


def test_cache_is_bounded_when_asked() -> None:
    pool = BlockPool(8, 1, prefix_cache_max_blocks=2)
    blocks = pool.allocate(5)
    for block, key in zip(blocks, chain_keys(list(range(5)), 1), strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.counts().cached == 2
    pool.check()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "give", "reserve", "commit", "drop"]), st.integers(0, 6)
        ),
        max_size=60,
    )
)
def test_blocks_are_conserved_under_any_sequence_of_calls(
    operations: list[tuple[str, int]],
) -> None:
    pool = BlockPool(12, 2, prefix_cache_max_blocks=5)
    owned: list[list[int]] = []
    reserved: list[list[int]] = []
    for operation, n in operations:
        try:
            if operation == "take":
                tokens = list(range(2 * n))
                blocks = pool.match(chain_keys(tokens, 2))
                owned.append(blocks)
                blocks += pool.allocate(n - len(blocks))
                for block, key in zip(blocks, chain_keys(tokens, 2), strict=True):
                    pool.publish(block, key)
            elif operation == "give" and owned:
                pool.release(owned.pop(n % len(owned)))
            elif operation == "reserve":
                reserved.append(pool.reserve(n))
            elif operation == "commit" and reserved:
                blocks = reserved.pop(n % len(reserved))
                pool.commit(blocks)
                owned.append(blocks)
            elif operation == "drop" and reserved:
                pool.cancel_reservation(reserved.pop(n % len(reserved)))
        except OutOfBlocksError:
            pass
        pool.check()
    for blocks in owned:
        pool.release(blocks)
    for blocks in reserved:
        pool.cancel_reservation(blocks)
    pool.check()
    assert pool.counts().available == 12

"""Digest of a prefix index: bounded, complete up to the sample, and never behind."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.kv.block_pool import BlockPool
from tandem.shared.kv.prefix_keys import KEY_BYTES, chain_keys, short_key
from tandem.shared.kv.published import MAX_KEYS, Changes, PrefixDigest

NUMBERS = st.integers(0, 40)
STEPS = st.lists(st.one_of(NUMBERS, NUMBERS.map(lambda n: -n), st.just("look")), max_size=120)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


class Follower:
    """A router's copy, which learns of changes now and then."""

    def __init__(self) -> None:
        self.version = 0
        self.keys: set[int] = set()

    def take(self, changes: Changes) -> None:
        assert changes.base <= self.version
        self.keys = (self.keys if changes.base else set()) - set(changes.removed)
        self.keys |= set(changes.added)
        self.version = changes.version


@given(steps=STEPS, max_keys=st.integers(1, 12), max_changes=st.integers(1, 12))
def test_a_follower_has_every_sampled_key_and_nothing_else(
    steps: list[int | str], max_keys: int, max_changes: int
) -> None:
    published, keys = PrefixDigest(max_keys, max_changes), set[int]()
    one, late = Follower(), Follower()
    before = published.since(0)
    late.take(before)
    for step in [*steps, "look"]:
        if isinstance(step, str):
            changes = published.since(one.version)
            one.take(changes)
            one.take(changes)  # a heartbeat whose reply was lost comes again
        elif step > 0:
            published.add(key(step))
            keys.add(step)
        else:
            published.remove(key(-step))
            keys.discard(-step)
        assert len(published) <= max_keys
        assert set(published) == {n for n in keys if not n % published.stride}
    late.take(published.since(late.version))
    assert one.keys == late.keys == set(published)
    assert len(published.since(late.version).added) == 0


def test_the_digest_is_bounded_however_large_the_cache() -> None:
    published = PrefixDigest()
    for prompt in range(40):
        for one in chain_keys(range(prompt * 10_000, (prompt + 1) * 10_000), 4):
            published.add(one)
    whole = published.since(0)
    assert published.stride == 8 and MAX_KEYS / 4 < len(whole.added) <= MAX_KEYS
    assert len(published.since(whole.version - 1).added) <= 1


def test_an_index_publishes_what_it_adds_and_evicts() -> None:
    pool = BlockPool(4, 2)
    keys = chain_keys([1, 2, 3, 4], 2)
    blocks = pool.allocate(2)
    for block, one in zip(blocks, keys, strict=True):
        pool.publish(block, one)
    assert set(pool.index.published) == {short_key(one) for one in keys}
    pool.release(blocks)
    version = pool.index.published.since(0).version
    pool.allocate(3)
    assert pool.index.published.since(version).removed == [short_key(keys[1])]
    pool.index.published.remove(keys[1])
    assert set(pool.index.published) == {short_key(keys[0])}


def test_every_process_comes_to_the_same_keys() -> None:
    code = (
        "from tandem.shared.kv.prefix_keys import chain_keys, short_key\n"
        "print(*map(short_key, chain_keys([1, 2, 3, 4], 2, 'tenant')))"
    )
    process = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    here = [short_key(one) for one in chain_keys([1, 2, 3, 4], 2, "tenant")]
    assert [int(word) for word in process.stdout.split()] == here


def test_changes_hold_nothing_that_a_follower_has_seen() -> None:
    published = PrefixDigest(MAX_KEYS, 12)
    for number in range(4):
        published.add(key(number))
        version = published.since(0).version
        published.add(key(100 + number))
        changes = published.since(version)
        assert (changes.base, changes.added, changes.removed) == (version, [100 + number], [])

"""Prefixes of nodes: matched for a prompt, within its tenant only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import tandem_pb2 as pb
from tandem.router.placement.node_prefixes import (
    MAX_KEYS,
    MAX_PROMPT_KEYS,
    NodePrefixes,
    PromptKeys,
)
from tandem.shared.kv.prefix_keys import chain_keys, pack_keys, short_key, unpack_keys

TOKENS = list(range(100))


def report_of(tokens: list[int], block_size: int, salt: str = "", stride: int = 1) -> pb.Prefixes:
    keys = [short_key(key) for key in chain_keys(tokens, block_size, salt)]
    return pb.Prefixes(
        version=1,
        block_size=block_size,
        stride=stride,
        added=pack_keys(key for key in keys if not key % stride),
    )


def holding(message: pb.Prefixes) -> NodePrefixes:
    prefixes = NodePrefixes()
    prefixes.update(message)
    return prefixes


@pytest.mark.parametrize("block_size", [1, 7, 16, 50])
@pytest.mark.parametrize("length", [0, 16, 50, 99, 100])
def test_a_node_of_any_block_size_is_matched_up_to_its_last_full_block(
    block_size: int, length: int
) -> None:
    node = holding(report_of(TOKENS[:length], block_size))
    full = length // block_size * block_size
    # The last token is always computed.
    assert node.matched(PromptKeys(TOKENS)) == min(full, len(TOKENS) - 1)
    assert node.matched(PromptKeys([9, *TOKENS])) == 0


def test_a_prompt_is_matched_with_its_own_tenant_s_only() -> None:
    node = holding(report_of(TOKENS, 10, "a"))
    assert node.matched(PromptKeys(TOKENS, "a")) == 99
    assert node.matched(PromptKeys(TOKENS, "b")) == node.matched(PromptKeys(TOKENS)) == 0


@given(held_tokens=st.integers(0, 100), stride=st.sampled_from([1, 2, 4, 8]))
def test_a_sample_matches_up_to_its_last_key(held_tokens: int, stride: int) -> None:
    node = holding(report_of(TOKENS[:held_tokens], 1, stride=stride))
    keys = [short_key(key) for key in chain_keys(TOKENS[:held_tokens], 1)]
    sampled = [number for number, key in enumerate(keys, 1) if not key % stride]
    assert node.matched(PromptKeys(TOKENS)) == min(99, max(sampled, default=0))


def test_changes_follow_the_version_that_they_were_made_for() -> None:
    node = holding(report_of(TOKENS[:40], 10))
    first = report_of(TOKENS, 10).added[:8]
    more = report_of(TOKENS[:60], 10).added[4 * 8 :]
    node.update(pb.Prefixes(version=3, base=1, block_size=10, stride=1, added=more))
    assert (node.matched(PromptKeys(TOKENS)), node.version) == (60, 3)
    node.update(pb.Prefixes(version=9, base=8, block_size=10, stride=1, removed=first))
    assert (node.matched(PromptKeys(TOKENS)), node.version) == (60, 3), "one was missed"
    node.update(pb.Prefixes(version=4, base=3, block_size=10, stride=1, removed=more[8:]))
    assert node.matched(PromptKeys(TOKENS)) == 50
    node.update(pb.Prefixes(version=5, block_size=10, stride=1))
    assert len(node) == 0


def test_more_keys_than_the_limit_are_ignored() -> None:
    node = holding(pb.Prefixes(version=1, block_size=1, stride=1, added=bytes(8 * (MAX_KEYS + 1))))
    assert len(node) == 0 and node.matched(PromptKeys(TOKENS)) == 0


def test_only_the_beginning_of_a_long_prompt_in_tiny_blocks_is_matched() -> None:
    tokens = list(range(100_000))
    prompt = PromptKeys(tokens)
    assert holding(report_of(tokens[:20_000], 1)).matched(prompt) == MAX_PROMPT_KEYS // 2
    assert holding(report_of(tokens, 16)).matched(prompt) == MAX_PROMPT_KEYS // 4 * 16
    computed = sum(len(prompt.sample(size, 1)) for size in range(1, 64))
    assert computed <= MAX_PROMPT_KEYS


def test_expected_keys_count_as_held() -> None:
    node = holding(report_of(TOKENS[:20], 10))
    expected = set(unpack_keys(report_of(TOKENS[:70], 10).added))
    assert node.matched(PromptKeys(TOKENS), expected.__contains__) == 70

"""Prompts whose KV moves, recorded for the cluster page."""

from __future__ import annotations

from tandem.proto import tandem_pb2 as pb
from tandem.router.placement.recent_prefills import MAX_RECENT, RECENT_SECONDS, RecentPrefills


def usage(node: str = "", tokens: int = 0) -> pb.Usage:
    return pb.Usage(prefill_node=node, remote_tokens=tokens)


def test_a_prompt_moves_until_its_kv_is_complete() -> None:
    now = [10.0]
    prefills = RecentPrefills(lambda: now[0])
    one = prefills.begin("p0", "d0", 500)
    assert list(prefills.running()) == [one] and prefills.recent() == []
    now[0] = 12.0
    prefills.finish(one, usage("p1", 499))
    prefills.end(one)
    assert list(prefills.running()) == [] and prefills.recent() == [one]
    assert (one.prefill_node, one.moved_tokens, one.end, one.failed) == ("p1", 499, 12.0, False)
    assert (prefills.prompts_moved, prefills.tokens_moved, prefills.prompts_local) == (1, 499, 0)
    now[0] += RECENT_SECONDS + 1
    assert prefills.recent() == []


def test_prompts_of_decode_nodes_are_counted_only() -> None:
    prefills = RecentPrefills(lambda: 0.0)
    remote, alone = prefills.begin("p0", "d0", 5), prefills.begin("", "d0", 5)
    assert list(prefills.running()) == [remote]
    prefills.finish(remote, usage())
    prefills.end(alone)
    assert list(prefills.running()) == [] and prefills.recent() == []
    assert (prefills.prompts_moved, prefills.prompts_local) == (0, 1)


def test_a_prompt_that_ends_early_has_failed_and_memory_is_bounded() -> None:
    prefills = RecentPrefills(lambda: 0.0)
    for _ in range(3 * MAX_RECENT):
        prefills.end(prefills.begin("p0", "d0", 5))
    assert len(prefills.recent()) == MAX_RECENT and all(each.failed for each in prefills.recent())
    assert prefills.prompts_moved == 0

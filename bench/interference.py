"""The effect of one long prompt on concurrent streams.

Victims stream greedy tokens; once they run at their own speed, an attacker sends one new long
prompt. From then to the attacker's first token, each victim keeps a share of its own speed. The
results are the smallest share of a victim, the longest gap between two tokens of a victim, and the
attacker's time to first token relative to that without other streams.

A stream slows down by itself as its context grows: with a small model that reads 100 MB of weights
in a step, a thousand tokens of KV are another 50 MB. So the same streams run once more without an
attack, and a victim's own speed is the speed of that run over the same tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from itertools import pairwise
from random import Random
from typing import Any

from ..shared.errors import BenchmarkError
from .client.api_server import ApiServer
from .client.measured_response import MeasuredResponse
from .datasets.random_prompts import PromptMaker
from .running_streams import START_SECONDS, RunningStreams, greedy_body, running

# Tokens of each victim before its own speed is measured.
WARM_TOKENS = 40
FEW_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The victims and the attacker; lengths in tokens."""

    victims: int = 1
    prompt_tokens: int = 4000  # of the attacker
    attacker_tokens: int = 2
    victim_prompt_tokens: int = 16
    victim_tokens: int = 4000
    alone_seconds: float = 3.0  # undisturbed, before the attack


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """The result of a round; times in seconds, speeds in tokens per second."""

    prompt_tokens: int  # of the attacker, as counted by the server
    alone_first_token: float
    first_token: float
    shares: tuple[float, ...]  # of its own speed, for each victim
    longest_gap: float  # of any victim
    longest_gap_before: float  # of any victim, before the attack
    step: float  # median time between two tokens of a victim before the attack
    own_speed: float  # of the slowest victim, without an attack, over the tokens of the attack

    @property
    def worst_share(self) -> float:
        return min(self.shares)

    @property
    def lateness(self) -> float:
        return self.first_token / self.alone_first_token

    @property
    def gap_allowed(self) -> float:
        """Two decode steps and 20 ms."""
        return 2 * self.step + 0.02


async def attack(
    server: ApiServer,
    prompts: PromptMaker,
    name: str,
    scene: Scene,
    *,
    attacked: ApiServer | None = None,
    on_measuring: Callable[[], object] = lambda: None,
) -> Attack:
    """Run one round, and the attacker without victims. ``name`` makes the prompts unique;
    ``attacked`` gets the attacker's prompt, if not the victims' server; ``on_measuring`` is called
    when the measurement of the victims begins."""
    attacked = attacked or server
    alone = await _attacker(attacked, prompts, f"{name}/alone", scene)
    async with _victims(server, prompts, name, scene) as victims:
        streams = victims.responses
        on_measuring()
        before = time.perf_counter()
        await asyncio.sleep(scene.alone_seconds)
        await victims.until(lambda: _have_a_speed(streams, before))
        begin = time.perf_counter()
        attacker = await _attacker(attacked, prompts, f"{name}/attack", scene)
        end = attacker.times[0]
    windows = [_window(stream, begin, end) for stream in streams]
    async with _victims(server, prompts, name, scene) as victims:
        undisturbed = victims.responses
        need = [last + 1 for _, last in windows]
        await victims.until(
            lambda: all(len(one.times) >= n for one, n in zip(undisturbed, need, strict=True)),
            START_SECONDS + 2 * (end - before),
        )
    own_speeds = [
        (last - first) / (one.times[last] - one.times[first])
        for one, (first, last) in zip(undisturbed, windows, strict=True)
    ]

    return Attack(
        prompt_tokens=attacker.prompt_tokens or scene.prompt_tokens,
        alone_first_token=alone.ttft,
        first_token=attacker.ttft,
        shares=tuple(
            _rate(one, begin, end) / own for one, own in zip(streams, own_speeds, strict=True)
        ),
        longest_gap=max(_longest_gap(one, begin, end) for one in streams),
        longest_gap_before=max(_longest_gap(one, before, begin) for one in streams),
        step=statistics.median(
            later - earlier
            for one in streams
            for earlier, later in pairwise(t for t in one.times if before <= t < begin)
        ),
        own_speed=min(own_speeds),
    )


async def _attacker(
    server: ApiServer, prompts: PromptMaker, seed: str, scene: Scene
) -> MeasuredResponse:
    prompt = prompts.make(Random(seed), scene.prompt_tokens)
    response = await server.ask(greedy_body(server, prompt, scene.attacker_tokens))
    if not response.success:
        raise BenchmarkError(f"the long prompt failed: {response.error}")
    return response


def _victims(
    server: ApiServer, prompts: PromptMaker, name: str, scene: Scene
) -> AbstractAsyncContextManager[RunningStreams]:
    """Streams that run at their own speed."""
    bodies = [
        greedy_body(
            server,
            prompts.make(Random(f"{name}/victim {index}"), scene.victim_prompt_tokens),
            scene.victim_tokens,
        )
        for index in range(scene.victims)
    ]
    return running(server, bodies, warm_tokens=WARM_TOKENS, remedy="raise --victim-tokens")


def _have_a_speed(streams: Sequence[MeasuredResponse], since: float) -> bool:
    """True once each victim has enough tokens to measure the gaps between them."""
    return all(sum(at >= since for at in one.times[-FEW_TOKENS:]) == FEW_TOKENS for one in streams)


def _window(stream: MeasuredResponse, begin: float, end: float) -> tuple[int, int]:
    """The first and the last token in the window; later for the last one, if it has too few."""
    first, after = bisect_left(stream.times, begin), bisect_left(stream.times, end)
    return first, max(after - 1, first + FEW_TOKENS)


def _rate(stream: MeasuredResponse, begin: float, end: float) -> float:
    """Tokens per second within the window."""
    return sum(begin <= at < end for at in stream.times) / (end - begin)


def _longest_gap(stream: MeasuredResponse, begin: float, end: float) -> float:
    """The longest gap between two tokens that overlaps the window."""
    return max(
        later - earlier
        for earlier, later in pairwise(stream.times)
        if later > begin and earlier < end
    )


def summary(attacks: Sequence[Attack]) -> dict[str, Any]:
    """The medians of the rounds, and the rounds."""

    def middle(figure: Callable[[Attack], float]) -> float:
        return statistics.median(map(figure, attacks))

    return {
        "victim_speed": middle(lambda a: a.own_speed),
        "share_kept": middle(lambda a: a.worst_share),
        "longest_gap_before_ms": 1000 * middle(lambda a: a.longest_gap_before),
        "longest_gap_ms": 1000 * middle(lambda a: a.longest_gap),
        "longest_gap_over_allowed": middle(lambda a: a.longest_gap / a.gap_allowed),
        "attacker_ttft_alone_ms": 1000 * middle(lambda a: a.alone_first_token),
        "attacker_ttft_ms": 1000 * middle(lambda a: a.first_token),
        "attacker_ttft_over_alone": middle(lambda a: a.lateness),
        "rounds": [asdict(one) | {"worst_share": one.worst_share} for one in attacks],
    }

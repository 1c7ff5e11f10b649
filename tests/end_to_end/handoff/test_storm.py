"""Many streams while one request in ten brings a fault with it, drawn from a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tandem.tests.end_to_end.handoff.campaign import (
    DECODE_NODES,
    OUTPUT,
    PREFILL_NODES,
    Campaign,
    StreamResult,
    reference,
)
from tandem.tests.end_to_end.handoff.fault_proxy import BOTH, DOWN, UP, Wire
from tandem.tests.end_to_end.support.cluster import TestCluster
from tandem.tests.support.extent import STORM_SECONDS, STORM_SEED

CLIENTS = 4
PROMPTS = 16
FAULT_SHARE = 0.1
FAULTS: dict[str, Callable[[Wire], object]] = {
    "black hole": lambda wire: wire.hole(*BOTH),
    "cut down": lambda wire: wire.hole(DOWN),
    "cut up": lambda wire: wire.hole(UP),
    "reset": lambda wire: wire.reset(),
    "delay": lambda wire: wire.slow(*BOTH, delay=0.1),
    "throttle": lambda wire: wire.slow(*BOTH, rate=100_000),
    "flipped bit": lambda wire: wire.flip(DOWN),
    "doubled chunk": lambda wire: wire.duplicate(DOWN),
}
# Plain gRPC has no checksum of its own: TCP's and TLS's keep its bytes.
SPOILS = ("flipped bit", "doubled chunk")


class Storm:
    """``CLIENTS`` that ask until the time is over, and the faults that they bring."""

    def __init__(self, campaign: Campaign, want: list[tuple[list[int], list[int]]]) -> None:
        self._campaign = campaign
        self._want = want
        self._until = time.monotonic() + STORM_SECONDS
        self.num_results = 0
        self.faults: list[str] = []

    def client(self, number: int) -> None:
        draw = random.Random(f"{STORM_SEED}/{number}")
        while time.monotonic() < self._until:
            tokens, want = draw.choice(self._want)
            struck = self._bring_fault(draw) if draw.random() < FAULT_SHARE else None
            _check(self._campaign.ask(tokens), want)
            self.num_results += 1
            if struck is not None:
                struck.heal()

    def _bring_fault(self, draw: random.Random) -> Wire:
        name = draw.choice((*PREFILL_NODES, *DECODE_NODES))
        wires = self._campaign.wires[name]
        wire = draw.choice(wires.all()) if name in PREFILL_NODES else wires.grpc
        kinds = [kind for kind in FAULTS if wire is not wires.grpc or kind not in SPOILS]
        kind = draw.choice(kinds)
        reach = 400_000 if wire is wires.bulk else 1000
        wire.when(DOWN, draw.randrange(reach), lambda: FAULTS[kind](wire))
        self.faults.append(f"{kind} of {name}")
        return wire


def _check(result: StreamResult, want: list[int]) -> None:
    """All tokens; or the first of them and one error; or a refusal. Never another token."""
    assert result.tokens == want[: len(result.tokens)], result
    assert result.error or len(result.tokens) == OUTPUT, result
    assert not result.error or '"error"' in result.error, result


def test_no_wrong_token_and_no_leak_under_random_faults(
    campaign: Campaign, aggregated: TestCluster
) -> None:
    prompts = [
        campaign.new_prompt(decode, prefill)
        for decode in DECODE_NODES
        for prefill in PREFILL_NODES
        for _ in range(PROMPTS // 4)
    ]
    storm = Storm(campaign, [(tokens, reference(aggregated, tokens)) for tokens in prompts])
    with ThreadPoolExecutor(CLIENTS) as pool:
        for client in [pool.submit(storm.client, number) for number in range(CLIENTS)]:
            client.result()
    print(f"{storm.num_results} answers, seed {STORM_SEED}, faults: {storm.faults}")
    assert storm.num_results > CLIENTS
    campaign.heal()
    campaign.recover()

"""Two prefill and two decode nodes: prompts come back to the node that holds them, and nodes change
their roles under load without a lost request."""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tandem.router.cluster import admin
from tandem.tests.end_to_end.support.clients import greedy, prompt, stream_lines
from tandem.tests.end_to_end.support.cluster import (
    BLOCK,
    Part,
    TestCluster,
    node_metric,
    running,
    tandem,
    until,
)

ROLES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Any:
    with running(tmp_path_factory.mktemp("four"), tiny_model) as cluster:
        cluster.start_router()
        cluster.start_nodes(
            *((f"{role}-node", f"--node-id={name}") for name, role in ROLES.items())
        )
        cluster.wait_roles(ROLES)
        yield cluster


def nodes_command(cluster: TestCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return tandem("nodes", f"--router={cluster.registry}", *arguments)


def node_named(cluster: TestCluster, name: str) -> Part:
    return cluster.parts[1 + list(ROLES).index(name)]


def ask(cluster: TestCluster, tokens: list[int]) -> dict[str, Any]:
    return cluster.complete(tokens, max_tokens=2, temperature=0, ignore_eos=True)


def test_a_repeated_prompt_goes_to_the_node_that_holds_it(four: TestCluster) -> None:
    homes = {}
    for seed in range(4):
        tokens = prompt(100 + seed, 200)
        first = ask(four, tokens)
        homes[seed] = first["tandem"]["decode_nodes"]
        # At once, before any heartbeat can have reported it.
        again = ask(four, tokens)
        home = again["tandem"]["decode_nodes"]
        assert home == homes[seed], nodes_command(four, "--json").stdout
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 199 // BLOCK * BLOCK
    # And when the router knows it from the nodes alone.
    old = four.router
    assert old is not None
    old.kill()
    four.start_router(http=old.details["http"], registry=old.details["registry"])
    four.wait_roles(ROLES)
    for seed, home in homes.items():
        again = ask(four, [*prompt(100 + seed, 200), 1, 2, 3])
        assert again["tandem"]["decode_nodes"] == home
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 200 // BLOCK * BLOCK


FRESH = itertools.count(1000)


def test_nodes_change_their_roles_under_load_and_no_request_is_lost(four: TestCluster) -> None:
    want = {seed: greedy(four, seed) for seed in range(4)}
    stop = threading.Event()

    def load(seed: int) -> int:
        """Count outputs until the end; each must equal the previous one."""
        count = 0
        while not stop.is_set():
            assert greedy(four, seed) == want[seed]
            count += 1
            stop.wait(0.1)
        return count

    with ThreadPoolExecutor(4) as pool:
        under_load = [pool.submit(load, seed) for seed in want]
        try:
            # Each pair trades places, one node at a time, and trades back.
            for name, role in (
                ("p2", "decode"),
                ("d1", "prefill"),
                ("p1", "decode"),
                ("d2", "prefill"),
            ):
                done = nodes_command(four, "role", name, role)
                assert done.returncode == 0, done.stderr
                until(lambda: four.roles().get(name) == role, f"{name} to be a {role} node")  # noqa: B023
        finally:
            stop.set()
        counts = [future.result() for future in under_load]
    assert min(counts) > 0
    assert four.roles() == {"p1": "decode", "p2": "decode", "d1": "prefill", "d2": "prefill"}
    # The new prefill nodes hand over to the new decode nodes.
    before = Counter({n: transfers(four, n) for n in ("p1", "p2")})
    for _ in range(4):
        ask(four, prompt(next(FRESH), 300))
    assert sum(transfers(four, n) - before[n] for n in ("p1", "p2")) >= 4
    four.wait_idle(*(node_named(four, name) for name in ROLES))
    for name, role in (("d1", "decode"), ("p1", "prefill"), ("d2", "decode"), ("p2", "prefill")):
        admin.set_role(four.registry, name, role)
        until(lambda: four.roles().get(name) == role, f"{name} to be a {role} node")  # noqa: B023
    assert {seed: greedy(four, seed) for seed in want} == want


def transfers(cluster: TestCluster, name: str) -> float:
    return node_metric(node_named(cluster, name), 'tandem_transfers_total{outcome="committed"}')


def test_a_node_whose_role_changes_finishes_its_streams_first(four: TestCluster) -> None:
    done: list[tuple[str, subprocess.CompletedProcess[str]]] = []

    def change() -> None:
        running_on = [
            n for n in ("d1", "d2") if node_metric(node_named(four, n), "tandem_sequences_running")
        ]
        done.append((running_on[0], nodes_command(four, "role", running_on[0], "prefill")))

    lines = stream_lines(four, prompt(9, 20), change, max_tokens=400)
    assert lines[-1] == "data: [DONE]"
    until(lambda: bool(done), "the command")
    ((name, command),) = done
    assert command.returncode == 0, command.stderr
    until(lambda: four.roles().get(name) == "prefill", f"{name} to be a prefill node")
    admin.set_role(four.registry, name, "decode")
    until(lambda: four.roles().get(name) == "decode", f"{name} to be a decode node again")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("role", "nobody", "decode"), "no node is called 'nobody'; the nodes are: d1, d2, p1, p2"),
        (("role", "d1", "decode"), "node d1 is already a decode node"),
        (("role", "d1", "both"), "'both' is not one of 'prefill', 'decode'"),
    ],
)
def test_a_role_that_cannot_be_is_refused(
    four: TestCluster, arguments: tuple[str, ...], words: str
) -> None:
    done = nodes_command(four, *arguments)
    assert done.returncode in (1, 2) and words in done.stderr

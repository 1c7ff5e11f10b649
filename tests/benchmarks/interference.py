"""The effect of one long prompt on the streams that run meanwhile.

    python -m tandem.tests.benchmarks.interference
    python -m tandem.tests.benchmarks.interference --model DIR --llama-server PATH --gguf FILE

Victims stream greedy tokens; once they run at their own speed, an attacker sends one fresh long
prompt. From that moment to the attacker's first token, each victim keeps a share of the speed that
it had before. Reported are the share that the worst victim keeps, its longest gap between two
tokens, and the attacker's first token over the one that it gets there when nobody streams.

Every side has the same two cores and the same weights:

- disaggregated: a prefill node on one core and a decode node on the other, one thread each;
- aggregated: one node on both cores, two threads, with the default ``--itl-target``;
- aggregated replicas: two nodes of one thread, each on a core of its own, behind one router. There
  are as many victims as replicas, because with fewer the attacker would meet an idle one;
- llama.cpp's server on both cores, where ``--llama-server`` and ``--gguf`` name it and the model.

All sides run throughout and take turns; the sides that are not measured are idle. Figures are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..end_to_end.cluster import get, until
from .cores import two_cores
from .neighbours import Neighbours
from .random_model import LLAMA_135M, write_random_model
from .report import write
from .sides import APART, REPLICAS, START_SECONDS, TOGETHER, pinned, serving
from .streaming import Received, complete, events_of

VICTIM_PROMPT, VICTIM_TOKENS = 16, 4000
ATTACKER_TOKENS = 2
WARM_TOKENS = 40  # of each victim, before its own speed is measured
ALONE_SECONDS = 3.0
FINISH_SECONDS = 120.0
# Token ids that every model here has and that are ordinary text.
FIRST_ID, LAST_ID = 1_000, 30_000

Request = Callable[[int, list[int], int, Received | None], Awaitable[Received]]


@dataclass(frozen=True, slots=True)
class Server:
    """A running side: where it listens, and how it is asked."""

    name: str
    port: int
    ask: Request = complete


@dataclass(frozen=True, slots=True)
class Attack:
    """One round: what the victims had before and during it. Seconds, and tokens a second."""

    alone_first_token: float
    first_token: float
    shares: tuple[float, ...]  # of its own speed that each victim kept
    longest_gap: float  # of any victim
    longest_gap_before: float  # the same before the attack
    step: float  # median time between two tokens of a victim before the attack
    speed: float  # of the slowest victim before the attack
    others: float  # share of the cores that other processes took

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


# ---- the peer ----------------------------------------------------------------------------------


@contextmanager
def llama_server(binary: Path, gguf: Path, cores: Sequence[int], logs: Path) -> Iterator[Server]:
    """llama.cpp's server on the same cores, with its default batch sizes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "-m", gguf, "--port", str(port), "-t", str(len(cores)), "-np", "4"]
    command += ["-c", str(4 * 8192)]
    logs.mkdir(parents=True, exist_ok=True)
    with open(logs / "llama.log", "wb") as log, pinned(cores):
        process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
    try:
        health = f"http://127.0.0.1:{port}/health"
        until(lambda: '"ok"' in get(health), "llama.cpp's server", seconds=START_SECONDS)
        yield Server("llama.cpp", port, complete_llama)
    finally:
        process.terminate()
        process.wait(10)


async def complete_llama(
    port: int, prompt: list[int], max_tokens: int, received: Received | None = None
) -> Received:
    """As ``complete``, in the words of llama.cpp's server."""
    body = {
        "prompt": prompt,
        "n_predict": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    received = received or Received(time.monotonic())
    async with aclosing(events_of(port, "/completion", body)) as events:
        async for event in events:
            if not event.get("stop"):
                received.times += [time.monotonic()] * max(1, len(event.get("tokens", ())))
    return received


# ---- one round ---------------------------------------------------------------------------------


def prompt(seed: str, tokens: int) -> list[int]:
    """Fresh for each seed, the same on all sides."""
    return random.Random(seed).choices(range(FIRST_ID, LAST_ID), k=tokens)


async def attack(server: Server, name: str, victims: int, prompt_tokens: int) -> Attack:
    """One round on one side, and the attacker's first token without victims."""
    alone = await server.ask(server.port, prompt(f"{name}/alone", prompt_tokens), 2, None)
    async with _victims(server, name, victims) as streams:
        neighbours = Neighbours(sorted(os.sched_getaffinity(0)))
        before = time.monotonic()
        await asyncio.sleep(ALONE_SECONDS)
        begun = time.monotonic()
        attacker = await server.ask(
            server.port, prompt(f"{name}/attack", prompt_tokens), ATTACKER_TOKENS, None
        )
        end = attacker.times[0]
        others = neighbours.share()
        until_next = max(stream.times[-1] for stream in streams)
        while not all(stream.times[-1] > end for stream in streams):
            await asyncio.sleep(0.01)
            if time.monotonic() > until_next + FINISH_SECONDS:
                raise RuntimeError(f"{server.name}: a victim got no token after the attack")
    return Attack(
        alone_first_token=alone.first_token_seconds,
        first_token=attacker.first_token_seconds,
        shares=tuple(
            _rate(stream, begun, end) / _rate(stream, before, begun) for stream in streams
        ),
        longest_gap=max(_longest_gap(stream, begun, end) for stream in streams),
        longest_gap_before=max(_longest_gap(stream, before, begun) for stream in streams),
        step=statistics.median(
            later - earlier
            for stream in streams
            for earlier, later in pairwise(t for t in stream.times if before <= t < begun)
        ),
        speed=min(_rate(stream, before, begun) for stream in streams),
        others=others,
    )


@asynccontextmanager
async def _victims(server: Server, name: str, count: int) -> AsyncIterator[list[Received]]:
    """Streams that run at their own speed, and are cut at the end. One begins after the other, so
    that the router sees how busy each replica is."""
    streams = [Received(time.monotonic()) for _ in range(count)]
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, stream in enumerate(streams):
            tokens = prompt(f"{name}/victim {index}", VICTIM_PROMPT)
            ask = server.ask(server.port, tokens, VICTIM_TOKENS, stream)
            tasks.append(group.create_task(_awaited(ask)))
            async with asyncio.timeout(START_SECONDS):
                while len(stream.times) < WARM_TOKENS:  # noqa: ASYNC110 - one waiter
                    await asyncio.sleep(0.02)
        yield streams
        for task in tasks:
            if task.done():
                raise RuntimeError(f"a stream of {VICTIM_TOKENS} tokens ended within the round")
            task.cancel()


async def _awaited(work: Awaitable[Received]) -> Received:
    return await work


def _rate(stream: Received, begin: float, end: float) -> float:
    """Tokens a second within the window."""
    return sum(begin <= at < end for at in stream.times) / (end - begin)


def _longest_gap(stream: Received, begin: float, end: float) -> float:
    """Between any two tokens of which at least one wait fell into the window."""
    return max(
        later - earlier
        for earlier, later in pairwise(stream.times)
        if later > begin and earlier < end
    )


# ---- the comparison ----------------------------------------------------------------------------

# A side, its victims, and the goals of: the share kept, the gap over what is allowed, lateness.
SCENES: tuple[tuple[str, int, tuple[str, str, str]], ...] = (
    (APART.name, 1, (">=0.85", "<=1", "")),
    (APART.name, 2, (">=0.9", "<=1", "")),
    (TOGETHER.name, 1, (">=0.3", "", "<=2")),
    (REPLICAS.name, 2, ("", "", "")),
    ("llama.cpp", 1, ("", "", "")),
)


def compare(servers: dict[str, Server], prompt_tokens: int, rounds: int) -> dict[Any, list[Attack]]:
    """Every scene whose side runs, in turn, ``rounds`` times."""
    scenes = [(name, victims) for name, victims, _ in SCENES if name in servers]
    results: dict[Any, list[Attack]] = {scene: [] for scene in scenes}
    for number in range(-1, rounds):
        for name, victims in scenes:
            done = asyncio.run(
                attack(servers[name], f"round {number}/{victims}", victims, prompt_tokens)
            )
            if number < 0:
                continue  # the first makes memory and kernels ready
            results[name, victims].append(done)
            print(
                f"round {number}, {name}, {victims} victims: keeps {done.worst_share:.2f} of "
                f"{done.speed:.1f} tok/s, gap {done.longest_gap_before:.3f}, then "
                f"{done.longest_gap:.3f} s, first token alone "
                f"{done.alone_first_token:.2f}, now {done.first_token:.2f} s, "
                f"others {done.others:.2f}",
                flush=True,
            )
    return results


def rows(results: dict[Any, list[Attack]], about: str) -> list[dict[str, Any]]:
    """The report's rows: medians over the rounds."""
    made = []
    for name, victims, goals in SCENES:
        attacks = results.get((name, victims))
        if not attacks:
            continue

        def middle(figure: Callable[[Attack], float], attacks: list[Attack] = attacks) -> float:
            return statistics.median(figure(one) for one in attacks)

        streams = "one victim" if victims == 1 else f"{victims} victims"
        what = f"interference ({about}), {name}, {streams}"
        share, gap, late = goals
        made += [
            {
                "metric": f"{what}: share of its speed that the worst victim keeps",
                "value": middle(lambda a: a.worst_share),
                "unit": "1",
                "goal": share,
                "against": f"its own {middle(lambda a: a.speed):.1f} tok/s before the attack",
            },
            {
                "metric": f"{what}: longest gap",
                "value": 1e3 * middle(lambda a: a.longest_gap),
                "unit": "ms",
                "goal": gap,
                "against": f"two steps and 20 ms ({1e3 * middle(lambda a: a.gap_allowed):.0f} ms)",
                "ratio": middle(lambda a: a.longest_gap / a.gap_allowed),
            },
            {
                "metric": f"{what}: the attacker's first token",
                "value": 1e3 * middle(lambda a: a.first_token),
                "unit": "ms",
                "goal": late,
                "against": f"alone there ({1e3 * middle(lambda a: a.alone_first_token):.0f} ms)",
                "ratio": middle(lambda a: a.lateness),
            },
        ]
    if (apart := results.get((APART.name, 2))) and (others := results.get((REPLICAS.name, 2))):
        made.append(
            {
                "metric": f"interference ({about}), 2 victims: the attacker's first token apart",
                "value": 1e3 * statistics.median(one.first_token for one in apart),
                "unit": "ms",
                "goal": "<=1.1",
                "against": "two aggregated replicas on the same cores",
                "ratio": statistics.median(
                    ours.first_token / theirs.first_token
                    for ours, theirs in zip(apart, others, strict=True)
                ),
            }
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="folder; random weights if left out")
    parser.add_argument("--cpu-kernels", default="compiled", help="of Tandem's nodes")
    parser.add_argument("--dtype", default="float32", help="of Tandem's nodes")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="the same model for it")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of the attacker")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cores = two_cores()
    flags = (f"--cpu-kernels={options.cpu_kernels}", f"--dtype={options.dtype}")
    with tempfile.TemporaryDirectory() as folder, pinned(cores), ExitStack() as stack:
        model, logs = options.model, Path(folder, "logs")
        about = "real weights" if model else "random weights"
        if model is None:
            model = Path(folder, "model")
            count = write_random_model(model, LLAMA_135M)
            about = f"{count / 1e6:.0f} M random weights"
        servers = {
            side.name: Server(
                side.name,
                stack.enter_context(serving(side, cores, model, logs / side.name, *flags)),
            )
            for side in (APART, TOGETHER, REPLICAS)
        }
        if options.llama_server and options.gguf:
            peer = llama_server(options.llama_server, options.gguf, cores, logs)
            servers["llama.cpp"] = stack.enter_context(peer)
        about += f", {options.dtype}, a prompt of {options.prompt_tokens:,} tokens"
        results = compare(servers, options.prompt_tokens, options.rounds)
    print(write("interference", rows(results, about)).read_text())


if __name__ == "__main__":
    main()

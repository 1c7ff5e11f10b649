"""The effect of one long prompt on concurrent streams, for several ways to use two cores.

    python -m tandem.benchmarks.interference
    python -m tandem.benchmarks.interference --model FILE.gguf --llama-server PATH

The method is that of ``tandem.bench.interference`` (`tandem bench interference` runs it against any
URL). Every side has the same two cores and the same weights:

- disaggregated: a prefill node on one core and a decode node on the other, one thread each;
- aggregated: one node on both cores, two threads, with the default ``--itl-target``;
- aggregated replicas: two nodes of one thread, each on a core of its own, behind one router. There
  are as many victims as replicas, because with fewer the attacker would meet an idle one;
- llama.cpp's server on both cores, where ``--llama-server`` names it, with the same file.

Cores share their memory and its bandwidth. So as a limit, the streams of the disaggregated side
also run while the prompt is read by another server, of one node on the prefill node's core.

All sides run throughout and take turns; the sides that are not measured are idle. Figures are
medians over the rounds.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.bench.datasets.random_prompts import IdPrompts
from tandem.bench.interference import Attack, Scene, attack, summary
from tandem.benchmarks.support.cores import two_cores
from tandem.benchmarks.support.neighbours import Neighbours
from tandem.benchmarks.support.random_model import LLAMA_135M, write_random_model
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.benchmarks.support.sides import (
    APART,
    REPLICAS,
    START_SECONDS,
    STRANGER,
    TOGETHER,
    pinned,
    serving,
)
from tandem.benchmarks.support.streaming import connected
from tandem.tests.end_to_end.support.cluster import get, until

# Token ids of ordinary text in every model used here.
PROMPTS = IdPrompts(range(1_000, 30_000))


@dataclass(frozen=True, slots=True)
class RunningSide:
    """A running side: its URL, and extra request fields."""

    name: str
    port: int
    fields: Mapping[str, Any] = field(default_factory=dict)


# ---- the peer ----------------------------------------------------------------------------------


@contextmanager
def llama_server(
    binary: Path, file: Path, cores: Sequence[int], logs: Path
) -> Iterator[RunningSide]:
    """llama.cpp's server on the same cores, with its default batch sizes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "-m", file, "--port", str(port), "-t", str(len(cores)), "-np", "4"]
    command += ["-c", str(4 * 8192)]
    logs.mkdir(parents=True, exist_ok=True)
    with open(logs / "llama.log", "wb") as log, pinned(cores):
        process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
    try:
        health = f"http://127.0.0.1:{port}/health"
        until(lambda: '"ok"' in get(health), "llama.cpp's server", seconds=START_SECONDS)
        # Otherwise llama.cpp reuses the prefix of the previous prompt.
        yield RunningSide("llama.cpp", port, {"cache_prompt": False})
    finally:
        process.kill()  # a SIGTERM would finish running requests first
        process.wait(10)


# ---- one round ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredAttack:
    """An attack, and the share of the cores used by other processes during it."""

    attack: Attack
    others: float


async def measure(
    side: RunningSide, attacked: RunningSide, name: str, victims: int, prompt_tokens: int
) -> MeasuredAttack:
    """One round on one side, with the prompt on the same or another one."""
    watched: list[Neighbours] = []
    with connected(side.port) as server, connected(attacked.port) as other:
        server.extra_body, other.extra_body = side.fields, attacked.fields
        done = await attack(
            server,
            PROMPTS,
            name,
            Scene(victims=victims, prompt_tokens=prompt_tokens),
            attacked=other,
            on_measuring=lambda: watched.append(Neighbours(sorted(os.sched_getaffinity(0)))),
        )
    return MeasuredAttack(done, watched[0].share())


# ---- the comparison ----------------------------------------------------------------------------

# Side, number of victims, and goals: share of speed kept, excess gap, lateness.
SCENES: tuple[tuple[str, int, tuple[str, str, str]], ...] = (
    (APART.name, 1, (">=0.95", "<=1", "")),
    (APART.name, 2, (">=0.9", "<=1", "")),
    (STRANGER.name, 1, ("", "", "")),
    (TOGETHER.name, 1, (">=0.3", "", "<=2")),
    (REPLICAS.name, 2, ("", "", "")),
    ("llama.cpp", 1, ("", "", "")),
)


def compare(
    servers: dict[str, RunningSide], prompt_tokens: int, rounds: int
) -> dict[Any, list[MeasuredAttack]]:
    """Measure every scene whose side runs, in turn, ``rounds`` times."""
    scenes = [(name, victims) for name, victims, _ in SCENES if name in servers]
    results: dict[Any, list[MeasuredAttack]] = {scene: [] for scene in scenes}
    for number in range(-1, rounds):
        for name, victims in scenes:
            attacked = servers[name]
            side = servers[APART.name] if name == STRANGER.name else attacked
            done = asyncio.run(
                measure(side, attacked, f"round {number}/{victims}", victims, prompt_tokens)
            )
            if number < 0:
                continue  # warms memory and kernels
            results[name, victims].append(done)
            one = done.attack
            print(
                f"round {number}, {name}, {victims} victims: keeps {one.worst_share:.2f} of "
                f"{one.own_speed:.1f} tok/s, gap {one.longest_gap_before:.3f}, then "
                f"{one.longest_gap:.3f} s, first token alone "
                f"{one.alone_first_token:.2f}, now {one.first_token:.2f} s, "
                f"others {done.others:.2f}",
                flush=True,
            )
    return results


def rows(results: dict[Any, list[MeasuredAttack]], about: str) -> list[dict[str, Any]]:
    """The report's rows: medians over the rounds."""
    report = []
    for name, victims, goals in SCENES:
        attacks = [one.attack for one in results.get((name, victims), ())]
        if not attacks:
            continue
        figures = summary(attacks)
        allowed = 1e3 * statistics.median(one.gap_allowed for one in attacks)
        streams = "one victim" if victims == 1 else f"{victims} victims"
        what = f"interference ({about}), {name}, {streams}"
        share, gap, late = goals
        report += [
            {
                "metric": f"{what}: share of its speed that the worst victim keeps",
                "value": figures["share_kept"],
                "unit": "1",
                "goal": share,
                "against": f"its own {figures['victim_speed']:.1f} tok/s, over the same tokens "
                "without an attack",
            },
            {
                "metric": f"{what}: longest gap",
                "value": figures["longest_gap_ms"],
                "unit": "ms",
                "goal": gap,
                "against": f"two steps and 20 ms ({allowed:.0f} ms)",
                "ratio": figures["longest_gap_over_allowed"],
            },
            {
                "metric": f"{what}: the attacker's first token",
                "value": figures["attacker_ttft_ms"],
                "unit": "ms",
                "goal": late,
                "against": f"alone there ({figures['attacker_ttft_alone_ms']:.0f} ms)",
                "ratio": figures["attacker_ttft_over_alone"],
            },
        ]
    if (apart := results.get((APART.name, 1))) and (limits := results.get((STRANGER.name, 1))):
        report.append(
            {
                "metric": f"interference ({about}), disaggregated, one victim: share of its speed",
                "unit": "1",
                "goal": ">=0.95",
                "against": "what it keeps while another server reads the prompt on that core",
            }
            | in_pairs(lambda one: one.worst_share, apart, limits)
        )
    if (apart := results.get((APART.name, 2))) and (others := results.get((REPLICAS.name, 2))):
        report.append(
            {
                "metric": f"interference ({about}), 2 victims: the attacker's first token apart",
                "unit": "ms",
                "goal": "<=1.1",
                "against": "two aggregated replicas on the same cores",
            }
            | in_pairs(lambda one: 1e3 * one.first_token, apart, others)
        )
    return report


def in_pairs(
    figure: Callable[[Attack], float], ours: list[MeasuredAttack], theirs: list[MeasuredAttack]
) -> dict[str, float]:
    """The median of a figure, and of its ratios to those of another scene in the same rounds."""
    pairs = [(figure(a.attack), figure(b.attack)) for a, b in zip(ours, theirs, strict=True)]
    return {
        "value": statistics.median(our for our, _ in pairs),
        "ratio": statistics.median(our / their for our, their in pairs),
    }


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=3)
    parser.add_argument("--model", type=Path, help="folder or file; random weights if left out")
    parser.add_argument("--cpu-kernels", default="compiled", help="of Tandem's nodes")
    parser.add_argument("--dtype", default="auto", help="of Tandem's nodes")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of Tandem's nodes")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server; needs a GGUF file")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of the attacker")
    options = parser.parse_args()
    model = options.model
    is_gguf = model is not None and model.suffix == ".gguf"
    if options.llama_server and not is_gguf:
        parser.error("--llama-server reads GGUF files: name one with --model")
    cores = two_cores()
    flags = (
        f"--cpu-kernels={options.cpu_kernels}",
        f"--dtype={options.dtype}",
        f"--kv-cache-dtype={options.kv_cache_dtype}",
    )
    with tempfile.TemporaryDirectory() as folder, pinned(cores), ExitStack() as stack:
        logs = Path(folder, "logs")
        about = model.stem if is_gguf else f"{model.name} in {options.dtype}" if model else ""
        if model is None:
            model = Path(folder, "model")
            count = write_random_model(model, LLAMA_135M)
            about = f"{count / 1e6:.0f} M random weights in {options.dtype}"
        servers = {
            side.name: RunningSide(
                side.name,
                stack.enter_context(serving(side, cores, model, logs / side.name, *flags)),
            )
            for side in (APART, STRANGER, TOGETHER, REPLICAS)
        }
        if options.llama_server:
            peer = llama_server(options.llama_server, model, cores, logs)
            servers["llama.cpp"] = stack.enter_context(peer)
        about += f", a prompt of {options.prompt_tokens:,} tokens"
        results = compare(servers, options.prompt_tokens, options.rounds)
    publish("interference", rows(results, about), dry=options.dry)


if __name__ == "__main__":
    main()

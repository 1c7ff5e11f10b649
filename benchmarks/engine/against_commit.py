"""The engine on a CPU against an earlier commit's, through the Python API.

    python -m tandem.benchmarks.engine.against_commit REVISION [--threads 2]

Both checkouts keep an engine of the same model in a process of their own and take turns, figure by
figure, in alternating order: a ratio is the median over the pairs. The built-in model's short steps
show the cost of head, messages and sampler; 42 million random weights show the kernels. HEAD as the
revision shows the machine's noise, which on two shared cores is about the goal's 5%.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tandem.benchmarks.support.random_model import QWEN3_42M, write_random_model
from tandem.benchmarks.support.rate_process import RateProcess
from tandem.benchmarks.support.report import benchmark_parser, publish

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "support" / "engine_side.py"
CONTEXT = 64
FIGURES = {
    "prefill of 512 tokens": "prefill 512",
    "decoding at batch 1": f"decode 1 {CONTEXT} 96 0",
    "decoding at batch 8": f"decode 8 {CONTEXT} 64 0",
    "decoding at batch 32": f"decode 32 {CONTEXT} 48 0",
    "decoding at batch 32 by chance": f"decode 32 {CONTEXT} 48 0.8",
}


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tandem")
        path.mkdir()
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", revision], stdout=subprocess.PIPE
        )
        if archive.returncode:
            sys.exit(f"{revision!r} is no commit of {ROOT}; name one that git log lists")
        subprocess.run(["tar", "x", "-C", str(path)], input=archive.stdout, check=True)
        yield path


def side(root: Path, model: str, threads: int, kernels: str) -> RateProcess:
    """An engine of one checkout (``support/engine_side.py``)."""
    return RateProcess(
        [sys.executable, "-P", str(SCRIPT), model, str(threads), kernels],
        environment=os.environ | {"PYTHONPATH": str(root.parent)},
    )


def compare(
    now: RateProcess, before: RateProcess, line: str, rounds: int
) -> tuple[float, float, float]:
    """Medians of both sides' tokens a second, and of their ratio."""
    now.rate(line), before.rate(line)
    pairs = []
    for number in range(rounds):
        if number % 2:
            pairs.append((now.rate(line), before.rate(line)))
        else:
            earlier = before.rate(line)
            pairs.append((now.rate(line), earlier))
    ratio = statistics.median(new / old for new, old in pairs)
    new, old = (statistics.median(side) for side in zip(*pairs, strict=True))
    return new, old, ratio


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=21)
    parser.add_argument("revision", help="the commit whose engine to compare with")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--cpu-kernels", default="compiled")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        earlier = stack.enter_context(checkout(options.revision))
        link = Path(stack.enter_context(tempfile.TemporaryDirectory()), "tandem")
        link.symlink_to(ROOT)
        large = stack.enter_context(tempfile.TemporaryDirectory())
        write_random_model(Path(large), QWEN3_42M)
        models = {"built-in model": "builtin", "42M random weights": large}
        for name, model in models.items():
            with ExitStack() as sides:
                now, before = (
                    side(root, model, options.threads, options.cpu_kernels)
                    for root in (link, earlier)
                )
                sides.callback(now.close)
                sides.callback(before.close)
                for figure, line in FIGURES.items():
                    new, old, ratio = compare(now, before, line, options.rounds)
                    rows.append(
                        {
                            "metric": f"{figure}, {name}, {options.threads} threads",
                            "value": new,
                            "unit": "tok/s",
                            "goal": ">=0.95",
                            "against": f"{options.revision} ({old:.0f} tok/s)",
                            "ratio": ratio,
                        }
                    )
                    print(f"{figure}, {name}: {new:.0f} / {old:.0f} = {ratio:.3f}", flush=True)
    publish("engine/against_commit", rows, dry=options.dry)


if __name__ == "__main__":
    main()

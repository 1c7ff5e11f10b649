"""A layer's quantised experts on a CPU with int8 dot products, against bf16.

    python -m tandem.benchmarks.quantised_experts [REVISION] [--threads 2]

The experts of a layer of Qwen3-30B-A3B in Q4_0 are compared with those of an earlier commit, and
with today's loop over them, which torch's kernels use, both in bf16. Each side is a process with
the environment of a rank. Sides take turns; each call of a turn chooses other experts, and the best
one counts. A ratio is the median over the pairs.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any

from tandem.benchmarks.engine.against_commit import ROOT, checkout, compare
from tandem.benchmarks.support.experts_side import CHOSEN, COUNT, HIDDEN, INNER
from tandem.benchmarks.support.rate_process import RateProcess
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.kernels.cpu import jit
from tandem.shared.engine.executor import ENVIRONMENT

SCRIPT = ROOT / "benchmarks" / "support" / "experts_side.py"
# Before experts were computed from their codes.
EARLIER = "b3f7b36f"
ROWS = (1, 8, 32)


def side(name: str, threads: int, path: list[str]) -> RateProcess:
    """A process of ``support/experts_side.py``, with folders of modules."""
    return RateProcess(
        [sys.executable, "-P", str(SCRIPT), name, str(threads)],
        environment=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)},
    )


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=11)
    parser.add_argument("revision", nargs="?", default=EARLIER, help=f"{EARLIER} if left out")
    parser.add_argument("--threads", type=int, default=2, help="of each side")
    options = parser.parse_args()
    if not jit.multiplies_bytes():
        parser.exit(message="this CPU has no AVX2: nothing to measure\n")
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = str(stack.enter_context(checkout(options.revision)).parent)
        sides = {
            "Q4_0": side("Q4_0", options.threads, []),
            options.revision: side("earlier", options.threads, [folder]),
            "today's loop": side("bf16", options.threads, []),
        }
        for each in sides.values():
            stack.callback(each.close)
        now = sides.pop("Q4_0")
        for other, process in sides.items():
            for count in ROWS:
                new, old, ratio = compare(now, process, str(count), options.rounds)
                about = f"{count} row{'s' if count > 1 else ''}, {CHOSEN} experts each of {COUNT}"
                rows.append(
                    {
                        "metric": f"experts of {HIDDEN} by {INNER} in Q4_0, {about}",
                        "value": new,
                        "unit": "GOP/s",
                        "goal": ">=4" if other == options.revision else "",
                        "against": f"{other} in bf16 ({old:.0f} GOP/s)",
                        "ratio": ratio,
                    }
                )
                print(f"{about}: {new:.0f} GOP/s, {other} {old:.0f}: {ratio:.2f}", flush=True)
    publish("quantised_experts", rows, dry=options.dry)


if __name__ == "__main__":
    main()

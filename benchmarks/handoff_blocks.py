"""Throughput of KV when the blocks of a prompt are scattered over the cache.

    python -m tandem.benchmarks.handoff_blocks

Whole transfers between the real caches of two ranks, alternating between contiguous blocks on both
sides and blocks in random order, as a full cache allocates them.

Uses ``--cpu-kernels compiled``, whose copies prefetch reads and use non-temporal stores. With
numpy, one core copies 4 KiB pieces (one head of a block) at 7 to 9 GB/s in random order and at 13
GB/s in sequence, and the ratio over shared memory was 0.67 to 0.76.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from tandem.benchmarks.support.handoff_pair import (
    MIB,
    Ranks,
    Variant,
    row,
    shuffled,
    side_by_side,
    take_turns,
    whole_transfers,
)
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.shared.handoff.carriers.shared_memory import NAME as SHARED_MEMORY
from tandem.shared.handoff.carriers.tcp import NAME as TCP

CARRIERS = {TCP: "TCP", SHARED_MEMORY: "shared memory"}


def rows(size: int, rounds: int) -> list[dict[str, Any]]:
    variants = {
        (carrier, table): Variant(*whole_transfers(carrier, ranks=Ranks(table=table)), size, rounds)
        for carrier in CARRIERS
        for table in (side_by_side, shuffled)
    }
    rates = take_turns(variants, rounds)
    results = []
    for carrier, name in CARRIERS.items():
        together, scattered = (rates[carrier, table] for table in (side_by_side, shuffled))
        results.append(
            {
                "metric": f"whole transfers over {name}, blocks side by side",
                "value": statistics.median(together),
                "unit": "GB/s",
            }
        )
        metric = f"whole transfers over {name}, every block apart"
        results.append(row(metric, scattered, together, ">=0.8", "blocks side by side, same run"))
    return results


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=9)
    parser.add_argument("--mib", type=int, default=256)
    options = parser.parse_args()
    results = rows(options.mib * MIB, options.rounds)
    publish("handoff_blocks", results, dry=options.dry)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""One checkout's side of ``engine/against_commit.py``, run with that checkout as ``tandem``.

``python engine_side.py MODEL THREADS CPU_KERNELS`` reads lines ``decode STREAMS CONTEXT STEPS
TEMPERATURE`` and ``prefill LENGTH``, and replies to each with tokens a second.
"""

from __future__ import annotations

import runpy
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from tandem import Engine, EngineConfig, SamplingParams

MAX_STREAMS = 64
# This file's own measure, not the checkout's.
decode_rate = runpy.run_path(str(Path(__file__).with_name("decode_rate.py")))["decode_rate"]
_seeds = count()


def prefill_rate(engine: Any, length: int) -> float:
    """Tokens a second of a prompt that shares no prefix with others."""
    seed = next(_seeds)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    engine.generate_sync([[1 + (at + seed) % 100 for at in range(length)]], one)
    return length / (time.perf_counter() - start)


def main() -> None:
    model, threads, kernels = sys.argv[1:]
    config = EngineConfig(
        model=model,
        device="cpu",
        threads=int(threads),
        cpu_kernels=kernels,
        max_model_len=1024,
        max_num_seqs=MAX_STREAMS,
        enable_prefix_caching=False,
        itl_target=0,  # streams of a batch start together
    )
    with Engine(config) as engine:
        for line in sys.stdin:
            work, *numbers = line.split()
            if work == "prefill":
                rate = prefill_rate(engine, int(numbers[0]))
            else:
                streams, context, steps = map(int, numbers[:3])
                prompts = [[1 + stream, *range(1, context)] for stream in range(streams)]
                rate = decode_rate(engine, prompts, steps, float(numbers[3]))
            print(rate, flush=True)


if __name__ == "__main__":
    main()

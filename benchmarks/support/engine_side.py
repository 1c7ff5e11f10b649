"""One checkout's side of ``engine/against_commit.py``, run with that checkout as ``tandem``.

``python engine_side.py MODEL THREADS CPU_KERNELS`` reads lines ``decode STREAMS CONTEXT STEPS
TEMPERATURE`` and ``prefill LENGTH``, and replies to each with tokens a second.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tandem import Engine, EngineConfig

MAX_STREAMS = 64
# Prompts' tokens, of the smallest vocabulary.
VOCAB = 100
# This checkout's measures for both.
rates = runpy.run_path(str(Path(__file__).with_name("engine_rates.py")))


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
        for number, line in enumerate(sys.stdin):
            work, *numbers = line.split()
            if work == "prefill":
                rate = rates["prefill_rate"](engine, int(numbers[0]), number, vocab=VOCAB)
            else:
                streams, context, steps = map(int, numbers[:3])
                prompts = [[1 + stream, *range(1, context)] for stream in range(streams)]
                rate = rates["decode_rate"](engine, prompts, steps, float(numbers[3]))
            print(rate, flush=True)


if __name__ == "__main__":
    main()

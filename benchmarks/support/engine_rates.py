"""Rates of an engine, through the Python API."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any


def decode_rate(
    engine: Any, prompts: Sequence[list[int]], steps: int, temperature: float = 0.0
) -> float:
    """Tokens per second while all streams decode: from the last one's first token to the first
    one's last. Each decodes at least ``steps`` tokens beside the others."""
    from tandem import SamplingParams

    # The first stream decodes while the later ones are still prefilled.
    tokens = steps + 2 * len(prompts)
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    times: list[list[float]] = [[] for _ in prompts]

    def read(stream: int) -> None:
        for delta in engine.generate_stream(prompts[stream], params):
            times[stream] += [time.perf_counter()] * len(delta.tokens)

    threads = [threading.Thread(target=read, args=(stream,)) for stream in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(start < t <= end for stream in times for t in stream) / (end - start)


def prefill_rate(engine: Any, length: int, seed: int, *, vocab: int = 4000) -> float:
    """Tokens a second of a prompt that shares no prefix with those of other seeds."""
    from tandem import SamplingParams

    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    engine.generate_sync([[100 + (at + seed) % vocab for at in range(length)]], one)
    return length / (time.perf_counter() - start)

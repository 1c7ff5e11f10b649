"""A process of llama.cpp with one model, for comparisons."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from tandem.benchmarks.support.rate_process import RateProcess


class LlamaProcess(RateProcess):
    """``llama_side.py``, run by an interpreter that has ``llama-cpp-python``. Its figures are
    ``prefill LENGTH`` and ``decode STREAMS CONTEXT STEPS``."""

    def __init__(
        self, python: str, file: str, *, threads: int, streams: int, context: int, kv_dtype: str
    ) -> None:
        """A cache in float32 or float16 for ``streams`` sequences of ``context`` tokens."""
        script = Path(__file__).with_name("llama_side.py")
        sizes = map(str, (threads, streams, context))
        super().__init__([python, str(script), file, kv_dtype, *sizes], stderr=subprocess.DEVNULL)

    def logits(self, tokens: list[int], vocab: int) -> np.ndarray:
        """Logits [tokens, vocab] of a sequence, in float32."""
        self._ask("logits", *tokens)
        assert self._process.stdout is not None
        size = 4 * len(tokens) * vocab
        data = self._process.stdout.read(size)
        if len(data) < size:
            self._fail()
        return np.frombuffer(bytearray(data), np.float32).reshape(len(tokens), vocab)

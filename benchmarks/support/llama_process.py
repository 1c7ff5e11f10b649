"""A process of llama.cpp with one model, for comparisons."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NoReturn

import numpy as np


class LlamaProcess:
    """``llama_side.py``, run by an interpreter that has ``llama-cpp-python``."""

    def __init__(
        self, python: str, file: str, *, threads: int, streams: int, context: int, kv_dtype: str
    ) -> None:
        """A cache in float32 or float16 for ``streams`` sequences of ``context`` tokens."""
        script = Path(__file__).with_name("llama_side.py")
        sizes = map(str, (threads, streams, context))
        self._process = subprocess.Popen(
            [python, str(script), file, kv_dtype, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def rate(self, *question: object) -> float:
        """Tokens a second of ``prefill LENGTH`` or ``decode STREAMS CONTEXT STEPS``."""
        self._ask(*question)
        assert self._process.stdout is not None
        return float(self._process.stdout.readline() or self._fail())

    def logits(self, tokens: list[int], vocab: int) -> np.ndarray:
        """Logits [tokens, vocab] of a sequence, in float32."""
        self._ask("logits", *tokens)
        assert self._process.stdout is not None
        size = 4 * len(tokens) * vocab
        data = self._process.stdout.read(size)
        if len(data) < size:
            self._fail()
        return np.frombuffer(bytearray(data), np.float32).reshape(len(tokens), vocab)

    def _ask(self, *question: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, question)).encode() + b"\n")
        self._process.stdin.flush()

    def _fail(self) -> NoReturn:
        raise RuntimeError(f"llama.cpp's process ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

"""llama.cpp's side of ``quantised_models.py``, run by a Python that has ``llama-cpp-python``.

``python llama_side.py FILE THREADS STREAMS CONTEXT`` reads lines ``prefill LENGTH`` and ``decode
STREAMS CONTEXT STEPS``, and replies to each with tokens a second.
"""

import ctypes
import sys
import time

import llama_cpp as api
import numpy as np


class Side:
    """A model with a cache for several streams; decoding is greedy."""

    def __init__(self, path: str, threads: int, streams: int, context: int) -> None:
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        settings = api.llama_context_default_params()
        settings.n_ctx = streams * context
        settings.n_seq_max = streams
        settings.n_batch = settings.n_ubatch = 512
        settings.n_threads = settings.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, settings)
        self.prefilled: tuple[int, int] | None = None  # cached streams and context
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def compute(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of token, position, stream, and whether there are logits of it."""
        batch = api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for index, (token, position, stream, wants_logits) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream
            batch.logits[index] = wants_logits
        assert api.llama_decode(self.context, batch) == 0
        api.llama_synchronize(self.context)
        api.llama_batch_free(batch)

    def best(self, row: int) -> int:
        """The token with the largest logit of a row."""
        logits = api.llama_get_logits_ith(self.context, row)
        return int(
            np.ctypeslib.as_array(
                ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab,)
            ).argmax()
        )

    def prefill(self, length: int) -> float:
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        self.prefilled = None
        start = time.perf_counter()
        self.compute([(at, at, 0, at == length - 1) for at in range(length)])
        self.best(length - 1)
        return length / (time.perf_counter() - start)

    def decode(self, streams: int, context: int, steps: int) -> float:
        memory = api.llama_get_memory(self.context)
        if self.prefilled != (streams, context):
            api.llama_memory_clear(memory, True)
            for stream in range(streams):
                prompt = [(at + stream, at, stream, at == context - 1) for at in range(context)]
                self.compute(prompt)
            self.prefilled = streams, context
        for stream in range(streams):
            api.llama_memory_seq_rm(memory, stream, context, -1)
        tokens = [1 + stream for stream in range(streams)]
        start = time.perf_counter()
        for step in range(steps):
            rows = enumerate(tokens)
            self.compute([(token, context + step, stream, True) for stream, token in rows])
            tokens = [self.best(row) for row in range(streams)]
        return streams * steps / (time.perf_counter() - start)


def main() -> None:
    path, threads, streams, context = sys.argv[1], *map(int, sys.argv[2:])
    side = Side(path, threads, streams, context)
    for line in sys.stdin:
        what, *numbers = line.split()
        print(getattr(side, what)(*map(int, numbers)), flush=True)


if __name__ == "__main__":
    main()

"""llama.cpp's side of ``llama_process.py``, run by a Python that has ``llama-cpp-python``.

``python llama_side.py FILE KV_DTYPE THREADS STREAMS CONTEXT`` reads lines ``prefill LENGTH`` and
``decode STREAMS CONTEXT STEPS``, and replies to each with a line of tokens a second. To ``logits
TOKEN ...`` it replies with the bytes of these tokens' logits in float32.
"""

import ctypes
import sys
import time

import llama_cpp as api
import numpy as np

KV_TYPES = {"float32": api.GGML_TYPE_F32, "float16": api.GGML_TYPE_F16}


class Side:
    """A model with a cache for several streams; decoding is greedy."""

    def __init__(self, path: str, kv_dtype: str, threads: int, streams: int, context: int) -> None:
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        settings = api.llama_context_default_params()
        settings.n_ctx = streams * context
        settings.n_seq_max = streams
        settings.n_batch = settings.n_ubatch = 512
        settings.type_k = settings.type_v = KV_TYPES[kv_dtype]
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

    def row_logits(self, row: int) -> np.ndarray:
        """A row's logits, valid until the next batch."""
        logits = api.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(
            ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab,)
        )

    def best(self, row: int) -> int:
        """The token with the largest logit of a row."""
        return int(self.row_logits(row).argmax())

    def clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        self.prefilled = None

    def logits(self, *tokens: int) -> bytes:
        self.clear()
        self.compute([(token, at, 0, True) for at, token in enumerate(tokens)])
        return b"".join(self.row_logits(row).tobytes() for row in range(len(tokens)))

    def prefill(self, length: int) -> bytes:
        self.clear()
        start = time.perf_counter()
        self.compute([(at, at, 0, at == length - 1) for at in range(length)])
        self.best(length - 1)
        return rate_line(length, start)

    def decode(self, streams: int, context: int, steps: int) -> bytes:
        memory = api.llama_get_memory(self.context)
        if self.prefilled != (streams, context):
            self.clear()
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
        return rate_line(streams * steps, start)


def rate_line(tokens: int, start: float) -> bytes:
    """The reply of tokens a second since ``start``."""
    return b"%r\n" % (tokens / (time.perf_counter() - start))


def main() -> None:
    path, kv_dtype, *sizes = sys.argv[1:]
    side = Side(path, kv_dtype, *map(int, sizes))
    for line in sys.stdin:
        what, *numbers = line.split()
        sys.stdout.buffer.write(getattr(side, what)(*map(int, numbers)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

"""CUDA graphs of steps in which all rows decode.

Launching a small model's kernels one by one takes longer than computing them. A graph has the
launches of the whole forward pass for a number of rows; a step is padded to the next larger one,
and the head and the sampler follow as usual. Graphs read a step's inputs at fixed addresses
(``StaticInputs``), block tables from the slots, and share one pool of memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...kv.cache import KVCache
from ...models.decoder import Decoder
from ..plan import StepColumns
from .step_inputs import DrawingSlots, StaticInputs, StepInputs

# Records the launches of a function; returns what repeats them, and the function's result, whose
# contents each repetition replaces.
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]

# More rows are computed eagerly: by then, launching takes less time than computing.
MAX_ROWS = 512


def graph_sizes(max_rows: int) -> list[int]:
    """The numbers of rows to capture: steps of 8, and fewer rows more finely."""
    limit = min(max_rows, MAX_ROWS)
    sizes = [1, 2, 4, *range(8, limit, 8), limit]
    return sorted({size for size in sizes if size <= limit})


class DecodeGraphs:
    """The captured forward passes of a model, by their number of rows."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        inputs: StepInputs,
        sizes: Sequence[int],
        capture: Capture,
    ) -> None:
        """Capture graphs of ascending sizes, largest first, so that the others fit into its
        memory."""
        self._inputs = inputs
        self._sizes = sizes
        self._static = StaticInputs.allocate(self._sizes[-1], cache.device)
        self._graphs: dict[int, tuple[Callable[[], object], torch.Tensor]] = {}
        for size in reversed(self._sizes):
            self._graphs[size] = capture(partial(self._forward, model, cache, size))

    def _forward(self, model: Decoder, cache: KVCache, size: int) -> torch.Tensor:
        # A batch of its own for each call, since kernels keep in it what layers share.
        return model.forward(self._inputs.static_batch(self._static, size), cache.kv)

    def takes(self, rows: StepColumns) -> bool:
        """True if a graph has as many rows as these, which ``only_decode``."""
        return len(rows) <= self._sizes[-1]

    def forward(self, rows: StepColumns) -> tuple[torch.Tensor, DrawingSlots]:
        """The normalised hidden states of the rows, valid until the next call, and their slots."""
        count = len(rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        drawing = self._inputs.fill(rows, self._static, size)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[:count], drawing


def cuda_capture() -> Capture:
    """``Capture`` by CUDA."""
    pool = torch.cuda.graph_pool_handle()

    def capture(
        forward: Callable[[], torch.Tensor],
    ) -> tuple[Callable[[], object], torch.Tensor]:
        forward()  # libraries allocate their workspaces
        graph = torch.cuda.CUDAGraph()
        # The data plane's thread may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            hidden = forward()
        return graph.replay, hidden

    return capture

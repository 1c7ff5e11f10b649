"""The profile of a rank on a GPU: the memory that steps take beside weights and cache.

Once the weights are loaded, and before the cache is sized, a rank runs the largest steps that the
head may plan, on a cache of two blocks: no kernel minds that all tables point to the same ones.
What the allocator reserves for them is left free for steps. The memory of CUDA graphs is
extrapolated from the largest few.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from ....proto.packed_logprobs import MAX_LOGPROBS
from ...errors import StartupError
from ...kv.planning import CONTEXT_BYTES, CUDA, RankDevice, RankMemory, library_bytes
from ..device_memory import free_memory
from ..messages import RankSettings
from ..plan import (
    PooledRow,
    RankSampling,
    SamplerSpec,
    SequenceStep,
    SlotLimits,
    StepLimits,
    StepPlan,
)
from .device import data_plane_bytes
from .graphs import Capture, cuda_capture, graph_sizes
from .loading import LoadedModel
from .runner import ModelRunner, lacks_memory

_BLOCKS = 2
# Tokens before most rows.
_USUAL = 1000
# Most of what sampling can be asked for: edited and filtered logits, and logprobs of them.
_SAMPLING = RankSampling(
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logprobs=MAX_LOGPROBS,
)
# Graphs that are captured to learn what each one takes, and the least that each is assumed to take.
_CAPTURED = 3
_GRAPH_BYTES = 2 << 20


class DeviceMemory(Protocol):
    """The memory of a rank's GPU, in bytes."""

    def release(self) -> None:
        """Free what torch caches, and forget the peak."""
        ...

    def reserved(self) -> int:
        """What torch has reserved."""
        ...

    def peak(self) -> int:
        """The most that torch has reserved since ``release``."""
        ...

    def free(self) -> int:
        """What is free on the device."""
        ...


class CudaMemory:
    """``DeviceMemory`` by CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def release(self) -> None:
        """See ``DeviceMemory.release``."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def reserved(self) -> int:
        """See ``DeviceMemory.reserved``."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """See ``DeviceMemory.peak``."""
        return torch.cuda.max_memory_reserved(self._device)

    def free(self) -> int:
        """See ``DeviceMemory.free``."""
        return int(torch.cuda.mem_get_info(self._device)[0])


def memory_of(
    model: LoadedModel,
    settings: RankSettings,
    limits: StepLimits,
    opened: RankDevice,
    memory: DeviceMemory | None,
) -> RankMemory:
    """The rank's memory after loading the weights; on a GPU, ``memory``, also that of steps.

    ``opened``: its device before. Raises ``StartupError`` if not even a step fits.
    """
    device = model.device
    if memory is None:
        return RankMemory(free_memory(device), 0, model.bytes_per_block)
    capture = None if settings.enforce_eager or device.type != CUDA else cuda_capture()
    shared = settings.shares_device
    step_bytes, graph_bytes = profile(model, limits, memory, capture, shared=shared)
    free, weights = memory.free(), memory.reserved()
    if shared:  # others allocate too
        libraries = library_bytes(settings.size)
    else:  # without the context, which is there when a device is opened
        libraries = CONTEXT_BYTES + max(0, opened.free_bytes - free - weights)
    plane = data_plane_bytes(settings.carrier, device)
    return RankMemory(
        max(0, free - plane),
        weights + libraries + plane,
        model.bytes_per_block,
        step_bytes,
        graph_bytes,
    )


def profile(
    model: LoadedModel,
    limits: StepLimits,
    memory: DeviceMemory,
    capture: Capture | None,
    *,
    shared: bool = False,
) -> tuple[int, int]:
    """The bytes that the largest step takes, and those of CUDA graphs, none without ``capture``.
    ``shared``: other processes allocate on the device at the same time.

    Raises ``StartupError`` if not even one step fits beside the weights.
    """
    memory.release()
    # On average, since all ranks of a model must compute the same rows.
    fitting = model.tp.agree([memory.free() // model.bytes_per_block])[0] // model.tp.size
    length = max(2, min(limits.length, fitting * model.block_size))
    blocks = -(-length // model.block_size)
    try:
        runner = model.runner(_BLOCKS, SlotLimits(limits.sequences, blocks))
        memory.release()
        for plan in largest_steps(model, limits.tokens, limits.sequences, length):
            runner.execute(plan)
        peak = memory.peak()
        graphs = graph_bytes(runner, limits.sequences, memory, capture, shared=shared)
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise StartupError(
            f"a step of {limits.tokens} tokens and {limits.sequences} sequences does not fit "
            f"beside the weights: {(str(error).splitlines() or [''])[0]}; lower "
            f"--max-num-batched-tokens or --max-num-seqs, or split the model over more GPUs (--d)"
        ) from None
    del runner
    memory.release()
    return max(0, peak - memory.reserved()), graphs


def largest_steps(
    model: LoadedModel, tokens: int, sequences: int, length: int
) -> Iterator[StepPlan]:
    """The steps that take the most memory: one chunk that ends at ``length`` beside decoding
    rows, many chunks, and only decoding rows. A model that does not generate has only chunks."""
    generates, bidirectional = model.model.head is not None, model.model.spec.bidirectional
    rows, many = min(sequences, tokens), max(1, min(sequences, tokens // 2))
    chunks = [min(tokens // many, length)] * many
    shapes = [[min(tokens - rows + 1, length)] + [1] * (rows - 1), chunks, [1] * rows]
    if bidirectional or not generates:  # alone, a prompt of such a model may be longer than a step
        shapes = [[length if bidirectional else min(tokens, length)], chunks]
    removed = list(range(sequences))
    for step, counts in enumerate(shapes):
        planned = [
            _row(number, count, 0 if bidirectional else length - count, model, generates=generates)
            for number, count in enumerate(counts)
        ]
        added = [
            SamplerSpec(row.sequence_id, _SAMPLING, row.sequence_id, [0])
            for row in planned
            if row.sample
        ]
        yield StepPlan.of(step, planned, added, removed)


def _row(
    number: int, count: int, start: int, model: LoadedModel, *, generates: bool
) -> SequenceStep:
    """A row of ``count`` tokens; those that generate ask for logprobs of all tokens. Only the first
    two rows need to be far into their sequences, and no chunk whose context takes no memory: after
    a million tokens, attention takes seconds."""
    is_far = number < 2 and (count == 1 or not model.model.chunks_in_place)
    start = start if is_far else min(start, _USUAL)
    blocks = [0] * -(-(start + count) // model.block_size)
    if not generates:
        return SequenceStep(number, [0] * count, start, blocks, False, pool=PooledRow("sum"))
    top = MAX_LOGPROBS if count > 1 else None
    targets = (0,) * (count - 1)
    return SequenceStep(number, [0] * count, start, blocks, True, top, targets)


def graph_bytes(
    runner: ModelRunner,
    max_rows: int,
    memory: DeviceMemory,
    capture: Capture | None,
    *,
    shared: bool = False,
) -> int:
    """The memory of all graphs. The largest one's activations serve for all.

    On a device that is ``shared``, where what is free also falls by what others allocate, only
    torch's share of it is measured.
    """
    if capture is None or not runner.can_capture():
        return 0

    def taken() -> int:
        return memory.reserved() if shared else -memory.free()

    memory.release()  # as each capture does first
    after = [taken()]

    def measured(
        forward: Callable[[], torch.Tensor],
    ) -> tuple[Callable[[], object], torch.Tensor]:
        captured = capture(forward)
        after.append(taken())
        return captured

    sizes = graph_sizes(max_rows)
    runner.capture_graphs(measured, sizes[-_CAPTURED:])
    largest, rest = after[1] - after[0], after[-1] - after[1]
    each = max(_GRAPH_BYTES, rest // max(1, len(after) - 2))
    return max(_GRAPH_BYTES, largest) + each * (len(sizes) - 1)

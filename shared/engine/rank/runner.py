"""The model runner: executes one rank's share of a step."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ....kernels.streams import Wait, to_host
from ...errors import StartupError
from ...kv.cache import KVCache
from ...models.decoder import Decoder
from ...models.parallel import TensorParallel
from ..plan import (
    COMPUTATION,
    OUT_OF_MEMORY,
    VOID,
    PromptTargets,
    SlotLimits,
    StepColumns,
    StepPlan,
    StepResult,
)
from .device_logprobs import PromptLogprobs, prompt_entries
from .graphs import Capture, DecodeGraphs
from .last_draws import LastDraws, StepVoidError
from .mask_inbox import MaskInbox
from .output_rows import finite_rows, not_finite, output_rows, packed, pooled_states
from .sampler_choice import sampler_for
from .slots import Slots
from .step_inputs import DrawingSlots, StepInputs

if TYPE_CHECKING:
    from .gpu_sampler import GpuSampler
    from .sampler import Sampler

log = logging.getLogger(__name__)

# Plain RuntimeErrors: of torch's on CPUs; of pinned memory, Triton and NCCL; and of cuBLAS.
_LACKS_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)

# Logits of prompt positions are computed this many rows at a time: each has the whole vocabulary.
_PROMPT_ROWS = 64


# Adds its part to a step's result, once the device has computed the step.
Output = Callable[[StepResult], None]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that a GPU may still be computing. ``computed`` waits for its end, after which
    ``outputs`` may be called; it is ``None`` on a CPU, which computes a step in its launch."""

    step: int
    ahead: bool
    start: float
    outputs: list[Output]
    computed: Wait | None


class ModelRunner:
    """Owns one rank's tensors. Between steps it keeps the weights, the cache, and the slots of live
    sequences with the sampler's history; everything else arrives in the plan, and masks in
    ``masks``. Only rank 0 samples: the others have no ``sampler``."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        sampler: Sampler | GpuSampler | None,
        tp: TensorParallel,
        slots: Slots,
        *,
        batched_decode: bool = False,
    ) -> None:
        self.batched_decode = batched_decode
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.tp = tp
        self.slots = slots
        self.masks = MaskInbox()
        self.inputs = StepInputs(
            slots,
            cache.block_size,
            model.place.operators,
            batched_decode=batched_decode,
            one_by_one=model.attends_one_by_one,
        )
        self.graphs: DecodeGraphs | None = None
        self._last_draws = LastDraws(tp, slots.last_tokens)
        self._last_end = 0.0  # of the step that was collected last

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """Run one step. See ``launch`` and ``collect``."""
        return self.collect(self.launch(plan, on_layer))

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> LaunchedStep:
        """Launch one step on the device; on a CPU, compute it. Nothing here waits for a GPU.
        ``on_layer(i)``: layer i's KV of this step is launched to the cache.

        Raises ``StepVoidError`` if the step was planned on top of one that failed.
        """
        start = time.perf_counter()
        self._last_draws.begin(plan)
        self._update_slots(plan)
        outputs = self._run(plan, on_layer) if plan.columns else []
        mark = self.cache.mark
        computed = None if mark is None else mark()
        self._last_draws.end()
        return LaunchedStep(plan.step, plan.ahead, start, outputs, computed)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait until the device has computed a step, and return its results. The head frees and
        reuses blocks once it has them. Steps are collected in their order, by any one thread."""
        if step.computed is not None:
            step.computed()
        result = StepResult(step.step)
        for enter in step.outputs:
            enter(result)
        end = time.perf_counter()
        result.seconds = end - max(step.start, self._last_end)
        self._last_end = end
        return result

    def can_capture(self) -> bool:
        """True if the model has decode steps, and all ranks can capture them in CUDA graphs: those
        that could would wait for the others in the model's collectives."""
        model = self.model
        by_kernels = self.batched_decode and not model.attends_one_by_one
        here = model.head is not None and by_kernels and not model.waits_for_device
        return self.tp.agree([here])[0] == self.tp.size

    def capture_graphs(self, capture: Capture, sizes: Sequence[int]) -> None:
        """Capture graphs of decode steps of these numbers of rows, if the model allows it."""
        if not self.can_capture():
            if self.model.head is not None:
                log.info(
                    "decode steps are launched kernel by kernel: not all ranks have kernels for "
                    "attention and experts"
                )
            return
        try:
            with torch.inference_mode():
                self.graphs = DecodeGraphs(self.model, self.cache, self.inputs, sizes, capture)
        except Exception as error:  # Triton raises errors of many types
            first = _first_of(error)  # the last one may only say that the capture is invalid
            remedy = "use --enforce-eager"
            if lacks_memory(first):
                remedy = f"lower --gpu-memory-utilization or --max-num-seqs, or {remedy}"
            log.debug("a capture failed", exc_info=error)
            summary = " ".join(str(first).splitlines()[:1])
            raise StartupError(
                f"the CUDA graphs of decode steps could not be captured: {type(first).__name__}: "
                f"{summary}; {remedy}"
            ) from None

    def recover(self) -> None:
        """Wait for the device and release memory after a step that raised.

        Raises if the device itself is broken, so that no later step could work.
        """
        gc.collect()
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
            torch.cuda.empty_cache()

    def _update_slots(self, plan: StepPlan) -> None:
        """Forget the sequences that have ended, and begin those that the sampler does not know."""
        sampler = self.sampler
        if sampler is not None:
            for sequence_id in plan.removed:
                if sequence_id in self.slots:
                    sampler.remove(self.slots[sequence_id])
        self.slots.remove(plan.removed)
        for spec in plan.added:
            slot = self.slots.assign(spec.sequence_id)
            if sampler is not None:
                sampler.add(slot, spec)

    def _run(self, plan: StepPlan, on_layer: Callable[[int], None] | None) -> list[Output]:
        columns = plan.columns
        if columns.only_decode:
            logits, drawing = self._decode(columns, on_layer)
            return self._sample(plan.step, columns, drawing, logits)
        rows = output_rows(columns)
        batch = self.inputs.batch(columns, rows.all, needs_logits=rows.needs_logits)
        hidden = self.model.forward(batch.forward, self.cache.kv, on_layer)
        drawn, prompts, others, pooled = rows.split(hidden)
        outputs: list[Output] = []
        if rows.drawn:
            logits = self.model.logits(drawn)
            outputs += self._sample(plan.step, columns, batch.drawing, logits)
        if rows.prompts:
            asks = {
                columns.sequence_id[number]: columns.prompt_logprobs[number]
                for number, _ in rows.prompts
            }
            outputs += self._prompt_logprobs(asks, prompts, batch.prompt_targets)
        if rows.others and self.tp.rank == 0:
            finite = finite_rows(others)
            outputs.append(
                lambda result: result.failed.update(not_finite(columns, rows.others, finite))
            )
        if rows.pooled:
            model = self.model
            # On all ranks, since scores may need logits of which each rank has a part.
            states = pooled_states(
                columns, rows.pooled, pooled, model.project_vectors, model.scores
            )
            if self.tp.rank == 0:
                outputs.append(lambda result: result.hidden.update(packed(states)))
        return outputs

    def _decode(
        self, rows: StepColumns, on_layer: Callable[[int], None] | None
    ) -> tuple[torch.Tensor | None, DrawingSlots]:
        """The logits of rows that ``only_decode``, on rank 0, and their slots."""
        if self.graphs is not None and self.graphs.takes(rows):
            hidden, drawing = self.graphs.forward(rows)
            logits = self.model.logits(hidden)
            self.model.announce_all(on_layer)
            return logits, drawing
        batch = self.inputs.batch(rows)
        logits = self.model.decode(batch.forward, self.cache.kv, on_layer)
        if logits is None:
            logits = self.model.logits(self.model.forward(batch.forward, self.cache.kv, on_layer))
        return logits, batch.drawing

    def _sample(
        self,
        step: int,
        rows: StepColumns,
        drawing: DrawingSlots,
        logits: torch.Tensor | None,
    ) -> list[Output]:
        """Draw from logits, on rank 0."""
        if logits is None or self.sampler is None:
            return []
        masks = self.masks.take(step) if rows.masked else {}
        slot_masks = {self.slots[each]: mask for each, mask in masks.items()}
        draws = self.sampler.draw(drawing.on_device, drawing.on_host, logits, slot_masks)

        def enter(result: StepResult) -> None:
            result.sampled, result.logprobs, failed = draws.collect()
            result.failed.update(failed)

        return [enter]

    def _prompt_logprobs(
        self, asks: dict[int, PromptTargets], hidden: torch.Tensor, targets: torch.Tensor
    ) -> list[Output]:
        """Launch the logprobs of targets on rank 0; the others compute parts of the logits."""
        top = max(ask.top for ask in asks.values())
        entries = []
        for part, tokens in zip(
            hidden.split(_PROMPT_ROWS), targets.split(_PROMPT_ROWS), strict=True
        ):
            logits = self.model.logits(part)
            if logits is not None:
                entries.append(prompt_entries(logits, tokens, top))
        if not entries:
            return []
        logprobs = PromptLogprobs(asks, to_host(torch.cat(entries)))
        return [lambda result: result.prompt_logprobs.update(logprobs.collect())]


def cause_of(error: Exception) -> str:
    """The cause of a step's failure, as one of plan.py's."""
    if isinstance(error, StepVoidError):
        return VOID
    return OUT_OF_MEMORY if lacks_memory(error) else COMPUTATION


def _first_of(error: BaseException) -> BaseException:
    """The first error of a chain of which each was raised while the one before was handled."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    return error


def lacks_memory(error: BaseException) -> bool:
    """True if an allocation failed."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(text in str(error) for text in _LACKS_MEMORY)


def runner_of(
    model: Decoder, cache: KVCache, tp: TensorParallel, limits: SlotLimits
) -> ModelRunner:
    """A runner, which attends for sequences in batches if the device supports it."""
    slots = Slots(limits, cache.device)
    with torch.inference_mode():
        model.prepare_ropes(cache.kv)
        vocab_size = model.spec.vocab_size
        sampler = None if tp.rank else sampler_for(vocab_size, slots.last_tokens)
        batched = model.prepare_batched_decode(cache.kv, cache.block_size)
        model.prepare_batched_chunks(cache.kv, cache.block_size)
    return ModelRunner(model, cache, sampler, tp, slots, batched_decode=batched)

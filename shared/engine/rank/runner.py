"""The model runner: executes one rank's share of a step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from ...kv.cache import KVCache
from ...models.batch import build_batch
from ...models.decoder import Decoder
from ...models.parallel import TensorParallel
from ..plan import (
    COMPUTATION,
    OUT_OF_MEMORY,
    VOID,
    PositionLogprobs,
    SequenceStep,
    StepPlan,
    StepResult,
)
from .last_draws import LastDraws, StepVoidError
from .logprobs import position_logprobs
from .mask_inbox import MaskInbox
from .output_rows import not_finite, output_rows, pooled_states
from .sampler import Sampler

# Logits of prompt positions are computed this many rows at a time: each has the whole vocabulary.
_PROMPT_ROWS = 64


class ModelRunner:
    """Owns one rank's tensors. Between steps it keeps the weights, the cache, the sampler's history
    and the last draws; everything else arrives in the plan, and masks in ``masks``. Only rank 0
    samples."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        sampler: Sampler,
        tp: TensorParallel,
        *,
        batched_decode: bool = False,
        batched_chunks: bool = False,
    ) -> None:
        self.batched_decode = batched_decode
        self.batched_chunks = batched_chunks
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.tp = tp
        self.masks = MaskInbox()
        self._last_draws = LastDraws(tp)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """Run one step. ``on_layer(i)``: layer i's KV of this step is in the cache.

        Raises ``StepVoidError`` if the step was planned on top of one that failed.
        """
        start = time.perf_counter()
        sequences = self._last_draws.begin(plan)
        for sequence_id in plan.removed:
            self.sampler.remove(sequence_id)
        for spec in plan.added:
            self.sampler.add(spec)
        result = StepResult(plan.step, [])
        if sequences:
            self._run(sequences, on_layer, result)
            self._finish()
        self._last_draws.end(result.sampled)
        result.seconds = time.perf_counter() - start
        return result

    def recover(self) -> None:
        """Wait for the device and release memory after a step that raised.

        Raises if the device itself is broken, so that no later step could work.
        """
        gc.collect()
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
            torch.cuda.empty_cache()

    def _finish(self) -> None:
        """Synchronise a GPU: the head frees and reuses blocks once it has the result of a step."""
        if self.cache.device.type == "cuda":
            torch.cuda.current_stream(self.cache.device).synchronize()

    def _run(
        self,
        sequences: list[SequenceStep],
        on_layer: Callable[[int], None] | None,
        result: StepResult,
    ) -> None:
        rows = output_rows(sequences)
        batch = build_batch(
            sequences,
            self.cache.block_size,
            self.cache.device,
            rows.all,
            batched_decode=self.batched_decode,
            batched_chunks=self.batched_chunks,
            needs_logits=rows.needs_logits,
        )
        if len(rows.samples) == len(sequences):
            logits = self.model.decode(batch, self.cache.kv, on_layer)
            if logits is not None:
                self._sample(rows.samples, logits, result)
                return
        hidden = self.model.forward(batch, self.cache.kv, on_layer)
        sampling, prompt, others, pooled = rows.split(hidden)
        if rows.samples:
            logits = self.model.logits(sampling)
            if logits is not None:
                self._sample(rows.samples, logits, result)
        counts = [len(one.prompt_targets) for one in rows.asks]
        for one, part in zip(rows.asks, prompt.split(counts) if counts else (), strict=True):
            result.prompt_logprobs[one.sequence_id] = self._prompt(one, part)
        model = self.model
        # On all ranks, since scores may need logits of which each rank has a part.
        states = pooled_states(rows.pools, pooled, model.project_vectors, model.scores)
        if self.tp.rank == 0:
            result.failed.update(not_finite(rows.computes, others))
            result.hidden.update(states)

    def _sample(self, rows: list[SequenceStep], logits: torch.Tensor, result: StepResult) -> None:
        masked = any(row.masked for row in rows)
        masks = self.masks.take(result.step) if masked else {}
        sampled, failed = self.sampler.sample([row.sequence_id for row in rows], logits, masks)
        result.sampled.extend(sampled)
        result.failed.update(failed)

    def _prompt(self, sequence: SequenceStep, hidden: torch.Tensor) -> list[PositionLogprobs]:
        logprobs: list[PositionLogprobs] = []
        for first in range(0, len(hidden), _PROMPT_ROWS):
            logits = self.model.logits(hidden[first : first + _PROMPT_ROWS])
            if logits is not None:
                targets = sequence.prompt_targets[first : first + _PROMPT_ROWS]
                logprobs += position_logprobs(logits, targets, sequence.prompt_logprobs or 0)
        return logprobs


def cause_of(error: Exception) -> str:
    """The cause of a step's failure, as one of plan.py's."""
    if isinstance(error, StepVoidError):
        return VOID
    return OUT_OF_MEMORY if lacks_memory(error) else COMPUTATION


def lacks_memory(error: Exception) -> bool:
    """True if an allocation failed."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "can't allocate memory" in str(error)  # a plain RuntimeError of torch's, on CPUs


def runner_of(model: Decoder, cache: KVCache, tp: TensorParallel) -> ModelRunner:
    """A runner, which attends for sequences in batches if the device supports it."""
    sampler = Sampler(model.spec.vocab_size, cache.device)
    with torch.inference_mode():
        decode, chunks = model.prepare_batched_attention(cache.kv, cache.block_size)
    return ModelRunner(model, cache, sampler, tp, batched_decode=decode, batched_chunks=chunks)

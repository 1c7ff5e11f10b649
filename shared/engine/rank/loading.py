"""A rank's model, loaded on its device, and its cache.

This module has the heavy imports, so that a rank that ends at once never pays for them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ....kernels.errors import KernelUnavailableError
from ...config.fields import json_object
from ...config.kv_dtypes import SCALED_AS_A_WHOLE
from ...errors import StartupError
from ...kv.backing import Backing
from ...kv.cache import KVCache
from ...kv.layout import UNSCALED, WholeScales
from ...kv.planning import CPU, bytes_per_block
from ...models.decoder import Decoder
from ...models.parallel import TensorParallel
from ...models.registry import spec_of
from ...weights import load
from ...weights.footprint import parameter_sizes
from ...weights.kv_scales import read_kv_scales
from ...weights.source import open_source
from ...weights.transfer import in_words
from ..device import operators_for, usable_decode_kernel
from ..device_memory import description, report
from ..messages import LoadFormats, RankSettings
from ..plan import SlotLimits
from .group import meet
from .runner import ModelRunner, lacks_memory, runner_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights on their device, before the cache is planned."""

    model: Decoder
    block_size: int
    kv_dtype: torch.dtype
    tp: TensorParallel
    kv_scales: WholeScales = UNSCALED

    @property
    def device(self) -> torch.device:
        return self.model.place.device

    @property
    def bytes_per_block(self) -> int:
        return bytes_per_block(
            self.model.spec, self.block_size, self.kv_dtype, self.tp.size, self.tp.rank
        )

    def runner(self, num_blocks: int, limits: SlotLimits) -> ModelRunner:
        """Allocate the cache for a runner. Raises ``StartupError`` if it does not fit."""
        try:
            cache = KVCache(
                self.model.spec,
                num_blocks=num_blocks,
                block_size=self.block_size,
                dtype=self.kv_dtype,
                device=self.device,
                tp_rank=self.tp.rank,
                tp_size=self.tp.size,
                operators=self.model.place.operators,
                whole_scales=self.kv_scales,
            )
        except (RuntimeError, MemoryError) as error:
            size = num_blocks * self.bytes_per_block
            raise StartupError(
                f"the KV cache of {num_blocks} blocks ({size} bytes) cannot be allocated: "
                f"{str(error).splitlines()[0]}; lower --kv-fraction or "
                f"--gpu-memory-utilization"
            ) from None
        try:
            return runner_of(self.model, cache, self.tp, limits)
        except KernelUnavailableError as error:
            raise StartupError(
                f"Triton's decode kernel cannot run on {description(self.device)}: {error}; use "
                f"--decode-kernel torch, which is slow in large batches"
            ) from None
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            raise StartupError(
                f"beside the KV cache there is no memory for {limits.sequences} sequences: "
                f"{(str(error).splitlines() or [''])[0]}; lower --kv-fraction, "
                f"--gpu-memory-utilization or --max-num-seqs"
            ) from None


def load_model(settings: RankSettings, formats: LoadFormats, device: torch.device) -> LoadedModel:
    """Load this rank's part of the model, after meeting the other ranks if there are any."""
    torch.set_num_threads(settings.threads)
    decode_kernel = usable_decode_kernel(device, settings.decode_kernel)
    tp = meet(settings, device)
    overrides = json_object("--hf-overrides", settings.hf_overrides)
    operators = operators_for(device, cpu_kernels=settings.cpu_kernels, decode_kernel=decode_kernel)
    try:
        model = load.load_model(
            settings.model_path,
            dtype=formats.dtype,
            device=device,
            tp=tp,
            load_format=settings.load_format,
            ignored_keys=frozenset(settings.ignored_config_keys),
            overrides=overrides,
            max_model_len=settings.max_model_len,
            seed=settings.seed,
            isq=settings.isq,
            operators=operators,
        )
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise _too_large(settings, formats, device) from None
    kv_scales = UNSCALED
    if formats.kv_dtype in SCALED_AS_A_WHOLE and settings.load_format != "dummy":
        kv_scales = read_kv_scales(settings.model_path, model.spec, overrides)
        _log_scales(kv_scales)
    kv_dtype = getattr(torch, formats.kv_dtype)
    return LoadedModel(model, settings.block_size, kv_dtype, tp, kv_scales)


def _too_large(settings: RankSettings, formats: LoadFormats, device: torch.device) -> StartupError:
    """The error for weights that do not fit the device, with their size."""
    remedy = "free its memory, choose another one with --d, or split the model over several"
    if device.type == CPU:
        remedy = "free some, or serve a smaller or a quantised version of the model"
    size_of = ""
    if settings.load_format != "dummy":
        source = open_source(
            settings.model_path, json_object("--hf-overrides", settings.hf_overrides)
        )
        ignored = frozenset(settings.ignored_config_keys)
        spec = spec_of(source.config(), ignored, settings.max_model_len)
        sizes = parameter_sizes(source, spec, formats.dtype, settings.size, settings.isq)
        size_of = f" {in_words(sum(each.nbytes for each in sizes))} of"
    return StartupError(f"the{size_of} weights do not fit: {report(device)}; {remedy}")


def _log_scales(kv_scales: WholeScales) -> None:
    if kv_scales:
        log.info("KV is cached in fp8 with the checkpoint's scales")
    else:
        log.info("KV is cached in fp8 with scale 1: the checkpoint has no scales of K and V")


def backing_of(cache: KVCache) -> Backing | None:
    """A started ``Backing``, which populates the cache's memory ahead of use; ``None`` on a GPU,
    whose memory needs none."""
    if cache.device.type != CPU:
        return None
    backing = Backing((each for layer in cache.layers for each in layer), cache.block_size)
    backing.start()
    return backing

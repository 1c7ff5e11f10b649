"""The dtypes in which a model is computed and cached."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..config import EngineConfig
from ..config.kv_dtypes import kv_dtype_of
from ..errors import StartupError
from ..kv.planning import CPU, RankDevice
from ..models.spec import DecoderSpec
from .messages import LoadFormats

log = logging.getLogger("tandem.node")


def formats_for(
    config: EngineConfig, spec: DecoderSpec, devices: Sequence[RankDevice]
) -> LoadFormats:
    """Resolve ``--dtype`` and ``--kv-cache-dtype`` for the devices of all ranks.

    Raises ``StartupError`` for bfloat16 on a GPU that does not have it.
    """
    on_cpu = devices[0].kind == CPU
    lacking = next((each for each in devices if not each.has_bfloat16), None)
    dtype = spec.dtype_for(config.dtype, on_cpu=on_cpu, has_bfloat16=lacking is None)
    formats = LoadFormats(dtype, kv_dtype_of(config.kv_cache_dtype, dtype, spec.kv_dtype))
    if lacking is None:
        return formats
    for option, name in (("--dtype", dtype), ("--kv-cache-dtype", formats.kv_dtype)):
        if name == "bfloat16":
            raise StartupError(
                f"{option} bfloat16 needs compute capability 8.0, which {lacking.name} does not "
                f"have; use {option} float16"
            )
    if dtype != spec.dtype_for(config.dtype, on_cpu=on_cpu):
        log.warning(
            "%s has no bfloat16, so this model runs in float16; if its numbers overflow there, use "
            "--dtype float32",
            lacking.name,
        )
    return formats

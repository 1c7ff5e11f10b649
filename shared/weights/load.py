"""Loading of a rank's part of a model, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...kernels.block_formats import Q8_0, BlockFormat
from ...kernels.operators import Operators
from ..errors import ModelError
from ..models.decoder import Decoder
from ..models.layers.part import Part
from ..models.parallel import TensorParallel, WeightPlacement
from ..models.registry import family_of, spec_of
from ..models.spec import DecoderSpec
from .checkpoint import CheckpointWeights
from .in_situ import InSitu
from .memory import resident_bytes
from .random import RandomWeights
from .source import WeightSource, check_format, open_source
from .transfer import in_words

log = logging.getLogger("tandem.node")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def resolve_dtype(name: str, spec: DecoderSpec, device: torch.device) -> torch.dtype:
    """``DecoderSpec.dtype_for`` as torch's dtype. Raises ``ModelError`` for an unknown name."""
    dtype = spec.dtype_for(name, on_cpu=device.type == "cpu")
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; use auto or {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    tp: TensorParallel | None = None,
    load_format: str = "auto",
    ignored_keys: frozenset[str] = frozenset(),
    overrides: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    seed: int = 0,
    isq: str | None = None,
    operators: Operators | None = None,
) -> Decoder:
    """Load this rank's part of the model at a path. ``load_format`` dummy needs only its config.

    ``ignored_keys``, ``max_model_len``: see ``spec_of``; ``overrides``: see ``open_source``.
    """
    tp = tp or TensorParallel()
    source = open_source(path, overrides)
    spec = spec_of(source.config(), ignored_keys, max_model_len)
    device = torch.device(device)
    place = WeightPlacement(
        resolve_dtype(dtype, spec, device),
        device,
        tp,
        operators or Operators(),
    )
    if load_format == "dummy":
        return random_decoder(spec, place, seed)
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load format {load_format!r}; supported: {', '.join(LOAD_FORMATS)}")
    check_format(source, load_format)
    with source:
        return decoder_from(source, spec, place, isq)


def decoder_from(
    source: WeightSource, spec: DecoderSpec, place: WeightPlacement, isq: str | None = None
) -> Decoder:
    """Build a decoder with the weights of an open source, quantised if ``isq`` is given."""
    config = source.config()
    in_situ = None if isq is None else InSitu(isq, spec)
    family = family_of(config.values, config.file)
    weights = CheckpointWeights(source, family, spec, in_situ, place.operators)

    if place.tp.size == 1:  # several ranks each read a part of the files
        weights.read_ahead()
    stated_bytes = loaded_bytes = 0
    formats: set[BlockFormat] = set()

    def load(part: Part) -> None:
        nonlocal stated_bytes, loaded_bytes
        slots = part.weight_slots().values()
        stated_bytes += sum(slot.target.nbytes for slot in slots)
        formats.update(slot.format for slot in slots if slot.format is not None)
        weights.fill(part)
        part.finish_loading()
        loaded_bytes += resident_bytes(part)

    place = replace(place, format_of=weights.format_of, order_of=weights.order_of)
    model = Decoder(spec, place, load, has_head=weights.has_head)
    weights.finish()
    log.info(
        "the weights take %s of memory; their formats imply %s",
        in_words(loaded_bytes),
        in_words(stated_bytes),
    )
    _warn_of_decoding(formats, place)
    return model


def _warn_of_decoding(formats: Iterable[BlockFormat], place: WeightPlacement) -> None:
    """Name the weights that a CPU decodes for each product, up to a hundred times as slowly."""
    if place.device.type != "cpu":
        return
    operators, dtype = place.operators, place.activations
    decoded = sorted(each.name for each in formats if not operators.has_product(each, dtype))
    if not decoded:
        return
    remedy = "use a file in another format, such as Q8_0"
    if type(operators) is Operators:
        remedy = "--cpu-kernels compiled has kernels for most formats, on CPUs with AVX2"
    elif not operators.has_product(Q8_0, dtype):
        remedy = "this CPU lacks AVX2, which kernels need: use weights in bfloat16 or float32"
    log.warning(
        "weights in %s are decoded for each product, which is slow; %s",
        " and ".join(decoded),
        remedy,
    )


def random_decoder(spec: DecoderSpec, place: WeightPlacement, seed: int) -> Decoder:
    """Build a decoder with random weights."""
    weights = RandomWeights(seed, place.device)

    def load(part: Part) -> None:
        weights.fill(part)
        part.finish_loading()

    return Decoder(spec, place, load)

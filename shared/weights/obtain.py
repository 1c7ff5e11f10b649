"""A model for a node: found, judged by everything but its weights, and only then downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..config import EngineConfig
from ..config.kv_dtypes import kv_dtype_of
from ..errors import ModelError
from ..models.registry import family_of, spec_of
from ..models.spec import QUANTIZED, DecoderSpec, Scoring, tensor_parallel_problem
from .folder_kind import INDEX, SINGLE
from .locate import FoundModel, find_model
from .origins import lacks_head, tensor_origins
from .safetensors_folder import without_loadable_weights
from .source import WeightSource, check_format, open_source


@dataclass(frozen=True, slots=True)
class ObtainedModel:
    """A model that can be loaded. One that does not generate has no head, and embeds only.
    ``name`` is that of the very version, for those who will load the same."""

    name: str
    path: Path
    source: WeightSource
    spec: DecoderSpec
    generates: bool

    @property
    def scoring(self) -> Scoring | None:
        """How the model scores two texts; ``None`` for one that generates text."""
        return self.spec.scoring or (None if self.generates else "vectors")


def obtain_model(config: EngineConfig) -> ObtainedModel:
    """Find a model, and download its weights once nothing else speaks against it; with random
    weights, it needs none.

    Raises ``ModelError``.
    """
    with find_model(config.model) as found:
        name = str(found.version or config.model)
        source = open_source(found.path, config.config_overrides)
        spec = spec_of(source.config(), config.ignored_config_keys, config.max_model_len)
        if problem := tensor_parallel_problem(spec, config.world_size):
            raise ModelError(
                f"{found.path} cannot be split over {config.world_size} ranks: {problem}"
            )
        # Raises for KV of a format that is not supported; the dtype of weights is chosen later.
        kv_dtype_of(config.kv_cache_dtype, spec.dtype, spec.kv_dtype)
        spec = quantised(spec, config)
        if config.load_format == "dummy" and (found.download is None or found.path.is_dir()):
            return ObtainedModel(name, found.path, source, spec, generates=spec.has_head)
        if config.load_format != "dummy":
            check_format(source, config.load_format)
        check_files(source, found)
        generates = _check_tensors(source, spec)
        if found.download is None:
            return ObtainedModel(name, found.path, source, spec, generates)
        source.tokenizer_files()  # no router could serve the model without them
        downloaded = found.download(source.weight_files())
        source = open_source(downloaded, config.config_overrides)
    return ObtainedModel(name, source.path, source, spec, _check_tensors(source, spec))


def quantised(spec: DecoderSpec, config: EngineConfig) -> DecoderSpec:
    """The spec of a model that may be quantised while it is loaded. Raises ``ModelError`` where
    there is nothing to quantise."""
    if config.isq is None:
        return spec
    if config.load_format == "dummy":
        raise ModelError(f"--isq {config.isq}: random weights are not quantised; leave it out")
    if spec.dtype == QUANTIZED:
        raise ModelError(
            f"--isq {config.isq}: the weights of {config.model} are quantised already; leave it "
            f"out, or give the model in bfloat16, float16 or float32"
        )
    return replace(spec, dtype=QUANTIZED)


def check_files(source: WeightSource, found: FoundModel) -> None:
    """Refuse a folder or a repository without some of the files of its weights. Raises
    ``ModelError``."""
    if found.files is None or not found.path.is_dir():
        return
    missing = [
        file
        for file in source.weight_files()
        if file not in found.files and not (found.path / file).is_file()
    ]
    place = found.download.name.repository if found.download else str(found.path)
    if missing == [SINGLE]:
        raise without_loadable_weights(found.files, place)
    if missing:
        lists = "modules.json" if "/" in missing[0] else INDEX
        raise ModelError(
            f"{Path(place) / missing[0]} is missing, and {lists} lists it: "
            + ("use another model" if found.download else "resume the download")
        )


def _check_tensors(source: WeightSource, spec: DecoderSpec) -> bool:
    """Refuse tensors that are not the model's, as far as they are known. Returns whether the model
    can generate."""
    config, names = source.config(), source.tensor_names()
    if names is None:
        return True
    family = family_of(config.values, config.file)
    known = source.weight_names(family)
    origins = tensor_origins(names, known, spec, source.path, family.more_layers, family.wrapped)
    return not lacks_head(origins, spec, source.path)

"""A model for a node: checked by everything but its weights, and only then downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..config import EngineConfig
from ..config.kv_dtypes import kv_dtype_of
from ..errors import ModelError
from ..kv.planning import check_context
from ..models.config_files import ModelConfig
from ..models.registry import family_of, spec_of
from ..models.spec import QUANTIZED, DecoderSpec, tensor_parallel_problem
from ..scoring import Scoring
from ..text.tokenizer import Tokenizer
from .alternatives import suggest_alternatives
from .folder_kind import INDEX, SINGLE
from .locate import FoundModel, find_model
from .origins import check_complete, lacks_head, tensor_origins
from .remote_headers import absent_files, with_headers
from .safetensors_folder import without_loadable_weights
from .source import WeightSource, check_format, open_source


@dataclass(frozen=True, slots=True)
class ObtainedModel:
    """A loadable model. One that does not generate has no head, and only embeds. ``name`` includes
    the exact version, so that others can load the same."""

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
    """Find a model, check it, and download its weights, unless they are random.

    Raises ``ModelError``, or ``StartupError`` for a context that the model does not support.
    """
    with find_model(config.model) as location, suggest_alternatives(config.model, location):
        name = str(location.version or config.model)
        source = open_source(location.path, config.config_overrides)
        spec = spec_of(source.config(), config.ignored_config_keys, config.max_model_len)
        check_context(config, spec.max_position)
        if problem := tensor_parallel_problem(spec, config.world_size):
            raise ModelError(
                f"{location.path} cannot be split over {config.world_size} ranks: {problem}"
            )
        # Raises for KV of a format that is not supported; the dtype of weights is chosen later.
        kv_dtype_of(config.kv_cache_dtype, spec.dtype, spec.kv_dtype)
        spec = apply_isq(spec, config)
        if config.load_format == "dummy" and (location.download is None or location.path.is_dir()):
            return ObtainedModel(name, location.path, source, spec, generates=spec.has_head)
        if config.load_format != "dummy":
            check_format(source, config.load_format)
        check_files(source, location)
        if location.download is not None:
            _check_remote(location, source, spec, config)
            path = location.download(source.weight_files())
            source = open_source(path, config.config_overrides)
    return ObtainedModel(name, source.path, source, spec, check_tensors(source, spec))


def _check_remote(
    location: FoundModel, source: WeightSource, spec: DecoderSpec, config: EngineConfig
) -> None:
    """Check a model on a hub by its tokenizer, and by the headers of weights to download. Raises
    ``ModelError``."""
    absent = absent_files(location, source)
    listing = location.download.listing if location.download else None
    if location.path.is_dir() and not absent:
        return  # nothing will be downloaded
    Tokenizer.load(source.tokenizer_files(), spec.vocab_size)  # as every router does
    if absent:
        check_tensors(source, spec, by_index=True)
    if listing is None or not all(map(listing.sizes.get, absent)):
        return  # headers cannot be read without the sizes
    with with_headers(location, source, absent, config.config_overrides) as headers:
        check_tensors(headers, spec, source.config())


def apply_isq(spec: DecoderSpec, config: EngineConfig) -> DecoderSpec:
    """The spec of a model after ``--isq``. Raises ``ModelError`` if there is nothing to
    quantise."""
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


def check_files(source: WeightSource, location: FoundModel) -> None:
    """Raise ``ModelError`` for a folder or a repository that lacks some weight files."""
    if location.files is None or not location.path.is_dir():
        return
    missing = [
        file
        for file in source.weight_files()
        if file not in location.files and not (location.path / file).is_file()
    ]
    place = location.download.name.repository if location.download else str(location.path)
    if missing == [SINGLE]:
        raise without_loadable_weights(location.files, place)
    if missing:
        lists = "modules.json" if "/" in missing[0] else INDEX
        raise ModelError(
            f"{Path(place) / missing[0]} is missing, and {lists} lists it: "
            + ("use another model" if location.download else "resume the download")
        )


def check_tensors(
    source: WeightSource,
    spec: DecoderSpec,
    config: ModelConfig | None = None,
    *,
    by_index: bool = False,
) -> bool:
    """Raise ``ModelError`` for missing or unknown tensors. Returns whether the model can generate.
    ``config`` defaults to the source's. With ``by_index``, missing tensors are accepted, since an
    index may leave out tensors that its files have."""
    config, tensors = config or source.config(), source.tensor_names()
    if tensors is None:
        return True
    family, path = family_of(config.values, config.file), source.path
    names = source.weight_names(family)
    origins = tensor_origins(tensors, names, spec, path, family.more_layers, family.wrapped)
    if by_index:
        return not lacks_head(origins, spec, path)
    return check_complete(origins, names, spec, path, family.wrapped)

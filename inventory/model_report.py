"""``tandem info MODEL``: a model's description, and whether it fits here, from its headers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..shared.config import EngineConfig
from ..shared.engine.device import choose_device
from ..shared.engine.formats import formats_for
from ..shared.errors import ModelError
from ..shared.kv.layout import kv_layout, token_bytes
from ..shared.kv.planning import (
    CPU,
    CUDA,
    NodeDevice,
    RankDevice,
    RankMemory,
    check_context,
    library_bytes,
)
from ..shared.kv.step_estimate import estimated_step_bytes
from ..shared.models.config_files import ModelConfig
from ..shared.models.registry import spec_of
from ..shared.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    tensor_parallel_problem,
)
from ..shared.text.tokenizer import Tokenizer
from ..shared.text.tokenizer_files import DEFAULT
from ..shared.text.vocabulary.files import kind_of
from ..shared.weights.alternatives import suggest_alternatives
from ..shared.weights.footprint import ParameterSize, parameter_sizes
from ..shared.weights.locate import FoundModel, find_model, is_gguf
from ..shared.weights.obtain import apply_isq, check_files, check_tensors
from ..shared.weights.remote_headers import absent_files, with_headers
from ..shared.weights.source import WeightSource, open_source
from ..shared.weights.transfer import in_words
from .machine import Machine, in_sentence, kernels_of

# Parts of a model by substrings of their parameters' names; the first match counts.
_PARTS = (
    ("embed.", "embedding"),
    ("token_inputs.", "per-layer embeddings"),
    (".token_gate.", "per-layer embeddings"),
    ("head.", "head"),
    (".mlp.experts.", "experts"),
    (".mlp.", "feed-forward"),
    (".attention.", "attention"),
    ("norm", "norms"),
)
_REQUESTS_AT_ONCE = 8
_MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The description of a model, as fields and as lines."""

    about: dict[str, Any]
    lines: tuple[str, ...]


def describe_model(config: EngineConfig, machine: Machine) -> ModelReport:
    """Describe a model. From a hub, only its configuration and the headers of its weights are
    downloaded. Raises ``StartupError``, also if no server could start with the options here."""
    device = CUDA if machine.gpus else CPU
    if config.device != "auto" and config.device != device:
        device = choose_device(config.device, 0).type  # raises without a GPU
    with _checked(config) as (model, source, values, spec):
        files, size = _weights(model, source)
        on_cpu = device == CPU
        devices = (machine.cpu,) if on_cpu else machine.gpus
        formats = formats_for(config, spec, devices)
        dtype, kv_dtype = formats.dtype, formats.kv_dtype
        sizes = parameter_sizes(source, spec, dtype, isq=config.isq)
        tokenizer = _tokenizer(source, spec.vocab_size)
        used = kernels_of(
            config, on_gpu=not on_cpu, multiplied=_multiplied(sizes, spec), dtype=dtype
        )
        fits = [_fit(source, spec, dtype, kv_dtype, each, devices, config) for each in devices]
    experts = sum(each.values for each in sizes if _part(each.name) == "experts")
    active = sum(each.values for each in sizes) - experts + _active(spec, experts)
    about = {
        "model": config.model,
        "format": source.format,
        "files": files,
        "size": size,
        "layers": len(spec.layers),
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "context": spec.max_position,
        "max_seq_length": values.longest_text,
        "layer_kinds": [
            {"layers": count, "description": text} for text, count in _kinds(spec.layers)
        ],
        "tokenizer": tokenizer,
        "tied_embeddings": spec.tie_embeddings,
        "parameters": sum(each.values for each in sizes),
        "active_parameters": active,
        "dtype": dtype,
        "memory": sum(each.nbytes for each in sizes),
        "memory_by_part": _sums((_part(each.name), each.nbytes) for each in sizes),
        "memory_by_format": _sums((each.format, each.nbytes) for each in sizes),
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": token_bytes(kv_layout(spec, kv_dtype)),
        "fits": fits,
        "kernels": used,
    }
    return ModelReport(about, tuple(_lines(about)))


def as_json(report: ModelReport, machine: Machine) -> str:
    """All fields as JSON."""
    return json.dumps({**report.about, "machine": machine.about}, indent=2)


@contextmanager
def _checked(
    config: EngineConfig,
) -> Iterator[tuple[FoundModel, WeightSource, ModelConfig, DecoderSpec]]:
    """The model with the headers of its weights, checked except for its tensors and tokenizer."""
    overrides = config.config_overrides
    with find_model(config.model) as model, suggest_alternatives(config.model, model):
        source = open_source(model.path, overrides)
        values = source.config()
        spec = spec_of(values, config.ignored_config_keys, config.max_model_len)
        check_context(config, spec.max_position)
        spec = apply_isq(spec, config)
        check_files(source, model)
        absent = _absent(config, model, source)
        if absent:
            check_tensors(source, spec, by_index=True)
        with with_headers(model, source, absent, overrides) as headers:
            yield model, headers, values, spec


def _multiplied(sizes: Sequence[ParameterSize], spec: DecoderSpec) -> list[ParameterSize]:
    """The parameters without the tables of embeddings."""
    tables = {"token_inputs.table.weight"} | (set() if spec.tie_embeddings else {"embed.weight"})
    return [each for each in sizes if each.name not in tables]


def _absent(config: EngineConfig, model: FoundModel, source: WeightSource) -> list[str]:
    """The missing files of weights, whose headers are read from the hub. Raises ``ModelError`` if
    the hub does not have them."""
    absent = absent_files(model, source)
    listing = model.download.listing if model.download else None
    if absent and (listing is None or any(file not in listing.sizes for file in absent)):
        raise ModelError(
            f"{config.model!r} is incomplete in the hub's cache, which lacks {absent[0]}"
        )
    return absent


def _weights(model: FoundModel, source: WeightSource) -> tuple[int, int]:
    """The number and the total size of the files of weights."""
    if model.download is not None and model.download.weights:
        paths = [source.path.parents[file.count("/")] / file for file in model.download.weights]
    else:
        paths = [_folder(source.path) / file for file in source.weight_files()]
    return len(paths), sum(path.stat().st_size for path in paths if path.is_file())


def _fit(
    source: WeightSource,
    spec: DecoderSpec,
    dtype: str,
    kv_dtype: str,
    device: RankDevice,
    devices: Sequence[RankDevice],
    config: EngineConfig,
) -> dict[str, Any]:
    """Whether a model fits on a device, with KV for a sequence of ``--max-model-len``; if not, the
    number of such GPUs over which it would have to be split. ``tokens`` is the room for KV."""
    max_ranks = len(devices) if device.kind != "cpu" else 1
    for ranks in range(1, max(max_ranks, _MAX_RANKS if device.kind != "cpu" else 1) + 1):
        if tensor_parallel_problem(spec, ranks):
            continue
        sizes = parameter_sizes(source, spec, dtype, ranks, config.isq)
        weights = sum(each.nbytes for each in sizes)
        node = NodeDevice((device,) * ranks)
        free, step = device.free_bytes - weights, 0
        if not node.on_cpu:
            step = estimated_step_bytes(
                spec,
                tokens=config.max_num_batched_tokens or node.token_budget,
                sequences=config.max_num_seqs or node.max_num_seqs,
                itemsize=4 if dtype == "float32" else 2,
                ranks=ranks,
            )
        memory = RankMemory(max(0, free), weights + library_bytes(ranks), 0, step)
        room = node.cache_bytes([memory] * ranks, node.gpu_share(config))
        tokens = int(room * node.cache_fraction) // token_bytes(kv_layout(spec, kv_dtype, 0, ranks))
        if free > 0 and tokens >= (config.max_model_len or 2):
            fits = ranks <= max_ranks
            return {"device": device.name, "ranks": ranks, "fits": fits, "tokens": tokens}
    return {"device": device.name, "ranks": 1, "fits": False, "tokens": 0}


def _tokenizer(source: WeightSource, vocab_size: int) -> dict[str, Any]:
    """The tokenizer and the files of its chat templates, or the ``problem`` for which a router
    would reject them."""
    try:
        files = source.tokenizer_files()
        tokens = Tokenizer.load(files, vocab_size).vocab_size
    except ModelError as error:
        # Without the folder, which is temporary for headers from a hub.
        return {"problem": str(error).replace(f"{_folder(source.path)}/", "")}
    origin = Path(files.origin)
    return {
        "kind": "GGUF" if is_gguf(origin) else kind_of(origin).value,
        "file": origin.name,
        "tokens": tokens,
        "templates": {name: Path(one.origin).name for name, one in files.templates().items()},
    }


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _active(spec: DecoderSpec, experts: int) -> int:
    """The number of the experts' parameters that a token uses."""
    routers = [layer.mlp.router for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    if not routers:
        return 0
    return experts * sum(router.top_k for router in routers) // sum(r.experts for r in routers)


def _part(name: str) -> str:
    return next((part for sign, part in _PARTS if sign in name), "others")


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for name, size in pairs:
        sums[name] += size
    return dict(sums.most_common())


def _kinds(layers: Sequence[LayerSpec]) -> list[tuple[str, int]]:
    """Descriptions of the distinct kinds of layers, with their counts."""
    return list(Counter(_layer_in_words(layer) for layer in layers).items())


def _layer_in_words(layer: LayerSpec) -> str:
    match layer.attention:
        case AttentionSpec() as each:
            heads = f"{each.num_heads} heads of {each.head_dim} over {each.num_kv_heads} of KV"
            window = f", the last {each.sliding_window} tokens" if each.sliding_window else ""
            attention = heads + window
        case MLASpec() as latent:
            attention = (
                f"{latent.num_heads} heads over a latent of {latent.kv_lora_rank} + "
                f"{latent.rope_dim}"
            )
        case other:
            attention = type(other).__name__.removesuffix("Spec")
    match layer.mlp:
        case DenseSpec() as dense:
            mlp = f"feed-forward of {dense.intermediate}"
        case MoESpec() as moe:
            shared = f", and one of {moe.shared.intermediate} for all" if moe.shared else ""
            mlp = (
                f"{moe.router.top_k} of {moe.router.experts} experts of "
                f"{moe.expert.intermediate}{shared}"
            )
        case another:
            mlp = type(another).__name__.removesuffix("Spec")
    return f"{attention}; {mlp}"


def _lines(about: dict[str, Any]) -> Iterator[str]:
    files = f"{about['files']} files" if about["files"] > 1 else "1 file"
    yield f"model       {about['model']} ({about['format']}, {files}, {in_words(about['size'])})"
    limited = about["context"] == about["max_seq_length"]
    yield (
        f"layers      {about['layers']} of width {about['hidden_size']}; vocabulary "
        f"{about['vocab_size']}; context {about['context']} tokens"
        f"{', by max_seq_length' if limited else ''}"
    )
    for kind in about["layer_kinds"]:
        yield f"            {kind['layers']} x {kind['description']}"
    yield f"tokenizer   {_tokenizer_in_words(about['tokenizer'])}"
    active = about["active_parameters"]
    used = f", of which a token uses {_count(active)}" if active < about["parameters"] else ""
    yield f"parameters  {_count(about['parameters'])}{used}"
    yield f"weights     {in_words(about['memory'])} as {_shares(about['memory_by_format'])}"
    yield f"            {_shares(about['memory_by_part'])}"
    yield f"KV cache    {about['kv_bytes_per_token']} bytes a token in {about['kv_dtype']}"
    for fit in about["fits"]:
        yield f"fits        {_fit_in_words(fit)}"
    yield f"kernels     {in_sentence(about['kernels'])}"


def _tokenizer_in_words(tokenizer: dict[str, Any]) -> str:
    if "problem" in tokenizer:
        return f"refused: {tokenizer['problem']}"
    templates = [
        f"template of {'chats' if name == DEFAULT else name} in {file}"
        for name, file in tokenizer["templates"].items()
    ]
    return (
        f"{tokenizer['kind']} in {tokenizer['file']}, {tokenizer['tokens']} tokens; "
        f"{', '.join(templates) or 'no template of chats'}"
    )


def _fit_in_words(fit: dict[str, Any]) -> str:
    if fit["fits"]:
        split = f", split over {fit['ranks']} such" if fit["ranks"] > 1 else ""
        return f"{fit['device']}{split}: yes, with {fit['tokens']} tokens of KV"
    if fit["tokens"]:
        return f"{fit['device']}: no; it would take {fit['ranks']} such"
    return f"{fit['device']}: no"


def _shares(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {in_words(size)}" for name, size in sizes.items())


def _count(number: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)

"""Descriptions of quantised checkpoints: the method, and what tensors do not show. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ModelError, UnsupportedWeightsError, in_line
from .config import Config

# Keys of a config.json: of transformers, of MLX, and of older compressed-tensors.
_KEYS = ("quantization_config", "quantization", "compression_config")
# Files beside a config.json, and the method of the libraries that write them.
QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
QUANTIZATION_KEYS = frozenset((*_KEYS, *QUANTIZATION_FILES))
# Keys of a description that errors quote.
_DETAILS = ("quant_algo", "kv_cache_quant_algo", "format", "fmt", "bits", "w_bit", "group_size")

Method = Literal[
    "fp8", "modelopt", "gptq", "awq", "compressed-tensors", "bitsandbytes", "mxfp4", "mlx", "none"
]
# Other names of methods.
_SAME = {"fbgemm_fp8": "fp8", "compressed_tensors": "compressed-tensors"}
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")
_FORMATS = (
    *("float-quantized", "naive-quantized", "int-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mixed-precision", "dense"),
)
_E4M3 = "float8_e4m3fn"
_MLX_BITS, _MLX_GROUPS = (2, 3, 4, 5, 6, 8), (16, 32, 64, 128)


@dataclass(frozen=True)
class Quantization:
    """How the weights of a checkpoint are stored. ``none``: unquantised, with scales for an 8-bit
    KV cache.

    ``key`` names the description in errors. ``block`` has the outputs and inputs that share a
    scale. ``exceptions`` are descriptions of single layers. ``kv_dtype``: see ``DecoderSpec``.
    ``rounds_inputs``: fp8 weights are made for fp8 activations.
    """

    method: Method
    key: str
    bits: int = 0
    group_size: int = 0
    symmetric: bool = False
    # GPTQ's first format stores zeros less one.
    zeros_less_one: bool = False
    block: tuple[int, int] | None = None
    mode: str = "affine"
    exceptions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kv_dtype: str = ""
    rounds_inputs: bool = False


def read_quantization(config: Config, remedy: str) -> Quantization | None:
    """The description in a config.json or a file beside it; ``None`` if weights are not quantised.

    Raises ``UnsupportedWeightsError`` for an unsupported method or parameter; ``remedy`` says what
    to use instead.
    """
    descriptions = [(key, how) for key in (*_KEYS, *QUANTIZATION_FILES) if (how := config.get(key))]
    if not descriptions:
        return None
    key, how = descriptions[0]
    file = Path(config.file).with_name(key) if key in QUANTIZATION_FILES else config.file
    place = str(file) if key in QUANTIZATION_FILES else f"{file}: {key}"
    name = _name(key, how)
    if name not in _READERS:
        raise UnsupportedWeightsError(
            f"{file}: the weights are quantized ({key}, method {_describe(key, how)}), which is "
            f"not supported",
            remedy,
        )
    inner = how.get("quantization")
    table = Config({**how, **(inner if isinstance(inner, dict) else {})}, place)
    try:
        return _READERS[name](table)
    except ModelError as error:
        raise UnsupportedWeightsError(str(error), remedy) from error


def _name(key: str, how: Any) -> str:
    """The method's name, in the form of ``_READERS`` if it is supported."""
    if not isinstance(how, dict):
        return ""
    inner = how.get("quantization")
    how = {**how, **(inner if isinstance(inner, dict) else {})}
    name = how.get("quant_method") or how.get("quant_library") or QUANTIZATION_FILES.get(key)
    if name is None and "quant_algo" in how:
        name = "modelopt"
    if name is None and {"bits", "group_size"} <= how.keys():
        name = "mlx"
    return _SAME.get(str(name), str(name or ""))


def _describe(key: str, how: Any) -> str:
    if not isinstance(how, dict):
        return "not named"
    inner = how.get("quantization")
    how = {**how, **(inner if isinstance(inner, dict) else {})}
    name = in_line(_name(key, how) or "not named")
    details = [f"{detail} {in_line(how[detail])}" for detail in _DETAILS if how.get(detail)]
    return f"{name}: {', '.join(details)}" if details else name


def _fp8(config: Config) -> Quantization:
    config.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = _block(config, "weight_block_size")
    return Quantization("fp8", config.file, block=block, rounds_inputs=True)


def _block(config: Config, key: str) -> tuple[int, int] | None:
    """The outputs and inputs that share a scale."""
    return None if config.get(key) is None else config.matrix(key)


def _modelopt(config: Config) -> Quantization:
    kv_dtype = _kv_dtype(config)
    if config.get("quant_algo") is None:
        return Quantization("none", config.file, kv_dtype=kv_dtype)
    algorithm = config.one_of("quant_algo", _ALGORITHMS)
    size = config.integer("group_size", 128) if algorithm == "FP8_PB_WO" else 0
    block = (size, size) if size else None
    return Quantization(
        "modelopt",
        config.file,
        block=block,
        kv_dtype=kv_dtype,
        rounds_inputs=algorithm != "FP8_PB_WO",
    )


def _kv_dtype(config: Config) -> str:
    """The dtype of the KV cache, by ModelOpt's name or by a scheme like those of weights."""
    algorithm, scheme = config.get("kv_cache_quant_algo"), config.get("kv_cache_scheme")
    # Without the folder, since it enters the fingerprint, which is the same on all machines.
    place = Path(config.file).name
    if scheme is None:
        if algorithm in (None, "FP8"):
            return "" if algorithm is None else _E4M3
        return f"{place}: KV by kv_cache_quant_algo {algorithm}"
    table = _table(config, "kv_cache_scheme")
    values = {
        "type": table.get("type", "int"),
        "num_bits": table.get("num_bits", 8),
        "strategy": table.get("strategy") or "tensor",
        "symmetric": table.flag("symmetric", default=True),
    }
    if values == {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}:
        return _E4M3
    text = ", ".join(f"{key} {value}" for key, value in values.items())
    return f"{place}: KV by kv_cache_scheme {text}"


def _table(config: Config, key: str) -> Config:
    """The table of a key, empty if the key is missing."""
    values = config.get(key, {})
    if not isinstance(values, dict):
        raise config.refusal(key, values, "a table")
    return config.table(key, values)


def _gptq(config: Config) -> Quantization:
    if config.get("is_marlin_format"):
        raise config.refusal("is_marlin_format", True, "false: use a version in GPTQ's own format")
    layout = config.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return Quantization(
        "gptq",
        config.file,
        bits=config.one_of("bits", (2, 3, 4, 8)),
        group_size=_group_size(config, "group_size"),
        symmetric=config.flag("sym", default=True),
        zeros_less_one=layout == "gptq",
    )


def _group_size(config: Config, key: str, default: int = -1) -> int:
    """The group size; -1 means all inputs."""
    return -1 if config.get(key, default) == -1 else config.integer(key, default)


def _awq(config: Config) -> Quantization:
    version = str(config.get("version", "gemm"))
    if version.lower() != "gemm":
        raise config.refusal("version", version, "'gemm'")
    key, size = ("bits", "group_size") if "bits" in config.values else ("w_bit", "q_group_size")
    bits = config.one_of(key, (4,))
    return Quantization("awq", config.file, bits=bits, group_size=_group_size(config, size, 128))


def _compressed_tensors(config: Config) -> Quantization:
    config.one_of("format", _FORMATS, "dense")
    _table(config, "sparsity_config").one_of("format", ("dense",), "dense")
    if config.get("transform_config"):
        raise config.refusal("transform_config", config.values["transform_config"], "none")
    groups = config.get("config_groups", {})
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        raise config.refusal("config_groups", groups, "a table of groups")
    bits, blocks, symmetric, rounds_inputs = set(), set(), True, False
    for name, group in groups.items():
        table = config.table(f"config_groups: {name}", group)
        table.one_of("format", (*_FORMATS, None))
        if not isinstance(weights := table.get("weights"), dict):
            continue
        inputs = table.get("input_activations")
        rounds_inputs |= isinstance(inputs, dict) and _is_e4m3(table.table("inputs", inputs))
        table = table.table("weights", weights)
        kind = table.one_of("type", ("int", "float"), "int")
        bits.add(table.one_of("num_bits", (4, 8), 8) if kind == "int" else 0)
        if block := _block(table, "block_structure"):
            blocks.add(block)
        symmetric &= table.flag("symmetric", default=True)
    widths = bits - {0}
    if len(widths) > 1 or len(blocks) > 1:
        raise config.refusal(
            "config_groups", sorted(groups), "groups of one width and size of blocks"
        )
    return Quantization(
        "compressed-tensors",
        config.file,
        bits=min(widths, default=0),
        symmetric=symmetric,
        block=min(blocks, default=None),
        kv_dtype=_kv_dtype(config),
        rounds_inputs=rounds_inputs,
    )


def _is_e4m3(table: Config) -> bool:
    return (table.get("type"), table.get("num_bits")) == ("float", 8)


def _bitsandbytes(config: Config) -> Quantization:
    if config.get("load_in_4bit"):
        config.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        config.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
    return Quantization("bitsandbytes", config.file)


def _mxfp4(config: Config) -> Quantization:
    return Quantization("mxfp4", config.file)


def _mlx(config: Config) -> Quantization:
    exceptions = {key: value for key, value in config.values.items() if isinstance(value, dict)}
    for key, value in exceptions.items():
        _mlx_layer(config.table(key, value))
    size, mode = _mlx_layer(config)
    return Quantization("mlx", config.file, group_size=size, mode=mode, exceptions=exceptions)


def _mlx_layer(config: Config) -> tuple[int, str]:
    mode = config.one_of("mode", ("affine", "mxfp4"), "affine")
    config.one_of("bits", _MLX_BITS)
    return config.one_of("group_size", _MLX_GROUPS), mode


_READERS = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "mlx": _mlx,
}

"""Tiny checkpoints in the formats of methods of quantisation, written by their definitions.

Each method turns the matrix of a linear into its tensors, by the endings of their names, and into
the numbers that these stand for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tandem.kernels.block_codes import FP4, NF4

Tensors = dict[str, torch.Tensor]
Encode = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Method:
    """A method: what its config says, and the tensors of a matrix."""

    config: dict[str, Any]
    encode: Encode
    # Endings of matrices that stay numbers.
    unquantized: tuple[str, ...] = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    key: str = "quantization_config"
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [n, I], one after the other from the lowest bit of int32 words on."""
    places = torch.arange(bits)
    stream = (codes.long()[..., None] >> places & 1).flatten(1).unflatten(1, (-1, 32))
    return (stream << torch.arange(32)).sum(-1).to(torch.uint32).view(torch.int32)


def groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    return weight.unflatten(1, (-1, size))


def floats(
    block: tuple[int, int] | None,
    *,
    name: str = "weight_scale_inv",
    channels: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Encode:
    """FP8 with a scale for each block, each output, or all."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        height, width = block or ((1, inputs) if channels else (outputs, inputs))
        rows, columns = -(-outputs // height), -(-inputs // width)
        scales = torch.empty(rows, columns)
        wide = torch.empty(outputs, inputs)
        for row in range(rows):
            for column in range(columns):
                part = weight[
                    row * height : (row + 1) * height, column * width : (column + 1) * width
                ]
                scales[row, column] = part.abs().max() / 448
        scales = scales.to(dtype)
        for row in range(outputs):
            for column in range(columns):
                place = slice(column * width, (column + 1) * width)
                wide[row, place] = scales[row // height, column].float()
        codes = (weight / wide).to(FP8)
        saved = scales if block or channels else scales.reshape(())
        more = {} if block else {"input_scale": torch.tensor(1.0)}
        return {"weight": codes, name: saved, **more}, codes.float() * wide

    return encode


def integers(weight: torch.Tensor, bits: int, size: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """Unsigned codes [O, I], fp16 scales [O, G] and zeros [O, G]."""
    each = groups(weight, size)
    max_code = (1 << bits) - 1
    if symmetric:
        scales = (each.abs().amax(-1) / (max_code / 2)).half()
        zeros = torch.full(scales.shape, 1 << bits - 1)
    else:
        low, high = each.amin(-1).clamp(max=0), each.amax(-1).clamp(min=0)
        scales = ((high - low) / max_code).half()
        zeros = (-low / scales).round().clamp(0, max_code).long()
    codes = (each / scales.float()[..., None]).round().long() + zeros[..., None]
    return codes.clamp(0, max_code).flatten(1), scales, zeros


def value(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    size = codes.shape[1] // scales.shape[1]
    return (scales.float()[..., None] * (groups(codes, size) - zeros[..., None])).flatten(1)


def gptq(
    bits: int,
    size: int,
    symmetric: bool,
    *,
    act_order: bool = False,
    less: int = 1,
    dtype: torch.dtype = torch.float16,
) -> Encode:
    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        order = torch.arange(inputs)
        if act_order:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        codes, scales, zeros = integers(
            weight[:, order], bits, inputs if size < 0 else size, symmetric
        )
        scales = scales.to(dtype)
        decoded = torch.empty_like(weight)
        decoded[:, order] = value(codes, scales, zeros)
        plain = torch.empty_like(codes)
        plain[:, order] = codes
        index = torch.empty(inputs, dtype=torch.int32)
        index[order] = (torch.arange(inputs) // (inputs if size < 0 else size)).int()
        # Taken from whole words, so that a zero of 0 borrows from the next.
        ones = 0 if 32 % bits else sum(less << place for place in range(0, 32, bits))
        zero_points = zeros.T if ones else zeros.T - less & (1 << bits) - 1
        return {
            "qweight": words(plain, bits).T.contiguous(),
            "qzeros": words(zero_points, bits) - ones,
            "scales": scales.T.contiguous(),
            "g_idx": index,
            # As AutoGPTQ adds to all.
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }, decoded

    return encode


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros = integers(weight, 4, 32, symmetric=False)

    def interleaved(codes: torch.Tensor) -> torch.Tensor:
        eights = codes.T.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(eights.flatten(1), 4)

    return {
        "qweight": interleaved(codes),
        "qzeros": interleaved(zeros),
        "scales": scales.T.contiguous(),
    }, value(codes, scales, zeros)


def packed(bits: int, size: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16) -> Encode:
    """compressed-tensors' pack-quantized."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = integers(weight, bits, size, symmetric)
        scales = scales.to(dtype)
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return tensors, value(codes, scales, zeros)

    return encode


def signed(symmetric: bool, size: int = 0) -> Encode:
    """compressed-tensors' int-quantized."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = integers(weight, 8, size or weight.shape[1], symmetric)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.float()}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, value(codes, scales, zeros)

    return encode


def bits_and_bytes(kind: str, nested: bool) -> Encode:
    levels = torch.tensor(NF4 if kind == "nf4" else FP4)

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        flat = weight.flatten().unflatten(0, (-1, 64))
        largest = flat.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "shape": [*weight.shape]}
        more = {}
        if nested:
            table = torch.linspace(-1, 1, 256)
            offset = largest.mean()
            less = largest - offset
            outer = torch.stack([part.abs().max() for part in less.split(256)])
            each = outer.repeat_interleave(256)[: len(less)]
            codes = (less[:, None] / each[:, None] - table).abs().argmin(1)
            largest = table[codes] * each + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset.item()}
            more = {"weight.nested_absmax": outer, "weight.nested_quant_map": table.clone()}
            saved = codes.byte()
        else:
            saved = largest
        codes = (flat[..., None] / largest[:, None, None] - levels).abs().argmin(-1)
        pairs = codes.flatten().unflatten(0, (-1, 2)).byte()
        text = json.dumps(state).encode()
        return {
            "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).contiguous(),
            "weight.absmax": saved,
            "weight.quant_map": levels.clone(),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(text), dtype=torch.uint8),
            **more,
        }, (levels[codes] * largest[:, None]).view(weight.shape)

    return encode


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """bitsandbytes' LLM.int8."""
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (largest / 127)[:, None]


def mlx(bits: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Encode:
    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        each = groups(weight, size)
        minimum = each.amin(-1).to(dtype)
        scales = ((each.amax(-1) - minimum.float()) / ((1 << bits) - 1)).to(dtype)
        codes = ((each - minimum.float()[..., None]) / scales.float()[..., None]).round()
        codes = codes.clamp(0, (1 << bits) - 1)
        decoded = codes * scales.float()[..., None] + minimum.float()[..., None]
        packed_words = words(codes.flatten(1), bits).view(torch.uint32)
        return {"weight": packed_words, "scales": scales, "biases": minimum}, decoded.flatten(1)

    return encode


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1 = torch.cat([_E2M1, -_E2M1])


def powers(each: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """MXFP4: exponents [O, G], codes [O, G, 32] and numbers."""
    exponents = (each.abs().amax(-1) / 6).log2().ceil().clamp(min=-126)
    factors = 2.0**exponents
    codes = (each[..., None] / factors[..., None, None] - _E2M1).abs().argmin(-1)
    return (exponents + 127).byte(), codes, _E2M1[codes] * factors[..., None]


def mlx_mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    exponents, codes, decoded = powers(groups(weight, 32))
    packed_words = words(codes.flatten(1), 4).view(torch.uint32)
    return {"weight": packed_words, "scales": exponents}, decoded.flatten(1)


def nvfp4(compressed: bool) -> Encode:
    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        each = groups(weight, 16)
        whole = each.abs().max() / (6 * 448)
        scales = (each.abs().amax(-1) / 6 / whole).to(FP8)
        scale = 1 / whole if compressed else whole
        factors = scales.float() / scale if compressed else scales.float() * scale
        codes = (each[..., None] / factors[..., None, None] - _E2M1).abs().argmin(-1)
        pairs = codes.flatten(1).unflatten(1, (-1, 2)).byte()
        bytes_of = pairs[..., 0] | pairs[..., 1] << 4
        decoded = (_E2M1[codes] * factors[..., None]).flatten(1)
        names = (
            ("weight_packed", "weight_global_scale") if compressed else ("weight", "weight_scale_2")
        )
        return {
            names[0]: bytes_of,
            "weight_scale": scales,
            names[1]: scale.reshape(1) if compressed else scale,
        }, decoded

    return encode


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _gptq_config(bits: int, size: int, sym: bool, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, **more}


_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
METHODS: dict[str, Method] = {
    "fp8 blocks": Method(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}, floats((32, 32))
    ),
    "fp8 uneven blocks": Method(
        {"quant_method": "fp8", "weight_block_size": [48, 40], "activation_scheme": "dynamic"},
        floats((48, 40), dtype=torch.bfloat16),
    ),
    "fp8 tensor": Method(
        {"quant_method": "fp8", "activation_scheme": "static"}, floats(None, name="weight_scale")
    ),
    "fp8 channel": Method(
        {"quant_method": "fbgemm_fp8"}, floats(None, name="weight_scale", channels=True)
    ),
    "modelopt fp8": Method(
        {},
        floats(None, name="weight_scale"),
        beside={
            "hf_quant_config.json": {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
            }
        },
    ),
    "modelopt nvfp4": Method({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(False)),
    "compressed fp8": Method(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        floats(None, name="weight_scale", channels=True, dtype=torch.bfloat16),
    ),
    "compressed nvfp4": Method(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), nvfp4(True)
    ),
    "gptq 4": Method(_gptq_config(4, 32, True), gptq(4, 32, True)),
    "gptq 4 order": Method(
        _gptq_config(4, 32, False, desc_act=True), gptq(4, 32, False, act_order=True)
    ),
    "gptq 4 v2": Method(
        _gptq_config(4, 16, False, checkpoint_format="gptq_v2"), gptq(4, 16, False, less=0)
    ),
    "gptq 4 bf16": Method(_gptq_config(4, 32, True), gptq(4, 32, True, dtype=torch.bfloat16)),
    "gptq 8": Method(_gptq_config(8, -1, True), gptq(8, -1, True)),
    "gptq 8 zeros": Method(_gptq_config(8, 32, False), gptq(8, 32, False)),
    "gptq 8 order": Method(
        _gptq_config(8, 32, True, desc_act=True), gptq(8, 32, True, act_order=True)
    ),
    "gptq 3": Method(_gptq_config(3, 32, False), gptq(3, 32, False)),
    "gptq 2 beside": Method(
        {},
        gptq(2, 32, False),
        beside={"quantize_config.json": {"bits": 2, "group_size": 32, "sym": False}},
    ),
    "awq": Method(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq,
    ),
    "compressed int4": Method(
        compressed("pack-quantized", num_bits=4, group_size=32, symmetric=True),
        packed(4, 32, True),
    ),
    "compressed int4 zeros": Method(
        compressed("pack-quantized", num_bits=4, group_size=16, symmetric=False),
        packed(4, 16, False, torch.float16),
    ),
    "compressed int8": Method(
        compressed("pack-quantized", num_bits=8, strategy="channel"), packed(8, 32, True)
    ),
    "compressed w8a8": Method(
        compressed("int-quantized", num_bits=8, strategy="channel"), signed(True)
    ),
    "compressed w8 zeros": Method(
        compressed("int-quantized", num_bits=8, group_size=32, symmetric=False), signed(False, 32)
    ),
    "nf4": Method(_BNB | {"bnb_4bit_quant_type": "nf4"}, bits_and_bytes("nf4", False)),
    "nf4 nested": Method(_BNB | {"bnb_4bit_quant_type": "nf4"}, bits_and_bytes("nf4", True)),
    "fp4": Method(_BNB | {"bnb_4bit_quant_type": "fp4"}, bits_and_bytes("fp4", True)),
    "int8": Method({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8),
    **{
        f"mlx {bits}": Method(
            {"group_size": 32, "bits": bits}, mlx(bits, 32), unquantized=(), key="quantization"
        )
        for bits in (2, 3, 4, 5, 6, 8)
    },
    "mlx mxfp4": Method(
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        mlx_mxfp4,
        unquantized=(),
        key="quantization",
    ),
}


def write_quantized(folder: Path, target: Path, method: Method) -> tuple[Path, Path]:
    """A checkpoint's folders in a method, and with the numbers that it stands for."""
    quantized, plain = target / "coded", target / "plain"
    weights = load_file(folder / "model.safetensors")
    tensors: Tensors = {}
    numbers: Tensors = {}
    for name, weight in weights.items():
        if weight.dim() != 2 or name.endswith(method.unquantized):
            tensors[name] = numbers[name] = weight
            continue
        parts, numbers[name] = method.encode(weight.float())
        stem = name.removesuffix("weight")
        # A bias of the model stays what it is.
        tensors = {f"{stem}{ending}": each.contiguous() for ending, each in parts.items()} | tensors
    tensors |= {name: each for name, each in weights.items() if each.dim() != 2}
    return _write(folder, (quantized, tensors), (plain, numbers), method)


def write_mxfp4(folder: Path, target: Path) -> tuple[Path, Path]:
    """As ``write_quantized``, in gpt-oss's own format."""
    tensors: Tensors = {}
    numbers = load_file(folder / "model.safetensors")
    for name, weight in numbers.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weight
            continue
        exponents, codes, decoded = powers(weight.float().mT.unflatten(-1, (-1, 32)))
        pairs = codes.byte().unflatten(-1, (-1, 2))
        tensors[f"{name}_blocks"] = pairs[..., 0] | pairs[..., 1] << 4
        tensors[f"{name}_scales"] = exponents
        numbers[name] = decoded.flatten(-2).mT.contiguous()
    method = Method({"quant_method": "mxfp4"}, mlx_mxfp4)
    return _write(folder, (target / "coded", tensors), (target / "plain", numbers), method)


def write_stacked(
    folder: Path, target: Path, method: Method, *, transpose: bool
) -> tuple[Path, Path]:
    """As ``write_quantized``, in FP8 with each side of a layer's experts in one tensor, which is
    [experts, inputs, outputs] if it is ``transpose``; all else stays numbers."""
    tensors: Tensors = {}
    numbers: Tensors = {}
    experts: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        before, among, rest = name.partition(".experts.")
        if not among or rest.endswith("bias"):
            tensors[name] = numbers[name] = weight
        elif weight.dim() == 3:  # gpt-oss has them so
            for index, each in enumerate(weight):
                experts.setdefault(f"{before}.experts", {})[f"{index}.{rest}"] = each.mT
        else:
            experts.setdefault(f"{before}.experts", {})[rest.removesuffix(".weight")] = weight
    for stem, sides in experts.items():
        apart = "0.gate_proj" in sides
        parts: dict[str, list[torch.Tensor]] = {}
        decoded: dict[str, list[torch.Tensor]] = {}
        for index in range(1 + max(int(each.partition(".")[0]) for each in sides)):
            gate_up = (
                torch.cat([sides[f"{index}.gate_proj"], sides[f"{index}.up_proj"]])
                if apart
                else sides[f"{index}.gate_up_proj"]
            )
            for side, weight in (
                ("gate_up_proj", gate_up),
                ("down_proj", sides[f"{index}.down_proj"]),
            ):
                stored_parts, number = method.encode(weight.float())
                for ending, each in stored_parts.items():
                    suffixes = {"weight": "", "weight_scale_inv": "_scale_inv"}
                    suffix = suffixes.get(ending, f"_{ending}")
                    parts.setdefault(f"{stem}.{side}{suffix}", []).append(each)
                if not apart:
                    decoded.setdefault(f"{stem}.{side}", []).append(number.mT)
                elif side == "down_proj":
                    numbers[f"{stem}.{index}.down_proj.weight"] = number
                else:
                    for part, half in zip(("gate_proj", "up_proj"), number.chunk(2), strict=True):
                        numbers[f"{stem}.{index}.{part}.weight"] = half.contiguous()
        for name, every in parts.items():
            stacked = torch.stack(every)
            turn = transpose and stacked.dim() == 3
            tensors[name] = (stacked.mT if turn else stacked).contiguous()
        numbers |= {name: torch.stack(every).contiguous() for name, every in decoded.items()}
    return _write(folder, (target / "coded", tensors), (target / "plain", numbers), method)


def stack_experts(folder: Path) -> None:
    """Bring the experts of each layer into tensors of MLX's names."""
    stacked: dict[str, dict[int, torch.Tensor]] = {}
    tensors: Tensors = {}
    for name, each in load_file(folder / "model.safetensors").items():
        before, among, rest = name.partition(".experts.")
        if not among:
            tensors[name] = each
            continue
        number, _, leaf = rest.partition(".")
        stacked.setdefault(f"{before}.switch_mlp.{leaf}", {})[int(number)] = each
    for name, experts in stacked.items():
        tensors[name] = torch.stack([experts[index] for index in range(len(experts))])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _write(
    folder: Path, coded_in: tuple[Path, Tensors], plain_in: tuple[Path, Tensors], method: Method
) -> tuple[Path, Path]:
    quantized, plain = coded_in[0], plain_in[0]
    for made_in, content in (coded_in, plain_in):
        shutil.copytree(folder, made_in, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(content, made_in / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if method.config:
        config[method.key] = method.config
    (quantized / "config.json").write_text(json.dumps(config))
    for name, values in method.beside.items():
        (quantized / name).write_text(json.dumps(values))
    return quantized, plain

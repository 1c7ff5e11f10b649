# mypy: ignore-errors
"""Writes a matrix by the library of a format, with what that library makes of its own tensors:

    python quantized.py LIBRARY FILE

The file, in safetensors, has the tensors of each case as ``CASE:NAME`` and the decoded matrix as
``CASE:decoded``. ``about`` in its metadata has the ``quantization_config`` of each case and the
versions.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

OUTPUTS, INPUTS = 32, 64  # as few as the libraries take
FEWER = 16
LAYER = "model.layers.0.mlp.down_proj"


def matrix(outputs=OUTPUTS, inputs=INPUTS):
    generator = torch.Generator().manual_seed(outputs * inputs)
    return torch.randn(outputs, inputs, generator=generator) / 16


def parameters(weight, bits, size, symmetric):
    """Scales in the precision of float16 and zeros [O, G], of neighbours in a row."""
    each = weight.unflatten(1, (-1, size))
    max_code = (1 << bits) - 1
    if symmetric:
        scales = (each.abs().amax(-1) / (max_code / 2)).half().float()
        return scales, torch.full_like(scales, 1 << bits - 1)
    low, high = each.amin(-1).clamp(max=0), each.amax(-1).clamp(min=0)
    scales = ((high - low) / max_code).half().float()
    return scales, (-low / scales).round().clamp(0, max_code)


def under(layer, tensors):
    return {f"{layer}.{name}": each for name, each in tensors.items()}


def compressed_tensors():
    four, eight = ({"num_bits": bits, "type": "int"} for bits in (4, 8))
    group, zeros = {"strategy": "group", "group_size": 32}, {"symmetric": False}
    channel, whole, fp8 = {"strategy": "channel"}, {"strategy": "tensor"}, {"type": "float"}
    blocks = {"strategy": "block", "block_structure": [16, 32]}
    yield from _compressed_tensors(
        {
            "w4a16 groups": (four | group, None),
            "w4a16 groups with zeros": (four | group | zeros, None),
            "w4a16 channels": (four | channel, None),
            "w4a16 channels with zeros": (four | channel | zeros, None),
            "w4a16 in order of weights": (four | group | {"actorder": "weight"}, None),
            "w8a16 groups with zeros": (eight | group | zeros, None),
            "w8a16 channels": (eight | channel, None),
            "w8a8 channels": (eight | channel, "int"),
            "w8a8 tensor": (eight | whole, "int"),
            "fp8 channels": (fp8 | channel, "float"),
            "fp8 tensor": (fp8 | whole, "float"),
            "fp8 blocks": (fp8 | blocks, None),
        }
    )


def compressed_tensors_groups():
    """Groups of inputs in any order, which later versions do not write."""
    args = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}
    yield from _compressed_tensors(
        {
            "w4a16 in order": (args, None),
            "w4a16 in order with zeros": (args | {"symmetric": False}, None),
        }
    )


def _compressed_tensors(kinds):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    for name, (args, activations) in kinds.items():
        model = torch.nn.Module()
        place = model
        *parents, last = LAYER.split(".")
        for each in parents:
            place.add_module(each, torch.nn.Module())
            place = getattr(place, each)
        linear = torch.nn.Linear(INPUTS, FEWER, bias=False, dtype=torch.bfloat16)
        linear.weight.data = matrix(FEWER).bfloat16()
        place.add_module(last, linear)
        group = {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True} | args}
        if activations is not None:
            kind = {"num_bits": 8, "type": activations, "strategy": "token"}
            group["input_activations"] = kind | {"symmetric": True, "dynamic": True}
        config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
        apply_quantization_config(model, config)
        weights, shape = linear.quantization_scheme.weights, linear.weight_scale.shape
        weight = linear.weight.data.float()
        if hasattr(linear, "weight_g_idx"):
            order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0))
            linear.weight_g_idx.data[order] = (torch.arange(INPUTS) // 32).int()
            weight = weight[:, order]
        if weights.strategy == "block":
            height, width = weights.block_structure
            each = weight.unflatten(0, (-1, height)).unflatten(2, (-1, width))
            low, high = each.amin((1, 3)), each.amax((1, 3))
        else:
            each = weight.reshape(*shape[: max(0, len(shape) - 1)], shape[-1], -1)
            low, high = each.amin(-1), each.amax(-1)
        scales, zeros = calculate_qparams(low.view(shape), high.view(shape), weights)
        linear.weight_scale.data = scales.to(linear.weight_scale.dtype)
        if hasattr(linear, "weight_zero_point"):
            linear.weight_zero_point.data = zeros.to(linear.weight_zero_point.dtype)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        tensors = {each: value.clone() for each, value in model.state_dict().items()}
        with tempfile.TemporaryDirectory() as folder:
            compressor.update_config(folder)
            settings = json.loads((Path(folder) / "config.json").read_text())
        compressor.decompress_model(model)
        yield name, settings["quantization_config"], tensors, linear.weight.data


def gptqmodel():
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import FORMAT, QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format

    kinds = {
        "2 bits": {"bits": 2, "sym": False},
        "3 bits": {"bits": 3, "sym": False},
        "4 bits": {"bits": 4, "sym": True},
        "4 bits, zeros": {"bits": 4, "sym": False},
        "4 bits, order": {"bits": 4, "sym": True, "desc_act": True},
        "4 bits, order, zeros": {"bits": 4, "sym": False, "desc_act": True},
        "4 bits, second format": {"bits": 4, "sym": False, "format": FORMAT.GPTQ_V2},
        "8 bits": {"bits": 8, "sym": True, "group_size": -1},
        "8 bits, zeros": {"bits": 8, "sym": False},
    }
    for name, options in kinds.items():
        options = {"group_size": 32, "desc_act": False, "format": FORMAT.GPTQ} | options
        config = QuantizeConfig(**options, offload_to_disk=False)
        size = INPUTS if config.group_size == -1 else config.group_size
        weight, order = matrix(), torch.arange(INPUTS)
        # A zero of 0, which the first format stores as a borrow.
        weight[3, :size] = weight[3, :size].abs()
        if config.desc_act:
            order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0))
        groups = torch.empty(INPUTS, dtype=torch.int32)
        groups[order] = (torch.arange(INPUTS) // size).int()
        scales, zeros = parameters(weight[:, order], config.bits, size, config.sym)
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        linear.weight.data = weight
        layer = TorchLinear(
            bits=config.bits,
            group_size=config.group_size,
            sym=config.sym,
            desc_act=config.desc_act,
            in_features=INPUTS,
            out_features=OUTPUTS,
            format=config.format,
        )
        layer.pack_original(linear, scales, zeros, groups)
        layer.post_init()
        decoded = layer.dequantize_weight().T.contiguous()
        if config.format == FORMAT.GPTQ:
            convert_gptq_v2_to_v1_format(torch.nn.Sequential(layer), config, TorchLinear)
        names = ("qweight", "qzeros", "scales", "g_idx")
        tensors = {each: getattr(layer, each).clone() for each in names}
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            settings = json.loads((Path(folder) / "quantize_config.json").read_text())
        yield name, settings, under(LAYER, tensors), decoded


def autoawq():
    # Its packages import what no longer exists; these modules need nothing of that.
    root = Path(importlib.util.find_spec("awq").origin).parent
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils", "awq.models"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    for name, size in (("groups", 32), ("channels", -1)):
        config = AwqConfig(w_bit=4, q_group_size=size, zero_point=True, version="gemm")
        size = INPUTS if size == -1 else size
        weight = matrix()
        scales, zeros = parameters(weight, 4, size, symmetric=False)
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        linear.weight.data = weight
        layer = WQLinear_GEMM.from_linear(
            linear, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
        )
        decoded = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, size)
        settings = config.to_transformers_dict()
        yield name, settings, under(LAYER, layer.state_dict()), decoded.T.contiguous()


def bitsandbytes():
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig

    kinds = {
        "nf4": {"bnb_4bit_quant_type": "nf4"},
        "fp4": {"bnb_4bit_quant_type": "fp4"},
        "nf4 nested": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "fp4 nested": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    }
    for name, options in kinds.items():
        nested = options.get("bnb_4bit_use_double_quant", False)
        # Nested scales are of 256 blocks of 64.
        weight = matrix(FEWER, 1088) if name == "nf4 nested" else matrix(FEWER)
        outputs, inputs = weight.shape
        kind = options["bnb_4bit_quant_type"]
        layer = bnb.nn.Linear4bit(
            inputs, outputs, bias=False, compress_statistics=nested, quant_type=kind
        )
        layer.load_state_dict({"weight": weight.bfloat16()})
        layer = layer.to("cpu")  # quantises
        decoded = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        if name == "nf4 nested":
            decoded = decoded.bfloat16()  # half as much to keep
        config = BitsAndBytesConfig(load_in_4bit=True, **options).to_dict()
        tensors = {each: value.clone() for each, value in layer.state_dict().items()}
        yield name, config, under(LAYER, tensors), decoded
    weight = matrix(FEWER).half()
    layer = bnb.nn.Linear8bitLt(INPUTS, FEWER, bias=False, has_fp16_weights=False)
    layer.load_state_dict({"weight": weight})
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight)
    layer.weight.data, layer.weight.CB, layer.weight.SCB = codes, codes, scales
    decoded = bnb.functional.int8_vectorwise_dequant(codes, scales)
    tensors = {each: value.clone() for each, value in layer.state_dict().items()}
    config = BitsAndBytesConfig(load_in_8bit=True).to_dict()
    yield "int8", config, under(LAYER, tensors), decoded


def mlx():
    import mlx.core as mx
    import mlx.nn as nn

    def as_torch(array):
        if array.dtype == mx.bfloat16:
            return as_torch(array.view(mx.uint16)).view(torch.bfloat16)
        return torch.frombuffer(bytearray(memoryview(array)), dtype=dtypes[array.dtype]).view(
            array.shape
        )

    dtypes = {mx.uint8: torch.uint8, mx.uint16: torch.uint16, mx.uint32: torch.uint32}
    dtypes |= {mx.float16: torch.float16, mx.float32: torch.float32}
    weight = mx.array(matrix(FEWER).numpy())
    cases = [(bits, size, "affine") for bits, size in ((2, 32), (3, 64), (4, 32), (4, 64), (5, 32))]
    for bits, size, mode in [*cases, (6, 64, "affine"), (8, 32, "affine"), (4, 32, "mxfp4")]:
        linear = nn.Linear(INPUTS, FEWER, bias=False)
        linear.weight = weight.astype(mx.bfloat16)
        layer = linear.to_quantized(group_size=size, bits=bits, mode=mode)
        # As numbers in float32, in whose precision codes are multiplied and added.
        decoded = mx.dequantize(
            layer.weight,
            layer.scales.astype(mx.float32) if mode == "affine" else layer.scales,
            layer.biases.astype(mx.float32) if mode == "affine" else None,
            group_size=size,
            bits=bits,
            mode=mode,
        ).astype(mx.float32)
        tensors = {name: as_torch(each) for name, each in layer.parameters().items()}
        config = {"group_size": size, "bits": bits, "mode": mode}
        yield f"{mode} {bits} bits by {size}", config, under(LAYER, tensors), as_torch(decoded)


LIBRARIES = {
    "compressed-tensors": compressed_tensors,
    "compressed-tensors-groups": compressed_tensors_groups,
    "gptqmodel": gptqmodel,
    "autoawq": autoawq,
    "bitsandbytes": bitsandbytes,
    "mlx": mlx,
}


def main(library, file):
    stored_tensors, configs = {}, {}
    for case, config, tensors, decoded in LIBRARIES[library]():
        configs[case] = config
        tensors = tensors | {"decoded": decoded}
        stored_tensors |= {f"{case}:{name}": each.contiguous() for name, each in tensors.items()}
    package = library.removesuffix("-groups")
    versions = {each: importlib.metadata.version(each) for each in (package, "torch")}
    about = {"versions": versions, "configs": configs}
    save_file(stored_tensors, file, {"about": json.dumps(about)})


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Weights of random bytes in any block format."""

from __future__ import annotations

import numpy as np
import torch

from tandem.kernels.block_formats import SCALE_BYTES, BlockFormat, GroupFormat, group_format
from tandem.kernels.quantized import QuantizedWeight

# The bytes at which a block has fp16 numbers, if they are not the first two.
PLACES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# Formats without a place for an fp16 number: the bytes of their scales, and the bits of these that
# are kept and set.
OTHER_SCALES = {
    "MXFP4": (slice(0, 1), 0x00, 0x78),
    "NVFP4": (slice(0, 4), 0x0F, 0x00),
    "IQ1_M": (slice(49, None, 2), 0x0F, 0x10),
}
_IQ1_M_SCALE = 0x1111


# Formats of other methods than GGUF.
GROUPS = {
    f"{each.name}-{each.values}-{each.scale}-{each.offset}": each
    for each in (
        group_format("e4m3", 8, 128, "F32"),
        group_format("e4m3", 8, 40, "F32"),
        group_format("int", 8, 128, "BF16"),
        group_format("int", 8, 32, "F16", "zero"),
        group_format("int", 8, 64, "BF16", "minimum"),
        group_format("int", 4, 128, "F16", "zero"),
        group_format("int", 4, 64, "BF16", "minimum"),
        group_format("int", 4, 16, "BF16"),
        group_format("int", 6, 64, "F16", "minimum"),
        group_format("int", 3, 32, "F16", "zero"),
        group_format("int", 2, 32, "F32"),
        group_format("nf4", 4, 64, "F32"),
        group_format("e2m1", 4, 16, "F32"),
    )
}
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def random_groups(kind: GroupFormat, outputs: int, blocks: int, seed: int) -> QuantizedWeight:
    """Any codes that are numbers, with scales and offsets of a weight's size."""
    generator = torch.Generator().manual_seed(seed)
    shape = outputs, blocks, 1

    def of_scale() -> torch.Tensor:
        scales = torch.randn(shape, generator=generator) * 1e-2
        return scales.to(_DTYPES[kind.scale]).view(torch.uint8)

    fields = [of_scale()]
    if kind.offset == "zero":
        zeros = torch.randint(0, 1 << kind.bits, shape, generator=generator).short()
        fields.append(zeros.view(torch.uint8))
    elif kind.offset == "minimum":
        fields.append(of_scale())
    width = kind.nbytes - SCALE_BYTES[kind.scale] - kind.offset_bytes
    codes = torch.randint(0, 256, (outputs, blocks, width), generator=generator).byte()
    fields.append(codes & 0xBF if kind.codes == "e4m3" else codes)
    return QuantizedWeight(kind, torch.cat(fields, dim=-1).flatten(1))


def random_weight(kind: BlockFormat, outputs: int, blocks: int, seed: int = 0) -> QuantizedWeight:
    """Any bytes, with scales of a weight's size."""
    if isinstance(kind, GroupFormat):
        return random_groups(kind, outputs, blocks, seed)
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (outputs, blocks, kind.nbytes), dtype=np.uint8)
    if kind.name in OTHER_SCALES:
        place, mask, bits = OTHER_SCALES[kind.name]
        data[..., place] = data[..., place] & mask | bits
    else:
        for at in PLACES.get(kind.name, (0,)):
            # The large blocks have scales that multiply others.
            size = 1e-2 if kind.values < 256 else 2e-4
            scales = (generator.standard_normal((outputs, blocks, 1)) * size).astype(np.float16)
            data[..., at : at + 2] = scales.view(np.uint8)
    return QuantizedWeight(kind, torch.from_numpy(data.reshape(outputs, -1)))


def rescaled(weight: QuantizedWeight, deviation: float) -> QuantizedWeight:
    """The same codes with scales with which the values have this standard deviation, about."""
    kind = weight.format
    factor = deviation / float(weight.values().std())
    data = weight.blocks.numpy().reshape(weight.outputs, -1, kind.nbytes).copy()
    if kind.name == "IQ1_M":  # four bits of an fp16 number are in each of four places
        number = np.array(_IQ1_M_SCALE, np.uint16).view(np.float16) * np.float16(factor)
        for index, place in enumerate(range(49, 56, 2)):
            bits = int(number.view(np.uint16)) >> 4 * index & 0x0F
            data[..., place] = data[..., place] & 0x0F | bits << 4
    elif kind.name == "NVFP4":
        eights = torch.from_numpy(data[..., :4].copy()).view(torch.float8_e4m3fn)
        eights = (eights.float() * factor).to(torch.float8_e4m3fn)
        data[..., :4] = eights.view(torch.uint8).numpy()
    else:
        for at in PLACES.get(kind.name, (0,)):
            scales = np.ascontiguousarray(data[..., at : at + 2]).view(np.float16)
            data[..., at : at + 2] = (scales * np.float16(factor)).view(np.uint8)
    return QuantizedWeight(kind, torch.from_numpy(data.reshape(weight.outputs, -1)))

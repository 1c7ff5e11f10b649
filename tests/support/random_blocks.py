"""Weights of random bytes in any block format."""

from __future__ import annotations

import numpy as np
import torch

from tandem.kernels.block_formats import BlockFormat
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


def random_weight(kind: BlockFormat, outputs: int, blocks: int, seed: int = 0) -> QuantizedWeight:
    """Any bytes, with scales of a weight's size."""
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (outputs, blocks, kind.nbytes), dtype=np.uint8)
    if kind.name in OTHER_SCALES:
        place, kept, added = OTHER_SCALES[kind.name]
        data[..., place] = data[..., place] & kept | added
    else:
        for at in PLACES.get(kind.name, (0,)):
            # The large blocks have scales that multiply others.
            size = 1e-2 if kind.values < 256 else 2e-4
            scales = (generator.standard_normal((outputs, blocks, 1)) * size).astype(np.float16)
            data[..., at : at + 2] = scales.view(np.uint8)
    return QuantizedWeight(kind, torch.from_numpy(data.reshape(outputs, -1)))

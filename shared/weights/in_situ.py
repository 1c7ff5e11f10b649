"""Quantisation of weights during loading: which weights, and to which formats. No torch."""

from __future__ import annotations

import re
from math import gcd

from ...kernels.block_formats import (
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    BlockFormat,
    group_format,
)
from ..models.spec import DecoderSpec
from .origins import EMBEDDING, HEAD

_KINDS = {
    "q2k": Q2_K,
    "q3k": Q3_K,
    "q4k": Q4_K,
    "q5k": Q5_K,
    "q6k": Q6_K,
    "q8_0": Q8_0,
    "q4_0": Q4_0,
    "int8": Q8_0,
}
_FP8 = "fp8"
_FP8_RUN = 128
# Weights of linears and tables; norms, routers and latent expansions are not quantised.
_LINEAR = re.compile(
    r"\.(q|k|v|o|q_a|q_b|kv_a|gate|up|down)\.weight$|^token_inputs\.(table|projection)\.weight$"
)


class InSitu:
    """The formats for a value of ``--isq``. As in llama.cpp, a head becomes at least Q6_K."""

    def __init__(self, kind: str, spec: DecoderSpec) -> None:
        self._kind = kind
        self._tie_embeddings = spec.tie_embeddings

    def format_of(self, name: str, inputs: int) -> BlockFormat | None:
        """The format of a parameter; ``None`` if it is not quantised. Rows that are not a multiple
        of 256 become Q8_0."""
        is_head = name == HEAD or (name == EMBEDDING and self._tie_embeddings)
        if not is_head and name != EMBEDDING and not _LINEAR.search(name):
            return None
        if self._kind == _FP8:
            run = gcd(inputs, _FP8_RUN)
            return group_format("e4m3", 8, run, "F32") if run >= 8 else None
        format = _KINDS[self._kind]
        choices = (Q6_K if is_head and format != Q8_0 else format, Q8_0)
        return next((each for each in choices if inputs % each.values == 0), None)

    def names(self) -> frozenset[str]:
        """The names of the formats, for the canary."""
        return frozenset({"FP8" if self._kind == _FP8 else _KINDS[self._kind].name})

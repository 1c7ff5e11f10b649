"""How much memory KV blocks take: arithmetic on a spec, without torch."""

from __future__ import annotations

from ..errors import StartupError
from ..kv.formats import BYTES
from .spec import DecoderSpec


def bytes_per_block(
    spec: DecoderSpec, block_size: int, dtype: object, tp_size: int = 1, tp_rank: int = 0
) -> int:
    """Bytes that one block takes on one rank, over all that every layer keeps.

    ``dtype`` is a torch dtype or its name.
    """
    per_token = 0
    for layer in spec.layers:
        kv = layer.attention.kv
        per_token += len(kv.sides) * len(kv.heads_of(tp_rank, tp_size)) * kv.dim
    return per_token * block_size * BYTES[str(dtype).removeprefix("torch.")]


def plan_num_blocks(
    spec: DecoderSpec,
    *,
    block_size: int,
    dtype: object,
    max_model_len: int,
    max_num_seqs: int = 1,
    kv_bytes: int | None = None,
    tp_size: int = 1,
) -> int:
    """How many blocks a rank should hold.

    With ``kv_bytes``, as many as fit into it; without, enough for ``max_num_seqs`` sequences of
    ``max_model_len`` tokens. Fewer than one whole sequence needs is an error, because such a
    sequence could never finish.
    """
    one_sequence = -(-max_model_len // block_size)
    if kv_bytes is None:
        return one_sequence * max_num_seqs
    block = bytes_per_block(spec, block_size, dtype, tp_size)
    if kv_bytes < one_sequence * block:
        raise StartupError(
            f"{kv_bytes} bytes of KV cache hold {kv_bytes // block * block_size} tokens, and one "
            f"sequence may have {max_model_len}: give at least {one_sequence * block} bytes, or "
            f"lower the maximal length"
        )
    return kv_bytes // block

"""An estimate of the memory that steps take on a GPU, from a model's headers alone.

Ranks measure it once their weights are loaded (``engine/rank/step_profile.py``); until then this
tells whether a model fits. It rounds up: no kernel is asked what it allocates.
"""

from __future__ import annotations

from ...kernels.gpu import split_rule
from ..models.spec import AttentionSpec, DecoderSpec, DenseSpec, LayerSpec, MLASpec

# Workspaces of matrix products, and what fragmentation wastes.
_FIXED_BYTES = 256 << 20
# Copies of fp32 logits: as they come, edited, their logprobs, and the counts of penalties.
_LOGITS = 4
# Rows of a prompt whose logprobs are computed at a time.
_PROMPT_ROWS = 64
# Keys of logprobs are sorted for so many rows at once, with three copies of 8 bytes.
_SORTED_BYTES = 32 * 3 * 8
# Residual, normed and summed hidden states, and a copy.
_HIDDEN = 4
# Programs of decode attention on the NVIDIA GPU with the most processors (RTX PRO 6000), and the
# heads that a program of latent attention takes. Half as many programs may take twice the heads.
_PROGRAMS, _LATENT_HEADS = split_rule.ROW_PROGRAMS * 188, 16
_GRAPHS_AT_MOST, _ROWS_PER_GRAPH, _GRAPH_BYTES = 512, 8, 4 << 20


def estimated_step_bytes(
    spec: DecoderSpec, *, tokens: int, sequences: int, itemsize: int, ranks: int = 1
) -> int:
    """Bytes of a step of ``tokens`` and of CUDA graphs on one of ``ranks``; ``itemsize`` is that of
    activations."""
    widest = max(_width(layer, spec.hidden_size, ranks) for layer in spec.layers)
    activations = tokens * itemsize * (_HIDDEN * spec.hidden_size + widest)
    rows = max(sequences, min(tokens, _PROMPT_ROWS))
    logits = spec.vocab_size * (4 * _LOGITS * rows + _SORTED_BYTES)
    partials = max(_partials(layer, sequences, ranks) for layer in spec.layers)
    graphs = _GRAPH_BYTES * (4 + min(sequences, _GRAPHS_AT_MOST) // _ROWS_PER_GRAPH)
    return _FIXED_BYTES + activations + logits + partials + graphs


def _width(layer: LayerSpec, hidden: int, ranks: int) -> int:
    """Numbers of a token that attention or feed-forward holds at once, whichever has more."""
    match layer.attention:
        case AttentionSpec() as each:
            attention = 2 * (each.num_heads + each.num_kv_heads) * each.head_dim // ranks
        case MLASpec() as latent:
            head = 2 * latent.qk_dim + 2 * latent.kv_lora_rank + 2 * latent.v_dim
            attention = latent.num_heads * head // ranks + (latent.q_lora_rank or 0)
    match layer.mlp:
        case DenseSpec() as dense:
            mlp = 3 * dense.intermediate // ranks
        case experts:
            chosen = 3 * experts.expert.intermediate // ranks + 2 * hidden
            shared = experts.shared.intermediate if experts.shared else 0
            mlp = experts.router.top_k * chosen + 3 * shared // ranks
    return max(attention, mlp)


def _partials(layer: LayerSpec, sequences: int, ranks: int) -> int:
    """Bytes of a layer's partial results of decoding rows, in fp32."""
    match layer.attention:
        case AttentionSpec() as each:
            splits = split_rule.max_splits(_PROGRAMS * ranks, each.num_kv_heads)
            return 4 * sequences * splits * each.num_heads * each.head_dim // ranks
        case MLASpec() as latent:
            heads = -(-latent.num_heads // ranks)
            programs = _PROGRAMS, -(-heads // _LATENT_HEADS)
            bounds = split_rule.max_splits(*programs), split_rule.step_splits(*programs)
            return 4 * split_rule.num_partials(sequences, *bounds) * heads * latent.kv_lora_rank

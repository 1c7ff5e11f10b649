"""The rows of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels.attention_metadata import AttentionMetadata


class ForwardBatch(NamedTuple):
    """The tokens of several sequences, flattened to T rows.

    ``output_rows`` are the rows whose hidden state is returned, or ``None`` for all. Unless
    ``needs_logits``, the model stops after the last layer's KV, and the hidden state is that
    layer's input. Without ``segments``, all tokens belong to the first. ``biases`` of each
    sequence's scores, [H, rows, tokens], are set by models that have them.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    output_rows: torch.Tensor | None
    needs_logits: bool = True
    segments: torch.Tensor | None = None
    biases: Sequence[torch.Tensor] | None = None

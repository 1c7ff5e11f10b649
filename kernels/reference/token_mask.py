"""Masks of tokens on logits, in plain torch.

R rows of logits, V vocabulary, M masked rows, B bytes of a mask: a bit for each token, from the
lowest bit of the first byte.
"""

from __future__ import annotations

import torch

_BITS = 8
_FORBIDDEN = float("-inf")


class TokenMask:
    """Forbids tokens. Its table has what each byte of a mask adds to the logits of its tokens."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        bits = torch.arange(1 << _BITS)[:, None] >> torch.arange(_BITS) & 1
        self._table = torch.where(bits == 1, 0.0, _FORBIDDEN).to(device)

    def apply(self, logits_RV: torch.Tensor, rows: list[int], masks: list[bytes]) -> None:
        """Forbid the tokens that are not in a row's mask, in place.

        If everything else has forbidden all those that are, they have equal logits.
        """
        if not rows:
            return
        added_MV = self._added(masks, logits_RV.shape[-1])
        for row, added in zip(rows, added_MV, strict=True):
            logits_RV[row] += added
        best = logits_RV.amax(dim=-1).tolist()
        for row, added in zip(rows, added_MV, strict=True):
            if best[row] == _FORBIDDEN:
                logits_RV[row] = added

    def _added(self, masks: list[bytes], vocab_size: int) -> torch.Tensor:
        packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8)
        packed_MB = packed.view(len(masks), -1).to(self._table.device)
        return self._table[packed_MB.int()].view(len(masks), -1)[:, :vocab_size]

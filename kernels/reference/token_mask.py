"""Masks of tokens on logits.

R rows of logits, V vocabulary, M masked rows, B bytes of a mask: a bit for each token, from the
lowest bit of the first byte.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

_BITS = 8
_FORBIDDEN = float("-inf")


class TokenMask:
    """Forbids tokens, with a table of what each byte of a mask adds to the logits of its tokens."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        bits = torch.arange(1 << _BITS)[:, None] >> torch.arange(_BITS) & 1
        table = torch.where(bits == 1, 0.0, _FORBIDDEN)
        self._table = table.to(device)
        self._host = _HostMask(table.numpy())

    def apply(
        self,
        logits_RV: torch.Tensor,
        rows: list[int],
        masks: list[bytes],
        restricted: Collection[int] = (),
    ) -> None:
        """Forbid the tokens that are not in a row's mask, in place.

        In ``restricted`` rows, tokens may be forbidden already. If these are all tokens that the
        mask allows, they get equal logits.
        """
        if not rows:
            return
        if logits_RV.device.type == "cpu":
            self._host.apply(logits_RV.numpy(), rows, masks)
        else:
            for row, added in zip(rows, self._added(masks, logits_RV.shape[-1]), strict=True):
                logits_RV[row] += added
        masked = dict(zip(rows, masks, strict=True))
        self._allow_again(logits_RV, {row: masked[row] for row in restricted if row in masked})

    def _allow_again(self, logits_RV: torch.Tensor, masked: dict[int, bytes]) -> None:
        """Give equal logits to the allowed tokens of rows in which all tokens are forbidden."""
        if not masked:
            return
        best = logits_RV[list(masked)].amax(dim=-1).tolist()
        for (row, mask), highest in zip(masked.items(), best, strict=True):
            if highest == _FORBIDDEN:
                logits_RV[row] = self._added([mask], logits_RV.shape[-1])[0]

    def _added(self, masks: list[bytes], vocab_size: int) -> torch.Tensor:
        packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8)
        packed_MB = packed.view(len(masks), -1).to(self._table.device)
        return self._table[packed_MB.int()].view(len(masks), -1)[:, :vocab_size]


class _HostMask:
    """The same on a CPU, by numpy, whose ``take`` into existing memory takes a tenth of the time of
    torch's index."""

    def __init__(self, table: np.ndarray) -> None:
        self._table = table
        self._added_BX = np.empty((0, _BITS), table.dtype)

    def apply(self, logits_RV: np.ndarray, rows: list[int], masks: list[bytes]) -> None:
        for row, mask in zip(rows, masks, strict=True):
            packed_B = np.frombuffer(mask, np.uint8)
            if len(packed_B) != len(self._added_BX):
                self._added_BX = np.empty((len(packed_B), _BITS), self._table.dtype)
            # Clipping changes no byte, and lets numpy write without a copy.
            np.take(self._table, packed_B, axis=0, out=self._added_BX, mode="clip")
            logits_RV[row] += self._added_BX.reshape(-1)[: logits_RV.shape[-1]]

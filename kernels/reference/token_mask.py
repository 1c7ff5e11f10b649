"""Masks of tokens on logits.

R rows of logits, V vocabulary, M masked rows, B bytes of a mask: a bit for each token, from the
lowest bit of the first byte.

Most masks of grammars allow a few tokens, as between the parts of JSON, or forbid a few, as in
strings. On a CPU, only those are looked at; a GPU reads a table.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

_BITS = 8
_NONE, _ALL = 0x00, 0xFF
_FORBIDDEN = float("-inf")
# Up to this share of a mask's bytes, their bits are unpacked one by one.
_FEW = 1 / 16


class TokenMask:
    """Forbids tokens. Its table has what each byte of a mask adds to the logits of its tokens."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        bits = torch.arange(1 << _BITS)[:, None] >> torch.arange(_BITS) & 1
        self._table = torch.where(bits == 1, 0.0, _FORBIDDEN).to(device)

    def apply(
        self,
        logits_RV: torch.Tensor,
        rows: list[int],
        masks: list[bytes],
        restricted: Collection[int] = (),
    ) -> None:
        """Forbid the tokens that are not in a row's mask, in place.

        Something else has forbidden tokens of the ``restricted`` rows. If these are all that the
        mask allows, they have equal logits.
        """
        if not rows:
            return
        masked = dict(zip(rows, masks, strict=True))
        if logits_RV.device.type == "cpu":
            for row, mask in masked.items():
                _forbid(logits_RV[row], np.frombuffer(mask, np.uint8))
        else:
            for row, added in zip(rows, self._added(masks, logits_RV.shape[-1]), strict=True):
                logits_RV[row] += added
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


def _forbid(logits_V: torch.Tensor, mask_B: np.ndarray) -> None:
    """Forbid the tokens of one row, in place."""
    allowing = np.flatnonzero(mask_B != _NONE)
    if len(allowing) <= _FEW * len(mask_B):
        tokens = _tokens(allowing, mask_B[allowing], len(logits_V))
        kept = logits_V[tokens]
        logits_V.fill_(_FORBIDDEN)
        logits_V[tokens] = kept
        return
    forbidding = np.flatnonzero(mask_B != _ALL)
    if len(forbidding) <= _FEW * len(mask_B):
        logits_V[_tokens(forbidding, ~mask_B[forbidding], len(logits_V))] = _FORBIDDEN
        return
    bits = np.unpackbits(~mask_B, count=len(logits_V), bitorder="little")
    logits_V.masked_fill_(torch.from_numpy(bits.view(np.bool_)), _FORBIDDEN)


def _tokens(places: np.ndarray, values: np.ndarray, vocab_size: int) -> torch.Tensor:
    """The tokens whose bits are set in bytes with these values at these places."""
    bits = np.unpackbits(values, bitorder="little").view(np.bool_)
    tokens = (places[:, None] * _BITS + np.arange(_BITS)).reshape(-1)[bits]
    return torch.from_numpy(tokens[tokens < vocab_size])

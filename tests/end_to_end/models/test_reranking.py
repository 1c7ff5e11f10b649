"""Scores and vectors of a cluster whose nodes are apart, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from tandem.tests.end_to_end.support.cluster import committed_transfers, running
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.rerankers import LABELS, add_labels, on_the_card

QUERY = "What is the capital of China?"
DOCUMENTS = ["The capital of China is Beijing.", "Gravity attracts bodies.", "yes"]


def probability(folder: Path, document: str) -> float:
    """That of yes against no, as on Qwen3-Reranker's model card."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.inference_mode():
        logits = model(torch.tensor([on_the_card(raw, QUERY, document)])).logits[0, -1]
    both = torch.stack([logits[raw.token_to_id(token)] for token in LABELS])
    return float(both.log_softmax(0)[1].exp())


def test_pairs_of_a_reranker_are_prefilled_elsewhere(tmp_path: Path) -> None:
    """As it was first published, on two ranks that prefill and one that decodes."""
    folder = tmp_path / "Qwen3-Reranker-0.6B"
    tiny_models.build("qwen3", folder)
    add_labels(folder)
    scores = [probability(folder, text) for text in DOCUMENTS]
    with running(tmp_path, str(folder)) as cluster:
        cluster.start_router()
        _, decode = cluster.start_nodes(("prefill-node", "--tp=2"), ("decode-node",))
        cluster.wait_nodes(decode=1, prefill=1)
        for path in ("/score", "/v1/score"):
            status, body = cluster.post(path, {"text_1": QUERY, "text_2": DOCUMENTS})
            assert status == 200, body
            assert [item["score"] for item in body["data"]] == pytest.approx(scores, abs=1e-5)
        assert committed_transfers(decode) >= len(DOCUMENTS)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            request: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
            status, body = cluster.post(path, request)
            assert status == 200, body
            best = sorted(range(3), key=lambda i: -scores[i])[:2]
            assert [item["index"] for item in body["results"]] == best
            returned_scores = [item["relevance_score"] for item in body["results"]]
            assert returned_scores == pytest.approx([scores[i] for i in best], abs=1e-5)
        status, body = cluster.post("/classify", {"input": DOCUMENTS})
        assert status == 200 and len(body["data"][0]["probs"]) == 1, body
        cluster.wait_idle(*cluster.parts[1:])


def test_an_encoders_texts_are_computed_by_the_decode_node(tmp_path: Path) -> None:
    folder = tmp_path / "nli"
    names = {0: "no", 1: "maybe", 2: "yes"}
    labels: dict[str, Any] = {"id2label": names, "num_labels": 3}
    tiny_models.build("mpnet_scorer", folder, max_position_embeddings=600, **labels)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with running(tmp_path, str(folder)) as cluster:
        cluster.start_router()
        _, decode = cluster.start_nodes(("prefill-node",), ("decode-node",))
        cluster.wait_nodes(decode=1, prefill=1)
        status, body = cluster.post("/classify", {"input": DOCUMENTS})
        assert status == 200, body
        for text, item in zip(DOCUMENTS, body["data"], strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([raw.encode(text).ids])).logits[0]
            assert item["probs"] == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
            assert item["label"] == names[int(logits.argmax())]
        assert committed_transfers(decode) == 0
        status, body = cluster.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS})
        assert (status, body["error"]["code"]) == (400, "model_cannot_score")

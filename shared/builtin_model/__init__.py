"""The built-in model: a few million weights in the package, so that a fresh install can talk.

It needs no download and no GPU, it answers in whole sentences about a small world, and it
recalls facts from long prompts, so that demos and tests of handing over a KV cache can tell a
right answer from a wrong one. How it is made: `corpus.py` and `train.py`; what it can do:
README.md beside this file.
"""

from pathlib import Path


def builtin_model_path() -> Path:
    """The folder with the weights, in Hugging Face's layout; a path only, nothing is loaded."""
    return Path(__file__).resolve().parent / "weights"

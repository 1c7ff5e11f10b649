"""The built-in model: a few million weights in the package, so that a fresh install can chat.

It needs no download and no GPU, answers in whole sentences about a small world, and recalls facts
from long prompts, so that demos and tests of the KV handoff can tell a correct answer from a wrong
one. `tools/builtin_model` in the repository makes it; README.md in this folder lists its abilities.
"""

from pathlib import Path


def builtin_model_path() -> Path:
    """Path of the folder with the weights, in Hugging Face's layout."""
    return Path(__file__).resolve().parent / "weights"

"""The sampling defaults of a GGUF file, as a ``generation_config.json`` of the same model has them.

No torch.
"""

from __future__ import annotations

from typing import Any

from .header import GGUFHeader

# Metadata that converters write from a generation_config.json.
_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
# What model cards recommend, by general.basename, for files from before there was such metadata.
_RECOMMENDED: dict[str, dict[str, Any]] = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
# Those of llama.cpp, for which such files are made: at OpenAI's temperature of 1, with every token
# of the vocabulary, small quantised models lose the thread and do not end.
_USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def generation_config(header: GGUFHeader) -> dict[str, Any]:
    """The file's own defaults, else the recommended or the usual ones."""
    metadata = header.metadata
    own = {name: metadata[key] for key, name in _KEYS.items() if key in metadata}
    basename = str(metadata.get("general.basename", "")).lower()
    return own or dict(_RECOMMENDED.get(basename, _USUAL))

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
# Recommendations of model cards, by general.basename, for files without such metadata.
_RECOMMENDED: dict[str, dict[str, Any]] = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
# llama.cpp's defaults: at OpenAI's temperature of 1 without truncation, small quantised models lose
# the thread and do not stop.
_USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def generation_config(header: GGUFHeader) -> dict[str, Any]:
    """The file's own defaults, or else recommended or usual ones."""
    metadata = header.metadata
    defaults = {name: metadata[key] for key, name in _KEYS.items() if key in metadata}
    basename = str(metadata.get("general.basename", "")).lower()
    return defaults or dict(_RECOMMENDED.get(basename, _USUAL))

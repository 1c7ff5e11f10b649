"""Templates of pairs of a query and a document, for rerankers with a decoder.

As in vLLM and sentence-transformers, this is a chat template whose messages have the roles
``query`` and ``document``; an instruction is a system message before both. Qwen3-Reranker and
Qwen3-VL-Reranker were first published with their templates in the model card only, so models of
these names get it without a file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

# The template's name among those of a model, as in llama.cpp.
RERANK = "rerank"
_QUERY, _DOCUMENT = re.compile(r"""['"]query['"]"""), re.compile(r"""['"]document['"]""")
_QWEN3 = re.compile(r"qwen3[-_ ](vl[-_ ])?reranker", re.IGNORECASE)
# vLLM's key in the config of a model that is scored by two tokens.
COMPARES = "is_original_qwen3_reranker"
# The tokens of a negative and a positive judgement.
QWEN3_SCORE_TOKENS = ("no", "yes")
_SCORING_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration")
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_VL_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
_TASK = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    "provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
# The text that llama.cpp's converter writes, also for a Qwen3-VL-Reranker.
QWEN3_PLACES = (
    f"{_TASK}<Instruct>: {_INSTRUCTION}\n<Query>: {{query}}\n<Document>: {{document}}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_VL_PLACES = (
    f"{_TASK}<Instruct>: {_VL_INSTRUCTION}<Query>:{{query}}\n<Document>:{{document}}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
_SYSTEM_CONTENTS = (
    "(messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list"
)
_CONTENT_OF_ROLE = "(messages | selectattr('role', 'equalto', '{}') | first).content"
_VALUES = {
    "{query}": _CONTENT_OF_ROLE.format("query"),
    "{document}": _CONTENT_OF_ROLE.format("document"),
    **{text: f"{_SYSTEM_CONTENTS} + ['{text}'])[0]" for text in (_INSTRUCTION, _VL_INSTRUCTION)},
}
_PLACES = re.compile(
    r"((?<!\{)\{query\}(?!\})|(?<!\{)\{document\}(?!\})|"
    f"{re.escape(_INSTRUCTION)}|{re.escape(_VL_INSTRUCTION)})"
)


def shows_pairs(source: str) -> bool:
    """Return whether a chat template renders pairs: it names both roles."""
    return bool(_QUERY.search(source) and _DOCUMENT.search(source))


def of_placeholders(text: str) -> str | None:
    """Convert llama.cpp's text with ``{query}`` and ``{document}``; ``None`` for any other text.
    The instruction in the model cards of Qwen3's rerankers becomes one that a request may
    replace."""
    return _fill(text) if {"{query}", "{document}"} <= set(_PLACES.findall(text)) else None


def _fill(text: str) -> str:
    parts = (
        _VALUES.get(part, json.dumps(part, ensure_ascii=False)) for part in _PLACES.split(text)
    )
    # Naming bos_token keeps the tokenizer from adding special tokens around the text.
    return "{# bos_token #}" + "".join(f"{{{{ {part} }}}}" for part in parts if part != '""')


QWEN3_TEMPLATE, QWEN3_VL_TEMPLATE = _fill(QWEN3_PLACES), _fill(_QWEN3_VL_PLACES)


def template_by_name(name: str) -> str | None:
    """The template of one of Qwen3's rerankers, by its name; ``None`` for any other model."""
    match = _QWEN3.search(name)
    if match is None:
        return None
    return QWEN3_VL_TEMPLATE if match[1] else QWEN3_TEMPLATE


def name_of(folder: Path) -> str:
    """The name of a folder, or of the repository that it is a snapshot of. It identifies a reranker
    whose config is that of a chat model."""
    # OWNER--NAME/snapshots/COMMIT in the cache of a hub.
    cached = folder.parent.name == "snapshots"
    return folder.parent.parent.name if cached else folder.name


def is_reranker_by_name(folder: Path) -> bool:
    """Return whether a folder is named like one of Qwen3's rerankers."""
    return template_by_name(name_of(folder)) is not None


def score_tokens_by_name(architecture: object, *, named: bool) -> tuple[str, ...] | None:
    """The score tokens of a model whose config has none, by its architecture, if it is ``named``
    like one of Qwen3's rerankers."""
    return QWEN3_SCORE_TOKENS if named and architecture in _SCORING_ARCHITECTURES else None

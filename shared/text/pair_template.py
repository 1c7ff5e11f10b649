"""Templates of pairs of a query and a document, for rerankers that are made of a decoder.

As vLLM and sentence-transformers have them, such a template is a chat template, whose messages are
of the roles ``query`` and ``document``; an instruction is a system message before both.
Qwen3-Reranker and Qwen3-VL-Reranker were first published with their templates in the description
only, so that a model of these names has it without a file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

# Its name among a model's templates, which is llama.cpp's.
RERANK = "rerank"
_QUERY, _DOCUMENT = re.compile(r"""['"]query['"]"""), re.compile(r"""['"]document['"]""")
_QWEN3 = re.compile(r"qwen3[-_ ](vl[-_ ])?reranker", re.IGNORECASE)
# vLLM's key in the config of one that compares its two answers.
COMPARES = "is_original_qwen3_reranker"
# In order: the answer against which the other one counts, and that one.
QWEN3_ANSWERS = ("no", "yes")
_ANSWERING = ("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration")
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_VL_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
_TASK = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    "provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
# As llama.cpp's converter writes it, which takes a Qwen3-VL-Reranker for a Qwen3-Reranker.
QWEN3_PLACES = (
    f"{_TASK}<Instruct>: {_INSTRUCTION}\n<Query>: {{query}}\n<Document>: {{document}}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_VL_PLACES = (
    f"{_TASK}<Instruct>: {_VL_INSTRUCTION}<Query>:{{query}}\n<Document>:{{document}}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
_GIVEN = "(messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list"
_OF_ROLE = "(messages | selectattr('role', 'equalto', '{}') | first).content"
_VALUES = {
    "{query}": _OF_ROLE.format("query"),
    "{document}": _OF_ROLE.format("document"),
    **{text: f"{_GIVEN} + ['{text}'])[0]" for text in (_INSTRUCTION, _VL_INSTRUCTION)},
}
_PLACES = re.compile(
    r"((?<!\{)\{query\}(?!\})|(?<!\{)\{document\}(?!\})|"
    f"{re.escape(_INSTRUCTION)}|{re.escape(_VL_INSTRUCTION)})"
)


def shows_pairs(source: str) -> bool:
    """Return whether a chat template is one of pairs: it names both roles."""
    return bool(_QUERY.search(source) and _DOCUMENT.search(source))


def of_placeholders(text: str) -> str | None:
    """The template of llama.cpp's text with ``{query}`` and ``{document}``; ``None`` for any other.
    The instruction of a card of Qwen3's rerankers is one that a request may replace."""
    return _filled(text) if {"{query}", "{document}"} <= set(_PLACES.findall(text)) else None


def _filled(text: str) -> str:
    parts = (
        _VALUES.get(part, json.dumps(part, ensure_ascii=False)) for part in _PLACES.split(text)
    )
    # Nothing is put around such a text, as where a template names the token itself.
    return "{# bos_token #}" + "".join(f"{{{{ {part} }}}}" for part in parts if part != '""')


QWEN3_TEMPLATE, QWEN3_VL_TEMPLATE = _filled(QWEN3_PLACES), _filled(_QWEN3_VL_PLACES)


def template_by_name(name: str) -> str | None:
    """The template that the rerankers of Qwen3 have by their names; ``None`` for any other."""
    found = _QWEN3.search(name)
    if found is None:
        return None
    return QWEN3_VL_TEMPLATE if found[1] else QWEN3_TEMPLATE


def name_of(folder: Path) -> str:
    """The name of a folder, or of the repository that it is a version of, by which a reranker is
    told whose config is that of a model which chats."""
    # OWNER--NAME/snapshots/COMMIT in the cache of a hub.
    cached = folder.parent.name == "snapshots"
    return folder.parent.parent.name if cached else folder.name


def is_reranker_by_name(folder: Path) -> bool:
    """Return whether a folder is named as one of the rerankers of Qwen3."""
    return template_by_name(name_of(folder)) is not None


def answers_by_name(architecture: object, *, named: bool) -> tuple[str, ...] | None:
    """The answers of a model whose config names none, by its architecture, if it is ``named`` as
    one of the rerankers of Qwen3."""
    return QWEN3_ANSWERS if named and architecture in _ANSWERING else None

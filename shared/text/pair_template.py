"""Templates of pairs of a query and a document, for rerankers that are made of a decoder.

As vLLM and sentence-transformers have them, such a template is a chat template, whose messages are
of the roles ``query`` and ``document``; an instruction is a system message before both.
Qwen3-Reranker was first published with its template in the description only, so that a model of
this name has it without a file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

# Its name among a model's templates, which is llama.cpp's.
RERANK = "rerank"
_QUERY, _DOCUMENT = re.compile(r"""['"]query['"]"""), re.compile(r"""['"]document['"]""")
_QWEN3 = re.compile(r"qwen3[-_ ]reranker", re.IGNORECASE)
# vLLM's key in the config of one that compares its two answers.
COMPARES = "is_original_qwen3_reranker"
# In order: the answer against which the other one counts, and that one.
QWEN3_ANSWERS = ("no", "yes")
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_GIVEN = "messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list"
QWEN3_TEMPLATE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    "provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    f"<Instruct>: {{{{ ({_GIVEN} + ['{_INSTRUCTION}'])[0] }}}}\n"
    "<Query>: {{ (messages | selectattr('role', 'equalto', 'query') | first).content }}\n"
    "<Document>: {{ (messages | selectattr('role', 'equalto', 'document') | first).content }}"
    "<|im_end|>\n"
    # Jinja drops a newline at the end.
    "<|im_start|>assistant\n<think>\n\n</think>{{ '\n\n' }}"
)


_PLACES = re.compile(r"((?<!\{)\{query\}(?!\})|(?<!\{)\{document\}(?!\})|" + _INSTRUCTION + ")")
_OF_ROLE = "(messages | selectattr('role', 'equalto', '{}') | first).content"
_VALUES = {
    "{query}": _OF_ROLE.format("query"),
    "{document}": _OF_ROLE.format("document"),
    _INSTRUCTION: f"({_GIVEN} + ['{_INSTRUCTION}'])[0]",
}


def shows_pairs(source: str) -> bool:
    """Return whether a chat template is one of pairs: it names both roles."""
    return bool(_QUERY.search(source) and _DOCUMENT.search(source))


def of_placeholders(text: str) -> str | None:
    """The template of llama.cpp's text with ``{query}`` and ``{document}``; ``None`` for any other.
    The instruction of Qwen3-Reranker's card is one that a request may replace."""
    if not {"{query}", "{document}"} <= set(_PLACES.findall(text)):
        return None
    parts = (
        _VALUES.get(part, json.dumps(part, ensure_ascii=False)) for part in _PLACES.split(text)
    )
    # Nothing is put around such a text, as where a template names the token itself.
    return "{# bos_token #}" + "".join(f"{{{{ {part} }}}}" for part in parts if part != '""')


def names_qwen3_reranker(name: str) -> bool:
    """Return whether a name is that of one of Qwen3-Reranker."""
    return _QWEN3.search(name) is not None


def is_reranker_by_name(folder: Path) -> bool:
    """Return whether a folder, or the repository that it is a version of, is named as one of
    Qwen3-Reranker, whose config is that of a Qwen3 model which chats."""
    # OWNER--NAME/snapshots/COMMIT in the cache of a hub.
    cached = folder.parent.name == "snapshots"
    return names_qwen3_reranker(folder.parent.parent.name if cached else folder.name)


def answers_by_name(architecture: object, *, named: bool) -> tuple[str, ...] | None:
    """The answers of a model whose config names none, by its architecture, if it is ``named`` as
    one of Qwen3-Reranker."""
    return QWEN3_ANSWERS if named and architecture == "Qwen3ForCausalLM" else None

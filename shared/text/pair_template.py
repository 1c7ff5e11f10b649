"""Templates of pairs of a query and a document, for rerankers that are made of a decoder.

As vLLM and sentence-transformers have them, such a template is a chat template, whose messages are
of the roles ``query`` and ``document``; an instruction is a system message before both.
Qwen3-Reranker was first published with its template in the description only, so that a model of
this name has it without a file.
"""

from __future__ import annotations

import re
from pathlib import Path

# Its name among a model's templates, which is llama.cpp's.
RERANK = "rerank"
_QUERY, _DOCUMENT = re.compile(r"""['"]query['"]"""), re.compile(r"""['"]document['"]""")
_QWEN3 = re.compile(r"qwen3[-_]reranker", re.IGNORECASE)
# vLLM's key in the config of one that compares its two answers.
COMPARES = "is_original_qwen3_reranker"
# In order: the answer against which the other one counts, and that one.
QWEN3_ANSWERS = ("no", "yes")
QWEN3_TEMPLATE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    "provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: {% set given = messages | selectattr('role', 'equalto', 'system') | list %}"
    "{{ given[0].content if given else"
    " 'Given a web search query, retrieve relevant passages that answer the query' }}\n"
    "<Query>: {{ (messages | selectattr('role', 'equalto', 'query') | first).content }}\n"
    "<Document>: {{ (messages | selectattr('role', 'equalto', 'document') | first).content }}"
    "<|im_end|>\n"
    # Jinja drops a newline at the end.
    "<|im_start|>assistant\n<think>\n\n</think>{{ '\n\n' }}"
)


def shows_pairs(source: str) -> bool:
    """Return whether a chat template is one of pairs: it names both roles."""
    return bool(_QUERY.search(source) and _DOCUMENT.search(source))


def is_qwen3_reranker(folder: Path) -> bool:
    """Return whether a folder, or the repository that it is a version of, is named as one of
    Qwen3-Reranker, whose config is that of a Qwen3 model which chats."""
    # OWNER--NAME/snapshots/COMMIT in the cache of a hub.
    cached = folder.parent.name == "snapshots"
    return _QWEN3.search(folder.parent.parent.name if cached else folder.name) is not None


def answers_by_name(architecture: object, folder: Path) -> tuple[str, ...] | None:
    """The answers of a model whose config names none, by its architecture and its folder's name."""
    named = architecture == "Qwen3ForCausalLM" and is_qwen3_reranker(folder)
    return QWEN3_ANSWERS if named else None

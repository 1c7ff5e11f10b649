"""``bad_words`` as sequences of tokens, which nodes keep from being completed."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import invalid
from ..served_model import ServedModel

# As nodes have it.
MAX_BAD_WORD_TOKENS = 64


def bad_word_ids(words: Sequence[str], model: ServedModel) -> list[list[int]]:
    """Each word as it is written at the beginning of a text, and after a space, which many
    tokenizers make a part of the token. Raises ``RequestError``."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise invalid("Invalid 'bad_words': a word consists of spaces only.", "bad_words")
        for text in (word, " " + word.lstrip()):
            ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise invalid(
                    f"Invalid 'bad_words': {word[:64]!r} has {len(ids)} tokens; the limit is "
                    f"{MAX_BAD_WORD_TOKENS}.",
                    "bad_words",
                )
            if ids:
                found[ids] = None
    return [list(ids) for ids in found]

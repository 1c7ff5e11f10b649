"""Fill-in-the-middle prompts, for models that were trained to write the text between two texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Encoded before a text, so that the tokenizer does not put a space in front of it.
_MARK = "\u263a"


@dataclass(frozen=True, slots=True)
class _Format:
    """The special tokens of one family of models, in the order of its prompts. ``ends`` may follow
    the generated text. With ``joined``, the text after the gap is encoded as if it continued a
    word."""

    before: str
    after: str
    middle: str
    ends: tuple[str, ...] = ()
    joined: bool = False


# In order: a newer family may also have the tokens of an older one.
FORMATS = (
    # Qwen-coder, CodeGemma
    _Format(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder2, Granite
    _Format(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<repo_name>", "<file_sep>")
    ),
    # SantaCoder
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>",)),
    # DeepSeek-coder
    _Format(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),
    # CodeLlama
    _Format("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",), joined=True),
)


class FillInMiddle:
    """The format of one model, as ids of its vocabulary."""

    def __init__(self, form: _Format, id_of: Callable[[str], int | None]) -> None:
        ids = [id_of(token) for token in (form.before, form.after, form.middle)]
        self._before, self._after, self._middle = (token for token in ids if token is not None)
        self._joined = form.joined
        self.ends = tuple(token for end in form.ends if (token := id_of(end)) is not None)

    def prompt(
        self, before: str, after: str, encode: Callable[[str], list[int]], opening: Sequence[int]
    ) -> list[int]:
        """The tokens of a prompt for the text between two texts. ``opening`` are the special tokens
        that begin every prompt."""
        last = _encode_joined(after, encode) if self._joined else encode(after)
        return [*opening, self._before, *encode(before), self._after, *last, self._middle]


def fill_in_middle(id_of: Callable[[str], int | None]) -> FillInMiddle | None:
    """The format of the model with this vocabulary; ``None`` if it has none."""
    for form in FORMATS:
        if all(id_of(token) is not None for token in (form.before, form.after, form.middle)):
            return FillInMiddle(form, id_of)
    return None


def _encode_joined(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    mark, with_mark = encode(_MARK), encode(_MARK + text)
    return with_mark[len(mark) :] if with_mark[: len(mark)] == mark else encode(text)

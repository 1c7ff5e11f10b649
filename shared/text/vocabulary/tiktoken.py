"""tiktoken's files of ranks: ``tiktoken.model``, ``qwen.tiktoken``, and Llama 3's
``tokenizer.model``.

They have tokens and ranks only; the rule by which texts are split, and the special tokens, are in
the code of each family.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ModelError
from ..model_files import read_text
from . import patterns
from .added_tokens import AddedTokens, entry
from .byte_spelling import decode_token, ranked_bytes
from .tokenizer_json import MAX_TOKENS, byte_level, split_by, tokenizer_json

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")


@dataclass(frozen=True, slots=True)
class _Family:
    """After the ranks come ``specials`` tokens: those in ``special``, and others that ``reserved``
    names by their numbers among all tokens, or ``counted_from`` a number. ``names`` are what
    ``tokenizer_config.json`` may leave out."""

    name: str
    pattern: str
    special: tuple[str, ...] = ()
    specials: int = 0
    reserved: str = ""
    counted_from: int | None = None
    names: tuple[tuple[str, str], ...] = ()
    begins: bool = False
    normalises: bool = False

    def special_tokens(self, ranks: int) -> list[str]:
        """All special tokens, by their numbers after the ranks."""
        known = len(self.special)
        base = ranks if self.counted_from is None else self.counted_from - known
        more = (self.reserved.format(base + number) for number in range(known, self.specials))
        return [*self.special, *more]


_KIMI = _Family(
    "Kimi's and Moonlight's",
    patterns.KIMI,
    specials=256,
    reserved="<|reserved_token_{}|>",
)
_QWEN = _Family(
    "Qwen's",
    patterns.QWEN,
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    specials=208,
    reserved="<|extra_{}|>",
    counted_from=0,
    names=(("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")),
    normalises=True,
)
_LLAMA3 = _Family(
    "Llama 3's",
    patterns.LLAMA3,
    special=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_1|>",
        "<|finetune_right_pad_id|>",
        "<|step_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
        "<|image|>",
    ),
    specials=256,
    reserved="<|reserved_special_token_{}|>",
    counted_from=2,
    names=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|end_of_text|>")),
    begins=True,
)
_LLAMA4 = _Family(
    "Llama 4's",
    patterns.LLAMA4,
    names=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|end_of_text|>")),
    begins=True,
)
# By the name of the file, and by the number of ranks in one whose name says nothing.
_BY_FILE = {"tiktoken.model": _KIMI, "qwen.tiktoken": _QWEN}
_BY_RANKS = {128_000: _LLAMA3, 200_000: _LLAMA4}
_CLASSES = {"tiktoken.model": ("TikTokenTokenizer",), "qwen.tiktoken": ("QWenTokenizer",)}


def is_ranks(beginning: bytes) -> bool:
    """Return whether a file begins as a list of ranks does."""
    return _LINE.match(beginning) is not None


def read_tiktoken(path: Path, added: AddedTokens) -> str:
    """The ``tokenizer.json`` of a file of ranks. Raises ``ModelError``."""
    origin = str(path)
    tokens = _ranks(path)
    family = _family_of(path.name, len(tokens), added, origin)
    listed = added.by_number
    special = family.special_tokens(len(tokens))
    if not special and not listed:
        raise ModelError(
            f"{origin}: {family.name} special tokens are in added_tokens_decoder of "
            f"tokenizer_config.json, which is missing there: download it too"
        )
    # A configuration may give a family's names to other numbers.
    given = {token["content"] for token in listed.values()}
    for number, text in enumerate(special, len(tokens)):
        if number not in listed and text not in given:
            listed[number] = entry(text, number)
    known = {token["content"] for token in listed.values()}
    added.default(**{key: text for key, text in family.names if text in known})
    vocabulary, model = ranked_bytes(tokens, 0, origin)
    every = added.joined(vocabulary, origin)
    first = ("bos_token",) if added.flag("add_bos_token", family.begins) else ()
    return tokenizer_json(
        model,
        added=every,
        normalizer={"type": "NFC"} if family.normalises else None,
        pre_tokenizer=split_by(family.pattern),
        post_processor=added.ends(first, (), vocabulary, origin),
        decoder=byte_level(use_regex=False),
    )


def _family_of(name: str, ranks: int, added: AddedTokens, origin: str) -> _Family:
    family = _BY_FILE.get(name) or _BY_RANKS.get(ranks)
    kind = added.tokenizer_class
    if family is None:
        known = ", ".join(f"{one.name} with {number}" for number, one in _BY_RANKS.items())
        raise ModelError(
            f"{origin}: is a file of tiktoken with {ranks} ranks, and the rule by which its texts "
            f"are split is unknown; known: {known}, and {', '.join(_BY_FILE)}"
        )
    if kind is not None and kind not in _CLASSES.get(name, (kind,)):
        raise ModelError(
            f"{origin}: tokenizer_class in tokenizer_config.json is {kind!r:.60}, whose rule for "
            f"splitting texts is unknown; known: {', '.join(_CLASSES[name])}"
        )
    return family


def _ranks(path: Path) -> Sequence[bytes]:
    """The tokens in the order of their ranks."""
    lines = read_text(path).split("\n")
    tokens: dict[int, bytes] = {}
    if len(lines) > MAX_TOKENS:
        raise ModelError(f"{path}: has more than {MAX_TOKENS} tokens")
    for number, line in enumerate(lines):
        if not (line := line.strip()):
            continue
        text, _, rank = line.partition(" ")
        if not (rank.isascii() and rank.isdecimal() and len(rank) < 9):
            raise ModelError(f"{path}: line {number + 1} must be a token in base64 and its rank")
        token = decode_token(text, int(rank), str(path))
        if tokens.setdefault(int(rank), token) != token:
            raise ModelError(f"{path}: two tokens have the rank {rank}")
    missing = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    if missing is not None:
        raise ModelError(f"{path}: no token has the rank {missing}, but others have later ones")
    return [tokens[rank] for rank in range(len(tokens))]

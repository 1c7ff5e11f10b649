"""tiktoken's files of ranks: ``tiktoken.model``, ``qwen.tiktoken``, and Llama 3's
``tokenizer.model``.

They contain tokens and ranks only; the splitting pattern and the special tokens are in the code of
each family.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ModelError
from ..model_files import read_text
from .added_tokens import AddedTokens, entry
from .byte_spelling import decode_token, ranked_bytes
from .split_patterns import (
    CASED_SIGNS,
    CASED_WORDS,
    CONTRACTIONS,
    LOWER,
    UPPER,
    cased_words,
    split_words,
)
from .tokenizer_json import MAX_TOKENS, byte_level, split_by, tokenizer_json

QWEN_PATTERN = split_words(numbers=r"\p{N}")
_LLAMA3_PATTERN = split_words(numbers=r"\p{N}{1,3}")
_LLAMA4_PATTERN = split_words(words=CASED_WORDS, numbers=r"\p{N}{1,3}", signs=CASED_SIGNS)
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI_WORDS = cased_words(f"[{UPPER}{_NOT_HAN}]", f"[{LOWER}{_NOT_HAN}]", f"{CONTRACTIONS}?")
_KIMI_PATTERN = split_words(words=rf"[\p{{Han}}]+|{_KIMI_WORDS}", numbers=r"\p{N}{1,3}")

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family's code adds to a file of ranks. After the ranks come ``num_special`` tokens:
    those in ``special``, then ``reserved`` ones, which are named by their ids, or count up from
    ``reserved_from``. ``names`` are defaults for ``tokenizer_config.json``."""

    name: str
    pattern: str
    special: tuple[str, ...] = ()
    num_special: int = 0
    reserved: str = ""
    reserved_from: int | None = None
    names: tuple[tuple[str, str], ...] = ()
    adds_bos: bool = False
    nfc: bool = False

    def special_tokens(self, ranks: int) -> list[str]:
        """All special tokens, in the order in which they follow the ranks."""
        count = len(self.special)
        base = ranks if self.reserved_from is None else self.reserved_from - count
        more = (self.reserved.format(base + number) for number in range(count, self.num_special))
        return [*self.special, *more]


_KIMI = _Family(
    "Kimi's and Moonlight's",
    _KIMI_PATTERN,
    num_special=256,
    reserved="<|reserved_token_{}|>",
)
_QWEN = _Family(
    "Qwen's",
    QWEN_PATTERN,
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    num_special=208,
    reserved="<|extra_{}|>",
    reserved_from=0,
    names=(("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")),
    nfc=True,
)
_LLAMA3 = _Family(
    "Llama 3's",
    _LLAMA3_PATTERN,
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
    num_special=256,
    reserved="<|reserved_special_token_{}|>",
    reserved_from=2,
    names=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|end_of_text|>")),
    adds_bos=True,
)
_LLAMA4 = _Family(
    "Llama 4's",
    _LLAMA4_PATTERN,
    names=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|end_of_text|>")),
    adds_bos=True,
)
# By file name, else by the number of ranks.
_BY_FILE = {"tiktoken.model": _KIMI, "qwen.tiktoken": _QWEN}
_BY_RANKS = {128_000: _LLAMA3, 200_000: _LLAMA4}
_CLASSES = {"tiktoken.model": ("TikTokenTokenizer",), "qwen.tiktoken": ("QWenTokenizer",)}


def is_ranks(beginning: bytes) -> bool:
    """Return whether a file that begins like this is a list of ranks."""
    return _LINE.match(beginning) is not None


def read_tiktoken(path: Path, added_tokens: AddedTokens) -> str:
    """Convert a file of ranks to a ``tokenizer.json``. Raises ``ModelError``."""
    origin = str(path)
    tokens = _ranks(path)
    family = _family_of(path.name, len(tokens), added_tokens, origin)
    by_number = added_tokens.by_number
    special = family.special_tokens(len(tokens))
    if not special and not by_number:
        raise ModelError(
            f"{origin}: {family.name} special tokens are in added_tokens_decoder of "
            f"tokenizer_config.json, which is missing there: download it too"
        )
    # A configuration may give these names to other ids.
    names = {token["content"] for token in by_number.values()}
    for number, text in enumerate(special, len(tokens)):
        if number not in by_number and text not in names:
            by_number[number] = entry(text, number)
    texts = {token["content"] for token in by_number.values()}
    added_tokens.default(**{key: text for key, text in family.names if text in texts})
    vocabulary, model = ranked_bytes(tokens, 0, origin)
    entries = added_tokens.merge_into(vocabulary, origin)
    first = ("bos_token",) if added_tokens.flag("add_bos_token", family.adds_bos) else ()
    return tokenizer_json(
        model,
        added=entries,
        normalizer={"type": "NFC"} if family.nfc else None,
        pre_tokenizer=split_by(family.pattern),
        post_processor=added_tokens.template_processing(first, (), vocabulary, origin),
        decoder=byte_level(use_regex=False),
    )


def _family_of(name: str, ranks: int, added_tokens: AddedTokens, origin: str) -> _Family:
    family = _BY_FILE.get(name) or _BY_RANKS.get(ranks)
    kind = added_tokens.tokenizer_class
    if family is None:
        supported = ", ".join(f"{one.name} with {number}" for number, one in _BY_RANKS.items())
        raise ModelError(
            f"{origin}: a tiktoken file with {ranks} ranks, whose splitting pattern is unknown; "
            f"supported: {supported}, and {', '.join(_BY_FILE)}"
        )
    if kind is not None and kind not in _CLASSES.get(name, (kind,)):
        raise ModelError(
            f"{origin}: tokenizer_class in tokenizer_config.json is {kind!r:.60}, whose "
            f"splitting pattern is unknown; supported: {', '.join(_CLASSES[name])}"
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

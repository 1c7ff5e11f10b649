"""SentencePiece's models: ``tokenizer.model``, ``spiece.model`` or ``sentencepiece.bpe.model``.

The tokenizers library finds special tokens first, and encodes the texts between them separately.
SentencePiece itself has only user-defined symbols, which it finds in the normalised text;
``_CLASSES`` has what a model's Python class adds to it.
"""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ModelError
from ...version import install_command
from ..model_files import read_bytes
from .added_tokens import AddedTokens, entry
from .charsmap import check_charsmap
from .tokenizer_json import (
    SPACE,
    Step,
    byte_pairs,
    merges_by_rank,
    number_tokens,
    replace_step,
    sequence,
    tokenizer_json,
)

if TYPE_CHECKING:
    from ....proto import sentencepiece_pb2 as pb

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
# Three times the largest published model; a piece takes at least two bytes.
_MAX_BYTES = 16 << 20
# Characters of all user-defined symbols, which become one pattern.
_MAX_SYMBOLS = 1 << 20
# Spaces before the first word of a text.
_MAX_STRIPPED = 64
# A character that occurs in no text and forms no grapheme with others.
_BREAK = "\U000e0fff"
# Characters that the map of most models composes.
_COMPOSED = {"e\u0301": "\u00e9", "a\u0302": "\u00e2"}


@dataclass(frozen=True, slots=True)
class _Class:
    """What a tokenizer's class adds to SentencePiece: special tokens before and after a text, by
    the defaults ``bos`` and ``eos`` of ``add_bos_token`` and ``add_eos_token`` or always
    (``first``, ``last``), and default ``names`` of special tokens."""

    bos: bool | None = None
    eos: bool | None = None
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()


_LLAMA = _Class(bos=True, eos=False)
_ENDS = (("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>"))
_CLASSES = {
    **dict.fromkeys(
        (
            "CodeLlamaTokenizer",
            "GemmaTokenizer",
            "InternLM2Tokenizer",
            "InternLM3Tokenizer",
            "InternLMTokenizer",
            "LlamaTokenizer",
        ),
        _LLAMA,
    ),
    "T5Tokenizer": _Class(last=("eos_token",), names=_ENDS),
    "XLMRobertaTokenizer": _Class(
        first=("cls_token",),
        last=("sep_token",),
        names=(*_ENDS, ("bos_token", "<s>"), ("cls_token", "<s>"), ("sep_token", "</s>")),
    ),
    "AlbertTokenizer": _Class(
        first=("cls_token",),
        last=("sep_token",),
        names=(
            *(("bos_token", "[CLS]"), ("eos_token", "[SEP]"), ("unk_token", "<unk>")),
            *(("cls_token", "[CLS]"), ("sep_token", "[SEP]"), ("pad_token", "<pad>")),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    score: float
    kind: int


def read_sentencepiece(path: Path, added_tokens: AddedTokens) -> str:
    """Convert a SentencePiece model to a ``tokenizer.json``. Raises ``ModelError``."""
    return _Model(path, added_tokens).tokenizer_json()


class _Model:
    def __init__(self, path: Path, added_tokens: AddedTokens) -> None:
        self._origin = str(path)
        self._added_tokens = added_tokens
        proto = _parse(path)
        self._trainer, self._normalizer = proto.trainer_spec, proto.normalizer_spec
        self._check_specs()
        self._class = self._class_of()
        self._pieces = [self._piece(number, one) for number, one in enumerate(proto.pieces)]
        if not self._pieces:
            raise self._invalid("has no pieces, so it is not a SentencePiece model")
        self._rearrange()
        self._numbers = number_tokens((piece.text for piece in self._pieces), self._origin)
        unknown = [piece.text for piece in self._pieces if piece.kind == _UNKNOWN]
        if len(unknown) != 1:
            raise self._invalid(f"has {len(unknown)} unknown pieces; supported: one")
        self._unknown = unknown[0]
        self._has_bytes = self._trainer.byte_fallback
        if self._has_bytes and sum(piece.kind == _BYTE for piece in self._pieces) != 256:
            raise self._invalid("byte_fallback needs all 256 bytes as pieces, and some are missing")
        self._name_special_tokens()

    def tokenizer_json(self) -> str:
        """The whole ``tokenizer.json``."""
        vocabulary = dict(self._numbers)
        tokens = self._added_tokens.merge_into(vocabulary, self._origin)
        prefixed = self._normalizer.add_dummy_prefix and self._added_tokens.flag(
            "add_prefix_space", True
        )
        # Classes that are not legacy put a space before the first text only.
        everywhere = self._added_tokens.flag("legacy", True)
        model = (
            self._bpe(vocabulary) if self._trainer.model_type == _BPE else self._unigram(vocabulary)
        )
        return tokenizer_json(
            model,
            added=tokens,
            normalizer=self._normalizer_step(prefixed and everywhere),
            pre_tokenizer=sequence(
                "pretokenizers",
                [
                    *(_first_space() if prefixed and not everywhere else ()),
                    *self._split_byte_pieces(),
                ],
            ),
            post_processor=self._post_processor(vocabulary),
            decoder=self._decoder(prefixed),
        )

    def _check_specs(self) -> None:
        kind = self._trainer.model_type
        if kind not in (_UNIGRAM, _BPE):
            raise self._invalid("is neither a BPE nor a Unigram model, the supported kinds")
        if self._trainer.treat_whitespace_as_suffix:
            raise self._invalid("has spaces after words (treat_whitespace_as_suffix); unsupported")
        if not self._normalizer.escape_whitespaces:
            raise self._invalid("does not escape spaces (escape_whitespaces); unsupported")
        charsmap = self._normalizer.precompiled_charsmap
        if charsmap and (problem := check_charsmap(charsmap)):
            raise self._invalid(f"its precompiled_charsmap {problem}")

    def _class_of(self) -> _Class:
        name = self._added_tokens.tokenizer_class
        if name in _CLASSES:
            return _CLASSES[name]
        if self._added_tokens.config.get("add_bos_token") is not None or (
            name is None and self._trainer.model_type == _BPE
        ):
            return _LLAMA
        raise ModelError(
            f"{self._origin}: the special tokens around a text are unknown, since tokenizer_class "
            f"in tokenizer_config.json is {name!r:.60}: set add_bos_token and add_eos_token there; "
            f"known: {', '.join(_CLASSES)}"
        )

    def _piece(self, number: int, piece: pb.ModelProto.SentencePiece) -> _Piece:
        try:
            text = piece.piece.decode()
        except UnicodeDecodeError:
            raise self._invalid(f"has a piece that is not UTF-8, number {number}") from None
        score, kind = piece.score, piece.type
        if not math.isfinite(score):
            raise self._invalid(f"has the score {score} for piece {number}")
        if kind == _UNUSED:
            raise self._invalid(f"has piece {number} of the type UNUSED; unsupported")
        if kind == _BYTE and not _BYTE_PIECE.fullmatch(text):
            raise self._invalid(f"has the byte {text[:40]!r}, number {number}; a byte is <0x00>")
        return _Piece(text, score, kind)

    def _rearrange(self) -> None:
        """Number the pieces as the model does, and rename those without text as its configuration
        does."""
        name = self._added_tokens.tokenizer_class
        if name == "XLMRobertaTokenizer":  # fairseq's own first four
            self._pieces[:3] = [
                *(_Piece(text, 0.0, _CONTROL) for text in ("<s>", "<pad>", "</s>")),
                _Piece("<unk>", 0.0, _UNKNOWN),
            ]
            self._pieces.append(_Piece("<mask>", 0.0, _CONTROL))
        by_number = self._added_tokens.by_number
        if name == "T5Tokenizer" and len(self._pieces) not in by_number:
            extra = self._added_tokens.config.get("extra_ids", 100)
            if not isinstance(extra, int) or not 0 <= extra <= 1000:
                raise self._invalid(f"has extra_ids {extra!r:.40}; supported: at most 1000")
            texts = (f"<extra_id_{number}>" for number in reversed(range(extra)))
            self._pieces += (_Piece(text, 0.0, _CONTROL) for text in texts)
        for number, piece in enumerate(self._pieces):
            token = by_number.get(number)
            if token is not None and piece.kind in (_CONTROL, _USER_DEFINED, _UNKNOWN):
                self._pieces[number] = _Piece(token["content"], piece.score, piece.kind)

    def _name_special_tokens(self) -> None:
        """Fill in the special tokens that ``tokenizer_config.json`` may leave out."""
        trainer, names = self._trainer, dict(self._class.names)
        for key, text in (
            ("bos_token", trainer.bos_piece),
            ("eos_token", trainer.eos_piece),
            ("pad_token", trainer.pad_piece),
        ):
            names.setdefault(key, text.decode(errors="replace"))
        names.setdefault("unk_token", self._unknown)
        self._added_tokens.default(
            **{key: name for key, name in names.items() if name in self._numbers}
        )
        by_number = self._added_tokens.by_number
        for number, token in by_number.items():
            by_number[number] = token | {"normalized": False}
        for number, piece in enumerate(self._pieces):
            if piece.kind == _USER_DEFINED:
                token = by_number.setdefault(number, entry(piece.text, number, special=False))
                normal = "".join(map(self._normalize, piece.text)) == piece.text
                by_number[number] = token | {"normalized": normal and not token["special"]}
            elif piece.kind in (_CONTROL, _UNKNOWN):
                by_number.setdefault(number, entry(piece.text, number))

    def _bpe(self, vocabulary: dict[str, int]) -> Step:
        normal = {piece.text for piece in self._pieces if piece.kind == _NORMAL}
        numbers = {text: number for text, number in self._numbers.items() if text in normal}
        # A stable sort: equal scores stay in their order.
        by_score = sorted(
            (piece for piece in self._pieces if piece.kind == _NORMAL),
            key=lambda piece: -piece.score,
        )
        try:
            merges = merges_by_rank((piece.text for piece in by_score), numbers)
        except ValueError as error:
            raise self._invalid(str(error)) from None
        return byte_pairs(
            vocabulary,
            merges,
            unk_token=self._unknown,
            fuse_unk=True,
            byte_fallback=self._has_bytes,
        )

    def _unigram(self, vocabulary: dict[str, int]) -> Step:
        texts = {number: text for text, number in vocabulary.items()}
        missing = next((number for number in range(len(texts)) if number not in texts), None)
        if missing is not None:
            raise self._invalid(
                f"has no token {missing}, and tokenizer_config.json adds later ones"
            )
        scores = {piece.text: piece.score for piece in self._pieces if piece.kind == _NORMAL}
        lowest = min(scores.values(), default=0.0)
        return {
            "type": "Unigram",
            "unk_id": self._numbers[self._unknown],
            "vocab": [
                (texts[number], scores.get(texts[number], lowest)) for number in range(len(texts))
            ],
            "byte_fallback": self._has_bytes,
        }

    def _split_byte_pieces(self) -> list[Step]:
        """Split text that looks like a byte piece, which the library would encode as that byte."""
        if not self._has_bytes or self._trainer.model_type != _UNIGRAM:
            return []
        return [
            {
                "type": "Split",
                "pattern": {"Regex": "(?<=<)0(?=x[0-9A-F]{2}>)"},
                "behavior": "Isolated",
                "invert": False,
            }
        ]

    def _normalizer_step(self, prefixed: bool) -> Step | None:
        steps = self._character_steps()
        trims = self._normalizer.remove_extra_whitespaces
        if trims:
            steps += [replace_step(" {2,}", " ", regex=True), replace_step(r"\A +", "", regex=True)]
        steps.append(replace_step(" ", SPACE))
        if trims:
            steps.append(replace_step(rf"{SPACE}+\z", "", regex=True))
        if prefixed:
            steps += self._prefix_steps()
        return sequence("normalizers", steps)

    def _character_steps(self) -> list[Step]:
        steps: list[Step] = []
        if self._added_tokens.tokenizer_class == "AlbertTokenizer":
            steps += [replace_step("``", '"'), replace_step("''", '"')]
            if not self._added_tokens.flag("keep_accents", False):
                steps += [{"type": "NFKD"}, {"type": "StripAccents"}]
            if self._added_tokens.flag("do_lower_case", True):
                steps.append({"type": "Lowercase"})
        if charsmap := self._normalizer.precompiled_charsmap:
            # The library looks up graphemes, and drops the rest of one of which only the beginning
            # is in the map, so it gets single characters. Entries for several characters compose
            # them, as NFC does, except for several marks in an unusual order.
            charsmap_base64 = base64.b64encode(charsmap).decode()
            composes = all(self._normalize(text) == one for text, one in _COMPOSED.items())
            composing: list[Step] = [{"type": "NFC"}] if composes else []
            steps += [
                *composing,
                replace_step(r"(?<=[\s\S])(?=[^\x00-\x7f])", _BREAK, regex=True),
                {"type": "Precompiled", "precompiled_charsmap": charsmap_base64},
                replace_step(_BREAK, ""),
                *composing,
            ]
        return steps

    def _decoder(self, prefixed: bool) -> Step:
        steps: list[Step] = [
            replace_step(SPACE, " "),
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        num_spaces = _MAX_STRIPPED if self._normalizer.remove_extra_whitespaces else int(prefixed)
        if num_spaces:
            steps.append({"type": "Strip", "content": " ", "start": num_spaces, "stop": 0})
        return {"type": "Sequence", "decoders": steps}

    def _prefix_steps(self) -> list[Step]:
        """Prepend a space to each text. The library also normalises user-defined symbols before it
        looks for them, so a text that is just a symbol gets no space."""
        steps: list[Step] = [{"type": "Prepend", "prepend": SPACE}]
        symbols = [
            token["content"]
            for token in self._added_tokens.by_number.values()
            if token["normalized"]
        ]
        if sum(map(len, symbols)) > _MAX_SYMBOLS:
            raise self._invalid(f"has more than {_MAX_SYMBOLS} characters of user-defined symbols")
        if symbols:
            one_of = "|".join(map(re.escape, symbols))
            steps.append(replace_step(rf"\A{SPACE}(?=(?:{one_of})\z)", "", regex=True))
        return steps

    def _normalize(self, text: str) -> str:
        """Normalise a single grapheme by the character map."""
        from tokenizers import normalizers

        charsmap = self._normalizer.precompiled_charsmap
        normalized: str = (
            normalizers.Precompiled(charsmap).normalize_str(text) if charsmap else text
        )
        return normalized

    def _post_processor(self, vocabulary: dict[str, int]) -> Step | None:
        """The special tokens before and after every text."""
        first, last = self._class.first, self._class.last
        if self._class.bos is not None:
            first = (
                ("bos_token",) if self._added_tokens.flag("add_bos_token", self._class.bos) else ()
            )
        if self._class.eos is not None:
            last = (
                ("eos_token",) if self._added_tokens.flag("add_eos_token", self._class.eos) else ()
            )
        return self._added_tokens.template_processing(first, last, vocabulary, self._origin)

    def _invalid(self, problem: str) -> ModelError:
        return ModelError(f"{self._origin}: {problem}")


def _parse(path: Path) -> pb.ModelProto:
    try:
        from google.protobuf.message import DecodeError

        from ....proto import sentencepiece_pb2 as pb
    except ImportError:
        raise ModelError(
            f"{path} needs the package protobuf, unless a tokenizer.json is beside it: "
            f"{install_command('serve')}"
        ) from None
    try:
        return pb.ModelProto.FromString(read_bytes(path, _MAX_BYTES))
    except DecodeError:
        raise ModelError(
            f"{path} is truncated or not a SentencePiece model: delete it and download it again"
        ) from None


def _first_space() -> list[Step]:
    """Prepend a space to the first text. ``Metaspace`` prepends none to its own replacement
    character, so the first step inserts a plain space, and the second one replaces it."""

    def metaspace(character: str, scheme: str) -> Step:
        return {
            "type": "Metaspace",
            "replacement": character,
            "prepend_scheme": scheme,
            "split": False,
        }

    return [metaspace(" ", "first"), metaspace(SPACE, "never")]

"""The tokenizer of a GGUF file, as the files of a Hugging Face tokenizer. No torch.

A file has the vocabulary, merges or scores, and the name of a splitting rule, but not the rule
itself.
"""

from __future__ import annotations

import base64
import json
import logging
from array import array
from pathlib import Path
from typing import Any

from ...errors import ModelError, brief
from ...text.pair_template import (
    QWEN3_PLACES,
    QWEN3_VL_TEMPLATE,
    RERANK,
    of_placeholders,
    shows_pairs,
    template_by_name,
)
from ...text.tokenizer_files import TOOL_USE, TemplateText, TokenizerFiles
from ...text.vocabulary.charsmap import check_charsmap
from ...text.vocabulary.tokenizer_json import byte_pairs, merges_by_rank
from .generation_config import generation_config
from .header import GGUFHeader
from .splitting import DEFAULT, RULES, UNSPLIT

log = logging.getLogger("tandem.weights")

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# SentencePiece's spelling of a space.
_SPACE = "\u2581"
_SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "sep": "seperator",
    "cls": "cls",
    "mask": "mask",
}


def tokenizer_files(header: GGUFHeader, origin: str) -> TokenizerFiles:
    """The tokenizer's files. Raises ``ModelError`` if it is unsupported or incomplete."""
    vocabulary = _Vocabulary(header, origin)
    tokenizer = vocabulary.tokenizer_json()
    return TokenizerFiles(
        tokenizer=json.dumps(tokenizer, ensure_ascii=False),
        origin=origin,
        config=vocabulary.config(),
        generation_config=generation_config(header),
        template=_template(header, "tokenizer.chat_template", origin),
        tool_template=_template(header, f"tokenizer.chat_template.{TOOL_USE}", origin),
        more_templates=_pair_templates(header, origin),
    )


def is_reranker_by_name(header: GGUFHeader, origin: str) -> bool:
    """Return whether a file, or the model in it, is named like one of Qwen3's rerankers."""
    return _template_by_name(header, origin) is not None


def _template_by_name(header: GGUFHeader, origin: str) -> str | None:
    names = [header.metadata.get(f"general.{key}") for key in ("name", "basename")]
    templates = (template_by_name(str(name)) for name in (Path(origin).name, *names))
    return next((template for template in templates if template is not None), None)


def _pair_templates(header: GGUFHeader, origin: str) -> dict[str, TemplateText]:
    """The template for a reranker's pairs, if any."""
    key = f"tokenizer.chat_template.{RERANK}"
    template = _template(header, key, origin)
    if template is None:
        source_by_name = _template_by_name(header, origin)
        return {} if source_by_name is None else {RERANK: TemplateText(source_by_name, origin)}
    if header.metadata.get("general.architecture") == "qwen3vl" and template.source == QWEN3_PLACES:
        return {RERANK: TemplateText(QWEN3_VL_TEMPLATE, origin)}
    source = of_placeholders(template.source)
    if source is None and not shows_pairs(template.source):
        raise ModelError(f"{origin}: {key} has no placeholders {{query}} and {{document}}")
    return {RERANK: template if source is None else TemplateText(source, origin)}


def _template(header: GGUFHeader, key: str, origin: str) -> TemplateText | None:
    template = header.metadata.get(key)
    if template is None:
        return None
    if not isinstance(template, str):
        raise ModelError(f"{origin}: {key} must be a string")
    return TemplateText(template, origin)


class _Vocabulary:
    """Builds the parts of a ``tokenizer.json`` from the metadata."""

    def __init__(self, header: GGUFHeader, origin: str) -> None:
        self._metadata = header.metadata
        self._origin = origin
        self._tokens = [*self._strings("tokens")]
        self._types = self._list("token_type", int) or [_NORMAL] * len(self._tokens)
        if len(self._types) != len(self._tokens):
            raise self._invalid(
                "token_type", f"has {len(self._types)} entries for {len(self._tokens)} tokens"
            )

    def config(self) -> dict[str, Any]:
        """The special tokens, by their names in a ``tokenizer_config.json``."""
        tokens = {name: self._token(f"{theirs}_token_id") for name, theirs in _SPECIAL.items()}
        return {f"{name}_token": token for name, token in tokens.items() if token is not None}

    def tokenizer_json(self) -> dict[str, Any]:
        """The whole ``tokenizer.json``."""
        kind, rule = (self._metadata.get(_PREFIX + key) for key in ("model", "pre"))
        if kind == "gemma4" or (kind == "gpt2" and rule in UNSPLIT):
            parts = self._pieces(self._merges(), prefixed=False)
        elif kind == "gpt2":
            parts = self._byte_pairs(rule)
        elif kind == "llama":
            self._respell_spaces()
            parts = self._pieces(self._merges_by_score(), prefixed=True)
        elif kind == "bert":
            parts = self._word_pieces()
        elif kind == "t5":
            parts = self._unigrams()
        else:
            raise self._unsupported(
                "model", f"is {brief(kind)}; supported: gpt2, llama, gemma4, bert and t5"
            )
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            **parts,
        }

    def _byte_pairs(self, name: object) -> dict[str, Any]:
        """Byte-pair encoding of bytes, as GPT-2 introduced it."""
        if name is None:
            log.warning(
                "%s does not name the rule for splitting texts, so that some get other tokens than "
                "in training: use a newer file of the model",
                self._origin,
            )
            name = DEFAULT
        # Among encoders, "bert" means RoBERTa here, whose pairs have two ends between the texts.
        architecture = self._metadata.get("general.architecture")
        roberta, modern = architecture == "bert", architecture == "modern-bert"
        rule = RULES.get(name) if isinstance(name, str) else None
        if rule is None:
            raise self._unsupported("pre", f"is {brief(name)}, which is unknown here")
        return {
            "normalizer": {"type": "NFC"} if rule.nfc else None,
            "pre_tokenizer": rule.pre_tokenizer(),
            "post_processor": self._post_processor(
                rule.adds_bos or roberta or modern,
                adds_last=roberta or modern,
                names=("cls", "seperator") if modern else ("bos", "eos"),
                between=2 if roberta else 1,
                segments=not roberta,
            )
            or _byte_level(use_regex=True),
            "decoder": _byte_level(use_regex=True),
            "model": self._model(self._merges(), ignore_merges=rule.whole_words),
        }

    def _pieces(self, merges: list[str], *, prefixed: bool) -> dict[str, Any]:
        """SentencePiece's byte-pair encoding of characters; unknown ones become bytes."""
        prefixed = self._flag("add_space_prefix", prefixed)
        normalizers: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        ]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefixed:
            normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._token("unknown_token_id") or "<unk>"
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "post_processor": self._post_processor(True),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._model(merges, byte_fallback=True, fuse_unk=True, unk_token=unknown),
        }

    def _word_pieces(self) -> dict[str, Any]:
        """BERT's WordPiece. Pieces that begin a word are marked in the file, and the others in a
        ``tokenizer.json``."""
        for number, token in enumerate(self._tokens):
            if not (token.startswith("[") and token.endswith("]")):
                within = not token.startswith(_SPACE)
                self._tokens[number] = f"##{token}" if within else token[len(_SPACE) :]
        lowercase = self._flag("normalizer.lowercase", True)
        return {
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": self._flag("normalizer.strip_accents", lowercase),
                "lowercase": lowercase,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": self._post_processor(
                True, adds_last=True, names=("cls", "seperator")
            ),
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": self._token("unknown_token_id") or "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": {token: number for number, token in enumerate(self._tokens)},
            },
        }

    def _unigrams(self) -> dict[str, Any]:
        """SentencePiece's unigram model."""
        scores = self._scores()
        unknown = self._metadata.get(f"{_PREFIX}unknown_token_id", 2)
        self._token("unknown_token_id")
        spaces: dict[str, Any] = {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": "always" if self._flag("add_space_prefix", True) else "never",
            "split": True,
        }
        splits = [spaces]
        if self._flag("remove_extra_whitespaces", False):
            splits.insert(0, {"type": "WhitespaceSplit"})
        characters = self._bytes("precompiled_charsmap")
        if characters and (problem := check_charsmap(characters)):
            raise self._invalid("precompiled_charsmap", problem)
        return {
            "normalizer": {
                "type": "Precompiled",
                "precompiled_charsmap": base64.b64encode(characters).decode(),
            }
            if characters
            else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
            "post_processor": self._post_processor(
                False, adds_last=True, between=2, segments=False
            ),
            "decoder": spaces,
            "model": {
                "type": "Unigram",
                "unk_id": unknown,
                "vocab": list(zip(self._tokens, scores, strict=True)),
                "byte_fallback": False,
            },
        }

    def _model(self, merges: list[str], **options: Any) -> dict[str, Any]:
        pairs = [_pair(merge) for merge in merges]
        # Converters pad the vocabulary to the number of embeddings.
        vocabulary = {
            token: number
            for number, token in enumerate(self._tokens)
            if self._types[number] != _UNUSED or token != f"[PAD{number}]"
        }
        for pair in pairs:
            if not {*pair, "".join(pair)} <= vocabulary.keys():
                raise self._invalid(
                    "merges",
                    f"has {' '.join(pair)!r}, which is not a pair of tokens that "
                    "concatenate to a token",
                )
        return byte_pairs(vocabulary, pairs, **options)

    def _respell_spaces(self) -> None:
        """Replace tokens of several plain spaces, which are stored verbatim."""
        for number, token in enumerate(self._tokens):
            if self._types[number] == _USER_DEFINED and token and not token.strip(" "):
                self._tokens[number], self._types[number] = _SPACE * len(token), _NORMAL

    def _merges_by_score(self) -> list[str]:
        """The pairs of pieces that concatenate to a piece, best scores first; for Gemma, in the
        order of tokens."""
        if str(self._metadata.get("general.architecture")).startswith("gemma"):
            scores = [-float(number) for number in range(len(self._tokens))]
        else:
            scores = self._scores()
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        try:
            merges = merges_by_rank((self._tokens[index] for index in order), vocabulary)
        except ValueError as error:
            raise self._invalid("tokens", f"cannot be used: {error}") from None
        return [" ".join(pair) for pair in merges]

    def _merges(self) -> list[str]:
        merges = self._list("merges", str)
        normal = (t for t, kind in zip(self._tokens, self._types, strict=True) if kind == _NORMAL)
        if not merges and any(len(token) > 1 for token in normal):
            raise self._invalid("merges", "is missing")
        return merges

    def _scores(self) -> list[float]:
        scores = self._list("scores", float)
        if len(scores) != len(self._tokens):
            raise self._invalid(
                "scores", f"has {len(scores)} entries for {len(self._tokens)} tokens"
            )
        return scores

    def _added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that are matched before a text is split."""
        special = (_CONTROL, _UNKNOWN)
        return [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind in special,
            }
            for number, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind in (*special, _USER_DEFINED) and token
        ]

    def _post_processor(
        self,
        adds_first: bool,
        *,
        adds_last: bool = False,
        names: tuple[str, str] = ("bos", "eos"),
        between: int = 1,
        segments: bool = True,
    ) -> dict[str, Any] | None:
        """The special tokens before and after every text. ``adds_first`` and ``adds_last`` are the
        defaults of the file's switches. In a pair, ``between`` end tokens separate the texts if the
        model has an end token; otherwise the second begins like the first. With ``segments``, the
        second text is in its own segment."""
        first = self._end(names[0], "bos") if self._flag("add_bos_token", adds_first) else None
        last = self._end(names[1], "eos") if self._flag("add_eos_token", adds_last) else None
        if first is None and last is None:
            return None
        single, second = [_text("A", 0)], [_text("B", int(segments))]
        if last is not None:
            single, second = [*single, _special(last, 0)], [*second, _special(last, int(segments))]
            gap = [_special(last, 0)] * (between - 1)
        else:
            gap = [] if first is None else [_special(first, int(segments))]
        if first is not None:
            single = [_special(first, 0), *single]
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, *gap, *second],
            "special_tokens": {
                token: {"id": token, "ids": [self._tokens.index(token)], "tokens": [token]}
                for token in (first, last)
                if token is not None
            },
        }

    def _end(self, name: str, other: str) -> str | None:
        return self._token(f"{name}_token_id") or self._token(f"{other}_token_id")

    def _token(self, key: str) -> str | None:
        """The text of a special token; an id beyond the vocabulary is an error."""
        number = self._metadata.get(_PREFIX + key)
        if number is None:
            return None
        if not isinstance(number, int) or not 0 <= number < len(self._tokens):
            raise self._invalid(
                key, f"is {brief(number)}; the vocabulary has {len(self._tokens)} tokens"
            )
        return self._tokens[number]

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self._invalid(key, f"is {brief(value)}; supported: true or false")
        return value

    def _strings(self, key: str) -> list[str]:
        values = self._list(key, str)
        if not values:
            raise self._invalid(
                key,
                "is missing or empty; use another GGUF file of the model, or its folder with "
                "safetensors",
            )
        return values

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._metadata.get(_PREFIX + key, [])
        values = values.tolist() if isinstance(values, array) else values
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self._invalid(key, f"is not a list of {kind.__name__}")
        return values

    def _bytes(self, key: str) -> bytes:
        values = self._metadata.get(_PREFIX + key, array("B"))
        if not isinstance(values, array) or values.itemsize != 1:
            raise self._invalid(key, "is not a list of bytes")
        return values.tobytes()

    def _unsupported(self, key: str, problem: str) -> ModelError:
        """The error for an unsupported tokenizer or splitting rule."""
        return ModelError(
            f"{self._origin}: {_PREFIX}{key} {problem}; use the model's folder with safetensors, "
            f"whose tokenizer.json has the rule itself"
        )

    def _invalid(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self._origin}: {_PREFIX}{key} {problem:.200}")


def _text(which: str, segment: int) -> dict[str, Any]:
    return {"Sequence": {"id": which, "type_id": segment}}


def _special(token: str, segment: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": segment}}


def _pair(merge: str) -> tuple[str, str]:
    """The tokens of a merge; the first may begin with a space."""
    first, _, second = merge[1:].partition(" ")
    return merge[:1] + first, second


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": use_regex,
    }

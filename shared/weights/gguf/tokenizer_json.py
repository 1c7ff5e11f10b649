"""The tokenizer of a GGUF file, as the files of a Hugging Face tokenizer. No torch.

A file has the vocabulary, merges or scores, and the name of a splitting rule; the rules themselves
are known to readers only.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

from ...errors import ModelError, shown
from ...text.tokenizer_files import TOOL_USE, TemplateText, TokenizerFiles
from .generation_config import generation_config
from .header import GGUFHeader
from .splitting import RULES, SplittingRule

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# What SentencePiece writes for a space.
_SPACE = "\u2581"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}


def tokenizer_files(header: GGUFHeader, origin: str) -> TokenizerFiles:
    """The files. Raises ``ModelError`` for an unsupported tokenizer, or one that is not whole."""
    vocabulary = _Vocabulary(header, origin)
    tokenizer = vocabulary.tokenizer_json()
    return TokenizerFiles(
        tokenizer=json.dumps(tokenizer, ensure_ascii=False),
        origin=origin,
        config=vocabulary.config(),
        generation_config=generation_config(header),
        template=_template(header, "tokenizer.chat_template", origin),
        tool_template=_template(header, f"tokenizer.chat_template.{TOOL_USE}", origin),
    )


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
        kind = self._metadata.get(f"{_PREFIX}model")
        if kind == "gpt2":
            parts = self._byte_pairs()
        elif kind == "llama":
            parts = self._pieces()
        else:
            raise self._unsupported("model", f"is {shown(kind)}; supported: 'gpt2' and 'llama'")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            **parts,
        }

    def _byte_pairs(self) -> dict[str, Any]:
        """Byte-pair encoding of bytes, as GPT-2 introduced it."""
        name = self._metadata.get(f"{_PREFIX}pre")
        rule = RULES.get(name) if isinstance(name, str) else None
        if rule is None:
            raise self._unsupported("pre", f"is {shown(name)}; supported: {', '.join(RULES)}")
        return {
            "normalizer": {"type": "NFC"} if rule.normalises else None,
            "pre_tokenizer": rule.pre_tokenizer(),
            "post_processor": self._with_ends(rule),
            "decoder": _byte_level(use_regex=True),
            "model": self._model(self._list("merges", str), ignore_merges=rule.whole_words),
        }

    def _pieces(self) -> dict[str, Any]:
        """SentencePiece: merges follow from scores, and unknown characters become bytes."""
        self._respell_spaces()
        prefixed = self._flag("add_space_prefix", True)
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
            "post_processor": self._with_ends(None),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._model(
                self._merges_by_score(), byte_fallback=True, fuse_unk=True, unk_token=unknown
            ),
        }

    def _model(self, merges: list[str], **options: Any) -> dict[str, Any]:
        merged = [tuple(merge.split(" ", 1)) for merge in merges]
        # Converters fill up the vocabulary to the number of embeddings.
        vocabulary = {
            token: number
            for number, token in enumerate(self._tokens)
            if self._types[number] != _UNUSED or token != f"[PAD{number}]"
        }
        for pair in merged:
            if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
                raise self._invalid(
                    "merges",
                    f"has {' '.join(pair)!r}, which is no pair of tokens that make a token",
                )
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merged,
            **options,
        }

    def _respell_spaces(self) -> None:
        """Several spaces in one token are stored as they are."""
        for number, token in enumerate(self._tokens):
            if self._types[number] == _USER_DEFINED and token and not token.strip(" "):
                self._tokens[number], self._types[number] = _SPACE * len(token), _NORMAL

    def _merges_by_score(self) -> list[str]:
        """The pairs of pieces that make a piece, best scores first. Gemma's merges are in the order
        of the tokens instead."""
        scores = self._list("scores", float)
        if str(self._metadata.get("general.architecture")).startswith("gemma"):
            scores = [-float(number) for number in range(len(self._tokens))]
        if len(scores) != len(self._tokens):
            raise self._invalid(
                "scores", f"has {len(scores)} entries for {len(self._tokens)} tokens"
            )
        number = {token: index for index, token in enumerate(self._tokens)}
        pairs = []
        for token, score in zip(self._tokens, scores, strict=True):
            splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            known = [(a, b) for a, b in splits if a in number and b in number]
            known.sort(key=lambda pair: (number[pair[0]], number[pair[1]]))
            pairs += [(score, pair) for pair in known]
        pairs.sort(key=lambda entry: -entry[0])
        return [" ".join(pair) for _, pair in pairs]

    def _added(self) -> list[dict[str, Any]]:
        """Tokens that are found before a text is split."""
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

    def _with_ends(self, rule: SplittingRule | None) -> dict[str, Any] | None:
        """The token before, and the token after every text, where the model wants them."""
        bos = self._flag("add_bos_token", rule is None or rule.begins)
        first = self._token("bos_token_id") if bos else None
        last = self._token("eos_token_id") if self._flag("add_eos_token", False) else None
        single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        if first is not None:
            single.insert(0, {"SpecialToken": {"id": first, "type_id": 0}})
        if last is not None:
            single.append({"SpecialToken": {"id": last, "type_id": 0}})
        if len(single) == 1:
            return None if rule is None else _byte_level(use_regex=True)
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, *({k: {**v, "type_id": 1} for k, v in e.items()} for e in single)],
            "special_tokens": {
                token: {"id": token, "ids": [self._tokens.index(token)], "tokens": [token]}
                for token in (first, last)
                if token is not None
            },
        }

    def _token(self, key: str) -> str | None:
        """The text of a special token; an id beyond the vocabulary is an error."""
        number = self._metadata.get(_PREFIX + key)
        if number is None:
            return None
        if not isinstance(number, int) or not 0 <= number < len(self._tokens):
            raise self._invalid(
                key, f"is {shown(number)}; the vocabulary has {len(self._tokens)} tokens"
            )
        return self._tokens[number]

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self._invalid(key, f"is {shown(value)}; supported: true or false")
        return value

    def _strings(self, key: str) -> list[str]:
        values = self._list(key, str)
        if not values:
            raise self._invalid(key, "is missing or empty")
        return values

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._metadata.get(_PREFIX + key, [])
        values = values.tolist() if isinstance(values, array) else values
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self._invalid(key, f"is not a list of {kind.__name__}")
        return values

    def _unsupported(self, key: str, problem: str) -> ModelError:
        """The error for a rule by which texts are split that only its name tells."""
        return ModelError(
            f"{self._origin}: {_PREFIX}{key} {problem}; use the model's folder with safetensors, "
            f"whose tokenizer.json has the rule itself"
        )

    def _invalid(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self._origin}: {_PREFIX}{key} {problem:.200}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": use_regex,
    }

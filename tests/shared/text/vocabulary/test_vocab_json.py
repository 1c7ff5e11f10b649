"""``vocab.json`` with ``merges.txt``: the same tokens as the ``tokenizer.json`` that has both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.shared.errors import ModelError
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.shared.text.vocabulary.support import AWKWARD, in_steps, load, write

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def trained() -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=["<s>", "</s>", END]
    )
    raw.train_from_iterator(["the quick brown fox, 'twas  2024\n\n"] * 4, trainer)
    return raw


def folder_of(folder: Path, raw: RawTokenizer, **config: Any) -> Path:
    model = json.loads(raw.to_str())["model"]
    merges = "\n".join(
        pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]
    )
    return write(
        folder,
        vocab_dot_json=model["vocab"],
        merges_dot_txt=f"#version: 0.2\n{merges}\n",
        tokenizer_config_dot_json=config,
    )


def test_the_tokens_are_those_of_a_tokenizer_json(tmp_path: Path, trained: RawTokenizer) -> None:
    special = {"additional_special_tokens": ["<s>", "</s>"]}
    ours = load(folder_of(tmp_path, trained, **special))
    for text in AWKWARD:
        assert ours.encode(text) == trained.encode(text).ids
        tokens = ours.encode(text, literally=True)
        assert ours.decode(tokens) == in_steps(ours, tokens) == text
    assert ours.encode(END) == [2] and 2 not in ours.encode(END, literally=True)
    assert ours.special_tokens["eos_token"] == END


@pytest.mark.parametrize(
    ("config", "first", "last"),
    [
        ({"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "</s>"}, 1, None),
        ({"tokenizer_class": "RobertaTokenizerFast"}, 0, 1),
        ({"tokenizer_class": "GPT2Tokenizer"}, None, None),
    ],
)
def test_classes_put_special_tokens_around_a_text(
    tmp_path: Path,
    trained: RawTokenizer,
    config: dict[str, Any],
    first: int | None,
    last: int | None,
) -> None:
    tokens = load(folder_of(tmp_path, trained, **config)).encode("fox")
    plain = trained.encode("fox").ids
    assert tokens == [*([first] if first is not None else []), *plain, *([last] if last else [])]


def test_qwens_class_splits_digits_and_composes(tmp_path: Path, trained: RawTokenizer) -> None:
    added_tokens = {"400": {"content": "<|im_end|>", "special": True}}
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added_tokens}
    ours = load(folder_of(tmp_path, trained, **config))
    assert [ours.decode([token]) for token in ours.encode("2024")] == ["2", "0", "2", "4"]
    assert ours.encode("e\u0301") == ours.encode("\u00e9")
    assert ours.encode("<|im_end|>") == [400] and ours.vocab_size == 401


def test_added_tokens_of_older_folders_are_read(tmp_path: Path, trained: RawTokenizer) -> None:
    place = folder_of(tmp_path, trained)
    write(
        place,
        added_tokens_dot_json={"<|im_start|>": 340, "<tool>": 341},
        special_tokens_map_dot_json={"additional_special_tokens": ["<|im_start|>"]},
    )
    ours = load(place)
    assert ours.encode("<|im_start|><tool>") == [340, 341]
    assert ours.decode([340, 341]) == "<tool>"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"merges_dot_txt": "a b c\n"}, "line 1 has 'a b c', which is not a pair of tokens"),
        ({"merges_dot_txt": "#version: 0.2\nzz zz\n"}, "line 2 has 'zz zz', which is not a pair"),
        ({"merges_dot_txt": "th\n"}, "line 1 has 'th', which is not a pair"),
        ({"vocab_dot_json": {"a": 1, "b": 1}}, "'a' and 'b' both have the number 1"),
        ({"vocab_dot_json": {"a": -1}}, "-1 is not a token id"),
        ({"vocab_dot_json": {"a": 10**10}}, "10000000000 is not a token id"),
        ({"vocab_dot_json": {"a": "1"}}, "'a' must have a number, not '1'"),
        ({"vocab_dot_json": {"a" * 5000: 1}}, "token 1 has 5000 characters"),
        (
            {"vocab_dot_json": {"a": 0}, "merges_dot_txt": ""},
            "not every byte is a token, and there is no",
        ),
        ({"vocab_dot_json": {}}, "has no tokens"),
        ({"vocab_dot_json": b"\xff"}, "not UTF-8"),
        (
            {"tokenizer_config_dot_json": {"tokenizer_class": "PreTrainedTokenizerFast"}},
            "the splitting pattern is unknown, since tokenizer_class in "
            "tokenizer_config.json is 'PreTrainedTokenizer'; supported: GPT2Tokenizer",
        ),
        (
            {"tokenizer_config_dot_json": {"added_tokens_decoder": {"x": {"content": "y"}}}},
            "the added token 'x' must have a number and a text",
        ),
        (
            {"tokenizer_config_dot_json": {"added_tokens_decoder": {"99999999": {"content": "y"}}}},
            "99999999 is not a token id",
        ),
        (
            {"tokenizer_config_dot_json": {"added_tokens_decoder": {"500": {"content": END}}}},
            "'<|endoftext|>' is added as token 500, and is token 2 of",
        ),
        ({"added_tokens_dot_json": {"x": 400, "y": 400}}, "token 400 is 'y', and 'x' too"),
    ],
)
def test_a_broken_file_says_what_is_wrong(
    tmp_path: Path, trained: RawTokenizer, files: dict[str, Any], reason: str
) -> None:
    place = write(folder_of(tmp_path, trained), **files)
    with pytest.raises(ModelError) as caught:
        read_tokenizer_files(place)
    assert reason in str(caught.value) and str(tmp_path) in str(caught.value)


def test_the_merges_must_be_there(tmp_path: Path, trained: RawTokenizer) -> None:
    place = folder_of(tmp_path, trained)
    (place / "merges.txt").unlink()
    with pytest.raises(ModelError, match=r"merges.txt does not exist, which vocab.json needs"):
        read_tokenizer_files(place)

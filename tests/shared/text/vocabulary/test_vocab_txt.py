"""``vocab.txt``: the tokens of transformers' class for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tandem.shared.errors import ModelError
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.shared.text.vocabulary.support import AWKWARD, load, write

WORDS = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es", "hello", "world", "a"),
    *("e", "你", "好", "1", "2", "##3", ",", ".", "!", "é", "Fox"),
)


def folder_of(folder: Path, **config: Any) -> Path:
    return write(folder, vocab_dot_txt="\n".join(WORDS) + "\n", tokenizer_config_dot_json=config)


@pytest.mark.parametrize("lower", [True, False])
def test_the_tokens_are_those_of_the_librarys_own(tmp_path: Path, lower: bool) -> None:
    ours = load(folder_of(tmp_path, do_lower_case=lower))
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    theirs = tokenizers.BertWordPieceTokenizer(vocabulary, lowercase=lower)
    for text in (*AWKWARD, "The Foxes, hello WORLD! 123 É [MASK]"):
        expected = theirs.encode(text)
        assert ours.encode(text) == expected.ids
        assert ours.decode(expected.ids) == theirs.decode(expected.ids)


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    ours = load(folder_of(tmp_path))
    assert ours.encode("[SEP] fox", add_special_tokens=False) == [3, WORDS.index("fox")]
    literal = ours.encode("[SEP] fox", add_special_tokens=False, literally=True)
    assert set(literal) == {1, WORDS.index("fox")}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"vocab_dot_txt": "a\nb\n"}, "has no unk_token"),
        (
            {"vocab_dot_txt": "a\n[UNK]\n"},
            "texts begin or end with the cls_token, but it is",
        ),
        ({"vocab_dot_txt": b"\xff\n"}, "not UTF-8"),
        ({"vocab_dot_txt": "a" * 3000}, "token 0 has 3000 characters"),
        ({"tokenizer_config_dot_json": {"do_basic_tokenize": False}}, "do_basic_tokenize is false"),
        (
            {"tokenizer_config_dot_json": {"tokenizer_class": "BertJapaneseTokenizer"}},
            "tokenizer_class in tokenizer_config.json is 'BertJapaneseTokenizer'; supported: Bert",
        ),
    ],
)
def test_a_broken_file_says_what_is_wrong(
    tmp_path: Path, files: dict[str, Any], reason: str
) -> None:
    place = write(folder_of(tmp_path), **files)
    with pytest.raises(ModelError) as caught:
        read_tokenizer_files(place)
    assert reason in str(caught.value)

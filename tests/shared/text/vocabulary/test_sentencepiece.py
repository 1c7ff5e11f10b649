"""Models of SentencePiece, whose tokens are those of its library: ``make_expected.py`` wrote
them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import sentencepiece_pb2 as pb
from tandem.shared.errors import ModelError
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.shared.text.vocabulary.support import AWKWARD, MODELS, in_steps, load, write

EXPECTED: dict[str, list[tuple[list[int], str]]] = json.loads(
    (MODELS / "expected.json").read_text()
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# A text that is one user-defined symbol, for which the library adds no space.
SYMBOLS_ALONE = {"<x>", " ", "\u2581", "  ", "   "}


def folder_of(folder: Path, model: str, name: str = "tokenizer.model", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copy(MODELS / f"{model}.model", folder / name)
    return write(folder, tokenizer_config_dot_json={"add_bos_token": True, **config})


def write_model(folder: Path, *pieces: tuple[str, float, int], **trainer: Any) -> Path:
    """A folder with a model of a few pieces."""
    proto = pb.ModelProto()
    for text, score, kind in pieces:
        proto.pieces.add(piece=text.encode(), score=score, type=kind)
    proto.trainer_spec.model_type = pb.TrainerSpec.BPE
    for key, value in trainer.items():
        setattr(proto.trainer_spec, key, value)
    return write(folder, tokenizer_dot_model=proto.SerializeToString())


ENDS = (("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL))


@pytest.mark.parametrize("model", EXPECTED)
def test_the_tokens_are_those_of_the_library(tmp_path: Path, model: str) -> None:
    ours = load(folder_of(tmp_path / "m", model))
    for text, (tokens, decoded) in zip(AWKWARD, EXPECTED[model], strict=True):
        if model == "symbols" and text in SYMBOLS_ALONE:
            continue
        ids = ours.encode(text, add_special_tokens=False, literally=True)
        assert ids == tokens, (text, [ours.texts.piece_of(token) for token in ids])
        # The library writes something for unknown characters.
        if model != "unigram":
            assert ours.decode(tokens) == decoded
        assert in_steps(ours, tokens) == ours.decode(tokens)


@pytest.mark.parametrize("model", EXPECTED)
def test_special_tokens_are_read_in_a_prompt_of_one_text_only(tmp_path: Path, model: str) -> None:
    ours = load(folder_of(tmp_path / "m", model))
    bos, eos = 1, 2
    tokens = ours.encode("<s>fox</s>", add_special_tokens=False)
    assert (tokens[0], tokens[-1]) == (bos, eos)
    chat = {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    ours = load(folder_of(tmp_path / "m", model, **chat))
    tokens = ours.encode_chat([{"role": "user", "content": "<s>fox</s> <0x0A>"}])
    assert [token for token in tokens if token in (bos, eos)] == [bos, eos]
    if model != "unigram":  # which lacks some of the characters
        assert ours.decode(tokens) == "<s>fox</s> <0x0A>"


def test_a_text_begins_and_ends_as_the_configuration_says(tmp_path: Path) -> None:
    for config, ends in (
        ({}, (True, False)),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True}, (True, True)),
        ({"add_bos_token": False}, (False, False)),
    ):
        ours = load(folder_of(tmp_path / "m", "llama", **config))
        tokens = ours.encode("the fox")
        assert (tokens[0] == 1, tokens[-1] == 2) == ends
        assert ours.decode(tokens) == "the fox"
        assert ours.special_tokens["eos_token"] == "</s>"


def test_only_the_first_text_gets_a_space_unless_the_class_is_legacy(tmp_path: Path) -> None:
    pieces = {}
    for legacy in (True, False):
        ours = load(folder_of(tmp_path / "m", "llama", legacy=legacy))
        tokens = ours.encode(" the</s>fox", add_special_tokens=False)
        pieces[legacy] = "".join(map(ours.texts.piece_of, tokens))
    assert pieces == {True: "▁▁the</s>▁fox", False: "▁▁the</s>fox"}


def test_user_defined_symbols_are_no_boundaries_of_texts(tmp_path: Path) -> None:
    ours = load(folder_of(tmp_path / "m", "symbols"))
    tokens = ours.encode("a<x>b  c", add_special_tokens=False)
    assert "".join(map(ours.texts.piece_of, tokens)) == "▁a<x>b▁▁c"
    assert ours.texts.special_ids == {0, 1, 2}  # they are shown in a text


def test_symbols_in_the_configuration_stay_symbols(tmp_path: Path) -> None:
    """As Gemma's are, which it lists as if they were found in the text as it is written."""
    proto = pb.ModelProto.FromString((MODELS / "gemma.model").read_bytes())
    symbols = {
        str(number): {"content": piece.piece.decode(), "normalized": False, "special": False}
        for number, piece in enumerate(proto.pieces)
        if piece.type == USER_DEFINED
    }
    ours = load(folder_of(tmp_path / "m", "gemma", added_tokens_decoder=symbols))
    for text, (tokens, _) in zip(AWKWARD, EXPECTED["gemma"], strict=True):
        assert ours.encode(text, add_special_tokens=False, literally=True) == tokens


def test_tokens_that_follow_the_pieces_are_no_part_of_the_vocabulary(tmp_path: Path) -> None:
    """Some models have no rows in their embedding for them, and are served all the same."""
    size = len(pb.ModelProto.FromString((MODELS / "llama.model").read_bytes()).pieces)
    added_tokens = {
        str(size): {"content": "<a>"},
        str(size + 1): {"content": "<b>", "special": True},
    }
    ours = load(folder_of(tmp_path / "m", "llama", added_tokens_decoder=added_tokens))
    assert ours.encode("<b><a>", add_special_tokens=False) == [size + 1, size]
    assert (ours.base_vocab_size, ours.vocab_size) == (size, size + 2)


def test_a_configuration_names_tokens_that_stand_for_no_text(tmp_path: Path) -> None:
    added_tokens = {
        "2": {"content": "<|end|>", "special": True},
        "3": {"content": "<|start|>", "special": True, "normalized": True},
        "10000": {"content": "<tool>", "special": False},
    }
    ours = load(
        folder_of(tmp_path / "m", "llama", added_tokens_decoder=added_tokens, eos_token="<|end|>")
    )
    assert ours.encode("<|start|><|end|><tool>", add_special_tokens=False) == [3, 2, 10000]
    assert ours.decode([3, 2, 10000]) == "<tool>"


@pytest.mark.parametrize(
    ("name", "first", "last", "ids"),
    [
        ("T5Tokenizer", [], ["</s>"], {"<extra_id_0>": -1, "<extra_id_99>": -100}),
        ("XLMRobertaTokenizer", ["<s>"], ["</s>"], {"<pad>": 1, "<unk>": 3, "<mask>": -1}),
    ],
)
def test_classes_have_numbers_of_their_own(
    tmp_path: Path, name: str, first: list[str], last: list[str], ids: dict[str, int]
) -> None:
    ours = load(folder_of(tmp_path / "m", "unigram", "spiece.model", tokenizer_class=name))
    plain = load(folder_of(tmp_path / "plain", "unigram"))
    expected = [plain.texts.piece_of(token) for token in plain.encode("the fox")[1:]]
    tokens = [ours.texts.piece_of(token) for token in ours.encode("the fox")]
    assert tokens == [*first, *expected, *last]
    for text, number in ids.items():
        assert ours.encode(text, add_special_tokens=False) == [number % ours.vocab_size]


def test_albert_lowers_letters_and_drops_accents(tmp_path: Path) -> None:
    pieces = [*ENDS, ("[CLS]", 0.0, CONTROL), ("[SEP]", 0.0, CONTROL)]
    letters = [(letter, -1.0, NORMAL) for letter in "\u2581ecaf"]
    place = write_model(tmp_path, *pieces, *letters, model_type=pb.TrainerSpec.UNIGRAM)
    write(place, tokenizer_config_dot_json={"tokenizer_class": "AlbertTokenizer"})
    ours = load(place)
    text = [ours.texts.piece_of(token) for token in ours.encode("Café")]
    assert text == ["[CLS]", "\u2581", "c", "a", "f", "e", "[SEP]"]


@pytest.mark.parametrize(
    ("pieces", "trainer", "reason"),
    [
        ((), {}, "has no pieces, so it is not a SentencePiece model"),
        (ENDS[1:], {}, "has 0 unknown pieces; supported: one"),
        ((*ENDS, ("a", 0.0, NORMAL), ("a", 1.0, NORMAL)), {}, "tokens 3 and 4 are the same, 'a'"),
        ((*ENDS, ("", 0.0, NORMAL)), {}, "token 3 is empty"),
        ((*ENDS, ("a" * 2000, 0.0, NORMAL)), {}, "token 3 has 2000 characters"),
        ((*ENDS, ("a", float("nan"), NORMAL)), {}, "has the score nan for piece 3"),
        ((*ENDS, ("a", 0.0, UNUSED)), {}, "has piece 3 of the type UNUSED"),
        ((*ENDS, ("<0xZZ>", 0.0, BYTE)), {}, "has the byte '<0xZZ>', number 3"),
        (ENDS, {"byte_fallback": True}, "byte_fallback needs all 256 bytes as pieces"),
        (ENDS, {"model_type": pb.TrainerSpec.WORD}, "is neither a BPE nor a Unigram model"),
        (ENDS, {"treat_whitespace_as_suffix": True}, "has spaces after words"),
    ],
)
def test_a_model_that_cannot_be_read_says_why(
    tmp_path: Path, pieces: Any, trainer: dict[str, Any], reason: str
) -> None:
    place = write_model(tmp_path, *pieces, **trainer)
    with pytest.raises(ModelError) as caught:
        read_tokenizer_files(place)
    assert str(caught.value).startswith(f"{place / 'tokenizer.model'}: {reason}")


def test_text_that_is_not_unicode_is_named(tmp_path: Path) -> None:
    proto = pb.ModelProto()
    proto.pieces.add(piece=b"\xff")
    proto.trainer_spec.model_type = pb.TrainerSpec.BPE
    write(tmp_path, tokenizer_dot_model=proto.SerializeToString())
    with pytest.raises(ModelError, match="has a piece that is not UTF-8, number 0"):
        read_tokenizer_files(tmp_path)


def test_a_truncated_model_says_so(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_dot_model=(MODELS / "llama.model").read_bytes()[:-3])
    with pytest.raises(ModelError, match="is truncated or not a SentencePiece model"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize(
    ("model", "config", "reason"),
    [
        ("llama", {"tokenizer_class": "OwnTokenizer"}, "'OwnTokenizer': set add_bos_token and"),
        ("unigram", {"tokenizer_class": None}, "is None: set add_bos_token and add_eos_token"),
        ("llama", {"add_bos_token": "yes"}, "add_bos_token is 'yes'; supported: true or false"),
        ("llama", {"tokenizer_class": 5}, "tokenizer_class is 5; must be a string"),
        (
            "llama",
            {"add_bos_token": True, "bos_token": "<none>"},
            "texts begin or end with the bos_token, but it is '<none>', which is not a token",
        ),
    ],
)
def test_what_is_around_a_text_is_never_guessed(
    tmp_path: Path, model: str, config: dict[str, Any], reason: str
) -> None:
    place = folder_of(tmp_path / "m", model)
    write(place, tokenizer_config_dot_json=config)
    with pytest.raises(ModelError) as caught:
        read_tokenizer_files(place)
    assert reason in str(caught.value)


def test_without_the_package_that_reads_it_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf.message", None)
    with pytest.raises(ModelError) as caught:
        read_tokenizer_files(folder_of(tmp_path / "m", "llama"))
    assert "needs the package protobuf" in str(caught.value)
    assert "pip install '.[serve]'" in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_without_any_configuration_is_read_as_llamas(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "m", "llama")
    (place / "tokenizer_config.json").unlink()
    ours = load(place)
    assert isinstance(ours, Tokenizer) and ours.encode("fox")[0] == 1

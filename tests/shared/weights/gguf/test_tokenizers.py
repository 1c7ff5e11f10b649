"""Tokenizers of GGUF files, against those that transformers builds from the same metadata."""

from __future__ import annotations

import json
import os
import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tandem.shared.errors import ModelError
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.shared.text.vocabulary.charsmap import check_charsmap
from tandem.shared.weights.gguf.splitting import RULES
from tandem.shared.weights.source import open_source
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import finish, write_gguf

CORPUS = Path(__file__).read_text() + "Sie können's nicht, 12345 Bäume. It's 6 o'clock; WE'LL go. "
TEXTS = (
    "Hello world",
    "It's 12345 o'clock,  isn't it?\n\n\tDON'T   stop!!  ",
    "def f(x: int) -> list[str]:\n    return [str(x)] * 100\n\n\n",
    "Grüße aus München, 東京 и Москва 🙂 é e\u0301",
    "\r\nmixed\rends 1 22 333 4444 // and --- rules",
    "",
)
# Splits of which transformers knows the pattern.
KNOWN = ("gpt-2", *GGUF_PRE_TOKENIZER_SPLITS)
# A text in parts, by one name of each other rule. Those of llama.cpp's patterns are equal, but for
# Kimi's, which it has no pattern for.
SPLIT = "Ab's aB 12345 x7\n\n 你好y!a don'T  été?\r\n(!)"
PARTS = {
    "default": "Ab|'|s| aB| |123|45| x|7|\n\n| 你好y|!|a| don|'|T| | été|?|\r\n|(!)",
    "smollm": "Ab|'s| aB| |1|2|3|4|5| x|7|\n\n| 你好y|!|a| don|'|T| | été|?|\r|\n|(!)",
    "minicpm5": "Ab|'s| aB| |123|45| x|7|\n\n| 你好y|!a| don|'T| | été|?\r\n|(!)",
    "jais-2": "Ab|'s| aB| |123|45| x|7|\n\n| 你好y|!a| don|'T| | été|?\r\n|(!)",
    "ufakzeka": "Ab|'s| aB| |1|2|3|4|5| x|7|\n\n| 你好y|!a| don|'T| | été|?\r\n|(!)",
    "laguna": "Ab|'s| aB| |1|2|3|4|5| x|7|\n\n| 你好y|!a| don|'T| | été|?\r|\n|(!)",
    "seed-coder": "Ab|'s| aB| |1|2|3|4|5| x|7|\n\n| 你好y|!a| don|'T| | été|?|\r\n|(!)",
    "exaone-moe": "Ab|'s| aB| |1|2|3|4|5| x|7|\n\n| 你好y|!a don|'T| | été|?\r|\n|(!)",
    "bailingmoe": "Ab|'s| aB| |1|2|3|4|5| x|7|\n\n| 你好y|!a| don|'T| | été|?\r\n|(!)",
    "tiny_aya": "Ab's| a|B| |12|345| x|7|\n\n| 你好y|!a| don'T| | été|?\r\n|(!)",
    "kimi-k2": "Ab's| a|B| |123|45| x|7|\n\n| |你好|y|!a| don'T| | été|?\r\n|(!)",
    "youtu": "Ab's| a|B| |1|2|3|4|5| x|7|\n\n| |你好|y|!a| don'T| | été|?\r\n|(!)",
    "deepseek-llm": "Ab|'|s| aB| |12345| x|7|\n|\n| |你好|y|!|a| don|'|T| | é|t|é|?|\r|\n|(!)",
    "deepseek-coder": "Ab|'|s| aB| |1|2|3|4|5| x|7|\n|\n| |你好|y|!|a| don|'|T| | été|?|\r|\n|(!)",
    "deepseek-v3": "Ab|'s| aB| |123|45| x|7|\n\n| |你好|y|!a| don|'T| | été|?\r\n|(!)",
    "spark2_5": "Ab|'s| aB| |1|2|3|4|5| x|7|\n|\n| |你好|y|!a| don|'T| | été|?|\r|\n|(!)",
    "afmoe": "Ab|'s| aB| |12|345| x|7|\n\n| |你好|y|!a| don|'T| | été|?\r\n|(!)",
    "falcon": "Ab|'|s| aB| |123|45| x|7|\n\n| 你好y|!|a| don|'|T| | été|?|\r\n|(!)",
    "poro-chat": "Ab's| aB| 12345| x7|\n\n| 你好y|!|a| don'T| | été|?\r\n(!)",
    "viking": "Ab's| aB| |1|2|3|4|5| x|7|\n\n| 你好y|!|a| don'T| | été|?\r\n(!)",
    "superbpe": "Ab's aB |12|345| x|7|\n\n 你好y!a don'T  été?\r\n(!)",
    "chameleon": "Ab|'|s| aB| |1|2|3|4|5| x|7|\n|\n| 你好y|!|a| don|'|T|  |été|?|\r|\n|(|!|)",
}
# What llama.cpp's repository has in models/: vocabularies, with texts and their tokens.
VOCABULARIES = sorted(
    Path(os.environ.get("LLAMA_CPP", "absent"), "models").glob("ggml-vocab-*.gguf")
)


def load_tokenizer(file: Path) -> Tokenizer:
    return Tokenizer.load(open_source(file).tokenizer_files())


def oracle(file: Path) -> tokenizers.Tokenizer:
    architecture, values, _ = get_gguf_tokenizer(str(file))
    return convert_gguf_tokenizer(architecture, values)[0]


def writer_for(file: Path, architecture: str = "llama") -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(64)
    return writer


def byte_pairs(file: Path, rule: str, **flags: Any) -> Path:
    """A file with a byte-pair vocabulary that was learned from words and spaces."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator(CORPUS.split(". "), trainer)
    entries = sorted(raw.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [token for token, _ in entries] + ["<|begin|>", "<|end|>", "<think>"]
    writer = writer_for(file)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(entries) + [3, 3, 4])
    merges = json.loads(raw.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(len(entries))
    writer.add_eos_token_id(len(entries) + 1)
    for name, value in flags.items():
        getattr(writer, f"add_{name}")(value)
    finish(writer)
    return file


def pieces(file: Path, architecture: str, prefixed: bool) -> Path:
    """A file with a SentencePiece vocabulary: bytes, characters, and parts of words."""
    words = CORPUS.replace("\n", " ").split(" ")
    parts = {word[:end] for word in words for end in range(2, min(9, len(word)) + 1)}
    parts |= {"\u2581" + part for part in parts} | {"\u2581\u2581", "\u2581\u2581\u2581"}
    single = dict.fromkeys("\u2581" + "".join(sorted(set(CORPUS) - {" "})))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(parts)]
    tokens += [each for each in single if each not in parts]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    spaces = tokens.index("\u2581\u2581")
    tokens[spaces], kinds[spaces] = "  ", 4 if architecture.startswith("gemma") else 1
    if not architecture.startswith("gemma"):
        tokens[spaces] = "\u2581\u2581"
    writer = writer_for(file, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores([-float(len(tokens) - len(token)) for token in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefixed)
    finish(writer)
    return file


@pytest.mark.parametrize("rule", KNOWN)
def test_byte_pairs_are_those_of_transformers(tmp_path: Path, rule: str) -> None:
    file = byte_pairs(tmp_path / "model.gguf", rule, add_bos_token=False)
    ours, theirs = load_tokenizer(file), oracle(file)
    for text in TEXTS:
        values = text.replace("e\u0301", "é")  # some rules normalise
        assert ours.encode(values) == theirs.encode(values, add_special_tokens=False).ids
        assert ours.decode(ours.encode(values)) == values


@pytest.mark.parametrize("rule", PARTS)
def test_texts_are_split_by_rules(rule: str) -> None:
    *splits, _ = RULES[rule].pre_tokenizer()["pretokenizers"]
    split = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(each["pattern"]["Regex"]), "isolated")
            for each in splits
        ]
    )
    assert "|".join(part for part, _ in split.pre_tokenize_str(SPLIT)) == PARTS[rule]


def test_every_rule_is_tested() -> None:
    tested = {RULES[name].patterns for name in (*KNOWN, *PARTS)}
    assert {rule.patterns for rule in RULES.values()} <= tested


@pytest.mark.skipif(not VOCABULARIES, reason="LLAMA_CPP is no folder of its source")
@pytest.mark.parametrize("file", VOCABULARIES, ids=lambda file: file.stem)
def test_texts_of_llama_cpp_are_its_tokens(
    file: Path, record_property: Callable[[str, object], None]
) -> None:
    ours = load_tokenizer(file)
    values = file.with_name(f"{file.name}.inp")
    if not values.exists():  # nobody has said what its tokens are
        assert ours.decode(ours.encode("Hello world")) == "Hello world"
        return
    texts = values.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = file.with_name(f"{file.name}.out").read_text().splitlines()
    files = open_source(file).tokenizer_files()
    composed = json.loads(files.tokenizer)["normalizer"] == {"type": "NFC"}
    assert len(lines) > 40
    tried = {
        text: [int(token) for token in line.split()]
        for text, line in zip(texts, lines, strict=False)  # a separator ends the texts too
        # llama.cpp composes no characters where the tokenizer of a model does.
        if not composed or unicodedata.is_normalized("NFC", text)
    }
    others = [text for text in tried if ours.encode(text, add_special_tokens=False) != tried[text]]
    record_property("texts", len(tried))
    record_property("equal", len(tried) - len(others))
    assert not others


def test_digits_are_split_before_words(tmp_path: Path) -> None:
    ours = load_tokenizer(byte_pairs(tmp_path / "model.gguf", "smollm"))
    tokens = ours.encode(" 2024x")
    assert [ours.decode([token]) for token in tokens][-5:] == ["2", "0", "2", "4", "x"]


@pytest.mark.parametrize(
    ("architecture", "prefixed"),
    [("llama", True), ("phi3", True), ("gemma2", False), ("gemma3", False)],
)
def test_pieces_are_those_of_transformers(
    tmp_path: Path, architecture: str, prefixed: bool
) -> None:
    file = pieces(tmp_path / "model.gguf", architecture, prefixed)
    ours, theirs = load_tokenizer(file), oracle(file)
    for text in TEXTS[1:-1]:
        tokens = ours.encode(text, add_special_tokens=False)
        assert tokens == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(tokens) == text


def written_pieces(file: Path, model: str, tokens: list[str], types: list[int]) -> gguf.GGUFWriter:
    writer = writer_for(file)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    return writer


def test_words_are_the_longest_pieces_of_bert(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[unused0]"]
    tokens += ["\u2581hello", "\u2581play", "ing", "ed", "\u2581!", "\u2581ete", "\u2581你"]
    for cased in (False, True):
        file = tmp_path / f"{cased}.gguf"
        writer = written_pieces(file, "bert", tokens, [3, 3, 3, 3, 1] + [1] * 7)
        for name, number in (("unknown", 1), ("cls", 2), ("seperator", 3)):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
        if cased:
            writer.add_bool("tokenizer.ggml.normalizer.lowercase", False)
        finish(writer)
        ours = load_tokenizer(file)
        assert ours.encode("hello playing played! 你[SEP]") == [2, 5, 6, 7, 6, 8, 9, 11, 3, 3]
        assert ours.encode("Hello été", add_special_tokens=False) == ([1, 1] if cased else [5, 10])
        assert ours.decode([2, 6, 7, 9, 3]) == "playing!"


def test_words_are_the_likeliest_pieces(tmp_path: Path) -> None:
    tokens = ["<pad>", "</s>", "<unk>", "\u2581", "\u2581a", "b", "ab", "\u2581ab", "\u2581abb"]
    scores = [0.0, 0.0, 0.0, -2.0, -1.0, -1.0, -1.0, -1.5, -9.0]
    writer = written_pieces(tmp_path / "model.gguf", "t5", tokens, [3, 3, 2] + [1] * 6)
    writer.add_token_scores(scores)
    for name, number in (("pad", 0), ("eos", 1), ("unk", 2)):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_remove_extra_whitespaces(True)
    finish(writer)
    ours = load_tokenizer(tmp_path / "model.gguf")
    theirs = oracle(tmp_path / "model.gguf")
    for text in ("ab", "abb  a", " abab", "a\nb", "cab"):
        tokens_of = ours.encode(text)
        assert tokens_of[-1] == 1
        assert tokens_of[:-1] == theirs.encode(text, add_special_tokens=False).ids, text
    assert ours.encode("abb") == [7, 5, 1]
    assert ours.decode(ours.encode("ab a")) == "ab a"


def test_merges_of_pieces_are_read_from_the_file(tmp_path: Path) -> None:
    """As in Gemma 4's files, whose characters are no bytes, and whose spaces merge."""
    pieces_of = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*pieces_of, "\u2581", "a", "é", "\n", "\n\n", "a\u2581", "a\u2581a", "\u2581a"]
    for model, rule in (("gemma4", None), ("gpt2", "sarvam-moe")):
        file = tmp_path / f"{model}.gguf"
        writer = written_pieces(file, model, tokens, [2] + [6] * 256 + [1] * 8)
        if rule is not None:
            writer.add_tokenizer_pre(rule)
        writer.add_token_merges(["a \u2581", "\n \n", "a\u2581 a", "\u2581 a"])
        writer.add_unk_token_id(0)
        finish(writer)
        ours = load_tokenizer(file)
        first = len(pieces_of)
        assert ours.encode("a a\n\né a") == [first + each for each in (6, 4, 2, 7)]
        assert ours.encode("ü") == [1 + 0xC3, 1 + 0xBC]
        assert ours.decode(ours.encode("a aü\n\n a ")) == "a aü\n\n a "


def test_a_text_begins_and_ends_as_the_file_says(tmp_path: Path) -> None:
    for rule, flags, bos, eos in (
        ("qwen2", {}, 0, 0),
        ("llama-bpe", {}, 1, 0),
        ("llama-bpe", {"add_bos_token": False}, 0, 0),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, 1, 1),
    ):
        file = byte_pairs(tmp_path / "model.gguf", rule, **flags)
        ours = load_tokenizer(file)
        tokens = ours.encode("Hello")
        first, last = ours.special_tokens["bos_token"], ours.special_tokens["eos_token"]
        assert (ours.decode(tokens[:1], skip_special_tokens=False) == first) == bool(bos)
        assert (ours.decode(tokens[-1:], skip_special_tokens=False) == last) == bool(eos)
        assert ours.decode(tokens) == "Hello"


def test_a_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    templates = [{"name": name, "template": name} for name in ("default", "tool_use")]
    ours = load_tokenizer(byte_pairs(tmp_path / "model.gguf", "qwen2", chat_template=templates))
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == "default"
    assert ours.apply_chat_template(messages, tools=[{}]) == "tool_use"


def test_the_template_and_the_special_tokens_come_from_the_file(tmp_path: Path) -> None:
    folder = tiny_models.cached("qwen3", tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf")
    ours, expected = load_tokenizer(file), Tokenizer.load(read_tokenizer_files(folder))
    assert ours.vocab_size == expected.vocab_size == 259
    messages = [{"role": "user", "content": "Say <|im_end|> twice."}]
    assert ours.encode_chat(messages) == expected.encode_chat(messages)
    assert open_source(file).end_tokens() == [256, 258]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("model", "rwkv", "tokenizer.ggml.model is 'rwkv'; supported: gpt2, llama, gemma4, bert"),
        ("pre", "unheard-of", "tokenizer.ggml.pre is 'unheard-of', which is unknown here"),
        ("pre", 7, "tokenizer.ggml.pre is 7"),
        ("tokens", [], "tokenizer.ggml.tokens is missing or empty; use another"),
        ("tokens", [1, 2], "tokenizer.ggml.tokens is not a list of str"),
        ("token_type", [1], "tokenizer.ggml.token_type has 1 entries for 259"),
        (
            "merges",
            ["a b", "ab zz"],
            "tokenizer.ggml.merges has 'a b', which is not a pair of tokens",
        ),
        ("merges", ["ab"], "has 'ab ', which is not a pair"),
        ("bos_token_id", 1 << 31, "bos_token_id is 2147483648; the vocabulary has 259 tokens"),
        ("bos_token_id", "one", "bos_token_id is 'one'"),
        ("add_bos_token", 1, "add_bos_token is 1; supported: true or false"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_says_why(
    tmp_path: Path, key: str, value: Any, reason: str
) -> None:
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<pad>"]
    source = open_source(byte_pairs(tmp_path / "model.gguf", "qwen2"))
    metadata = source.header.metadata  # type: ignore[attr-defined]
    metadata |= {"tokenizer.ggml.tokens": tokens}
    metadata |= {"tokenizer.ggml.token_type": [1] * 256 + [3] * 3}
    metadata |= {"tokenizer.ggml.merges": [], "tokenizer.ggml.bos_token_id": 256}
    metadata |= {"tokenizer.ggml.eos_token_id": 257, f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelError) as caught:
        source.tokenizer_files()
    assert reason in str(caught.value)
    otherwise = "use the model's folder with safetensors, whose tokenizer.json has the rule"
    assert (otherwise in str(caught.value)) == (key in ("model", "pre"))


def test_tokens_without_the_merges_that_make_them_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = written_pieces(file, "gpt2", ["a", "b", "ab", "<s>"], [1, 1, 1, 3])
    writer.add_tokenizer_pre("kimi-k2")
    finish(writer)
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.merges is missing"):
        open_source(file).tokenizer_files()


def test_a_table_of_characters_that_would_panic_is_refused(tmp_path: Path) -> None:
    """A trie whose searches leave it, and texts that are none, crash the library that reads it."""
    inner = [0] * 256
    inner[0] = 1 << 31  # a value, the place of the first text
    root = 256 << 10  # its children begin at 256
    good = table([root, *[0] * 255, *inner], b"x\0")
    assert check_charsmap(good) is None
    for bad in (
        b"",
        good[:-1],
        good[:600],
        table([], b"x\0"),
        table([root, *[0] * 255], b"x\0"),  # children beyond the end
        table([256 << 10 | 1 << 8, *[0] * 255, 1 << 31 | 2, *[0] * 255], b"x\0"),
        table([256 << 10 | 1 << 8, *[0] * 255, 1 << 31 | 1, *[0] * 255], "é\0".encode()),
        table([root, *[0] * 255, *inner], b"\xff\0"),
        table([root, *[0] * 255, *inner], b"x"),
    ):
        assert check_charsmap(bad)
    file = tmp_path / "model.gguf"
    writer = written_pieces(file, "t5", ["<pad>", "</s>", "<unk>"], [3, 3, 2])
    writer.add_token_scores([0.0, 0.0, 0.0])
    writer.add_precompiled_charsmap(good[:-1])
    finish(writer)
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.precompiled_charsmap is truncated"):
        open_source(file).tokenizer_files()


def table(units: list[int], texts: bytes) -> bytes:
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts

"""Tokenizers of GGUF files, against those that transformers builds from the same metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from tandem.shared.errors import ModelError
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.shared.weights.gguf.splitting import RULES
from tandem.shared.weights.source import open_source
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf

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
KNOWN = sorted(set(RULES) - {"smollm"})


def loaded(file: Path) -> Tokenizer:
    return Tokenizer.load(open_source(file).tokenizer_files())


def oracle(file: Path) -> tokenizers.Tokenizer:
    architecture, values, _ = get_gguf_tokenizer(str(file))
    return convert_gguf_tokenizer(architecture, values)[0]


def writer_for(file: Path, architecture: str = "llama") -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(64)
    return writer


def written(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    listed = sorted(raw.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [token for token, _ in listed] + ["<|begin|>", "<|end|>", "<think>"]
    writer = writer_for(file)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(listed) + [3, 3, 4])
    merges = json.loads(raw.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(len(listed))
    writer.add_eos_token_id(len(listed) + 1)
    for name, value in flags.items():
        getattr(writer, f"add_{name}")(value)
    written(writer)
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
    written(writer)
    return file


@pytest.mark.parametrize("rule", KNOWN)
def test_byte_pairs_are_those_of_transformers(tmp_path: Path, rule: str) -> None:
    file = byte_pairs(tmp_path / "model.gguf", rule, add_bos_token=False)
    ours, theirs = loaded(file), oracle(file)
    for text in TEXTS:
        given = text.replace("e\u0301", "é")  # some rules normalise
        assert ours.encode(given) == theirs.encode(given, add_special_tokens=False).ids
        assert ours.decode(ours.encode(given)) == given


def test_digits_are_split_before_words(tmp_path: Path) -> None:
    ours = loaded(byte_pairs(tmp_path / "model.gguf", "smollm"))
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
    ours, theirs = loaded(file), oracle(file)
    for text in TEXTS[1:-1]:
        found = ours.encode(text, add_special_tokens=False)
        assert found == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(found) == text


def test_a_text_begins_and_ends_as_the_file_says(tmp_path: Path) -> None:
    for rule, flags, bos, eos in (
        ("qwen2", {}, 0, 0),
        ("llama-bpe", {}, 1, 0),
        ("llama-bpe", {"add_bos_token": False}, 0, 0),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, 1, 1),
    ):
        file = byte_pairs(tmp_path / "model.gguf", rule, **flags)
        ours = loaded(file)
        tokens = ours.encode("Hello")
        first, last = ours.special_tokens["bos_token"], ours.special_tokens["eos_token"]
        assert (ours.decode(tokens[:1], skip_special_tokens=False) == first) == bool(bos)
        assert (ours.decode(tokens[-1:], skip_special_tokens=False) == last) == bool(eos)
        assert ours.decode(tokens) == "Hello"


def test_a_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": name, "template": name} for name in ("default", "tool_use")]
    ours = loaded(byte_pairs(tmp_path / "model.gguf", "qwen2", chat_template=named))
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == "default"
    assert ours.apply_chat_template(messages, tools=[{}]) == "tool_use"


def test_the_template_and_the_special_tokens_come_from_the_file(tmp_path: Path) -> None:
    folder = tiny_models.cached("qwen3", tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf")
    ours, expected = loaded(file), Tokenizer.load(read_tokenizer_files(folder))
    assert ours.vocab_size == expected.vocab_size == 259
    messages = [{"role": "user", "content": "Say <|im_end|> twice."}]
    assert ours.encode_chat(messages) == expected.encode_chat(messages)
    assert open_source(file).end_tokens() == [256, 258]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("model", "bert", "tokenizer.ggml.model is 'bert'; supported: 'gpt2' and 'llama'"),
        ("pre", "unheard-of", "tokenizer.ggml.pre is 'unheard-of'; supported: gpt-2"),
        ("pre", 7, "tokenizer.ggml.pre is 7"),
        ("tokens", [], "tokenizer.ggml.tokens is missing or empty"),
        ("tokens", [1, 2], "tokenizer.ggml.tokens is not a list of str"),
        ("token_type", [1], "tokenizer.ggml.token_type has 1 entries for 259"),
        ("merges", ["a b", "ab zz"], "tokenizer.ggml.merges has 'a b', which is no pair of tokens"),
        ("merges", ["ab"], "has 'ab', which is no pair"),
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
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 259}
    metadata |= {"tokenizer.ggml.merges": [], "tokenizer.ggml.bos_token_id": 256}
    metadata |= {"tokenizer.ggml.eos_token_id": 257, f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelError) as caught:
        source.tokenizer_files()
    assert reason in str(caught.value)
    otherwise = "use the model's folder with safetensors, whose tokenizer.json has the rule"
    assert (otherwise in str(caught.value)) == (key in ("model", "pre"))

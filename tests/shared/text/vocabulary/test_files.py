"""Which file of a folder counts, and files that are made to be expensive."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proto import sentencepiece_pb2 as pb
from tandem.shared.engine.structured.grammar import GrammarError
from tandem.shared.engine.structured.llguidance_backend import LLGuidanceBackend
from tandem.shared.engine.structured.params import GrammarKey
from tandem.shared.errors import ModelError
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.shared.text.vocabulary import tokenizer_json
from tandem.shared.weights.remote_files import DESCRIPTION
from tandem.shared.weights.safetensors_folder import SafetensorsFolder
from tandem.tests.shared.text.vocabulary.support import (
    MERGED,
    MODELS,
    byte_tokens,
    load,
    ranks,
    spell_bytes,
    tekken,
    write,
)
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.fuzz import cheap

TOKENS = byte_tokens(*MERGED)
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "fox")


@cache
def every_kind() -> dict[str, Any]:
    """A file of each kind, the first of which counts."""
    vocabulary = {spell_bytes(token): number for number, token in enumerate(TOKENS)}
    return {
        "tekken.json": json.dumps(tekken("v7")).encode(),
        "tiktoken.model": ranks(TOKENS).encode(),
        "qwen.tiktoken": ranks(TOKENS).encode(),
        "tokenizer.model": (MODELS / "llama.model").read_bytes(),
        "spiece.model": (MODELS / "unigram.model").read_bytes(),
        "vocab.json": json.dumps(vocabulary).encode(),
        "vocab.txt": "\n".join(WORDS).encode(),
    }


def test_the_first_of_several_files_counts(tmp_path: Path) -> None:
    tiny_models.write_tokenizer(tmp_path)
    write(tmp_path, tokenizer_config_dot_json={"add_bos_token": False}, merges_dot_txt="t h\n")
    kinds = every_kind()
    for name, content in kinds.items():
        (tmp_path / name).write_bytes(content)
    for name in ("tokenizer.json", *kinds):
        assert Path(read_tokenizer_files(tmp_path).origin).name == name
        (tmp_path / name).unlink()
    with pytest.raises(ModelError) as caught:
        read_tokenizer_files(tmp_path)
    assert (
        "a model folder needs a tokenizer: download it too (one of tokenizer.json, tekken.json"
        in (str(caught.value))
    )


def test_all_files_of_a_tokenizer_are_downloaded() -> None:
    for name in (*every_kind(), "merges.txt", "sentencepiece.bpe.model"):
        assert name in DESCRIPTION or name.endswith(".json")


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model", "tokenizer.model", "vocab.json"])
def test_outputs_follow_grammars_with_each_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(every_kind()[name])
    write(tmp_path, merges_dot_txt="t h\n", tokenizer_config_dot_json={})
    files = read_tokenizer_files(tmp_path)
    ours = Tokenizer.load(files)
    backend = LLGuidanceBackend(files, ours.vocab_size, [2])
    matcher = backend.compile(GrammarKey("regex", "the fox é")).matcher()
    tokens = ours.encode("the fox é", add_special_tokens=False)
    if name == "tokenizer.model":  # the space before a text is no part of an output
        tokens = [token for token in tokens if token != tokens[0]]
        tokens = backend.encode("the fox é")
    matcher.advance(tokens)
    assert matcher.accepting


def test_a_tokenizer_of_words_has_no_grammars(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    with pytest.raises(GrammarError, match="the model's tokenizer is of an unsupported kind"):
        LLGuidanceBackend(read_tokenizer_files(tmp_path), len(WORDS), [3])


@pytest.mark.parametrize(
    ("name", "end"), [("tekken.json", [2]), ("tokenizer.model", [2]), ("vocab.txt", [])]
)
def test_a_node_knows_the_token_that_ends_a_text(tmp_path: Path, name: str, end: list[int]) -> None:
    (tmp_path / name).write_bytes(every_kind()[name])
    assert SafetensorsFolder(tmp_path).end_tokens() == end


def test_the_number_in_the_configuration_is_enough(tmp_path: Path) -> None:
    added_tokens = {"7": {"content": "<|end|>"}}
    config = {"eos_token": "<|end|>", "added_tokens_decoder": added_tokens}
    write(tmp_path, tokenizer_config_dot_json=config, tokenizer_dot_model=b"?")
    assert SafetensorsFolder(tmp_path).end_tokens() == [7]


def test_a_node_runs_without_a_tokenizer(tmp_path: Path) -> None:
    assert SafetensorsFolder(tmp_path).end_tokens() == []
    (tmp_path / "tokenizer.model").write_bytes(b"?")
    assert SafetensorsFolder(tmp_path).end_tokens() == []


@pytest.mark.parametrize(
    ("name", "max_mib"),
    [("tokenizer.json", 128), ("tekken.json", 32), ("tokenizer.model", 16), ("vocab.txt", 32)],
)
def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, name: str, max_mib: int) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate((max_mib << 20) + 1)
    with cheap(1), pytest.raises(ModelError, match=rf"of a model has at most {max_mib} MiB"):
        read_tokenizer_files(tmp_path)


def test_an_lfs_pointer_says_so_for_each_kind(tmp_path: Path) -> None:
    for name in every_kind():
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid 0\n")
        with pytest.raises(ModelError, match=r"is a Git LFS pointer"):
            read_tokenizer_files(tmp_path)
        (tmp_path / name).unlink()


def test_tokens_that_are_made_in_too_many_ways_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_json, "MAX_MERGES", 1000)
    many = byte_tokens(*("a" * length for length in range(2, 60)))
    (tmp_path / "tiktoken.model").write_text(ranks(many))
    with pytest.raises(ModelError, match=r"merged from others in more than 1000 ways"):
        read_tokenizer_files(tmp_path)


def test_more_tokens_than_any_model_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.shared.text.vocabulary import tiktoken, vocab_txt

    monkeypatch.setattr(tiktoken, "MAX_TOKENS", 100)
    monkeypatch.setattr(vocab_txt, "MAX_TOKENS", 3)
    for name in ("tiktoken.model", "vocab.txt"):
        (tmp_path / name).write_bytes(every_kind()[name])
        with pytest.raises(ModelError, match=r"has more than \d+ tokens"):
            read_tokenizer_files(tmp_path)
        (tmp_path / name).unlink()


def test_the_longest_tokens_cost_little(tmp_path: Path) -> None:
    """Each can be merged from others in a thousand ways; all cuts of all of them are tried."""
    tokens = byte_tokens(*(f"{number:04}" * 256 for number in range(400)))
    (tmp_path / "tiktoken.model").write_text(ranks(tokens))
    with cheap(10):
        read_tokenizer_files(tmp_path)


def one_line(folder: Path) -> None:
    """Load a folder: the tokenizer, or an error of one line."""
    try:
        ours = load(folder)
    except ModelError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
        return
    text = "the <s> fox é e\u0301 \uff21 \u3000 日本"
    assert isinstance(ours.decode(ours.encode(text, literally=True)), str)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """The content with some bytes replaced, left out or put in."""
    change = st.tuples(st.integers(0, len(content)), st.integers(0, 8), st.binary(max_size=8))

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        values = content
        for at, removed, value in changes:
            values = values[:at] + value + values[at + removed :]
        return values

    return st.lists(change, min_size=1, max_size=4).map(apply)


@pytest.mark.parametrize("name", every_kind())
def test_a_damaged_file_is_one_line(name: str) -> None:
    content = every_kind()[name]

    @settings(max_examples=60, deadline=None)
    @given(damaged(content))
    def check(content: bytes) -> None:
        with tempfile.TemporaryDirectory() as place:
            config = {"add_bos_token": False}
            folder = write(
                Path(place), merges_dot_txt="t h\nh e\n", tokenizer_config_dot_json=config
            )
            (folder / name).write_bytes(content)
            one_line(folder)

    check()


def _tekken(changes: dict[str, Any], config: dict[str, Any]) -> bytes:
    values = tekken("v7") | changes
    if isinstance(values["config"], dict):
        values["config"] = values["config"] | config
    return json.dumps(values).encode()


def _pieces(pieces: list[tuple[bytes, float, int]]) -> bytes:
    proto = pb.ModelProto()
    for text, score, kind in pieces:
        proto.pieces.add(piece=text, score=score, type=kind)
    return proto.SerializeToString()


STRANGE: dict[str, st.SearchStrategy[bytes]] = {
    "tekken.json": st.builds(
        _tekken,
        st.dictionaries(st.sampled_from(["vocab", "special_tokens", "config"]), JSON, max_size=1),
        st.dictionaries(
            st.sampled_from(["pattern", "default_vocab_size", "default_num_special_tokens"]),
            JSON | st.integers(0, 300),
        ),
    ),
    "vocab.json": st.dictionaries(st.text(max_size=4), st.integers(-1, 300) | JSON).map(
        lambda value: json.dumps(value).encode()
    ),
    "vocab.txt": st.lists(
        st.sampled_from([*WORDS, "", " ", "##x", "\u2028"]) | st.text(max_size=5)
    ).map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")),
    "tiktoken.model": st.lists(st.tuples(st.binary(max_size=4), st.integers(-1, 5))).map(
        lambda pairs: b"".join(base64.b64encode(a) + f" {b}\n".encode() for a, b in pairs)
    ),
    "tokenizer.model": st.lists(
        st.tuples(
            st.binary(max_size=4) | st.sampled_from([b"<unk>", b"<s>", b"a", b"aa", b"<0x0A>"]),
            st.floats(width=32),
            st.integers(1, 6),
        )
    ).map(_pieces),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_file_is_one_line(name: str) -> None:
    @settings(max_examples=80, deadline=None)
    @given(STRANGE[name])
    def check(content: bytes) -> None:
        with tempfile.TemporaryDirectory() as place:
            folder = write(Path(place), merges_dot_txt="", tokenizer_config_dot_json={})
            (folder / name).write_bytes(content)
            one_line(folder)

    check()


SETTINGS = (
    *("added_tokens_decoder", "bos_token", "eos_token", "add_bos_token", "tokenizer_class"),
    *("additional_special_tokens", "legacy", "add_prefix_space", "chat_template"),
)


@pytest.mark.parametrize("name", every_kind())
def test_a_strange_configuration_is_one_line(name: str) -> None:
    added_tokens = st.dictionaries(
        st.integers(-1, 400).map(str) | st.text(max_size=3),
        st.fixed_dictionaries({"content": st.text(max_size=4)}, optional={"special": st.booleans()})
        | JSON,
        max_size=3,
    )

    @settings(max_examples=50, deadline=None)
    @given(st.dictionaries(st.sampled_from(SETTINGS), JSON | added_tokens, max_size=3))
    def check(config: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as place:
            write(Path(place), tokenizer_config_dot_json=config, merges_dot_txt="t h\n")
            (Path(place) / name).write_bytes(every_kind()[name])
            one_line(Path(place))

    check()


def test_special_tokens_are_text_in_chats_with_each_kind(tmp_path: Path) -> None:
    template = "{{ bos_token or '' }}{{ messages[0].content }}{{ eos_token or '' }}"
    loaders: dict[str, Callable[[], Tokenizer]] = {}
    for name, content in every_kind().items():
        place = tmp_path / name
        place.mkdir()
        (place / name).write_bytes(content)
        special = {"eos_token": "fox"} if name in ("vocab.json", "tiktoken.model") else {}
        config = {"chat_template": template, "add_bos_token": False, **special}
        if name == "tiktoken.model":
            config |= {"eos_token": f"<|reserved_token_{len(TOKENS)}|>"}
        write(place, tokenizer_config_dot_json=config, merges_dot_txt="t h\n")
        loaders[name] = lambda place=place: load(place)  # type: ignore[misc]
    for name, loader in loaders.items():
        ours = loader()
        ends = [text for text in ours.special_tokens.values() if text]
        content = "the ".join(ends) or "the"
        tokens = ours.encode_chat([{"role": "user", "content": content}])
        unknown = ours.texts.piece_of(0) and ours._raw.token_to_id(
            ours.special_tokens.get("unk_token", "")
        )
        actual = [token for token in tokens if token in ours.texts.special_ids - {unknown}]
        names = [ours.special_tokens.get("bos_token"), ours.special_tokens.get("eos_token")]
        assert actual == [ours._raw.token_to_id(text) for text in names if text], name

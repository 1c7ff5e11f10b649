"""tiktoken's files, whose tokens are those of its library, and the rules of each family."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tandem.shared.errors import ModelError
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.shared.text.vocabulary import tiktoken
from tandem.tests.shared.text.vocabulary.support import (
    FAMILIES,
    MODELS,
    TEXTS,
    TOKENS,
    in_steps,
    load,
    ranks,
    write,
)

EXPECTED = json.loads((MODELS / "tiktoken.json").read_text())


def folder_of(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Path:
    """A folder with a file of a family; Llama's are known by their numbers of ranks."""
    values = {"llama3": tiktoken._LLAMA3, "llama4": tiktoken._LLAMA4}
    name = "tokenizer.model" if family in values else family
    if family in values:
        monkeypatch.setattr(tiktoken, "_BY_RANKS", {len(TOKENS): values[family]})
    if family == "llama4":
        first = len(TOKENS)
        names = ("<|begin_of_text|>", "<|end_of_text|>")
        added_tokens = {
            str(first + at): {"content": text, "special": True} for at, text in enumerate(names)
        }
        config = {"added_tokens_decoder": added_tokens} | config
    write(folder, tokenizer_config_dot_json=config)
    (folder / name).write_text(ranks(TOKENS))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_tiktoken(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = load(folder_of(tmp_path, family, monkeypatch))
    for text, expected in zip(TEXTS, EXPECTED[family], strict=True):
        values = unicodedata.normalize("NFC", text) if family == "qwen.tiktoken" else text
        tokens = ours.encode(text, add_special_tokens=False, literally=True)
        assert tokens == expected, text
        assert ours.decode(tokens) == in_steps(ours, tokens) == values


@pytest.mark.parametrize(
    ("family", "token", "after", "begins"),
    [
        ("tiktoken.model", f"<|reserved_token_{len(TOKENS) + 5}|>", 5, False),
        ("qwen.tiktoken", "<|im_end|>", 2, False),
        ("qwen.tiktoken", "<|extra_204|>", 207, False),
        ("llama3", "<|eot_id|>", 9, True),
        ("llama3", "<|reserved_special_token_2|>", 12, True),
        ("llama3", "<|reserved_special_token_245|>", 255, True),
        ("llama4", "<|end_of_text|>", 1, True),
    ],
)
def test_special_tokens_follow_the_ranks(
    tmp_path: Path,
    family: str,
    token: str,
    after: int,
    begins: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = load(folder_of(tmp_path, family, monkeypatch))
    number = len(TOKENS) + after
    assert ours.encode(token, add_special_tokens=False) == [number]
    assert (ours.encode("a")[0] == len(TOKENS)) == begins
    literal = ours.encode(token, add_special_tokens=False, literally=True)
    assert max(literal) < len(TOKENS) and ours.decode(literal) == token


def test_a_configuration_names_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = {"content": "<|im_end|>", "special": True}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "added_tokens_decoder": {str(len(TOKENS) + 2): end},
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages[0].content }}<|im_end|>",
    }
    ours = load(folder_of(tmp_path, "tiktoken.model", monkeypatch, **config))
    tokens = ours.encode_chat([{"role": "user", "content": "the <|im_end|>"}])
    assert [token for token in tokens if token >= len(TOKENS)] == [len(TOKENS) + 2]
    assert ours.decode(tokens) == "the <|im_end|>" and ours.vocab_size == len(TOKENS) + 256


def test_a_configuration_may_give_a_name_to_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of Llama 3.1, where fewer tokens are reserved before the named ones."""
    added_tokens = {
        str(len(TOKENS) + 5): {"content": "<|reserved_special_token_2|>", "special": True}
    }
    ours = load(folder_of(tmp_path, "llama3", monkeypatch, added_tokens_decoder=added_tokens))
    tokens = ours.encode("<|reserved_special_token_2|><|eot_id|>", add_special_tokens=False)
    assert tokens == [len(TOKENS) + 5, len(TOKENS) + 9]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (ranks(TOKENS).replace(" 7\n", " 8\n", 1), "two tokens have the rank 8"),
        (ranks(TOKENS).replace(" 7\n", " 900\n", 1), "no token has the rank 7, but others have"),
        (
            ranks(TOKENS).replace(" 7\n", " -7\n", 1),
            "line 8 must be a token in base64 and its rank",
        ),
        (ranks(TOKENS).replace(" 7\n", "\n", 1), "line 8 must be a token in base64 and its rank"),
        (ranks(TOKENS) + "a%%= 999\n", "token 999 is not base64: 'a%%='"),
        (ranks([*TOKENS, b"fox"]), "the token b'fox' occurs twice"),
        (ranks(TOKENS[1:]), "not every byte is a token"),
        (
            ranks([*TOKENS, b"x" * 2000]),
            f"token {len(TOKENS)} has 2000 bytes; supported: 1 to 1024",
        ),
        ("", "not every byte is a token"),
    ],
)
def test_a_broken_file_says_what_is_wrong(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_text(content)
    with pytest.raises(ModelError) as caught:
        read_tokenizer_files(tmp_path)
    assert str(caught.value).startswith(f"{path}: {reason}")


def test_a_rule_that_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_dot_model=ranks(TOKENS))
    with pytest.raises(
        ModelError, match=r"ranks, whose splitting pattern is unknown; supported: Llama 3's with"
    ):
        read_tokenizer_files(tmp_path)
    write(
        tmp_path,
        tiktoken_dot_model=ranks(TOKENS),
        tokenizer_config_dot_json={"tokenizer_class": "OwnTokenizer"},
    )
    with pytest.raises(
        ModelError, match=r"'OwnTokenizer', whose splitting .* supported: TikTokenTokenizer"
    ):
        read_tokenizer_files(tmp_path)


def test_two_names_for_one_token_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added_tokens = {"added_tokens_decoder": {"104": {"content": "<|end|>"}}}
    place = folder_of(tmp_path, "tiktoken.model", monkeypatch, **added_tokens)
    with pytest.raises(ModelError, match=r"'<\|end\|>' is added as token 104, which is 'h' in"):
        read_tokenizer_files(place)

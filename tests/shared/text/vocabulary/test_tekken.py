"""``tekken.json``: its tokens, and chats, whose tokens mistral-common made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.shared.errors import ModelError, RequestError
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.shared.text.vocabulary.support import (
    MERGED,
    MODELS,
    TEXTS,
    byte_tokens,
    in_steps,
    load,
    tekken,
    write,
)

EXPECTED = json.loads((MODELS / "tiktoken.json").read_text())
CHATS = json.loads((MODELS / "chats.json").read_text())
SPECIAL = 30


def test_the_tokens_come_after_the_special_ones(tmp_path: Path) -> None:
    ours = load(write(tmp_path, tekken_dot_json=tekken("v7")))
    tokens = byte_tokens(*MERGED)
    for text, expected in zip(TEXTS, EXPECTED["tekken"], strict=True):
        ids = ours.encode(text, add_special_tokens=False, literally=True)
        assert ids == [SPECIAL + rank for rank in expected], text
        assert ours.decode(ids) == in_steps(ours, ids) == text
    assert ours.encode("a") == [1, SPECIAL + ord("a")]
    assert ours.encode("</s>[INST]<SPECIAL_29>", add_special_tokens=False) == [2, 3, 29]
    assert ours.vocab_size == SPECIAL + len(tokens)
    assert ours.special_tokens["eos_token"] == "</s>"


def test_older_versions_have_special_tokens_that_the_file_does_not_list(tmp_path: Path) -> None:
    ours = load(write(tmp_path, tekken_dot_json=tekken("v3", None)))
    assert ours.encode("[INST][TOOL_CONTENT]", add_special_tokens=False) == [3, 19]


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_chats_are_those_of_mistral_common(tmp_path: Path, version: str) -> None:
    ours = load(write(tmp_path, tekken_dot_json=tekken(version)))
    chats = [chat[1:] for chat in CHATS if chat[0] == version]
    assert len(chats) == 8
    for messages, tools, tokens in chats:
        ids = ours.encode_chat(messages, tools=tools)
        assert ids == tokens, ours.decode(ids, skip_special_tokens=False)


def test_a_template_in_the_folder_is_used_instead(tmp_path: Path) -> None:
    place = write(tmp_path, tekken_dot_json=tekken("v7"), chat_template_dot_jinja="own")
    assert load(place).apply_chat_template([{"role": "user", "content": "hi"}]) == "own"


def test_chats_of_an_unknown_version_are_refused(tmp_path: Path) -> None:
    ours = load(write(tmp_path, tekken_dot_json=tekken("v15")))
    with pytest.raises(RequestError, match=r"nor a tekken.json of a version whose chats are known"):
        ours.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "tool_call_id": "abcdefghi", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}],
        [{"role": "robot", "content": "x"}],
    ],
)
def test_conversations_that_mistral_common_refuses_are_refused(
    tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    ours = load(write(tmp_path, tekken_dot_json=tekken("v7")))
    with pytest.raises(RequestError, match="chat template rejects these messages"):
        ours.encode_chat(messages)


def with_changes(**config: Any) -> dict[str, Any]:
    content = tekken("v7")
    content["config"] |= config
    return content


def with_token(at: int, **token: Any) -> dict[str, Any]:
    content = tekken("v7")
    content["vocab"][at] |= token
    return content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "config is missing"),
        (with_changes(pattern=None), "config.pattern is missing"),
        (with_changes(default_vocab_size=10), "has 10 tokens, of which 30 are special"),
        (
            with_changes(default_vocab_size=10**12),
            "config.default_vocab_size is 1000000000000; it must",
        ),
        (
            with_changes(default_num_special_tokens=True),
            "config.default_num_special_tokens is True",
        ),
        (with_changes(default_vocab_size=5000), "vocab must be a list of at least 4970 tokens"),
        (
            with_changes(default_num_special_tokens=3),
            "a special token must have token_str, and a rank",
        ),
        (tekken("v11", None), "special_tokens are missing, which v11 needs; download"),
        (tekken("v7", ["<s>", "<s>"]), "two special tokens are the same"),
        (tekken("v7", [""]), "token 0 is empty"),
        (tekken("v7", ["a"]), "tokens 127 and 0 are the same, 'a'"),
        (with_token(5, token_bytes="%"), "token 5 is not base64: '%'"),
        (with_token(5, token_bytes=None), "token 5 of vocab has no token_bytes"),
        (with_token(5, token_bytes=""), "token 5 has 0 bytes"),
        (with_token(5, rank=6), "token 5 of vocab has the rank 6"),
        (with_token(5, token_bytes="YQ=="), "the token b'a' occurs twice"),
    ],
)
def test_a_broken_file_says_what_is_wrong(
    tmp_path: Path, content: dict[str, Any], reason: str
) -> None:
    write(tmp_path, tekken_dot_json=content)
    with pytest.raises(ModelError) as caught:
        read_tokenizer_files(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tekken.json'}: {reason}")


def test_a_pattern_that_is_none_is_an_error_of_the_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, tekken_dot_json=with_changes(pattern="(?P<"))
    with pytest.raises(ModelError, match=r"tekken.json: not a tokenizer"):
        load(tmp_path)

"""Deltas add up to what the tokenizer itself decodes, for each kind of decoder."""

from __future__ import annotations

import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.shared.text.detokenize import TokenTexts, detokenize

CORPUS = ["hello world again and again", "größe 日本語 naïve 🙂🙂", "spaces   and\nlines"]
SPECIAL = [AddedToken("<|end|>", special=True), AddedToken("<two words>", special=False)]


@cache
def byte_level() -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=330,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    raw.add_special_tokens(SPECIAL[:1])
    raw.add_tokens(SPECIAL[1:])
    return raw


def _pieces() -> dict[str, int]:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁wor", "ld", "a", "b", "é", "日", "!"]
    return {piece: i for i, piece in enumerate(pieces)}


@cache
def sentencepiece() -> Tokenizer:
    raw = Tokenizer(models.BPE(_pieces(), [], byte_fallback=True, unk_token="<unk>"))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(SPECIAL[:1])
    return raw


@cache
def metaspace() -> Tokenizer:
    raw = Tokenizer(models.BPE(_pieces(), [], unk_token="<unk>"))
    raw.decoder = decoders.Metaspace()
    raw.add_special_tokens(SPECIAL[:1])
    return raw


def deltas(raw: Tokenizer, tokens: list[int], skip: bool = True) -> list[str]:
    detokenizer = TokenTexts(raw).detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(st.text(max_size=60), st.booleans())
def test_byte_level_text_survives(text: str, skip: bool) -> None:
    raw = byte_level()
    tokens = raw.encode(text, add_special_tokens=False).ids
    result = deltas(raw, tokens, skip)
    assert "".join(result) == raw.decode(tokens, skip_special_tokens=skip)
    if "<|end|>" not in text:
        assert "".join(result) == text


@given(st.lists(st.integers(0, 340), max_size=60), st.booleans())
def test_any_byte_level_tokens_decode_as_the_tokenizer_does(tokens: list[int], skip: bool) -> None:
    raw = byte_level()
    assert "".join(deltas(raw, tokens, skip)) == raw.decode(tokens, skip_special_tokens=skip)


@given(st.lists(st.integers(257, 266), max_size=30), st.text(max_size=10), st.booleans())
def test_sentencepiece_with_byte_fallback(tokens: list[int], text: str, skip: bool) -> None:
    raw = sentencepiece()
    spelled = [1 + byte for byte in text.encode()]
    tokens = tokens + spelled + tokens
    assert "".join(deltas(raw, tokens, skip)) == raw.decode(tokens, skip_special_tokens=skip)


@given(st.lists(st.integers(257, 266), max_size=30))
def test_other_decoders_go_through_a_window(tokens: list[int]) -> None:
    raw = metaspace()
    assert not TokenTexts(raw).exact
    assert "".join(deltas(raw, tokens)) == raw.decode(tokens, skip_special_tokens=True)


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=30))
def test_no_delta_holds_half_a_character(text: str) -> None:
    result = deltas(byte_level(), byte_level().encode(text, add_special_tokens=False).ids, False)
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in result)


def test_an_incomplete_character_at_the_end_shows_as_one_replacement() -> None:
    raw = byte_level()
    tokens = raw.encode("🙂🙃", add_special_tokens=False).ids
    assert "".join(deltas(raw, tokens[:-1])).endswith("\ufffd")
    assert detokenize(TokenTexts(raw), tokens[:-1]) == raw.decode(tokens[:-1])


def test_ids_beyond_the_vocabulary_are_nothing() -> None:
    assert detokenize(TokenTexts(byte_level()), [10**6, 10**6]) == ""


@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace])
def test_the_cost_of_a_token_does_not_grow(make: object) -> None:
    raw = make()  # type: ignore[operator]
    token = raw.token_to_id("a")
    detokenizer = TokenTexts(raw).detokenizer()
    began = time.thread_time()  # CPU time: the machine may be busy
    for _ in range(50_000):
        detokenizer.push(token)
    assert time.thread_time() - began < 10

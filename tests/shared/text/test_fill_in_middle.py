"""Prompts for a gap, as each family of models was trained on them."""

from __future__ import annotations

import pytest

from tandem.shared.text.fill_in_middle import fill_in_middle

MARK = "\u263a"
FAMILIES = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
}


def spelled(text: str) -> list[int]:
    """A tokenizer like Llama's, which puts a space in front of a text."""
    return [ord(character) for character in f"_{text}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_before_comes_first_and_that_after_follows(family: str) -> None:
    names = FAMILIES[family]
    ids = {name: 1000 + number for number, name in enumerate(names)}
    result = fill_in_middle(ids.get)
    assert result is not None and result.ends == tuple(range(1003, 1000 + len(names)))
    after = [ord(c) for c in ("cd" if family == "codellama" else "_cd")]
    expected = [7, 1000, *spelled("ab"), 1001, *after, 1002]
    assert result.prompt("ab", "cd", spelled, [7]) == expected


def test_a_vocabulary_without_all_three_tokens_has_none() -> None:
    assert fill_in_middle({"<|fim_prefix|>": 1, "<|fim_suffix|>": 2}.get) is None

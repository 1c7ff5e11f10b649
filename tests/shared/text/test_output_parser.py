"""Reasoning and calls in the text of a choice, by its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.shared.text.output import OutputText
from tandem.shared.text.output_parser import call_markers, marker_tokens, output_parser
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.shared.text.tool_parsers.tool_use import ToolUse
from tandem.tests.router.support import make_model

CALL = '<tool_call>\n{"name": "grep", "arguments": {"p": "x"}}\n</tool_call>'
HARMONY = ("<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|return|>")


def tokenizer_of(folder: Path, special: Sequence[str]) -> Tokenizer:
    return Tokenizer.load(read_tokenizer_files(make_model(folder, special=special)))


def read(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    parser: str,
    reasoning: str,
    *,
    stops: Sequence[str] = (),
    stop_token: int | None = None,
) -> tuple[str, str, str]:
    """Reasoning, content, and arguments."""
    tools = ToolUse(parser=parser, schemas={"grep": {}})
    calls = call_markers(tools, tokenizer.texts)
    output = OutputText(
        tokenizer.detokenizer(keep=marker_tokens(reasoning, tools)),
        stops,
        parser=output_parser(reasoning, tools, opened=True, calls=calls),
        calls=calls,
    )
    deltas = [delta for token in tokens for delta in output.push(token)]
    deltas += output.finish(stop_token)
    arguments = [call.arguments for delta in deltas for call in delta.calls]
    return (
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        "".join(arguments),
    )


@pytest.mark.parametrize("stops", [(), ("<tool_call>\nX", "é<")])
def test_a_marker_ends_the_reasoning_only_as_a_token(tmp_path: Path, stops: Sequence[str]) -> None:
    tokenizer = tokenizer_of(tmp_path, ["<tool_call>", "</tool_call>", "</think>"])
    prose = tokenizer.encode(f"é {CALL} é", add_special_tokens=False, literally=True)
    called = tokenizer.encode(f" I will. {CALL}</think> So", add_special_tokens=False)
    assert tokenizer.texts.piece_of(called[-1]) and len(prose) > len(called)
    result = read(tokenizer, [*prose, *called], "hermes", "qwen3", stops=stops)
    assert result == (f"é {CALL} é I will. ", " So", '{"p": "x"}')
    broken = [tokenizer.encode("é", add_special_tokens=False)[0], *called]  # half of a character
    assert read(tokenizer, broken, "hermes", "qwen3") == ("\ufffd I will. ", " So", '{"p": "x"}')


def test_a_marker_that_is_no_token_is_text_of_the_reasoning(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, [])
    tokens = tokenizer.encode(f"Hm. {CALL}</think>{CALL}", add_special_tokens=False)
    assert read(tokenizer, tokens, "hermes", "qwen3") == (f"Hm. {CALL}", "", '{"p": "x"}')


def test_a_marker_that_ends_the_output_ends_a_call(tmp_path: Path) -> None:
    """Such as that of gpt-oss, which is an end token of the model."""
    tokenizer = tokenizer_of(tmp_path, HARMONY)
    text = "<|channel|>commentary to=functions.grep<|message|>"
    for arguments, result in (("", "{}"), ('{"p": 1', '{"p": 1}'), ('{"p": 1}', '{"p": 1}')):
        tokens = tokenizer.encode(text + arguments, add_special_tokens=False)
        [end] = tokenizer.encode("<|call|>", add_special_tokens=False)
        assert read(tokenizer, tokens, "openai", "openai_gptoss", stop_token=end)[1:] == (
            "",
            result,
        )
        cut = read(tokenizer, tokens, "openai", "openai_gptoss")
        assert not cut[1] and arguments.startswith(cut[2])
    [end] = tokenizer.encode("<|return|>", add_special_tokens=False)
    tokens = tokenizer.encode("Hello", add_special_tokens=False)
    assert read(tokenizer, tokens, "openai", "openai_gptoss", stop_token=end)[1] == "Hello"

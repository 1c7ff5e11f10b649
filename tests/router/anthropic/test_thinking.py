"""Thinking: blocks of reasoning, the template options that enable it, and how it is cleared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.tests.router.anthropic.test_messages import (
    named_events,
    post_message,
    text_block,
)
from tandem.tests.router.golden import check_golden
from tandem.tests.router.in_process import InProcess, tiny

THINKING = {"thinking": {"type": "enabled", "budget_tokens": 10}, "max_tokens": 40}
REASONED = "<think>one two</think>\n\nthree"
# Shows what a template is given.
SHOWING = (
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}\n{% endfor %}"
    "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }} {{ lazy }}"
)


def prompts(c: InProcess, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """What the template makes of each body."""
    texts = []
    for body in bodies:
        response = post_message(c, **body)
        assert response.status_code == 200, response.text
        texts.append(c.prompt())
    return texts


def test_reasoning_is_a_block_of_its_own() -> None:
    c = InProcess(reply=REASONED, reasoning_parser="qwen3")
    whole = post_message(c, **THINKING).json()
    stream = post_message(c, **THINKING, stream=True).text
    budget = c.node.requests[-1].sampling.thinking
    assert (budget.tokens, budget.param) == (10, "thinking.budget_tokens")
    omitted = THINKING | {"thinking": {"type": "adaptive", "display": "omitted"}}
    unseen = post_message(c, **omitted).json()
    unseen_stream = post_message(c, **omitted, stream=True).text
    blank = post_message(c, **THINKING, stop_sequences=["three"]).json()
    thought, text = whole["content"]
    assert thought.pop("signature")
    assert thought == {"type": "thinking", "thinking": "one two"}
    assert text == text_block("\n\nthree")
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    check_golden("anthropic_thinking", stream)
    assert unseen["content"][0]["thinking"] == "" and unseen["content"][0]["signature"]
    kinds = [event["delta"]["type"] for event in named_events(unseen_stream) if "index" in event
             and "delta" in event]  # fmt: skip
    assert kinds[0] == "signature_delta" and set(kinds[1:]) == {"text_delta"}
    assert [block["type"] for block in blank["content"]] == ["thinking"]


def test_a_response_without_text_has_an_empty_block() -> None:
    c = InProcess()
    c.node.reply = []
    assert post_message(c).json()["content"] == [text_block("")]
    check_golden("anthropic_empty", post_message(c, stream=True).text)


def test_thinking_sets_the_templates_reasoning_options() -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({}, "False False  "),
        ({"thinking": {"type": "disabled"}}, "False False  "),
        (THINKING, "True True  "),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "True True low "),
        ({"output_config": {"effort": "max"}}, "False False high "),
        ({"chat_template_kwargs": {"enable_thinking": 1, "lazy": 2}}, "1 False  2"),
    ]
    c = InProcess(tiny(SHOWING))
    texts = prompts(c, [body for body, _ in bodies])
    assert texts == [f"user::hi\n{expected}" for _, expected in bodies]


def test_reasoning_of_earlier_turns_is_kept_or_cleared() -> None:
    secret = {"type": "redacted_thinking", "data": "x"}
    turns: list[dict[str, Any]] = []
    for number in "123":
        thought = {"type": "thinking", "thinking": f"t{number}", "signature": "x"}
        text = {"type": "text", "text": f"a{number}"}
        turns += [
            {"role": "user", "content": f"u{number}"},
            {"role": "assistant", "content": [thought, secret, text]},
        ]
    turns.append({"role": "user", "content": "end"})
    keeps: list[tuple[Any, str]] = [
        ("all", "t1 t2 t3"),
        ({"type": "all"}, "t1 t2 t3"),
        ({"type": "thinking_turns", "value": 2}, "t2 t3"),
        (None, "t3"),
    ]
    edits = [{"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep, _ in keeps]
    c = InProcess(tiny(SHOWING))
    texts = prompts(c, [{"messages": turns, "context_management": edit} for edit in edits])
    for prompt, (_, expected) in zip(texts, keeps, strict=True):
        assert " ".join(t for t in ("t1", "t2", "t3") if f":{t}:a" in prompt) == expected
    applied = post_message(c, messages=turns, context_management=edits[-1])
    stream = post_message(c, messages=turns, context_management=edits[0], stream=True)
    (edit,) = applied.json()["context_management"]["applied_edits"]
    assert edit["cleared_thinking_turns"] == 2 and edit["cleared_input_tokens"] == 5
    assert named_events(stream.text)[-2]["context_management"] == {"applied_edits": []}

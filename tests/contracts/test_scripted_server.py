"""The values that the scripted server's node writes into JSON."""

from __future__ import annotations

from tandem.contracts.scripted_server import PromptValues

SCHEMA = {
    "type": "object",
    "properties": {
        "number": {"type": "integer"},
        "text": {"type": "string"},
        "one": {"type": "string", "enum": ["a", "b"]},
        "many": {"type": "array", "items": {"type": "number"}, "minItems": 2},
    },
}


def test_values_are_those_of_the_last_message_of_the_user() -> None:
    earlier = "<|start|>user\n7 'earlier'<|end|>\n<|start|>assistant\n8 'said'<|end|>\n"
    prompt = f"{earlier}<|start|>user\nf(3) of '你好'<|end|>\n<|start|>assistant\n"
    instance = PromptValues.of(prompt).instance_of(SCHEMA)
    assert instance == {"number": 3, "text": "你好", "one": "a", "many": [3, 3]}


def test_a_message_without_values_has_those_of_any_other() -> None:
    instance = PromptValues.of("<|start|>user\nhi<|end|>\n").instance_of(SCHEMA)
    assert instance == {"number": 1, "text": "hello", "one": "a", "many": [1, 1]}

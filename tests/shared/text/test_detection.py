"""The formats that templates show, by pieces of published ones."""

from __future__ import annotations

import pytest

from tandem.shared.text.detection import AUTO, OTHER_TOOLS, TOOL_SIGNS, tool_parser
from tandem.shared.text.tool_parsers.formats import FORMATS

TEMPLATES = (
    ('{{- \'<tool_call>\\n{"name": <function-name>, "arguments": <args>}\' }}', "hermes"),
    ("<tool_call>\n<function=example>\n<parameter=example_parameter_1>\n", "qwen3_xml"),
    ("{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>", "glm45"),
    ('Environment: ipython\nRespond in the format {"name": name}', "llama3_json"),
    ("{{- '[TOOL_CALLS][' }}", "mistral"),
    ("'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n```json'", "deepseek_v3"),
    ("'<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'", "deepseek_v31"),
    ("{{ 'assistant<|tool_call|>' }}", "granite"),
    ("<|start_of_role|>system<|end_of_role|> <tool_call></tool_call>", "granite4"),
    ("{{ message.content }}", OTHER_TOOLS),
)


@pytest.mark.parametrize(("template", "parser"), TEMPLATES)
def test_the_format_of_calls_follows_from_the_template(template: str, parser: str) -> None:
    assert tool_parser(AUTO, template) == parser
    assert tool_parser("mistral", template) == "mistral"


def test_every_detected_format_exists() -> None:
    assert {OTHER_TOOLS, *(name for _, name in TOOL_SIGNS)} <= FORMATS.keys()

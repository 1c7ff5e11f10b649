"""Conversations in the forms that chat templates take, by templates that refuse or leave out as
published ones do. Each shows what it gets as ``role=content`` lines."""

from __future__ import annotations

import copy
import itertools
import json
import re
from typing import Any

import pytest

from tandem.shared.errors import RequestError
from tandem.shared.text.chat_template import ChatTemplate

CALLS = (
    "{% for call in m.tool_calls %}+{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}"
)
SHOWN = "{{ m.role }}={{ m.content }}" + CALLS + "{{ '\n' }}"
PLAIN = "{% for m in messages %}" + SHOWN + "{% endfor %}"


def refusing(condition: str) -> str:
    """Shows everything, unless a message meets a condition."""
    refusal = f"{{% if {condition} %}}{{{{ raise_exception('refused') }}}}{{% endif %}}"
    return f"{{% for m in messages %}}{refusal}{SHOWN}{{% endfor %}}"


LATE = refusing("m.role == 'system' and not loop.first")
NO_SYSTEM = refusing("m.role == 'system'")
NO_DEVELOPER = refusing("m.role not in ('system', 'user', 'assistant', 'tool')")
ONLY_FIRST = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SHOWN
ONLY_FIRST += "{% endif %}{% endfor %}"
LAST_WINS = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}{{ '\n' }}"
    "{% for m in messages if m.role != 'system' %}" + SHOWN + "{% endfor %}"
)
# Takes a first message of both roles, as gpt-oss'.
INSTRUCTED = ONLY_FIRST.replace("!= 'system'", "not in ('system', 'developer')")
NEEDS_USER = PLAIN + (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('no user') }}{% endif %}"
)
# Calls and their results are not counted, as in Mistral's.
ALTERNATING = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role != 'system' and m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}" + SHOWN + "{% endfor %}"
)
GEMMA = ALTERNATING.replace(
    "{% for m",
    "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for m",
    1,
)


def say(*turns: str) -> list[dict[str, Any]]:
    """Messages by the first letters of their roles: ``s: text``."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[one[0]], "content": one[3:]} for one in turns]


def prompt(template: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    compiled = ChatTemplate(template, origin="here", tokens={})
    dialect = compiled.dialect(with_tools=bool(tools))
    before = copy.deepcopy((messages, tools))
    actual = compiled.render(dialect.messages(messages), tools=dialect.tools(tools))
    assert (messages, tools) == before
    return actual


@pytest.mark.parametrize("template", [PLAIN, ALTERNATING, NEEDS_USER])
def test_what_a_template_takes_stays_as_it_is(template: str) -> None:
    messages = say("s: 1", "u: 2", "a: 3", "u: 4")
    if template == PLAIN:
        messages = [*messages, *say("s: 5", "u: 6", "u: 7", "a: 8", "a: 9", "s: 10", "s: 11")]
    prompt_text = ChatTemplate(template, origin="here", tokens={}).render(messages)
    assert prompt(template, messages) == prompt_text


SYSTEM: list[tuple[str, list[str], str]] = [
    (LATE, ["s: 1", "s: 2", "u: 3"], "system=1\n\n2\nuser=3\n"),
    (LATE, ["s: 1", "d: 2", "u: 3"], "system=1\n\n2\nuser=3\n"),
    (LATE, ["d: 1", "u: 2"], "system=1\nuser=2\n"),
    (LATE, ["u: 1", "s: 2"], "user=1\n\n2\n"),
    (LATE, ["s: 1", "u: 2", "d: 3", "u: 4"], "system=1\nuser=2\n\n3\nuser=4\n"),
    (
        LATE,
        ["s: 1", "u: 2", "a: 3", "s: 4", "d: 5", "u: 6", "a: 7"],
        "system=1\nuser=2\nassistant=3\nuser=4\n\n5\n\n6\nassistant=7\n",
    ),
    (LATE, ["u: 1", "a: 2", "s: 3", "a: 4"], "user=1\nassistant=2\nuser=3\nassistant=4\n"),
    (NO_SYSTEM, ["s: 1", "u: 2"], "user=1\n\n2\n"),
    (
        NO_SYSTEM,
        ["d: 1", "s: 2", "u: 3", "a: 4", "s: 5"],
        "user=1\n\n2\n\n3\nassistant=4\nuser=5\n",
    ),
    (NO_SYSTEM, ["s: 1"], "user=1\n"),
    (NO_DEVELOPER, ["d: 1", "u: 2", "d: 3"], "system=1\nuser=2\nsystem=3\n"),
    (ONLY_FIRST, ["s: 1", "s: 2", "u: 3"], "system=1\n\n2\nuser=3\n"),
    (ONLY_FIRST, ["s: 1", "u: 2", "a: 3", "s: 4"], "system=1\nuser=2\nassistant=3\nuser=4\n"),
    (LAST_WINS, ["s: 1", "s: 2", "u: 3"], "1\n\n2\nuser=3\n"),
    (LAST_WINS, ["s: 1", "u: 2", "s: 3", "a: 4"], "1\nuser=2\n\n3\nassistant=4\n"),
    (INSTRUCTED, ["s: 1", "d: 2", "u: 3"], "system=1\n\n2\nuser=3\n"),
    (INSTRUCTED, ["d: 1", "u: 2", "d: 3"], "developer=1\nuser=2\n\n3\n"),
    (NEEDS_USER, ["s: 1"], "user=1\n"),
    (GEMMA, ["s: 1", "u: 2", "s: 3", "u: 4"], "user=1\n\n2\n\n3\n\n4\n"),
    (GEMMA, ["s: 1", "a: 2", "u: 3"], "user=1\nassistant=2\nuser=3\n"),
]


@pytest.mark.parametrize(("template", "turns", "expected"), SYSTEM)
def test_system_messages_are_folded_where_they_are_refused(
    template: str, turns: list[str], expected: str
) -> None:
    assert prompt(template, say(*turns)) == expected


@pytest.mark.parametrize("template", [LATE, ONLY_FIRST, LAST_WINS, GEMMA, NO_SYSTEM])
def test_each_prompt_begins_with_the_one_before_it(template: str) -> None:
    turns = say("s: 1", "u: 2", "s: 3", "a: 4", "s: 5", "a: 6", "u: 7", "s: 8", "a: 9", "u: 10")
    ends = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    prompts = [prompt(template, turns[:end]) for end in ends]
    for shorter, longer in itertools.pairwise(prompts):
        assert longer.startswith(shorter)


TURNS: list[tuple[list[str], str]] = [
    (["u: 1", "u: 2", "a: 3", "a: 4", "u: 5"], "user=1\n\n2\nassistant=3\n\n4\nuser=5\n"),
    (["s: 1", "a: 2", "u: 3"], "system=1\nuser=\nassistant=2\nuser=3\n"),
    (["a: 1", "u: 2"], "user=\nassistant=1\nuser=2\n"),
]


@pytest.mark.parametrize(("turns", "expected"), TURNS)
def test_turns_alternate_where_they_must(turns: list[str], expected: str) -> None:
    assert prompt(ALTERNATING, say(*turns)) == expected


def call(call_id: str | None, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def assistant_calls(*calls: dict[str, Any], content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [*calls], **fields}


def result(content: str, call_id: str | None = None) -> dict[str, Any]:
    values = {"role": "tool", "content": content}
    return values if call_id is None else values | {"tool_call_id": call_id}


LOOK = [*say("u: 1"), assistant_calls(call("call_a", x=2)), result("3", "call_a")]
BOTH = [
    *say("u: 1"),
    assistant_calls(call("call_a", x=2), call("call_b", x=3), content="look"),
    result("5", "call_b"),
    result("4", "call_a"),
    *say("u: 6"),
]


def test_what_follows_results_has_a_place_of_its_own_or_is_part_of_them() -> None:
    messages = [*LOOK, *say("u: 4", "a: 5", "u: 6")]
    assert prompt(ALTERNATING, messages) == (
        'user=1\nassistant=+f{"x": 2}\ntool=3\nassistant=\nuser=4\nassistant=5\nuser=6\n'
    )
    silent = "m.role == 'assistant' and not m.content and not m.tool_calls"
    never_silent = ALTERNATING + refusing(silent).replace(SHOWN, "")
    assert prompt(never_silent, [*LOOK, *say("u: 4")]) == (
        'user=1\nassistant=+f{"x": 2}\ntool=3\n\n4\n'
    )
    late = [*LOOK, *say("s: 4", "u: 5")]
    assert prompt(LATE, late) == 'user=1\nassistant=+f{"x": 2}\ntool=3\n\n4\nuser=5\n'


def test_a_tool_call_without_a_result_gets_an_empty_reply_where_turns_alternate() -> None:
    """As after a user has broken off a call; templates such as Mistral's do not count the call."""
    broken_off = [*say("u: 1"), assistant_calls(call("a", x=2)), *say("u: 3")]
    assert prompt(ALTERNATING, broken_off) == ('user=1\nassistant=+f{"x": 2}\nassistant=\nuser=3\n')
    assert prompt(PLAIN, broken_off) == 'user=1\nassistant=+f{"x": 2}\nuser=3\n'


def test_results_of_functions_are_those_of_tools_where_only_these_are_known() -> None:
    """Another comparison with 'function' is of a tool's type."""
    values = [*LOOK[:-1], {"role": "function", "name": "f", "content": "3"}]
    typed = "{% for t in tools or [] %}{% if t.type == 'function' %}t{% endif %}{% endfor %}"
    only_tools = refusing("m.role not in ('user', 'assistant', 'tool')")
    text = 'user=1\nassistant=+f{"x": 2}\n'
    assert prompt(typed + only_tools, values) == text + "tool=3\n"
    assert prompt("{% if messages[-1].role == 'function' %}{% endif %}" + PLAIN, values) == (
        text + "function=3\n"
    )


def test_results_follow_their_calls() -> None:
    between = [*LOOK[:2], *say("d: 3", "s: 4"), result("5", "call_a"), *say("s: 6", "u: 7")]
    assert prompt(LATE, between) == (
        'user=1\nassistant=+f{"x": 2}\ntool=5\n\n3\n\n4\n\n6\nuser=7\n'
    )
    assert prompt(LATE, between[:4]) == 'user=1\nassistant=+f{"x": 2}\nuser=3\n\n4\n'


# Calls only where there is no content, whose arguments are text, as DeepSeek R1's distills.
NONE_IS_A_CALL = (
    "{% for m in messages %}{{ m.role }}={% if m.role == 'assistant' and m.content is none %}"
    "{% for call in m.tool_calls %}{{ '+' + call.function.name + call.function.arguments }}"
    "{% endfor %}{% else %}{{ m.content + '' }}{% endif %}{{ '\n' }}{% endfor %}"
)
CONCATENATING = PLAIN.replace("{{ m.content }}", "{{ m.content + '' }}")
TEXT = PLAIN.replace("| tojson", "+ ''")
PRINTED = PLAIN.replace("| tojson", "")
DUMPED = PLAIN.replace("| tojson", "| tojson | tojson")


@pytest.mark.parametrize("template", [NONE_IS_A_CALL, CONCATENATING, TEXT, PRINTED, PLAIN])
def test_calls_are_shown_by_each_template(template: str) -> None:
    assert prompt(template, LOOK) == 'user=1\nassistant=+f{"x": 2}\ntool=3\n'


def test_a_form_that_no_template_shows_changes_nothing() -> None:
    assert prompt(DUMPED, LOOK).count("\\") == 2
    assert prompt("{% for m in messages %}{{ m.content }}{% endfor %}", LOOK) == "13"


def test_text_beside_calls_is_a_message_of_its_own_where_it_hides_them() -> None:
    assert prompt(
        NONE_IS_A_CALL, [*say("u: 1"), assistant_calls(call("a", x=2), content="look")]
    ) == ('user=1\nassistant=look\nassistant=+f{"x": 2}\n')
    both = [*say("u: 1"), assistant_calls(call("a", x=2), content="look")]
    assert prompt(PLAIN, both) == 'user=1\nassistant=look+f{"x": 2}\n'


# As gpt-oss': reasoning by its own name, and no text beside it.
THINKING = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{{ m.thinking }}{{ m.content }}",
)


def test_reasoning_has_the_name_that_a_template_reads() -> None:
    actual = assistant_calls(call("a", x=2), content="look", reasoning_content="hm")
    assert prompt(THINKING, [*say("u: 1"), actual]).endswith('=hm\n\nlook+f{"x": 2}\n')
    assert prompt(THINKING, [*say("u: 1"), actual | {"content": ""}]).endswith('=hm+f{"x": 2}\n')
    assert prompt(PLAIN, [*say("u: 1"), actual]).endswith('=look+f{"x": 2}\n')


IDS = (
    "{% for m in messages %}{% for call in m.tool_calls %}<{{ call.id }}>{{ check(call.id) }}"
    "{% endfor %}{% if m.role == 'tool' %}<{{ m.tool_call_id }}>{{ check(m.tool_call_id) }}"
    "{% endif %}{{ m.content }}" + CALLS + "{% endfor %}"
)
CHECK = "{% macro check(id) %}{% if id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
SHORT_IDS = CHECK + "{% endmacro %}" + IDS
ANY_IDS = "{% macro check(id) %}{% endmacro %}" + IDS


def test_foreign_ids_are_short_where_they_must_be() -> None:
    messages = [
        *say("u: 1"),
        assistant_calls(call("call_a", x=2), call("123456789", x=3)),
        result("4", "call_a"),
        result("5", "123456789"),
        assistant_calls(call("call_a", x=6)),
        result("7", "call_a"),
    ]
    actual = prompt(SHORT_IDS, messages)
    ids = re.findall(r"<([a-zA-Z0-9]{9})>", actual)
    foreign = ids[0]
    assert ids == [foreign, "123456789", foreign, "123456789", foreign, foreign]
    assert prompt(SHORT_IDS, messages) == actual
    assert prompt(ANY_IDS, messages).count("call_a") == 4


def test_calls_without_ids_get_some() -> None:
    messages = [
        *say("u: 1"),
        assistant_calls(call(None, x=2), call(None, x=3)),
        *(result("4"), result("5")),
        assistant_calls(call(None, x=6)),
        result("7"),
    ]
    actual = prompt(ANY_IDS, messages)
    assert re.findall(r"call_\d", actual) == ["call_0", "call_1"] * 2 + ["call_2"] * 2


ONE_CALL = refusing("m.tool_calls and m.tool_calls | length != 1")
FIRST_CALL = PLAIN.replace("in m.tool_calls", "in (m.tool_calls or [])[:1]")


@pytest.mark.parametrize("template", [ONE_CALL, FIRST_CALL])
def test_each_call_is_followed_by_its_result_where_there_may_be_only_one(template: str) -> None:
    assert prompt(template, BOTH) == (
        'user=1\nassistant=look+f{"x": 2}\ntool=4\nassistant=+f{"x": 3}\ntool=5\nuser=6\n'
    )
    unanswered = [*say("u: 1"), assistant_calls(call("a", x=2), call("b", x=3)), result("4", "b")]
    assert prompt(template, unanswered) == (
        'user=1\nassistant=+f{"x": 2}\nassistant=+f{"x": 3}\ntool=4\n'
    )
    assert prompt(PLAIN, BOTH).count("assistant") == 1


# Python's types of arguments, as in the templates of Hermes and Command-R+.
TYPED = (
    "{% macro kind(t) %}{% if t in ['string', 'integer', 'object', 'array'] %}{{ t }}"
    "{% elif t is iterable %}{% for one in t %}{{ kind(one) }}|{% endfor %}{% endif %}"
    "{% endmacro %}{% for tool in tools %}"
    "{{ tool.function.name + ':' + tool.function.description }}"
    "{% for name, value in tool.function.parameters.properties.items() %} {{ name }}="
    "{{ kind(value.type) }}{{ value.description + ';' }}{% endfor %}{{ '\n' }}{% endfor %}" + PLAIN
)


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_tools_are_completed_where_a_template_reads_what_they_lack() -> None:
    optional = {"type": ["integer", "null"], "description": "n"}
    properties = {"a": optional, "b": {"type": "string"}, "c": {"type": ["string", "integer"]}}
    tools = [tool("f"), tool("g", parameters={"type": "object", "properties": properties})]
    assert prompt(TYPED, say("u: 1"), tools) == (
        "f:\ng: a=integern; b=string; c=string|integer|;\nuser=1\n"
    )
    bare = [tool("f", description=None, parameters={}), tool("g", parameters={"type": "object"})]
    assert prompt(TYPED, say("u: 1"), bare) == "f:\ng:\nuser=1\n"
    whole = prompt(PLAIN + "{{ tools | tojson }}", say("u: 1"), tools)
    assert json.loads(whole.split("\n")[1]) == tools


def test_a_tool_that_a_template_refuses_is_named() -> None:
    good = tool("good", parameters={"type": "object", "properties": {}})
    bad = tool("bad", parameters={"type": "object", "properties": {"x": {"type": "any"}}})
    with pytest.raises(RequestError, match=r"rejects the tool 'bad': .*recursion") as refused:
        prompt(TYPED, say("u: 1"), [good, bad, good])
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('never') }}",
        "{% for i in range(99999) %}{% endfor %}" * 3 + PLAIN,
        "{{ messages[0].content }}",
        "{{ missing.field.field }}",
    ],
)
def test_a_template_that_takes_nothing_gets_what_is_given(template: str) -> None:
    messages = [*say("s: 1", "s: 2"), *BOTH, *say("d: 7", "u: 8")]
    dialect = ChatTemplate(template, origin="here", tokens={}).dialect(with_tools=True)
    renamed = [m | {"role": m["role"].replace("developer", "system")} for m in messages]
    assert dialect.messages(messages) == renamed

"""What a chat template takes: messages and tools in the form in which it shows them whole.

Templates differ in what they refuse, or leave out without a word: a second system message, or any;
two messages of a role in a row; two calls in one message; the ids that other servers make; a tool
without a description. What a template takes is found out by showing it small conversations, each
only once, and only if a conversation has what it tries. Everything else stays as it is, so that a
prompt is that of transformers, and an earlier part of a conversation is the same in each prompt.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from hashlib import blake2b
from itertools import takewhile
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

SYSTEM = ("system", "developer")
_FUNCTION_ROLE = re.compile(r"""==\s*['"]function['"]""")
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_ALPHANUMERIC = string.digits + string.ascii_letters
_FOREIGN_ID, _TRIED_ID, _OTHER_ID = "call_0123456789abcdef", "tandem001", "tandem002"
# Tools of a request that are tried one by one.
MAX_BLAMED = 128
# The name of the argument in calls that are tried.
_ARGUMENT = "tried"
_MARK = re.compile(r"tried\d\d")
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "try",
        "description": "Try.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "X."}},
            "required": ["x"],
        },
    },
}
# Whether arguments are text, and what a message that only calls has as its content.
_CALL_FORMS = ((False, ""), (False, None), (True, ""), (True, None))


class Dialect:
    """The form that one template takes. ``render`` renders a small conversation; ``None`` is a
    refusal. ``with_tools`` says whether the template is shown tools besides."""

    def __init__(
        self,
        source: str,
        render: Callable[[list[Message], list[Tool] | None], str | None],
        to_json: Callable[[Any], str],
        *,
        with_tools: bool,
    ) -> None:
        self._source = source
        self._render = render
        self._to_json = to_json
        self._tools = [_TOOL] if with_tools else None

    def messages(self, given: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The messages in the form that the template takes."""
        made = [self._with_known_names(message) for message in given]
        if any(message.get("tool_calls") for message in made):
            made = self._with_calls(made)
        return self._alternating(self._with_system(made))

    def tools(self, given: Sequence[Mapping[str, Any]] | None) -> list[Tool] | None:
        """The tools with what the template wants of their definitions."""
        return None if given is None else [self._with_whole_definition(tool) for tool in given]

    def refused_tool(self, given: Sequence[Mapping[str, Any]]) -> str | None:
        """The name of a tool that the template refuses, whatever the messages are."""
        user = [_user("tried00")]
        if self._render(user, [_TOOL]) is None:
            return None
        for tool in given[:MAX_BLAMED]:
            if self._render(user, [dict(tool)]) is None:
                return str(tool.get("function", {}).get("name"))
        return None

    def _takes(self, messages: list[Message], tools: list[Tool] | None = None) -> bool:
        """True if the template shows a conversation whole, and arguments as a JSON object."""
        rendered = self._render(messages, tools or self._tools)
        if rendered is None or f"{{'{_ARGUMENT}'" in rendered or f'\\"{_ARGUMENT}' in rendered:
            return False
        return all(text in rendered for message in messages for text in _texts(message))

    def _prefers(self, changed: list[Message], given: list[Message]) -> bool:
        """True if the template takes a conversation only in its changed form."""
        return not self._takes(given) and self._takes(changed)

    # Names

    def _with_known_names(self, message: Mapping[str, Any]) -> Message:
        """The message by names that the template knows, of its role and its reasoning."""
        made, role = dict(message), message["role"]
        # The result of a ``function_call``.
        if role == "function" and not self._knows_functions:
            made["role"] = "tool"
        # OpenAI's newer name of the system role.
        if role == "developer" and not self._knows_developers:
            made["role"] = "system"
        if "reasoning_content" in made and "thinking" in self._source:
            made.setdefault("thinking", made["reasoning_content"])
        return made

    @cached_property
    def _knows_developers(self) -> bool:
        named = "developer" in self._source
        return named and self._takes(
            [{"role": "developer", "content": "tried00"}, _user("tried01")]
        )

    @cached_property
    def _knows_functions(self) -> bool:
        if not _FUNCTION_ROLE.search(self._source):  # a type of tools has the same name
            return False
        called = self._in_form(self._call_form, _call(_TRIED_ID, "tried01"))
        given = [_user("tried00"), called, _result(_TRIED_ID, "tried02")]
        return not self._prefers(given, [*given[:-1], given[-1] | {"role": "function"}])

    # Calls

    def _with_calls(self, messages: list[Message]) -> list[Message]:
        messages = _with_ids(messages)
        if self._wants_short_ids:
            messages = [_with_short_ids(message) for message in messages]
        several = any(len(message.get("tool_calls", ())) > 1 for message in messages)
        if several and self._wants_single_calls:
            messages = _with_single_calls(messages)
        return [made for message in messages for made in self._call_form_of(message)]

    def _call_form_of(self, message: Message) -> Iterator[Message]:
        if not message.get("tool_calls"):
            yield message
            return
        as_text, content = self._call_form
        if message.get("content") and message.get("thinking") and self._wants_text_in_thinking:
            thinking = f"{message['thinking']}\n\n{message['content']}"
            message = {**message, "content": "", "thinking": thinking}
        if message.get("content") and self._wants_text_apart:
            yield {name: value for name, value in message.items() if name != "tool_calls"}
            message = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
        made = {**message, "content": message.get("content") or content}
        if as_text:
            made["tool_calls"] = [self._with_text(call) for call in message["tool_calls"]]
        yield made

    def _with_text(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = self._to_json(call["function"]["arguments"])
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _in_form(self, form: tuple[bool, str | None], *calls: Message) -> Message:
        as_text, content = form
        made = [self._with_text(call) for call in calls] if as_text else [*calls]
        return {"role": "assistant", "content": content, "tool_calls": made}

    @cached_property
    def _call_form(self) -> tuple[bool, str | None]:
        """The first of the forms in which the template shows a call."""
        for form in _CALL_FORMS:
            called = self._in_form(form, _call(_TRIED_ID, "tried01"))
            if self._takes([_user("tried00"), called, _result(_TRIED_ID, "tried02")]):
                return form
        return _CALL_FORMS[0]

    @cached_property
    def _wants_text_apart(self) -> bool:
        """True if a message that calls, and has text too, must be two. Not if the template leaves
        out only the text."""
        called = self._in_form(self._call_form, _call(_TRIED_ID, "tried01"))
        user, result = _user("tried00"), _result(_TRIED_ID, "tried02")
        both = [user, called | {"content": "tried03"}, result]
        return self._prefers([user, _assistant("tried03"), called, result], both)

    @cached_property
    def _wants_text_in_thinking(self) -> bool:
        """True if a message that calls may not have both text and reasoning, as gpt-oss'."""
        called = self._in_form(self._call_form, _call(_TRIED_ID, "tried01"))
        user, result = _user("tried00"), _result(_TRIED_ID, "tried02")
        both = called | {"content": "tried03", "thinking": "tried04"}
        return self._prefers([user, called | {"thinking": "tried03"}, result], [user, both, result])

    @cached_property
    def _wants_short_ids(self) -> bool:
        """True if ids must be as Mistral's, nine letters and digits."""

        def tried(call_id: str) -> list[Message]:
            called = self._in_form(self._call_form, _call(call_id, "tried01"))
            return [_user("tried00"), called, _result(call_id, "tried02")]

        return self._prefers(tried(_TRIED_ID), tried(_FOREIGN_ID))

    @cached_property
    def _wants_single_calls(self) -> bool:
        """True if each call must be followed by its result, as Llama 3's."""
        first, second = _call(_TRIED_ID, "tried01"), _call(_OTHER_ID, "tried02")
        results = _result(_TRIED_ID, "tried03"), _result(_OTHER_ID, "tried04")
        both = [_user("tried00"), self._in_form(self._call_form, first, second), *results]
        return self._prefers(_with_single_calls(both), both)

    # System messages

    def _with_system(self, messages: list[Message]) -> list[Message]:
        front = list(takewhile(lambda message: message["role"] in SYSTEM, messages))
        others = messages[len(front) :]
        if front and self._refuses_system:
            return _folded(messages)
        if len(front) > 1 and self._wants_one_system:
            front = [reduce(_joined, front)]
        if any(m["role"] in SYSTEM for m in others) and self._wants_system_in_front:
            others = _folded(others)
        if front and not others and self._wants_a_user:
            return _folded(front)
        return front + others

    def _system_roles(self) -> tuple[str, ...]:
        return SYSTEM if self._knows_developers else SYSTEM[:1]

    @cached_property
    def _wants_one_system(self) -> bool:
        """True if only one system message may be in front, or is shown."""
        roles = self._system_roles()
        return any(
            self._prefers(
                [{"role": first, "content": "tried00\n\ntried01"}, _user("tried02")],
                [
                    {"role": first, "content": "tried00"},
                    {"role": second, "content": "tried01"},
                    _user("tried02"),
                ],
            )
            for first in roles
            for second in roles
        )

    @cached_property
    def _refuses_system(self) -> bool:
        """True if there may be no system message at all. One that is merely left out stays."""
        given = [{"role": "system", "content": "tried00"}, _user("tried01")]
        return self._render(given, self._tools) is None and self._takes(_folded(given))

    @cached_property
    def _wants_system_in_front(self) -> bool:
        """True if a system message may not follow others, or moves or replaces the first."""
        front = [] if self._refuses_system else [{"role": "system", "content": "tried00"}]
        told: list[Message] = [_user("tried01"), _assistant("tried02")]
        for role in self._system_roles():
            for late in ([_user("tried04")], []):
                given = [*told, {"role": role, "content": "tried03"}, *late]
                if self._prefers([*front, *_folded(given)], [*front, *given]):
                    return True
        return False

    @cached_property
    def _wants_a_user(self) -> bool:
        """True if a conversation needs a message of the user."""
        return self._prefers([_user("tried00")], [{"role": "system", "content": "tried00"}])

    # Turns

    def _alternating(self, messages: list[Message]) -> list[Message]:
        made: list[Message] = []
        for message in messages:
            last, role = made[-1]["role"] if made else None, message["role"]
            if self._wants_joined(last, role):
                message = _joined(made.pop(), message)
            elif last in (None, *SYSTEM) and role == "assistant" and self._wants_user_first:
                made.append(_user(""))
            elif (last == "tool" and role == "user" and self._wants_answer_to_result) or (
                role == "user" and _calls(made) and self._wants_answer_to_call
            ):
                made.append(_assistant(""))
            made.append(message)
        return made

    def _wants_joined(self, last: str | None, role: str) -> bool:
        """True if a message must be one with that before it."""
        match last, role:
            case "user", "user":
                return self._wants_users_joined
            case "assistant", "assistant":
                return self._wants_assistants_joined
            case "tool", "user":
                return self._wants_question_in_result and not self._wants_answer_to_result
        return False

    @cached_property
    def _wants_users_joined(self) -> bool:
        first, second = _user("tried00"), _user("tried01")
        return self._prefers([_joined(first, second)], [first, second])

    @cached_property
    def _wants_assistants_joined(self) -> bool:
        first, second = _assistant("tried01"), _assistant("tried02")
        before, after = _user("tried00"), _user("tried03")
        return self._prefers(
            [before, _joined(first, second), after], [before, first, second, after]
        )

    @cached_property
    def _wants_user_first(self) -> bool:
        given = [_assistant("tried00"), _user("tried01")]
        return self._prefers([_user(""), *given], given)

    @cached_property
    def _wants_answer_to_result(self) -> bool:
        """True if the user may not speak right after the result of a call."""
        asked = self._asked_after_result()
        return self._prefers([*asked[:-1], _assistant(""), asked[-1]], asked)

    @cached_property
    def _wants_answer_to_call(self) -> bool:
        """True if the user may not speak right after a call, whose result is missing."""
        called = self._in_form(self._call_form, _call(_TRIED_ID, "tried01"))
        before, after = [_user("tried00"), called], _user("tried02")
        return self._prefers([*before, _assistant(""), after], [*before, after])

    @cached_property
    def _wants_question_in_result(self) -> bool:
        asked = self._asked_after_result()
        return self._prefers([*asked[:-2], _joined(*asked[-2:])], asked)

    def _asked_after_result(self) -> list[Message]:
        called = self._in_form(self._call_form, _call(_TRIED_ID, "tried01"))
        return [_user("tried00"), called, _result(_TRIED_ID, "tried02"), _user("tried03")]

    # Definitions of tools

    def _with_whole_definition(self, tool: Mapping[str, Any]) -> Tool:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            return dict(tool)
        made = dict(function)
        if made.get("description") is None and self._wants_descriptions:
            made["description"] = ""
        parameters = made.get("parameters")
        if parameters is None and self._wants_parameters:
            made["parameters"] = {"type": "object", "properties": {}}
        if isinstance(parameters, Mapping):
            if "properties" not in parameters and self._wants_properties:
                parameters = {"type": "object", **parameters, "properties": {}}
            made["parameters"] = self._with_plain_properties(parameters)
        return {**tool, "function": made}

    def _with_plain_properties(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema whose properties have what the template reads of them."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return schema
        made = {
            name: self._plain_property(value) if isinstance(value, Mapping) else value
            for name, value in properties.items()
        }
        return {**schema, "properties": made}

    def _plain_property(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        made = dict(schema)
        types = made.get("type")
        if isinstance(types, list) and self._wants_one_type:
            named = [name for name in types if name != "null"]
            made["type"] = named[0] if len(named) == 1 else named
        if made.get("description") is None and self._wants_property_descriptions:
            made["description"] = ""
        if isinstance(made.get("items"), Mapping):
            made["items"] = self._plain_property(made["items"])
        return self._with_plain_properties(made)

    def _refuses_tool(self, **changed: Any) -> bool:
        """True if the template refuses a tool only because of these parts; ``None`` is missing."""
        function = {**_TOOL["function"], **changed}
        tool = {name: value for name, value in function.items() if value is not None}
        user = [_user("tried00")]
        if self._takes(user, [{"type": "function", "function": tool}]):
            return False
        return self._takes(user, [_TOOL])

    def _refuses_property(self, schema: dict[str, Any]) -> bool:
        return self._refuses_tool(parameters={"type": "object", "properties": {"x": schema}})

    @cached_property
    def _wants_descriptions(self) -> bool:
        return self._refuses_tool(description=None)

    @cached_property
    def _wants_parameters(self) -> bool:
        return self._refuses_tool(parameters=None)

    @cached_property
    def _wants_properties(self) -> bool:
        return self._refuses_tool(parameters={"type": "object"})

    @cached_property
    def _wants_property_descriptions(self) -> bool:
        return self._refuses_property({"type": "string"})

    @cached_property
    def _wants_one_type(self) -> bool:
        """True if a value that may be null is too much, as in the templates of Hermes 2 and 3."""
        return self._refuses_property({"type": ["string", "null"], "description": "X."})


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _call(call_id: str, text: str) -> dict[str, Any]:
    function = {"name": "try", "arguments": {_ARGUMENT: text}}
    return {"id": call_id, "type": "function", "function": function}


def _result(call_id: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _calls(messages: list[Message]) -> bool:
    """True if the last message calls."""
    return bool(messages and messages[-1].get("tool_calls"))


def _texts(message: Message) -> Iterator[str]:
    """What a template must show of a tried message; it may leave out text beside calls."""
    calls = message.get("tool_calls", ())
    for value in [call["function"]["arguments"] for call in calls] or [message["content"]]:
        yield from _MARK.findall(str(value))


def _joined(first: Message, second: Message) -> Message:
    """Two messages as one, of the role of the first."""
    made = {**second, **first}
    for name in ("content", "reasoning_content", "thinking"):
        texts = [text for text in (first.get(name), second.get(name)) if text]
        if texts:
            made[name] = "\n\n".join(texts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        made["tool_calls"] = calls
    return made


def _folded(messages: list[Message]) -> list[Message]:
    """The messages without any of the system: their texts end the user's message or the result
    before them, or begin the user's message after them. So each prompt of a conversation begins
    like the one before it."""
    made: list[Message] = []
    opened = False  # the last message has no text of the user yet
    for message in _behind_results(messages):
        role, last = message["role"], made[-1]["role"] if made else None
        if role in SYSTEM and last in ("user", "tool"):
            made.append(_joined(made.pop(), message))
        elif role in SYSTEM:
            made.append(_user(message["content"]))
            opened = True
        elif role == "user" and opened:
            made.append(_joined(made.pop(), message))
            opened = False
        else:
            made.append(message)
            opened = False
    return made


def _behind_results(messages: list[Message]) -> list[Message]:
    """The messages, with those of the system behind the results that they keep from their calls."""
    made: list[Message] = []
    held: list[Message] = []
    for message in messages:
        if message["role"] in SYSTEM and made and made[-1].get("tool_calls"):
            held.append(message)
            continue
        if message["role"] != "tool":
            made += held
            held = []
        made.append(message)
    return made + held


def _with_ids(messages: list[Message]) -> list[Message]:
    """Messages of which each call and result has an id, those of a result by their order."""
    made: list[Message] = []
    count, waiting = 0, []
    for message in messages:
        if calls := message.get("tool_calls"):
            calls = [
                call if call.get("id") else {**call, "id": f"call_{count + i}"}
                for i, call in enumerate(calls)
            ]
            count += len(calls)
            waiting = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            answered = message.get("tool_call_id") or next(iter(waiting), None)
            if answered in waiting:
                waiting.remove(answered)
            if answered is not None:
                message = {**message, "tool_call_id": answered}
        made.append(message)
    return made


def _with_short_ids(message: Message) -> Message:
    made = dict(message)
    if "tool_calls" in made:
        made["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in made["tool_calls"]]
    if made.get("tool_call_id"):
        made["tool_call_id"] = _short_id(made["tool_call_id"])
    return made


def _short_id(call_id: str) -> str:
    """A short id that is the same for each mention of a longer one."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    digest = blake2b(call_id.encode(errors="surrogatepass"), digest_size=9).digest()
    return "".join(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in digest)


def _with_single_calls(messages: list[Message]) -> list[Message]:
    """Each of several calls as a message of its own, which its result follows."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            made.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            alone: Message = {"role": message["role"], "content": ""} if i else dict(message)
            made.append(alone | {"tool_calls": [call]})
            answers = (r for r in results if r.get("tool_call_id") == call["id"])
            if (answer := next(answers, None)) is not None:
                results.remove(answer)
                made.append(answer)
        made += results
    return made

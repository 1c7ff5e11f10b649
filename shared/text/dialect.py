"""The dialect of a chat template: the form of messages and tools that it renders completely.

Templates differ in what they reject or silently leave out: a second system message, or any; two
consecutive messages of a role; two calls in one message; the ids that other servers make; a tool
without a description. What a template accepts is found by rendering small probe conversations, each
once, and only if a request needs it. Everything else stays unchanged, so that a prompt equals
transformers', and each prompt of a conversation extends the one before.
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
_FOREIGN_ID, _PROBE_ID, _OTHER_ID = "call_0123456789abcdef", "tandem001", "tandem002"
# Tools of a request that are probed one by one.
MAX_BLAMED = 128
# The name of the argument in probed calls.
_ARGUMENT = "probe"
_MARK = re.compile(r"probe\d\d")
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
# Whether arguments are text, and the content of a message that consists of calls.
_CALL_FORMS = ((False, ""), (False, None), (True, ""), (True, None))


class Dialect:
    """The form that one template accepts. ``render`` renders a probe conversation, or returns
    ``None`` if the template rejects it. ``with_tools`` says whether probes include tools."""

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

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Convert messages to the form that the template accepts."""
        result = [self._with_known_names(message) for message in messages]
        if any(message.get("tool_calls") for message in result):
            result = self._with_calls(result)
        return self._alternating(self._with_system(result))

    def tools(self, tools: Sequence[Mapping[str, Any]] | None) -> list[Tool] | None:
        """Complete tools with what the template needs in their definitions."""
        return None if tools is None else [self._with_whole_definition(tool) for tool in tools]

    def rejected_tool(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """The name of a tool that the template rejects with any messages."""
        user = [_user("probe00")]
        if self._render(user, [_TOOL]) is None:
            return None
        for tool in tools[:MAX_BLAMED]:
            if self._render(user, [dict(tool)]) is None:
                return str(tool.get("function", {}).get("name"))
        return None

    def _accepts(self, messages: list[Message], tools: list[Tool] | None = None) -> bool:
        """True if the template renders a conversation completely, and arguments as JSON objects."""
        prompt = self._render(messages, tools or self._tools)
        if prompt is None or f"{{'{_ARGUMENT}'" in prompt or f'\\"{_ARGUMENT}' in prompt:
            return False
        return all(text in prompt for message in messages for text in _texts(message))

    def _prefers(self, converted: list[Message], original: list[Message]) -> bool:
        """True if the template accepts a conversation only in the converted form."""
        return not self._accepts(original) and self._accepts(converted)

    # Names

    def _with_known_names(self, message: Mapping[str, Any]) -> Message:
        """The message with the names of roles and reasoning that the template knows."""
        result, role = dict(message), message["role"]
        # The result of a ``function_call``.
        if role == "function" and not self._knows_functions:
            result["role"] = "tool"
        # OpenAI's newer name of the system role.
        if role == "developer" and not self._knows_developers:
            result["role"] = "system"
        if "reasoning_content" in result and "thinking" in self._source:
            result.setdefault("thinking", result["reasoning_content"])
        return result

    @cached_property
    def _knows_developers(self) -> bool:
        is_named = "developer" in self._source
        return is_named and self._accepts(
            [{"role": "developer", "content": "probe00"}, _user("probe01")]
        )

    @cached_property
    def _knows_functions(self) -> bool:
        if not _FUNCTION_ROLE.search(self._source):  # "function" is also a type of tool
            return False
        call = self._in_form(self._call_form, _call(_PROBE_ID, "probe01"))
        conversation = [_user("probe00"), call, _result(_PROBE_ID, "probe02")]
        return not self._prefers(
            conversation, [*conversation[:-1], conversation[-1] | {"role": "function"}]
        )

    # Calls

    def _with_calls(self, messages: list[Message]) -> list[Message]:
        messages = _with_ids(messages)
        if self._wants_short_ids:
            messages = [_with_short_ids(message) for message in messages]
        several = any(len(message.get("tool_calls", ())) > 1 for message in messages)
        if several and self._wants_single_calls:
            messages = _with_single_calls(messages)
        return [part for message in messages for part in self._in_call_form(message)]

    def _in_call_form(self, message: Message) -> Iterator[Message]:
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
        result = {**message, "content": message.get("content") or content}
        if as_text:
            result["tool_calls"] = [self._with_text(call) for call in message["tool_calls"]]
        yield result

    def _with_text(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = self._to_json(call["function"]["arguments"])
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _in_form(self, form: tuple[bool, str | None], *calls: Message) -> Message:
        as_text, content = form
        tool_calls = [self._with_text(call) for call in calls] if as_text else [*calls]
        return {"role": "assistant", "content": content, "tool_calls": tool_calls}

    @cached_property
    def _call_form(self) -> tuple[bool, str | None]:
        """The first form in which the template renders a call completely."""
        for form in _CALL_FORMS:
            call = self._in_form(form, _call(_PROBE_ID, "probe01"))
            if self._accepts([_user("probe00"), call, _result(_PROBE_ID, "probe02")]):
                return form
        return _CALL_FORMS[0]

    @cached_property
    def _wants_text_apart(self) -> bool:
        """True if a message with both text and calls must be split. Not if the template leaves out
        only the text."""
        call = self._in_form(self._call_form, _call(_PROBE_ID, "probe01"))
        user, result = _user("probe00"), _result(_PROBE_ID, "probe02")
        both = [user, call | {"content": "probe03"}, result]
        return self._prefers([user, _assistant("probe03"), call, result], both)

    @cached_property
    def _wants_text_in_thinking(self) -> bool:
        """True if a message with calls may not have both text and reasoning, as in gpt-oss."""
        call = self._in_form(self._call_form, _call(_PROBE_ID, "probe01"))
        user, result = _user("probe00"), _result(_PROBE_ID, "probe02")
        both = call | {"content": "probe03", "thinking": "probe04"}
        return self._prefers([user, call | {"thinking": "probe03"}, result], [user, both, result])

    @cached_property
    def _wants_short_ids(self) -> bool:
        """True if ids must be nine letters and digits, as for Mistral."""

        def probe(call_id: str) -> list[Message]:
            call = self._in_form(self._call_form, _call(call_id, "probe01"))
            return [_user("probe00"), call, _result(call_id, "probe02")]

        return self._prefers(probe(_PROBE_ID), probe(_FOREIGN_ID))

    @cached_property
    def _wants_single_calls(self) -> bool:
        """True if each call must be followed by its result, as for Llama 3."""
        first, second = _call(_PROBE_ID, "probe01"), _call(_OTHER_ID, "probe02")
        results = _result(_PROBE_ID, "probe03"), _result(_OTHER_ID, "probe04")
        both = [_user("probe00"), self._in_form(self._call_form, first, second), *results]
        return self._prefers(_with_single_calls(both), both)

    # System messages

    def _with_system(self, messages: list[Message]) -> list[Message]:
        front = list(takewhile(lambda message: message["role"] in SYSTEM, messages))
        others = messages[len(front) :]
        if front and self._rejects_system:
            return _fold_system(messages)
        if len(front) > 1 and self._wants_one_system:
            front = [reduce(_merge, front)]
        if any(m["role"] in SYSTEM for m in others) and self._wants_system_in_front:
            others = _fold_system(others)
        if front and not others and self._wants_a_user:
            return _fold_system(front)
        return front + others

    def _system_roles(self) -> tuple[str, ...]:
        return SYSTEM if self._knows_developers else SYSTEM[:1]

    @cached_property
    def _wants_one_system(self) -> bool:
        """True if at most one system message may be in front, or is rendered."""
        roles = self._system_roles()
        return any(
            self._prefers(
                [{"role": first, "content": "probe00\n\nprobe01"}, _user("probe02")],
                [
                    {"role": first, "content": "probe00"},
                    {"role": second, "content": "probe01"},
                    _user("probe02"),
                ],
            )
            for first in roles
            for second in roles
        )

    @cached_property
    def _rejects_system(self) -> bool:
        """True if system messages are rejected. One that is merely left out stays."""
        conversation = [{"role": "system", "content": "probe00"}, _user("probe01")]
        return self._render(conversation, self._tools) is None and self._accepts(
            _fold_system(conversation)
        )

    @cached_property
    def _wants_system_in_front(self) -> bool:
        """True if a later system message is rejected, moved, or replaces the first."""
        front = [] if self._rejects_system else [{"role": "system", "content": "probe00"}]
        earlier: list[Message] = [_user("probe01"), _assistant("probe02")]
        for role in self._system_roles():
            for late in ([_user("probe04")], []):
                conversation = [*earlier, {"role": role, "content": "probe03"}, *late]
                if self._prefers([*front, *_fold_system(conversation)], [*front, *conversation]):
                    return True
        return False

    @cached_property
    def _wants_a_user(self) -> bool:
        """True if a conversation needs a user message."""
        return self._prefers([_user("probe00")], [{"role": "system", "content": "probe00"}])

    # Turns

    def _alternating(self, messages: list[Message]) -> list[Message]:
        result: list[Message] = []
        for message in messages:
            last, role = result[-1]["role"] if result else None, message["role"]
            if self._wants_joined(last, role):
                message = _merge(result.pop(), message)
            elif last in (None, *SYSTEM) and role == "assistant" and self._wants_user_first:
                result.append(_user(""))
            elif (last == "tool" and role == "user" and self._wants_reply_to_result) or (
                role == "user" and _ends_in_call(result) and self._wants_reply_to_call
            ):
                result.append(_assistant(""))
            result.append(message)
        return result

    def _wants_joined(self, last: str | None, role: str) -> bool:
        """True if a message must be merged with the one before it."""
        match last, role:
            case "user", "user":
                return self._wants_users_joined
            case "assistant", "assistant":
                return self._wants_assistants_joined
            case "tool", "user":
                return self._wants_question_in_result and not self._wants_reply_to_result
        return False

    @cached_property
    def _wants_users_joined(self) -> bool:
        first, second = _user("probe00"), _user("probe01")
        return self._prefers([_merge(first, second)], [first, second])

    @cached_property
    def _wants_assistants_joined(self) -> bool:
        first, second = _assistant("probe01"), _assistant("probe02")
        before, after = _user("probe00"), _user("probe03")
        return self._prefers([before, _merge(first, second), after], [before, first, second, after])

    @cached_property
    def _wants_user_first(self) -> bool:
        conversation = [_assistant("probe00"), _user("probe01")]
        return self._prefers([_user(""), *conversation], conversation)

    @cached_property
    def _wants_reply_to_result(self) -> bool:
        """True if a user message may not directly follow the result of a call."""
        conversation = self._question_after_result()
        return self._prefers([*conversation[:-1], _assistant(""), conversation[-1]], conversation)

    @cached_property
    def _wants_reply_to_call(self) -> bool:
        """True if a user message may not directly follow a call without a result."""
        call = self._in_form(self._call_form, _call(_PROBE_ID, "probe01"))
        before, after = [_user("probe00"), call], _user("probe02")
        return self._prefers([*before, _assistant(""), after], [*before, after])

    @cached_property
    def _wants_question_in_result(self) -> bool:
        conversation = self._question_after_result()
        return self._prefers([*conversation[:-2], _merge(*conversation[-2:])], conversation)

    def _question_after_result(self) -> list[Message]:
        call = self._in_form(self._call_form, _call(_PROBE_ID, "probe01"))
        return [_user("probe00"), call, _result(_PROBE_ID, "probe02"), _user("probe03")]

    # Definitions of tools

    def _with_whole_definition(self, tool: Mapping[str, Any]) -> Tool:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            return dict(tool)
        definition = dict(function)
        if definition.get("description") is None and self._wants_descriptions:
            definition["description"] = ""
        parameters = definition.get("parameters")
        if parameters is None and self._wants_parameters:
            definition["parameters"] = {"type": "object", "properties": {}}
        if isinstance(parameters, Mapping):
            if "properties" not in parameters and self._wants_properties:
                parameters = {"type": "object", **parameters, "properties": {}}
            definition["parameters"] = self._with_plain_properties(parameters)
        return {**tool, "function": definition}

    def _with_plain_properties(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema whose properties have the keys that the template reads."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return schema
        plain = {
            name: self._plain_property(value) if isinstance(value, Mapping) else value
            for name, value in properties.items()
        }
        return {**schema, "properties": plain}

    def _plain_property(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        result = dict(schema)
        types = result.get("type")
        if isinstance(types, list) and self._wants_one_type:
            names = [name for name in types if name != "null"]
            result["type"] = names[0] if len(names) == 1 else names
        if result.get("description") is None and self._wants_property_descriptions:
            result["description"] = ""
        if isinstance(result.get("items"), Mapping):
            result["items"] = self._plain_property(result["items"])
        return self._with_plain_properties(result)

    def _rejects_tool(self, **changes: Any) -> bool:
        """True if the template rejects a tool because of these values; ``None`` removes a key."""
        function = {**_TOOL["function"], **changes}
        tool = {name: value for name, value in function.items() if value is not None}
        user = [_user("probe00")]
        if self._accepts(user, [{"type": "function", "function": tool}]):
            return False
        return self._accepts(user, [_TOOL])

    def _rejects_property(self, schema: dict[str, Any]) -> bool:
        return self._rejects_tool(parameters={"type": "object", "properties": {"x": schema}})

    @cached_property
    def _wants_descriptions(self) -> bool:
        return self._rejects_tool(description=None)

    @cached_property
    def _wants_parameters(self) -> bool:
        return self._rejects_tool(parameters=None)

    @cached_property
    def _wants_properties(self) -> bool:
        return self._rejects_tool(parameters={"type": "object"})

    @cached_property
    def _wants_property_descriptions(self) -> bool:
        return self._rejects_property({"type": "string"})

    @cached_property
    def _wants_one_type(self) -> bool:
        """True if a nullable property is rejected, as by the templates of Hermes 2 and 3."""
        return self._rejects_property({"type": ["string", "null"], "description": "X."})


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _call(call_id: str, text: str) -> dict[str, Any]:
    function = {"name": "try", "arguments": {_ARGUMENT: text}}
    return {"id": call_id, "type": "function", "function": function}


def _result(call_id: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _ends_in_call(messages: list[Message]) -> bool:
    """True if the last message has tool calls."""
    return bool(messages and messages[-1].get("tool_calls"))


def _texts(message: Message) -> Iterator[str]:
    """The texts of a probe message that must be rendered; text beside calls may be left out."""
    calls = message.get("tool_calls", ())
    for value in [call["function"]["arguments"] for call in calls] or [message["content"]]:
        yield from _MARK.findall(str(value))


def _merge(first: Message, second: Message) -> Message:
    """Merge two messages into one, with the role of the first."""
    result = {**second, **first}
    for name in ("content", "reasoning_content", "thinking"):
        texts = [text for text in (first.get(name), second.get(name)) if text]
        if texts:
            result[name] = "\n\n".join(texts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        result["tool_calls"] = calls
    return result


def _fold_system(messages: list[Message]) -> list[Message]:
    """Fold system messages into others: each is appended to the user message or result before it,
    or prepended to the user message after it. So each prompt extends the one before."""
    result: list[Message] = []
    is_open = False  # the last message has only a system text so far
    for message in _move_behind_results(messages):
        role, last = message["role"], result[-1]["role"] if result else None
        if role in SYSTEM and last in ("user", "tool"):
            result.append(_merge(result.pop(), message))
        elif role in SYSTEM:
            result.append(_user(message["content"]))
            is_open = True
        elif role == "user" and is_open:
            result.append(_merge(result.pop(), message))
            is_open = False
        else:
            result.append(message)
            is_open = False
    return result


def _move_behind_results(messages: list[Message]) -> list[Message]:
    """Move system messages between calls and their results behind the results."""
    result: list[Message] = []
    pending: list[Message] = []
    for message in messages:
        if message["role"] in SYSTEM and result and result[-1].get("tool_calls"):
            pending.append(message)
            continue
        if message["role"] != "tool":
            result += pending
            pending = []
        result.append(message)
    return result + pending


def _with_ids(messages: list[Message]) -> list[Message]:
    """Give each call and result an id; results without one match the calls in order."""
    result: list[Message] = []
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
            result_id = message.get("tool_call_id") or next(iter(waiting), None)
            if result_id in waiting:
                waiting.remove(result_id)
            if result_id is not None:
                message = {**message, "tool_call_id": result_id}
        result.append(message)
    return result


def _with_short_ids(message: Message) -> Message:
    result = dict(message)
    if "tool_calls" in result:
        result["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} for call in result["tool_calls"]
        ]
    if result.get("tool_call_id"):
        result["tool_call_id"] = _short_id(result["tool_call_id"])
    return result


def _short_id(call_id: str) -> str:
    """A short id, which is the same for every use of a longer one."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    digest = blake2b(call_id.encode(errors="surrogatepass"), digest_size=9).digest()
    return "".join(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in digest)


def _with_single_calls(messages: list[Message]) -> list[Message]:
    """Split messages with several calls: a message for each, followed by its result."""
    output: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            output.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            alone: Message = {"role": message["role"], "content": ""} if i else dict(message)
            output.append(alone | {"tool_calls": [call]})
            matching = (r for r in results if r.get("tool_call_id") == call["id"])
            if (result := next(matching, None)) is not None:
                results.remove(result)
                output.append(result)
        output += results
    return output

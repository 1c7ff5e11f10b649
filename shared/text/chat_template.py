"""Chat templates, rendered as in Hugging Face's transformers, with bounds on time and memory.

A template from the model folder is only half trusted: it runs in Jinja's immutable sandbox, every
loop and call draws on a budget of steps, and all text on a budget of characters. The same bounds
apply to templates from clients, which the operator has to allow.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ..errors import ModelError, RequestError
from .dialect import Dialect, Message, Tool

MAX_STEPS = 1_000_000
# For a probe conversation (``dialect.py``).
MAX_TRIAL_STEPS = MAX_STEPS // 20
STEPS_OF_A_CALL = 4
MAX_CHARACTERS = 64 * 1024 * 1024
# All strings that one rendering builds, most of which are temporary.
MAX_BUILT = 2 * MAX_CHARACTERS
# Values that the C encoder handles in a few milliseconds.
MAX_IN_C = 16 * 1024
# Not a valid identifier, so that a template cannot overwrite it.
BUDGET = "budget of this rendering"
# A field width in a format string that could exhaust memory.
_WIDE = re.compile(r"\d{7}")
# Methods of lists that change them one item at a time.
_LIST_CHANGES = frozenset(("append", "pop"))

T = TypeVar("T")


class TemplateBudgetError(Exception):
    """The template exceeded its budget."""


class _Budget:
    """The remaining budget of one rendering with these variables."""

    def __init__(self, variables: Mapping[str, Any], steps: int) -> None:
        self._limit = self._steps = steps
        self._characters = MAX_BUILT
        self._variables = variables

    @cached_property
    def input_lists(self) -> frozenset[int]:
        """The identities of all lists in the variables, which the template may not change."""
        ids: set[int] = set()
        stack: list[Any] = [*self._variables.values()]
        while stack:
            value = stack.pop()
            if isinstance(value, list):
                ids.add(id(value))
            if isinstance(value, (dict, list, tuple)):
                stack += value.values() if isinstance(value, dict) else value
        return frozenset(ids)

    def step(self, steps: int = 1) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise TemplateBudgetError(f"it takes more than {self._limit} steps")

    def count(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            yield item

    def weigh(self, value: T) -> T:
        """Return ``value``, charging the length of a text, or eight characters per list item."""
        if isinstance(value, (str, list, tuple)):
            self._characters -= len(value) * (1 if isinstance(value, str) else 8)
            if self._characters < 0:
                raise TemplateBudgetError(f"it builds more than {MAX_BUILT} characters")
        return value


class _GenerationTag(Extension):
    """``{% generation %}``, a mark for training: only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounds(NodeTransformer):
    """Wraps loops, filters and ``~`` in budget filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("concatenated", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        node.args = [_through("sized", value) for value in node.args]
        for pair in node.kwargs:
            pair.value = _through("sized", pair.value)
        # Without a node it is a filter block, whose output is charged when it is written.
        return node if node.node is None else _through("weighed", node)


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with budgets for loops and calls, and limits on growth. Unlike in transformers,
    a template may append to its own lists, as Kimi K2's does."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        template = _Bounds().visit(source).set_environment(self)
        return super()._generate(template, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow changes of lists; ``call`` rejects changes of input lists."""
        if isinstance(obj, list) and attr in _LIST_CHANGES:
            return True
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count every call and charge its result: macros may call each other without limit."""
        budget: _Budget = context[BUDGET]
        budget.step(STEPS_OF_A_CALL)
        owner = getattr(function, "__self__", None)
        changes = isinstance(owner, list) and function.__name__ in _LIST_CHANGES
        if changes and id(owner) in budget.input_lists:
            raise SecurityError(f"{function.__name__!r} would change a list of its input")
        for value in (*args, *kwargs.values()):
            _check_size(context, value)
        return budget.weigh(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """Check the format string when ``str.format`` is looked up, before it is called."""
        wrapper = super().wrap_str_format(value)
        if wrapper is not None:
            _check_format(value.__self__)
        return wrapper

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Reject operators that build gigabytes out of a few characters."""
        if operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
            value, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if isinstance(times, int) and len(value) * times > MAX_CHARACTERS:
                raise TemplateBudgetError("it repeats a string too often")
        if operator == "**" and (abs(left) > 1_000_000 or abs(right) > 100):
            raise TemplateBudgetError("it computes too large a power")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        budget: _Budget = context[BUDGET]
        return budget.weigh(super().call_binop(context, operator, left, right))


class ChatTemplate:
    """One compiled template; ``render`` may be called from any thread."""

    def __init__(self, source: str, *, origin: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self._tokens = dict(tokens)
        self._dialects: dict[bool, Dialect] = {}
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_weigh,
        )
        environment.filters["tojson"] = to_json
        environment.filters["from_json"] = _from_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.filters |= {
            "counted": _count,
            "concatenated": _concatenate,
            "sized": _check_size,
            "weighed": _weigh,
        }
        del environment.globals["lipsum"]
        try:
            self._template = environment.from_string(source)
        # Python's compiler also rejects deep nesting.
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError) as error:
            place = ""
            if isinstance(error, jinja2.TemplateSyntaxError):
                place = f" (line {error.lineno} of the template)"
            raise ModelError(
                f"{origin}: the chat template does not compile: {error}{place}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        steps: int = MAX_STEPS,
    ) -> str:
        """Render the prompt. Raises ``RequestError`` with the template's own message."""
        variables: dict[str, Any] = {**self._tokens, **(template_kwargs or {})}
        variables |= {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        variables[BUDGET] = _Budget(variables, steps)
        try:
            return _join(self._template.generate(variables))
        except TemplateBudgetError as error:
            raise RequestError(f"The chat template was stopped: {error}.") from error
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            what, param = "these messages", "messages"
            if tools and steps == MAX_STEPS:
                tool = self.dialect(with_tools=True).rejected_tool(tools)
                what, param = (what, param) if tool is None else (f"the tool {tool!r}", "tools")
            message = f"The model's chat template rejects {what}: {error}"
            raise RequestError(message, param=param) from error

    def dialect(self, *, with_tools: bool) -> Dialect:
        """The form of conversations that the template accepts."""
        if with_tools not in self._dialects:
            dialect = Dialect(self.source, self._try, to_json, with_tools=with_tools)
            self._dialects[with_tools] = dialect
        return self._dialects[with_tools]

    def _try(self, messages: list[Message], tools: list[Tool] | None) -> str | None:
        try:
            return self.render(messages, tools=tools, steps=MAX_TRIAL_STEPS)
        except RequestError:
            return None


def _join(pieces: Iterable[str]) -> str:
    parts: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateBudgetError(f"it writes more than {MAX_CHARACTERS} characters")
        parts.append(piece)
    return "".join(parts)


@jinja2.pass_context
def _count(context: Context, items: Any) -> Iterable[Any]:
    budget: _Budget = context[BUDGET]
    return budget.count(items)


@jinja2.pass_context
def _weigh(context: Context, value: T) -> T:
    budget: _Budget = context[BUDGET]
    return budget.weigh(value)


@jinja2.pass_context
def _concatenate(context: Context, parts: list[Any]) -> str:
    budget: _Budget = context[BUDGET]
    return "".join(budget.weigh(str(part)) for part in parts)


@jinja2.pass_context
def _check_size(context: Context, value: T) -> T:
    """Check an argument: a large integer as width or count would exhaust memory."""
    if isinstance(value, int) and abs(value) > MAX_STEPS:
        raise TemplateBudgetError(f"it gives a filter or a function a number over {MAX_STEPS}")
    return value


def _check_format(form: str) -> None:
    if len(form) > 10_000 or _WIDE.search(form):
        raise TemplateBudgetError("its format string is too long, or has too wide a field")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``tojson`` as in transformers; Jinja's own filter escapes HTML. Large values are encoded in
    Python, so that other threads can run meanwhile."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if _has_few_values(value):
        return encoder.encode(value)
    return "".join(encoder.iterencode(value))


def _from_json(text: str) -> Any:
    """Parse JSON; any other text is returned unchanged. Used by Tandem's own templates only."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _has_few_values(value: Any) -> bool:
    remaining, stack = MAX_IN_C, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (dict, list, tuple)):
            remaining -= len(item)
            if remaining < 0:
                return False
            stack += item.values() if isinstance(item, dict) else item
    return True


# The parts of a message that are text, and the name of the text in them.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def flatten_content(content: Any, *, param: str) -> str:
    """The text of a message: a string, or OpenAI's list of parts that are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(
            f"'{param}' must be a string or a non-empty list of content parts.", param=param
        )
    return "\n".join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError(f"'{param}' must be an object or a string.", param=param)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        # Anything but a string may be as large and deep as the whole body.
        value = repr(kind[:64]) if isinstance(kind, str) else type(kind).__name__
        raise RequestError(
            f"'{param}' has the unsupported type {value}; this model takes only 'text' parts.",
            param=param,
            code="unsupported_content",
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"'{param}.{TEXT_PARTS[kind]}' must be a string.", param=param)
    return text

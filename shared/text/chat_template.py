"""Chat templates, as Hugging Face renders them, with bounds on what a template may do.

The template belongs to the model folder, so it is only half trusted: it runs in Jinja's immutable
sandbox, every loop draws on one budget of steps, and the text it may build is limited. Clients
never send templates.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ModelError, RequestError

MAX_STEPS = 1_000_000
MAX_CHARACTERS = 64 * 1024 * 1024
BUDGET = "_loop_budget"


class TemplateBudgetError(Exception):
    """The template did more than it may."""


class _Budget:
    """How many loop steps one rendering has left."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def count(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._left -= 1
            if self._left < 0:
                raise TemplateBudgetError(f"it loops more than {MAX_STEPS} times")
            yield item


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a budget on every loop and limits on the operators that grow things."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            budget = nodes.Name(BUDGET, "load")
            counted = nodes.Filter(loop.iter, "counted", [budget], [], None, None)
            loop.iter = counted.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuses the operators that build gigabytes out of a few characters."""
        if operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if isinstance(times, int) and len(sized) * times > MAX_CHARACTERS:
                raise TemplateBudgetError("it repeats a string too often")
        if operator == "**" and (abs(left) > 1_000_000 or abs(right) > 100):
            raise TemplateBudgetError("it computes too large a power")
        if operator == "%" and isinstance(left, str) and len(left) > 10_000:
            raise TemplateBudgetError("its format string is too long")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """One compiled template; ``render`` may be called from any thread."""

    def __init__(self, source: str, *, origin: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self._tokens = dict(tokens)
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.filters["counted"] = _counted
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{origin}: the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. What the template refuses is a ``RequestError`` with its words."""
        variables: dict[str, Any] = {**self._tokens, **(template_kwargs or {})}
        variables |= {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            BUDGET: _Budget(),
        }
        try:
            return _joined(self._template.generate(variables))
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
            message = f"The model's chat template refuses these messages: {error}"
            raise RequestError(message, param="messages") from error


def _joined(pieces: Iterable[str]) -> str:
    parts: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateBudgetError(f"it writes more than {MAX_CHARACTERS} characters")
        parts.append(piece)
    return "".join(parts)


def _counted(items: Any, budget: _Budget | jinja2.Undefined) -> Iterable[Any]:
    return budget.count(items) if isinstance(budget, _Budget) else items


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: Jinja's own filter would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def flatten_content(content: Any, *, param: str) -> str:
    """The text of a message: a string, or OpenAI's list of parts of type ``text``."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(
            f"'{param}' must be a string or a non-empty list of content parts.", param=param
        )
    return "\n".join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"'{param}' must be an object.", param=param)
    kind = part.get("type")
    if kind != "text":
        raise RequestError(
            f"'{param}' has the unsupported type {kind!r}; this model takes only 'text' parts.",
            param=param,
            code="unsupported_content",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"'{param}.text' must be a string.", param=param)
    return text

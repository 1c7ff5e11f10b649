"""The constraint on calls that the model may make among other text: calls of custom tools follow
their grammar and calls of strict functions their schema, in the format that the model writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....proto import tandem_pb2 as pb
from ....shared.text.json_schema import SchemaError, clean_schema
from ....shared.text.tool_parsers.json_call import text_opening
from ...errors import invalid
from ..structured_outputs import constraint
from .call_forms import FORMS, CallForm, CallList, Parts
from .grammars import Schemas, ToolGrammars, verbatim
from .plain_fields import NotPlainError

_ANY_OBJECT = {"type": "object"}
CHANNELS = "openai"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedTools:
    """The functions of a request by name: all ``schemas``, the ``grammars`` of custom tools, and
    the places of ``strict`` schemas."""

    parser: str
    schemas: Schemas
    grammars: ToolGrammars
    strict: Mapping[str, str]

    def texts(self) -> ToolGrammars:
        """The grammars of functions whose text is written verbatim."""
        if self._form().fields is None:
            return verbatim(self.grammars, self.schemas)
        return {name: self.grammars[name] for name in self.schemas if name in self.grammars}

    def _form(self) -> CallForm:
        return _CHANNEL_FORM if self.parser == CHANNELS else FORMS[self.parser]

    def constraint(self, *, required: bool = False) -> pb.StructuredOutputs | None:
        """The constraint; ``None`` if any output is valid. Raises ``RequestError``."""
        places = [each.place for each in self.grammars.values()] + list(self.strict.values())
        if not places and not required:
            return None
        param = "tool_choice" if not places else places[0] if len(places) == 1 else "tools"
        return constraint("tool_calls", self._definition(required), param)

    def _definition(self, required: bool) -> dict[str, Any]:
        form, texts = self._form(), self.texts()
        guided = {name: self._schema(name) for name in self.schemas if name not in texts}
        schemas = guided if form.fields is None else {}
        if self.parser == CHANNELS:
            calls = [{"name": name, "begin": [], "schema": name} for name in guided]
            calls += [{"name": name} | self._text(name, form, []) for name in texts]
            return {"schemas": schemas, "channels": {"calls": calls, "required": required}}
        lists = [self._list(each, form, guided, texts) for each in form.lists]
        return {
            "schemas": schemas,
            "lists": lists,
            "anywhere": form.anywhere,
            "tags": list(form.tags),
        }

    def _schema(self, name: str) -> Mapping[str, Any]:
        is_guided = name in self.grammars or name in self.strict
        return (self.schemas[name] if is_guided else None) or _ANY_OBJECT

    def _list(
        self, one: CallList, form: CallForm, guided: Schemas, texts: ToolGrammars
    ) -> dict[str, Any]:
        start = {"trigger": one.trigger} if one.trigger else {"opening": one.opening}
        calls = [
            {"begin": one.head(name)} | self._arguments(name, schema, one, form)
            for name, schema in guided.items()
        ]
        verbatim_calls = [self._text(name, form, one.head(name)) for name in texts]
        delimiters = {"begin": one.begin, "separator": one.separator, "end": one.end}
        return start | delimiters | {"calls": calls, "texts": verbatim_calls}

    def _arguments(
        self, name: str, schema: Mapping[str, Any], one: CallList, form: CallForm
    ) -> dict[str, Any]:
        if form.fields is None:
            return {"schema": name, "end": one.close}
        if name not in self.strict:
            free = form.free or {}
            return free | {"end": "" if "until" in free else one.close}
        try:
            fields = form.fields.fields(clean_schema(schema))
        except SchemaError as error:
            message = f"Invalid '{self.strict[name]}': {error}."
            raise invalid(message, self.strict[name], "invalid_value") from None
        except NotPlainError as error:
            raise invalid(
                f"'{self.strict[name]}' has {error}, which calls in the format '{self.parser}' "
                f"cannot be made to follow with 'tool_choice' 'auto'; use 'required' or leave out "
                f"'strict'.",
                self.strict[name],
                "unsupported_value",
            ) from None
        return {"fields": fields, "separator": form.fields.separator, "end": one.close}

    def _text(self, name: str, form: CallForm, head: Parts) -> dict[str, Any]:
        grammar = self.grammars[name]
        begin = [*head, form.text_opening(grammar.argument)]
        return {"begin": begin, grammar.syntax: grammar.definition}


_CHANNEL_FORM = CallForm(lists=(), text_opening=text_opening)

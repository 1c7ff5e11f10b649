"""A router and one node whose output is scripted by the prompt, for tests of agents:

    python -m tandem.contracts.scripted_server --port 8000 [--key KEY --name NAME]

``[[NAME {...}]]`` in a user message makes the node call the tool NAME with these arguments; several
of them are called one by one, each after the previous result. The final output is ``Done:`` and the
last result. For programs without tools, ``[[say {"text": ...}]]`` outputs the text. A request for
JSON (or a forced tool call) gets an object with the schema's properties, filled with the first
number and the first quoted text of the last user message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.proto import tandem_pb2 as pb
from tandem.shared.config import RouterConfig
from tandem.tests.router.support import (
    Cluster,
    admitted,
    cluster,
    finished,
    make_model,
    tokens_event,
    usage,
)

TEMPLATE = (
    "{% if tools %}<tool_call>\n{% for t in tools %}{{ t.function.name }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|start|>{{ 'tool' if m.role == 'tool' else m.role }}"
    "\n{{ m.content }}"
    "{% for c in m.tool_calls or () %}\n{{ c.function | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MESSAGE = re.compile(r"<\|start\|>(\w+)\n(.*?)<\|end\|>", re.DOTALL)
ORDER = re.compile(r"\[\[([\w.:-]+) (\{.*?\})\]\]", re.DOTALL)
NUMBER = re.compile(r"\d{1,9}")
QUOTED = re.compile(r"'([^'\n]{1,100})'")
WRITTEN_AT_ONCE = 8  # tokens
SHOWN = 200  # characters of a result


def reply_to(prompt: str) -> str:
    """The node's output for a prompt of ``TEMPLATE``."""
    messages = MESSAGE.findall(prompt)
    results = [text for role, text in messages if role == "tool"]
    orders = [order for role, text in messages if role == "user" for order in ORDER.findall(text)]
    texts = [_arguments(arguments)["text"] for name, arguments in orders if name == "say"]
    if texts:
        return str(texts[-1])
    if prompt.startswith("<tool_call>") and len(results) < len(orders):
        name, arguments = orders[len(results)]
        tool_call = json.dumps({"name": name, "arguments": _arguments(arguments)})
        return f"I call {name}.\n<tool_call>\n{tool_call}\n</tool_call>"
    return f"Done: {results[-1][:SHOWN] if results else 'hello'}"


def _arguments(text: str) -> Any:
    """Parse arguments; some agents escape the quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text.replace('\\"', '"'))


@dataclass(frozen=True)
class PromptValues:
    """The number and the text in a user message, as values for schemas."""

    number: int = 1
    text: str = "hello"

    @classmethod
    def of(cls, prompt: str) -> PromptValues:
        question = [text for role, text in MESSAGE.findall(prompt) if role == "user"][-1:]
        number, quoted = NUMBER.search("".join(question)), QUOTED.search("".join(question))
        return cls(int(number[0]) if number else cls.number, quoted[1] if quoted else cls.text)

    def instance_of(self, schema: Any) -> Any:
        """A value of a simple schema."""
        if "const" in schema:
            return schema["const"]
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self.instance_of(schema[several][0])
        match schema.get("type"):
            case "object" | None:
                properties = schema.get("properties", {})
                return {name: self.instance_of(properties.get(name, {})) for name in properties}
            case "array":
                return [self.instance_of(schema.get("items", {}))] * schema.get("minItems", 0)
            case "boolean":
                return False
            case "integer" | "number":
                return self.number
        return next(iter(schema.get("enum", [self.text])))


class Script:
    """The scripted behaviour of the cluster's node."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def __call__(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateEvent]:
        yield admitted()
        yield usage(request)
        tokens = self._cluster.encode(self._text(request))
        for start in range(0, len(tokens), WRITTEN_AT_ONCE):
            yield tokens_event(0, tokens[start : start + WRITTEN_AT_ONCE])
        yield finished(0, stop_token=0)

    def _text(self, request: pb.GenerateRequest) -> str:
        structured = request.sampling.structured_outputs
        tokenizer = self._cluster.router.registry.model().tokenizer
        prompt = tokenizer.decode(request.prompt, skip_special_tokens=False)
        if structured.json:
            values = PromptValues.of(prompt)
            return json.dumps(values.instance_of(json.loads(structured.json)), ensure_ascii=False)
        return reply_to(prompt)


async def serve(port: int, context: int, **options: Any) -> None:
    """Serve until the process is terminated."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_model(path / "model", TEMPLATE)
        async with cluster(path, context=context, port=port, **options) as running:
            running.node.script = Script(running)
            await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tandem.contracts.scripted_server")
    parser.add_argument("--port", type=int, default=RouterConfig.port)
    parser.add_argument("--key")
    parser.add_argument("--name", help="the served name (default: tiny)")
    parser.add_argument("--context", type=int, default=400_000, help="tokens, of some two letters")
    options = parser.parse_args()
    fields = {"api_key": options.key, "served_model_name": options.name}
    asyncio.run(serve(options.port, options.context, **fields))


if __name__ == "__main__":
    main()

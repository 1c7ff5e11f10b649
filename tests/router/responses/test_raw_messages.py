"""vLLM's ``enable_response_messages``: what the model has read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.tests.router.in_process import InProcess
from tandem.tests.router.in_process_responses import openai_client
from tandem.tests.router.responses.test_responses import served
from tandem.tests.router.support import Cluster, until

MESSAGES = ("input_messages", "output_messages")
OUTPUT = "<think>one</think>two"
REQUEST: dict[str, Any] = {"input": "hi", "extra_body": {"enable_response_messages": True}}


def messages(c: InProcess | Cluster, prompt: str) -> tuple[list[Any], list[Any]]:
    """The messages of a response, in and out."""
    kind = {"type": "raw_message_tokens"}
    read = {"message": prompt, "tokens": list(c.node.requests[-1].prompt)}
    return [read | kind], [{"message": OUTPUT, "tokens": [*c.node.reply, 0]} | kind]


def test_a_response_has_its_prompt_and_its_output() -> None:
    with openai_client(reply=OUTPUT, reasoning_parser="qwen3") as (c, client):
        response: Any = client.responses.create(**REQUEST)
        assert (response.input_messages, response.output_messages) == messages(c, c.prompt())
        events: list[Any] = [*client.responses.create(**REQUEST, stream=True)]
        last = events[-1].response
        assert (last.input_messages, last.output_messages) == messages(c, c.prompt())
        assert [getattr(events[0].response, name) for name in MESSAGES] == [None, None]
        assert c.stored(last.id).body == last.to_dict()
        plain = client.responses.create(input="hi")
        assert not any(hasattr(plain, name) for name in MESSAGES)


async def test_a_response_in_the_background_has_them_once_it_ends(tmp_path: Path) -> None:
    async with served(tmp_path, reasoning_parser="qwen3") as (c, client):
        c.node.reply = c.encode(OUTPUT)
        response = await client.responses.create(**REQUEST, background=True)
        assert (response.input_messages, response.output_messages) == (None, None)
        await until(lambda: c.router.app.services.runs.find(response.id, "") is None)
        response = await client.responses.retrieve(response.id)
        assert (response.input_messages, response.output_messages) == messages(c, c.prompt())

"""vLLM's ``enable_response_messages``: the raw prompts and outputs of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.responses.test_responses import prompt, served
from tandem.tests.router.support import until

MESSAGES = ("input_messages", "output_messages")


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_has_its_prompt_and_its_output(tmp_path: Path, background: bool) -> None:
    async with served(tmp_path, reasoning_parser="qwen3") as (c, client):
        output = "<think>one</think>two"
        c.node.reply = c.encode(output)
        params: dict[str, Any] = {"input": "hi", "background": background}
        params["extra_body"] = {"enable_response_messages": True}
        response = await client.responses.create(**params)
        if background:
            assert (response.input_messages, response.output_messages) == (None, None)
            await until(lambda: c.router.app.services.runs.find(response.id, "") is None)
            response = await client.responses.retrieve(response.id)
        read = {"message": prompt(c), "tokens": list(c.node.requests[-1].prompt)}
        wrote = {"message": output, "tokens": [*c.node.reply, 0]}
        kind = {"type": "raw_message_tokens"}
        assert response.input_messages == [read | kind] and response.output_messages == [
            wrote | kind
        ]
        plain = await client.responses.create(input="hi")
        assert not any(hasattr(plain, name) for name in MESSAGES)
        if not background:
            stream = await client.responses.create(**params, stream=True)
            events = [event async for event in stream]
            last = events[-1].response
            assert [last.input_messages, last.output_messages] == [
                response.input_messages,
                response.output_messages,
            ]
            assert [getattr(events[0].response, name) for name in MESSAGES] == [None, None]
            assert await client.responses.retrieve(last.id) == last

"""The programs of the terminal with a cluster."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tandem.client.batch.run import run_batch
from tandem.client.complete import run_complete
from tandem.client.openai_server import OpenAIServer
from tandem.client.terminal_chat import TerminalChat
from tandem.shared.config.client import (
    ChatConfig,
    CompleteConfig,
    ConnectionConfig,
    RequestConfig,
    RunBatchConfig,
)
from tandem.shared.config.command_line import fill
from tandem.tests.end_to_end.support.cluster import TestCluster

SEEDED = fill(RequestConfig, {"temperature": 1.0, "seed": 3, "max_tokens": 8})


def test_all_programs_get_the_same_tokens(
    aggregated: TestCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one seed, from a chat on the terminal, a prompt, and a line of a file."""
    with contextlib.closing(OpenAIServer(ConnectionConfig(url=aggregated.url))) as server:
        console = Console(file=io.StringIO(), highlight=False)
        chat = TerminalChat(server, ChatConfig(), SEEDED.parameters, console)
        chat.ask("hello")
        (reply,) = chat.replies
        assert (reply.tokens, reply.finish_reason) == (8, "length") and reply.prompt_tokens > 0
        text = chat.conversation.messages[-1]["content"]

        run_complete(server, CompleteConfig(quick="hello", chat=True, json=True), SEEDED)
        assert json.loads(capsys.readouterr().out)["text"] == text

        body = {"messages": [{"role": "user", "content": "hello"}], **SEEDED.parameters}
        line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
        (tmp_path / "in").write_text(json.dumps(line))
        files = RunBatchConfig(input_file=str(tmp_path / "in"), output_file=str(tmp_path / "out"))
        run_batch(server, files)
        response = json.loads((tmp_path / "out").read_text())["response"]
        assert response["body"]["choices"][0]["message"]["content"] == text

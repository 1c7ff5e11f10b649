"""A chat on the terminal: what is sent, shown and kept."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from tandem.client.chat_commands import COMMANDS, run_command
from tandem.client.line_input import LineInput, history_path, line_editing
from tandem.client.openai_server import ServerError
from tandem.client.terminal_chat import TerminalChat
from tandem.shared.config.client import ChatConfig, ConnectionConfig
from tandem.shared.errors import TandemError, UsageError
from tandem.tests.client.fake_openai import FakeOpenAI, delta, words


def chat_with(fake: FakeOpenAI, *, terminal: bool = True, **config: Any) -> TerminalChat:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=60, highlight=False)
    return TerminalChat(fake.server(), ChatConfig(**config), {}, console)


def output(chat: TerminalChat) -> str:
    file = chat.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


class Typed(LineInput):
    """Lines of a test; one that is an exception is raised."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.prompts: list[str] = []
        remaining = list(lines)

        def read(prompt: str) -> str:
            self.prompts.append(prompt)
            line = remaining.pop(0) if remaining else EOFError()
            if isinstance(line, BaseException):
                raise line
            return line

        super().__init__(read)


def test_a_conversation_is_sent_whole_and_shown() -> None:
    fake = FakeOpenAI(lambda body: words("**four** it is"))
    chat = chat_with(fake, system_prompt="Be short.")
    chat.run(Typed("two and two", "", "again"), run_command)
    assert [m["content"] for m in fake.bodies[1]["messages"]] == [
        "Be short.",
        "two and two",
        "**four** it is ",
        "again",
    ]
    assert fake.bodies[0]["model"] == "m" and fake.bodies[0]["stream"] is True
    assert "\x1b[1mfour\x1b[0m it is" in output(chat)


def test_reasoning_is_dimmed_and_not_sent_again() -> None:
    def reply(body: Any) -> Any:
        yield delta(reasoning="Well, ")
        yield delta(reasoning_content="two")
        yield from words("four")

    fake = FakeOpenAI(reply)
    chat = chat_with(fake)
    chat.ask("two and two")
    assert "\x1b[2mWell, \x1b[0m" in output(chat)
    assert chat.conversation.messages[-1]["content"] == "four "


@pytest.mark.parametrize("cuts", [1, 3, 100])
def test_think_tags_of_servers_that_do_not_split_are_reasoning(cuts: int) -> None:
    text = "\n<think>a < b</think>\n\nfour <think> more"
    pieces = [text[i : i + cuts] for i in range(0, len(text), cuts)]
    fake = FakeOpenAI(lambda body: [delta(content=piece) for piece in pieces])
    chat = chat_with(fake)
    chat.ask("x")
    assert chat.conversation.messages[-1]["content"] == "four <think> more"


def test_ctrl_c_stops_the_reply_and_not_the_chat() -> None:
    fake = FakeOpenAI(lambda body: [delta(content="four"), KeyboardInterrupt()])
    chat = chat_with(fake)
    chat.run(Typed("two and two", KeyboardInterrupt(), "/show"), run_command)
    assert chat.conversation.messages[-1]["content"] == "four"
    assert fake.streams[0].closed
    assert "[stopped]" in output(chat) and "Ctrl-D or /exit ends" in output(chat)


def test_a_message_without_a_reply_is_removed() -> None:
    rejection = httpx.Response(400, json={"error": {"message": "too long"}})
    chat = chat_with(FakeOpenAI(lambda body: rejection))
    chat.run(Typed("hi"), run_command)
    assert chat.conversation.messages == []
    assert "400: too long" in output(chat) and "your message is removed" in output(chat)


def test_an_interrupted_reply_is_kept() -> None:
    events = [delta(content="fo"), {"error": {"message": "the node died"}}]
    chat = chat_with(FakeOpenAI(lambda body: events))
    chat.run(Typed("hi"), run_command)
    assert chat.conversation.messages[-1]["content"] == "fo"
    assert "[the response was interrupted: the node died]" in output(chat)


def test_a_failed_retry_keeps_the_previous_reply() -> None:
    replies = [words("four"), httpx.Response(503, json={"error": {"message": "busy"}})]
    chat = chat_with(FakeOpenAI(lambda body: replies.pop(0)))
    chat.run(Typed("two and two", "/retry"), run_command)
    assert [m["content"] for m in chat.conversation.messages] == ["two and two", "four "]
    assert "503: busy" in output(chat)


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    hostile = "\x1b]0;title\x07 \x9b31m <b>bold</b> [red]x[/red]\r"
    for markdown in (True, False):
        chat = chat_with(FakeOpenAI(lambda body: words(hostile)), markdown=markdown)
        chat.ask("x")
        run_command(chat, "/show")
        screen = output(chat)
        assert "\x1b]0" not in screen and "\x9b" not in screen and "\x07" not in screen
        assert "<b>bold</b> [red]x[/red]" in screen


def test_two_chats_keep_what_was_typed_in_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with line_editing([], keep=True):
        readline.add_history("in the first")
        other = tmp_path / "tandem/chat_history"
        other.parent.mkdir()
        other.write_text("in the other\n")
    readline.clear_history()
    assert other.read_text().splitlines() == ["in the other", "in the first"]
    assert history_path() == other


def test_output_to_a_file_is_the_reply_alone() -> None:
    fake = FakeOpenAI(lambda body: [delta(reasoning="hm"), *words("**four**")])
    chat = chat_with(fake, terminal=False)
    chat.ask_once("two and two")
    assert output(chat) == "**four** \n"


def test_messages_of_several_lines() -> None:
    typed = Typed("one \\", "two", '"""three', "", 'four"""', '"""x"""')
    assert [typed.read() for _ in range(3)] == ["one \ntwo", "three\n\nfour", "x"]


def test_commands(tmp_path: Path) -> None:
    fake = FakeOpenAI(lambda body: words("four"))
    chat = chat_with(fake)
    file = tmp_path / "a chat.json"
    chat.run(
        Typed(
            "/system Be short.",
            "/set temperature 0",
            "/set temperature 0.2",
            "/set top-k 3",
            "/model other",
            "two and two",
            "/retry",
            f"/save '{file}'",
            "/undo",
            "/clear",
            "/set temperature",
            f"/load '{file}'",
            "/stats on",
            "once more",
            "/stats",
            "/help",
            "/exit",
            "never sent",
        ),
        run_command,
    )
    first, retried, last = fake.bodies
    assert retried["messages"] == first["messages"]
    assert (first["temperature"], first["top_k"], first["model"]) == (0.2, 3, "other")
    assert [m["role"] for m in last["messages"]] == ["system", "user", "assistant", "user"]
    assert last["temperature"] == 0.2  # as it was saved
    assert json.loads(file.read_text())["model"] == "other"
    screen = output(chat)
    assert "All 3 replies: 3 tokens" in screen
    assert "Parameters: temperature 0\x1b" in screen
    assert "Parameters: temperature 0.2, top_k 3\x1b" in screen
    assert [usage for command in COMMANDS.values() if (usage := command.usage) not in screen] == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/hlep", "did you mean /help"),
        ("/xyzzy", "/help lists the commands"),
        ("/set temprature 1", "did you mean temperature"),
        ("/set temperature hot", "must be a number"),
        ("/set temperature 3", "out of range: it must be from 0 to 2"),
        ("/set top_k 1.5", "must be an integer"),
        ("/model none", "the server has no model 'none'; it has m, other"),
        ("/save", "needs the name of one file"),
        ("/save /none/x", "/save /none/x: the folder does not exist"),
        ("/load /none", "/none: No such file"),
        ("/retry", "there is no message yet"),
    ],
)
def test_a_wrong_command_says_what_to_do(line: str, words: str) -> None:
    with pytest.raises(TandemError, match=words):
        run_command(chat_with(FakeOpenAI(lambda body: [])), line)


@pytest.mark.parametrize("content", ["[", "{}", '{"messages": [{"role": "tool"}]}', "[1]"])
def test_a_file_that_is_no_conversation(tmp_path: Path, content: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    chat = chat_with(FakeOpenAI(lambda body: []))
    with pytest.raises(TandemError, match=r"x\.json"):
        chat.conversation.load(file)


def test_tools_of_mcp_servers_are_offered_and_their_calls_shown() -> None:
    tool_call = {"name": "list", "server_label": "files", "arguments": "{}", "output": "a.txt"}
    fake = FakeOpenAI(lambda body: [delta(mcp_calls=[tool_call]), *words("one file")])
    chat = chat_with(fake, mcp="files, web")
    chat.ask("which?")
    assert [tool["server_label"] for tool in fake.bodies[0]["tools"]] == ["files", "web"]
    assert "files list {}: a.txt" in output(chat)


def test_events_of_any_shape_do_no_harm() -> None:
    events: list[Any] = [
        {"choices": None, "usage": 3},
        {"choices": [3, {"delta": 3}, {"delta": {"content": 3, "tool_calls": [{"function": {}}]}}]},
        {"usage": {"completion_tokens": None, "prompt_tokens_details": None}},
        delta(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
        delta(content="\ud800four"),
    ]
    chat = chat_with(FakeOpenAI(lambda body: events))
    chat.ask("x")
    assert chat.conversation.messages[-1]["content"] == "\ud800four"
    assert "f {}" in output(chat)
    with pytest.raises(ServerError, match="an event that is not a JSON object"):
        chat_with(FakeOpenAI(lambda body: [[]])).ask_once("x")


@pytest.mark.parametrize(
    ("option", "key"),
    [("k", "k"), ("a: k,other", "k"), ("a: k rpm=3", "k"), ("sk-a:b", "sk-a:b"), ("", "")],
)
def test_the_key_of_a_server_may_be_one_of_its_list(option: str, key: str) -> None:
    assert ConnectionConfig(api_key=option).key == key


def test_where_the_server_is() -> None:
    fake = FakeOpenAI(lambda body: words("x"))
    for url, path in (
        ("localhost:9", "/v1/models"),
        ("http://a/v1/", "/v1/models"),
        ("https://a/api/v3", "/api/v3/models"),
    ):
        assert fake.server(url=url, api_key="k").model == "m"
        assert fake.paths[-1] == path
        assert fake.headers is not None and fake.headers["authorization"] == "Bearer k"
    with pytest.raises(UsageError, match="is not an address such as"):
        fake.server(url="ftp://a")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (httpx.Response(401, json={"error": {"message": "no"}}), r"401: no \(--api-key\)"),
        (httpx.Response(404, text="<html>"), "404: Not Found"),
        (httpx.Response(500, json={"detail": "broken"}), "500: broken"),
    ],
)
def test_errors_of_a_server_are_one_line(reply: httpx.Response, words: str) -> None:
    with pytest.raises(ServerError, match=words):
        chat_with(FakeOpenAI(lambda body: reply)).ask_once("x")


def test_a_server_that_is_not_there() -> None:
    def refuse(body: Any) -> Any:
        raise httpx.ConnectError("Connection refused")

    with pytest.raises(ServerError, match=r"nothing answers at .*start a server \(tandem serve\)"):
        chat_with(FakeOpenAI(refuse)).ask_once("x")

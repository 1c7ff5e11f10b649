"""``tandem chat``: a conversation, and its commands, which begin with a slash."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from ..shared.config.client import ChatConfig, RequestConfig
from ..shared.config.fields import check_option
from ..shared.errors import UsageError
from .line_input import LineInput, line_editing
from .openai_server import OpenAIServer
from .terminal_chat import TerminalChat, format_stats
from .text import printable


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """``run`` gets the rest of the line."""

    usage: str
    about: str
    run: Callable[[TerminalChat, str], None]


def run_command(chat: TerminalChat, line: str) -> None:
    """Run a line such as ``/set temperature 0``. Raises ``TandemError``."""
    name, _, rest = line.removeprefix("/").partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        near = get_close_matches(name, [*COMMANDS, *ALIASES], 1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists the commands"
        raise UsageError(f"/{name} is not a command; {hint}")
    command.run(chat, rest.strip())


def _help(chat: TerminalChat, _: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    for command in COMMANDS.values():
        chat.console.print(f"/{command.usage:{width}}  {command.about}", markup=False)
    chat.tell(
        'A line that ends with \\ continues in the next one; """ begins and ends a message of '
        "several lines. Ctrl-C stops a reply."
    )


def _clear(chat: TerminalChat, _: str) -> None:
    chat.conversation.clear()
    chat.tell("A new conversation.")


def _system(chat: TerminalChat, text: str) -> None:
    if text:
        chat.conversation.system = None if text == "none" else text
    chat.tell(f"System prompt: {chat.conversation.system or 'none'}")


def _set(chat: TerminalChat, rest: str) -> None:
    name, _, text = rest.partition(" ")
    if name:
        name = name.replace("-", "_")
        if text.strip() in ("", "none"):
            check_parameter(name)
            chat.parameters.pop(name, None)
        else:
            chat.parameters[name] = parameter(name, text.strip())
    values = ", ".join(f"{name} {_format(value)}" for name, value in chat.parameters.items())
    chat.tell(f"Parameters: {values or 'the defaults of the server'}")


def _format(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _model(chat: TerminalChat, name: str) -> None:
    models = chat.server.models()
    if name and name not in models:
        raise UsageError(f"the server has no model {name!r}; it has {', '.join(models)}")
    if name:
        chat.server.model = name
    others = [model for model in models if model != chat.server.model]
    chat.tell(f"Model: {chat.server.model}" + (f"; also {', '.join(others)}" if others else ""))


def _save(chat: TerminalChat, name: str) -> None:
    path = _path(name, "/save")
    chat.conversation.save(path, model=chat.server.model, parameters=chat.parameters)
    chat.tell(f"Saved {len(chat.conversation.turns)} messages in {path}")


def _load(chat: TerminalChat, name: str) -> None:
    path = _path(name, "/load")
    parameters = chat.conversation.load(path).get("parameters")
    if isinstance(parameters, dict):
        chat.parameters = {name: parameter(name, str(value)) for name, value in parameters.items()}
    chat.tell(f"Loaded {len(chat.conversation.turns)} messages from {path}")


def _show(chat: TerminalChat, _: str) -> None:
    for message in chat.conversation.messages:
        chat.tell(f"{message['role']}:")
        chat.console.print(printable(message["content"]), markup=False, soft_wrap=True)


def _retry(chat: TerminalChat, _: str) -> None:
    before = list(chat.conversation.turns)
    text = chat.conversation.undo()
    if text is None:
        raise UsageError("there is no message yet")
    try:
        chat.ask(text)
    finally:
        if len(chat.conversation.turns) < len(before):
            chat.conversation.turns = before  # keep the reply if there is no new one


def _undo(chat: TerminalChat, _: str) -> None:
    text = chat.conversation.undo()
    chat.tell("There is no message yet." if text is None else f"Removed: {text[:60]}")


def _stats(chat: TerminalChat, rest: str) -> None:
    if rest in ("on", "off"):
        chat.show_stats = rest == "on"
        return
    if not chat.replies:
        chat.tell("No replies yet.")
        return
    chat.tell(f"The last reply: {format_stats(chat.replies[-1])}")
    tokens = sum(stats.tokens for stats in chat.replies)
    chat.tell(f"All {len(chat.replies)} replies: {tokens} tokens")


def _exit(chat: TerminalChat, _: str) -> None:
    chat.ended = True


COMMANDS = {
    "help": ChatCommand("help", "this list", _help),
    "clear": ChatCommand("clear", "start a new conversation with the same system prompt", _clear),
    "system": ChatCommand("system [TEXT|none]", "show or change the system prompt", _system),
    "set": ChatCommand("set [NAME [VALUE]]", "show or change a sampling parameter", _set),
    "model": ChatCommand("model [NAME]", "show or change the model", _model),
    "retry": ChatCommand("retry", "get another reply to the last message", _retry),
    "undo": ChatCommand("undo", "remove the last message and its reply", _undo),
    "show": ChatCommand("show", "show the conversation", _show),
    "save": ChatCommand("save FILE", "write the conversation to a JSON file", _save),
    "load": ChatCommand("load FILE", "continue the conversation in a file", _load),
    "stats": ChatCommand(
        "stats [on|off]", "show tokens and times, now or after each reply", _stats
    ),
    "exit": ChatCommand("exit", "end the chat", _exit),
}
ALIASES = {"?": "help", "bye": "exit", "q": "exit", "quit": "exit", "new": "clear"}


def check_parameter(name: str) -> dict[str, Any]:
    """The description of a sampling parameter. Raises ``UsageError`` for an unknown one."""
    parameters = {item.name: dict(item.metadata) for item in fields(RequestConfig)}
    if name not in parameters:
        near = get_close_matches(name, parameters, 1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(parameters)}"
        raise UsageError(f"{name!r} is not a sampling parameter; {hint}")
    return parameters[name]


def parameter(name: str, text: str) -> Any:
    """The value of a sampling parameter. Raises ``UsageError``."""
    about = check_parameter(name)
    kind = str(get_type_hints(RequestConfig)[name])
    if kind.startswith("str"):
        return text
    try:
        value = int(text) if kind.startswith("int") else float(text)
    except ValueError:
        noun = "an integer" if kind.startswith("int") else "a number"
        raise UsageError(f"{name} {text!r} must be {noun}") from None
    check_option({**about, "flags": [name]}, value)
    return value


def _path(text: str, command: str) -> Path:
    """The path of a file, which may be quoted. Raises ``UsageError``."""
    try:
        (name,) = shlex.split(text)
    except ValueError:
        raise UsageError(f"{command} needs the name of one file") from None
    return Path(name).expanduser()


def run_chat(server: OpenAIServer, config: ChatConfig, request: RequestConfig) -> None:
    """Chat until the user ends it, or send the only message of ``--quick``."""
    chat = TerminalChat(server, config, request.parameters)
    if config.quick is not None:
        chat.ask_once(config.quick)
        return
    with line_editing([f"/{name}" for name in COMMANDS], keep=config.history):
        chat.run(LineInput(), run_command)

"""The messages of a chat, added and removed by whole turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..shared.errors import TandemError
from .text import json_text
from .whole_file import whole_file

MAX_FILE_BYTES = 64 << 20
ROLES = ("system", "user", "assistant")


class ConversationError(TandemError):
    """A file is not a saved conversation."""


class ChatHistory:
    """The turns of a chat, and its system prompt."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of a request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def add_message(self, text: str) -> None:
        """Add a message of the user."""
        self.turns.append({"role": "user", "content": text})

    def add_reply(self, text: str) -> None:
        """Add the model's reply."""
        self.turns.append({"role": "assistant", "content": text})

    def undo(self) -> str | None:
        """Remove the user's last message and the reply to it; returns the message."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def clear(self) -> None:
        """Remove all turns; the system prompt stays."""
        self.turns.clear()

    def save(self, path: Path, **about: Any) -> None:
        """Write the messages to a JSON file, atomically. Raises ``UsageError``."""
        with whole_file("/save", str(path)) as file:
            file.write(json_text({**about, "messages": self.messages}) + "\n")

    def load(self, path: Path) -> dict[str, Any]:
        """Replace the conversation by the messages of a file; returns the file's other members.
        Raises ``ConversationError``."""
        try:
            with path.open(encoding="utf-8") as file:
                content = json.loads(file.read(MAX_FILE_BYTES))
        except OSError as error:
            raise ConversationError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ConversationError(f"{path} is not a JSON file of at most 64 MB") from None
        rest = dict(content) if isinstance(content, dict) else {"messages": content}
        turns = [_message(message, path) for message in _messages(rest.pop("messages", None), path)]
        system = [turn["content"] for turn in turns if turn["role"] == "system"]
        self.system = "\n\n".join(system) or None
        self.turns = [turn for turn in turns if turn["role"] != "system"]
        return rest


def _messages(messages: Any, path: Path) -> list[Any]:
    if not isinstance(messages, list):
        raise ConversationError(f"{path} has no messages")
    return messages


def _message(message: Any, path: Path) -> dict[str, str]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES or not isinstance(message.get("content"), str):
        raise ConversationError(f"{path}: a message needs a role ({', '.join(ROLES)}) and a text")
    return {"role": role, "content": message["content"]}

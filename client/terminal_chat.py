"""A conversation on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rich.console import Console

from ..shared.config.client import ChatConfig
from ..shared.errors import TandemError
from .chat_history import ChatHistory
from .line_input import LineInput
from .openai_server import OpenAIServer
from .reply_stream import ReplyStats, ReplyStream
from .reply_views import MarkdownView, PlainView

GREETING = "Talking to {model} at {url}. /help lists the commands; Ctrl-D ends."


class TerminalChat:
    """A conversation with one server. Commands change its members between two answers."""

    def __init__(
        self,
        server: OpenAIServer,
        config: ChatConfig,
        parameters: dict[str, Any],
        console: Console | None = None,
    ) -> None:
        self.server = server
        self.conversation = ChatHistory(config.system_prompt)
        self.parameters = parameters
        self._tools = config.tools
        self.console = console or Console(highlight=False)
        # Notes are no part of an output that is written to a file.
        self.notes = self.console if self.console.is_terminal else Console(stderr=True)
        self.show_stats = config.stats
        self.markdown = config.markdown and self.console.is_terminal
        self.answers: list[ReplyStats] = []
        self.ended = False

    def run(self, lines: LineInput, command: Callable[[TerminalChat, str], None]) -> None:
        """Answer what is typed until the end of the input. ``command`` runs what begins with a
        slash. Ctrl-C stops an answer, or discards a line."""
        self.tell(GREETING.format(model=self.server.model, url=self.server.url))
        while not self.ended:
            try:
                text = lines.read().strip()
                if text.startswith("/"):
                    command(self, text)
                elif text:
                    self.ask(text)
            except KeyboardInterrupt:
                self.tell("\nCtrl-D or /exit ends the chat.")
            except EOFError:
                self.notes.print()
                return
            except TandemError as error:
                self.notes.print(f"tandem: {error}", style="red", markup=False, soft_wrap=True)

    def ask(self, text: str) -> None:
        """Send a message and show its answer. Without any answer, the message is taken back.
        Raises ``ServerError``."""
        self.conversation.ask(text)
        answer = ""
        try:
            answer = self._answer()
        finally:
            if answer:
                self.conversation.answer(answer)
            else:
                self.conversation.undo()
                self.tell("[no answer: your message is taken back]")

    def ask_once(self, text: str) -> None:
        """Send a message and show its answer; there is no next one. Raises ``ServerError``."""
        self.conversation.ask(text)
        stream = self._stream()
        self._show(stream, [])
        self._conclude(stream.stats)

    def _answer(self) -> str:
        """Show the answer to the conversation; returns its text, or what there is of it when it is
        stopped or breaks off."""
        stream = self._stream()
        text: list[str] = []
        try:
            self._show(stream, text)
        except KeyboardInterrupt:
            self.tell("[stopped]")
        except TandemError as error:
            if not text:
                raise
            self.tell(f"[{error}]")
        self._conclude(stream.stats)
        return "".join(text)

    def _stream(self) -> ReplyStream:
        body: dict[str, Any] = {
            "model": self.server.model,
            "messages": self.conversation.messages,
        }
        if self._tools:
            body["tools"] = self._tools
        return ReplyStream(self.server, body | self.parameters)

    def _show(self, stream: ReplyStream, text: list[str]) -> None:
        """Show the pieces of an answer, and add those of its text to ``text``."""
        view = MarkdownView(self.console) if self.markdown else PlainView(self.console)
        with contextlib.closing(view), contextlib.closing(stream.pieces()) as pieces:
            for piece in pieces:
                if not piece.aside:
                    text.append(piece.text)
                view.add(piece)

    def _conclude(self, stats: ReplyStats) -> None:
        self.answers.append(stats)
        if stats.finish_reason == "length":
            self.tell("[cut off: the answer has as many tokens as it may]")
        if self.show_stats:
            self.tell(described(stats))

    def tell(self, text: str) -> None:
        """Show something that is not from the model."""
        self.notes.print(text, style="dim", markup=False, highlight=False)


def described(stats: ReplyStats) -> str:
    """The figures of an answer."""
    cached = f", {stats.cached_tokens} of them cached" if stats.cached_tokens else ""
    first = "no token" if stats.first is None else f"the first after {stats.first:.2f} s"
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s, {first}, {stats.rate:.1f} tokens/s; "
        f"prompt of {stats.prompt_tokens} tokens{cached}"
    )

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
    """A conversation with one server. Commands change its attributes between replies."""

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
        # Notes must not be in output that is redirected to a file.
        self.notes = self.console if self.console.is_terminal else Console(stderr=True)
        self.show_stats = config.stats
        self.markdown = config.markdown and self.console.is_terminal
        self.replies: list[ReplyStats] = []
        self.ended = False

    def run(self, lines: LineInput, command: Callable[[TerminalChat, str], None]) -> None:
        """Send each message that the user types, until the end of the input. ``command`` runs lines
        that begin with a slash. Ctrl-C stops a reply, or discards a line."""
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
        """Send a message and show the reply. Without a reply, the message is removed. Raises
        ``ServerError``."""
        self.conversation.add_message(text)
        reply = ""
        try:
            reply = self._show_reply()
        finally:
            if reply:
                self.conversation.add_reply(reply)
            else:
                self.conversation.undo()
                self.tell("[no reply: your message is removed]")

    def ask_once(self, text: str) -> None:
        """Send the only message and show the reply. Raises ``ServerError``."""
        self.conversation.add_message(text)
        stream = self._stream()
        self._show(stream, [])
        self._conclude(stream.stats)

    def _show_reply(self) -> str:
        """Show the reply; returns its text, which is incomplete if it was interrupted."""
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
        """Show a reply, and add the pieces of its text to ``text``."""
        view = MarkdownView(self.console) if self.markdown else PlainView(self.console)
        with contextlib.closing(view), contextlib.closing(stream.pieces()) as pieces:
            for piece in pieces:
                if not piece.aside:
                    text.append(piece.text)
                view.add(piece)

    def _conclude(self, stats: ReplyStats) -> None:
        self.replies.append(stats)
        if stats.finish_reason == "length":
            self.tell("[cut off: the reply has reached the maximum number of tokens]")
        if self.show_stats:
            self.tell(format_stats(stats))

    def tell(self, text: str) -> None:
        """Print a note that is not from the model."""
        self.notes.print(text, style="dim", markup=False, highlight=False)


def format_stats(stats: ReplyStats) -> str:
    """The statistics of a reply as text."""
    cached = f", {stats.cached_tokens} of them cached" if stats.cached_tokens else ""
    first = "no token" if stats.first is None else f"the first after {stats.first:.2f} s"
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s, {first}, {stats.rate:.1f} tokens/s; "
        f"prompt of {stats.prompt_tokens} tokens{cached}"
    )

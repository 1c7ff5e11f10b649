"""``tandem complete``: completions of prompts, streamed to the terminal or written as JSONL."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console

from ..shared.config.client import CompleteConfig, RequestConfig
from ..shared.errors import TandemError
from .concurrent_replies import PendingReply, concurrent_replies
from .line_input import LineInput, line_editing
from .openai_server import OpenAIServer
from .prompts import PromptLine, prompt_of, read_prompts
from .reply_views import PlainView
from .text import json_text, printable
from .whole_file import whole_file

MAX_TITLE = 72


class CompletionError(TandemError):
    """Some completions are missing or incomplete."""


class CompletionRun:
    """Shows or writes completions, and counts their tokens."""

    def __init__(self, config: CompleteConfig, server: OpenAIServer) -> None:
        self._config = config
        self._server = server
        self._console = Console(highlight=False)
        self._failed = 0
        self._completions = 0
        self._tokens = 0
        self._start = time.monotonic()

    def run(self, prompts: Iterable[PromptLine], *, titled: bool = False) -> None:
        """Complete all prompts; if ``titled``, print the beginning of each. Raises
        ``CompletionError`` at the end if some failed."""
        with contextlib.ExitStack() as until_end:
            file: TextIO | None = sys.stdout if self._config.json else None
            if self._config.output is not None:
                file = until_end.enter_context(whole_file("--output", self._config.output))
            replies = concurrent_replies(prompts, self._server, self._config.max_concurrency)
            for reply in until_end.enter_context(contextlib.closing(replies)):
                self._output(reply, file, titled=titled)
        self._conclude()

    def _output(self, reply: PendingReply, file: TextIO | None, *, titled: bool) -> None:
        if file is None:
            self._show(reply, titled=titled)
        else:
            for _ in reply.pieces():
                pass
            print(json_text(reply.result()), file=file, flush=True)
        self._completions += 1
        self._tokens += reply.stats.tokens
        if reply.error:
            self._failed += 1
            print(f"tandem: prompt {reply.number + 1}: {printable(reply.error)}", file=sys.stderr)

    def _show(self, reply: PendingReply, *, titled: bool) -> None:
        if titled:
            title = " ".join(printable(str(reply.prompt.text)).split())[:MAX_TITLE]
            self._console.print(
                f"[{reply.number + 1}] {title}", style="bold", markup=False, soft_wrap=True
            )
        with contextlib.closing(PlainView(self._console)) as view:
            for piece in reply.pieces():
                view.add(piece)
        if titled:
            self._console.print()

    def _conclude(self) -> None:
        if self._config.stats:
            seconds = time.monotonic() - self._start
            rate = self._tokens / seconds if seconds else 0.0
            print(
                f"{self._completions} completions with {self._tokens} tokens in {seconds:.2f} s, "
                f"{rate:.1f} tokens/s",
                file=sys.stderr,
            )
        if self._failed:
            raise CompletionError(
                f"{self._failed} of {self._completions} completions are missing or incomplete"
            )


def run_complete(server: OpenAIServer, config: CompleteConfig, request: RequestConfig) -> None:
    """Complete the prompts of the options, or of the terminal."""
    parameters: dict[str, Any] = request.parameters
    prompts = read_prompts(config, parameters)
    if prompts is None:
        _converse(server, config, parameters)
        return
    several = config.input is not None or "|" in (config.prompts or "")
    CompletionRun(config, server).run(prompts, titled=several)


def _converse(server: OpenAIServer, config: CompleteConfig, parameters: dict[str, Any]) -> None:
    """Complete each prompt that the user types."""
    print(f"{server.model} completes your prompts; Ctrl-D ends.", file=sys.stderr)
    lines = LineInput()
    with line_editing([], keep=False):
        while True:
            try:
                text = lines.read()
                if text.strip():
                    CompletionRun(config, server).run([prompt_of(text, config, parameters)])
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\nCtrl-D ends.", file=sys.stderr)
            except TandemError as error:
                print(f"tandem: {error}", file=sys.stderr)

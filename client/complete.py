"""``tandem complete``: answers to prompts, shown while they come or written as JSONL."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console

from ..shared.config.client import CompleteConfig, RequestConfig
from ..shared.errors import TandemError
from .concurrent_replies import PendingReply, answers
from .json_text import json_text
from .line_input import LineInput, line_editing
from .openai_server import OpenAIServer
from .printable import printable
from .prompts import PromptLine, prompt_of, read_prompts
from .reply_views import PlainView
from .whole_file import whole_file

LONGEST_TITLE = 72


class CompletionError(TandemError):
    """Some prompts got no answer, or only a part of one."""


class CompletionRun:
    """Shows answers, or writes them, and counts."""

    def __init__(self, config: CompleteConfig, server: OpenAIServer) -> None:
        self._config = config
        self._server = server
        self._console = Console(highlight=False)
        self._failed = 0
        self._answers = 0
        self._tokens = 0
        self._begun = time.monotonic()

    def run(self, prompts: Iterable[PromptLine], *, titled: bool = False) -> None:
        """Answer all prompts, each below its beginning if ``titled``. Raises ``CompletionError`` at
        the end if some failed."""
        with contextlib.ExitStack() as until_end:
            file: TextIO | None = sys.stdout if self._config.json else None
            if self._config.output is not None:
                file = until_end.enter_context(whole_file("--output", self._config.output))
            found = answers(prompts, self._server, self._config.max_concurrency)
            for answer in until_end.enter_context(contextlib.closing(found)):
                self._take(answer, file, titled=titled)
        self._conclude()

    def _take(self, answer: PendingReply, file: TextIO | None, *, titled: bool) -> None:
        if file is None:
            self._show(answer, titled=titled)
        else:
            for _ in answer.pieces():
                pass
            print(json_text(answer.result()), file=file, flush=True)
        self._answers += 1
        self._tokens += answer.stats.tokens
        if answer.error:
            self._failed += 1
            print(f"tandem: prompt {answer.number + 1}: {printable(answer.error)}", file=sys.stderr)

    def _show(self, answer: PendingReply, *, titled: bool) -> None:
        if titled:
            title = " ".join(printable(str(answer.prompt.text)).split())[:LONGEST_TITLE]
            self._console.print(
                f"[{answer.number + 1}] {title}", style="bold", markup=False, soft_wrap=True
            )
        with contextlib.closing(PlainView(self._console)) as view:
            for piece in answer.pieces():
                view.add(piece)
        if titled:
            self._console.print()

    def _conclude(self) -> None:
        if self._config.stats:
            seconds = time.monotonic() - self._begun
            rate = self._tokens / seconds if seconds else 0.0
            print(
                f"{self._answers} answers with {self._tokens} tokens in {seconds:.2f} s, "
                f"{rate:.1f} tokens/s",
                file=sys.stderr,
            )
        if self._failed:
            raise CompletionError(
                f"{self._failed} of {self._answers} prompts have no complete answer"
            )


def run_complete(server: OpenAIServer, config: CompleteConfig, asked: RequestConfig) -> None:
    """Answer the prompts of the options, or those that the user types."""
    parameters: dict[str, Any] = asked.parameters
    prompts = read_prompts(config, parameters)
    if prompts is None:
        _converse(server, config, parameters)
        return
    several = config.input is not None or "|" in (config.prompts or "")
    CompletionRun(config, server).run(prompts, titled=several)


def _converse(server: OpenAIServer, config: CompleteConfig, parameters: dict[str, Any]) -> None:
    """Complete what is typed, each text for itself."""
    print(f"{server.model} continues what you type; Ctrl-D ends.", file=sys.stderr)
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

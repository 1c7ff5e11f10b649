"""How a command ends that fails: one line on stderr, and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from ..shared.errors import TandemError, UsageError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
LEVEL = "--log-level"


def exit_with(error: BaseException, arguments: Sequence[str]) -> NoReturn:
    """End the process: status 2 for wrong usage, 1 for a failure. An error that was not raised on
    purpose also shows its traceback at ``--log-level debug``."""
    if isinstance(error, click.exceptions.Exit):
        sys.exit(error.exit_code)
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        _say("interrupted")
        sys.exit(INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        silence_output()  # the reader of our output has left, as head does
        sys.exit(FAILED)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()  # the help of a command that needs another one
        sys.exit(WRONG_USAGE)
    if isinstance(error, click.ClickException):
        _say(_message(error))
        sys.exit(WRONG_USAGE if isinstance(error, click.UsageError) else FAILED)
    if isinstance(error, TandemError):
        _say(str(error))
        sys.exit(WRONG_USAGE if isinstance(error, UsageError) else FAILED)
    if isinstance(error, OSError) and error.strerror and not debugging(arguments):
        place = f"{error.filename}: " if error.filename else ""
        _say(place + error.strerror)
        sys.exit(FAILED)
    if debugging(arguments):
        traceback.print_exception(error)
    _say(_described(error))
    sys.exit(FAILED)


def _message(error: click.ClickException) -> str:
    """The message of an error, with the command's usage where an argument is missing or one too
    many."""
    text, context = error.format_message(), getattr(error, "ctx", None)
    extra = text.startswith("Got unexpected extra argument")
    if context is None or not (extra or isinstance(error, click.MissingParameter)):
        return text
    pieces = context.command.collect_usage_pieces(context)
    return f"{text.rstrip('.')}. Usage: {' '.join([context.command_path, *pieces])}"


def silence_output() -> None:
    """Discard output that is still buffered: Python would complain about it while it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def debugging(arguments: Sequence[str]) -> bool:
    """True if the command line, or the environment, asks for the level debug."""
    given = [
        following if argument == LEVEL else argument.removeprefix(f"{LEVEL}=")
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True)
        if argument.startswith(LEVEL)
    ]
    return (given or [os.environ.get("TANDEM_LOG_LEVEL", "")])[-1] == "debug"


def _described(error: BaseException) -> str:
    """An unexpected error with its place, which a report of it needs."""
    places = traceback.extract_tb(error.__traceback__)
    place = f" at {places[-1].filename}:{places[-1].lineno}" if places else ""
    return (
        f"unexpected {type(error).__name__}{place}: {error} ({LEVEL} debug shows how it came about)"
    )


def _say(message: str) -> None:
    print("tandem: " + " ".join(message.split()), file=sys.stderr)

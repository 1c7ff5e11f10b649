"""The end of a failed command: one line on stderr, and an exit status."""

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
    """End the process, with status 2 for wrong usage, 1 for a failure. At ``--log-level debug`` an
    unexpected error also has its traceback."""
    if isinstance(error, click.exceptions.Exit):
        sys.exit(error.exit_code)
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        _print("interrupted")
        sys.exit(INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        silence_output()  # the reader of our output, such as `head`, has ended
        sys.exit(FAILED)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()  # the help of a command that needs a subcommand
        sys.exit(WRONG_USAGE)
    if isinstance(error, click.ClickException):
        _print(_message(error))
        sys.exit(WRONG_USAGE if isinstance(error, click.UsageError) else FAILED)
    if isinstance(error, TandemError):
        _print(str(error))
        sys.exit(WRONG_USAGE if isinstance(error, UsageError) else FAILED)
    if isinstance(error, OSError) and error.strerror and not debugging(arguments):
        place = f"{error.filename}: " if error.filename else ""
        _print(place + error.strerror)
        sys.exit(FAILED)
    if debugging(arguments):
        traceback.print_exception(error)
    _print(_describe(error))
    sys.exit(FAILED)


def _message(error: click.ClickException) -> str:
    """The message of an error, with the usage if an argument is missing or one too many."""
    text, context = error.format_message(), getattr(error, "ctx", None)
    extra = text.startswith("Got unexpected extra argument")
    if context is None or not (extra or isinstance(error, click.MissingParameter)):
        return text
    pieces = context.command.collect_usage_pieces(context)
    return f"{text.rstrip('.')}. Usage: {' '.join([context.command_path, *pieces])}"


def silence_output() -> None:
    """Discard buffered output, about which Python would complain at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def debugging(arguments: Sequence[str]) -> bool:
    """True if the command line or the environment sets the log level to debug."""
    levels = [
        following if argument == LEVEL else argument.removeprefix(f"{LEVEL}=")
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True)
        if argument.startswith(LEVEL)
    ]
    return (levels or [os.environ.get("TANDEM_LOG_LEVEL", "")])[-1] == "debug"


def _describe(error: BaseException) -> str:
    """An unexpected error with its place in the code, for a bug report."""
    places = traceback.extract_tb(error.__traceback__)
    place = f" at {places[-1].filename}:{places[-1].lineno}" if places else ""
    return f"unexpected {type(error).__name__}{place}: {error} ({LEVEL} debug shows the traceback)"


def _print(message: str) -> None:
    print("tandem: " + " ".join(message.split()), file=sys.stderr)

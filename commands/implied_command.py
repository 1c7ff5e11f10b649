"""The command of a command line that begins with an option, or with ``help``."""

from __future__ import annotations

from collections.abc import Sequence

import click

IMPLIED, HELP = "serve", "help"


def with_command(root: click.Command, arguments: Sequence[str]) -> list[str]:
    """``arguments``, after ``serve`` if they begin with an option other than those of ``tandem``
    itself, as vLLM.rs takes them; ``help chat`` is ``chat --help``."""
    if arguments[:1] == [HELP]:
        return [*arguments[1:], "--help"]
    own = own_options(root)
    implied = arguments[:1] and arguments[0].startswith("-") and arguments[0] not in own
    return [IMPLIED, *arguments] if implied else [*arguments]


def own_options(root: click.Command) -> set[str]:
    """The options of ``tandem`` itself."""
    context = click.Context(root, **root.context_settings)
    return {name for made in root.get_params(context) for name in made.opts}

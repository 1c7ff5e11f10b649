"""The command of a command line that begins with an option."""

from __future__ import annotations

from collections.abc import Sequence

import click

IMPLIED = "serve"


def with_command(root: click.Command, arguments: Sequence[str]) -> list[str]:
    """``arguments``, behind ``serve`` if they begin with an option other than those of ``tandem``
    itself, as vLLM.rs takes them."""
    context = click.Context(root, **root.context_settings)
    own = {name for made in root.get_params(context) for name in made.opts}
    implied = arguments[:1] and arguments[0].startswith("-") and arguments[0] not in own
    return [IMPLIED, *arguments] if implied else [*arguments]

"""The environment variables of all options."""

from __future__ import annotations

import os

import click


def environment_of_parts(root: click.Group) -> dict[str, str]:
    """This process's environment without Tandem's options, which the parts get as flags."""
    options = option_variables(root)
    return {name: value for name, value in os.environ.items() if name not in options}


def option_variables(root: click.Group) -> set[str]:
    """The variables of the options of all commands."""
    given = [item.envvar for made in root.commands.values() for item in made.params]
    lists = [[names] if isinstance(names, str) else names or () for names in given]
    return {name for names in lists for name in names}

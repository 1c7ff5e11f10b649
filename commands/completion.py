"""``tandem completion``: completion of commands and options by the shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .help_page import HelpfulCommand

PROGRAM, VARIABLE = "tandem", "_TANDEM_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@click.command("completion", cls=HelpfulCommand)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that has SHELL complete commands and options of tandem.

    \b
    bash: echo 'eval "$(tandem completion bash)"' >> ~/.bashrc
    zsh:  echo 'eval "$(tandem completion zsh)"' >> ~/.zshrc
    fish: tandem completion fish > ~/.config/fish/completions/tandem.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    # The script itself, since click's method for bash would start one to ask for its version.
    made = kind(root, {}, PROGRAM, VARIABLE)
    click.echo(made.source_template % made.source_vars())

"""The command of a command line that begins with an option, or with another word than ours."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ..shared.errors import UsageError

IMPLIED, HELP, VERSION = "serve", "help", "version"
# Commands of ollama, vLLM, SGLang and llama.cpp, with those that do the same.
OTHERS = {
    "collect-env": "tandem info tells what this machine has, tandem doctor URL examines a cluster",
    "create": "the options of tandem serve take the place of a Modelfile",
    "generate": "tandem complete MODEL generates text",
    "ls": "tandem list lists what was downloaded",
    "ps": "tandem nodes lists the nodes of a server",
    "rm": "hf cache rm removes what was downloaded",
    "run": "tandem chat MODEL serves a model for a chat",
    "show": "tandem info MODEL tells what a model is",
    "status": "tandem nodes lists the nodes of a server",
    "stop": "Ctrl-C ends tandem serve, and tandem nodes drain a node",
}


def with_command(root: click.Command, arguments: Sequence[str]) -> list[str]:
    """``arguments``, after ``serve`` if they begin with an option other than those of ``tandem``
    itself, as vLLM.rs takes them; ``help chat`` is ``chat --help``, ``version`` is ``--version``.

    Raises ``UsageError`` for a peer's command, or a model without a command.
    """
    if arguments[:1] == [HELP]:
        return [*arguments[1:], "--help"]
    if arguments[:1] == [VERSION]:
        return ["--version"]
    first = arguments[0] if arguments else ""
    if first in OTHERS:
        raise UsageError(f"there is no command {first!r}: {OTHERS[first]}")
    if "/" in first or first.endswith(".gguf") or first in ("builtin", "smollm2"):
        raise UsageError(
            f"there is no command {first!r}; if that is a model: tandem {IMPLIED} {first}"
        )
    own = own_options(root)
    implied = arguments[:1] and arguments[0].startswith("-") and arguments[0] not in own
    return [IMPLIED, *arguments] if implied else [*arguments]


def own_options(root: click.Command) -> set[str]:
    """The options of ``tandem`` itself."""
    context = click.Context(root, **root.context_settings)
    return {name for made in root.get_params(context) for name in made.opts}

"""The implied command of a command line without one, and hints for other servers' commands."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ..shared.errors import UsageError

IMPLIED, HELP, VERSION = "serve", "help", "version"
# Commands of ollama, vLLM, SGLang and llama.cpp, with our alternatives.
OTHERS = {
    "collect-env": "tandem info describes this machine, tandem doctor URL examines a cluster",
    "create": "use the options of tandem serve instead of a Modelfile",
    "generate": "tandem complete MODEL generates text",
    "ls": "tandem list shows the downloaded models",
    "ps": "tandem nodes shows the nodes of a server",
    "rm": "hf cache rm removes downloaded models",
    "run": "tandem chat MODEL serves a model for a chat",
    "show": "tandem info MODEL describes a model",
    "status": "tandem nodes shows the nodes of a server",
    "stop": "Ctrl-C ends tandem serve, tandem nodes drain ends a node",
}


def with_command(root: click.Command, arguments: Sequence[str]) -> list[str]:
    """``arguments``, with ``serve`` before them if they begin with an option that is not one of
    ``tandem`` itself, as in vLLM.rs. ``help chat`` means ``chat --help``, ``version`` means
    ``--version``.

    Raises ``UsageError`` for another server's command, or a model without a command.
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
            f"there is no command {first!r}; to serve a model: tandem {IMPLIED} {first}"
        )
    own = own_options(root)
    implied = arguments[:1] and arguments[0].startswith("-") and arguments[0] not in own
    return [IMPLIED, *arguments] if implied else [*arguments]


def own_options(root: click.Command) -> set[str]:
    """The options of ``tandem`` itself."""
    context = click.Context(root, **root.context_settings)
    return {name for parameter in root.get_params(context) for name in parameter.opts}

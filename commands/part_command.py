"""Commands whose options are the fields of configurations."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..shared.config import HubConfig
from ..shared.config.command_line import command_options, fill
from ..shared.config.model_name import full_name
from ..shared.errors import UsageError
from .help_page import HelpfulCommand
from .implied import own_options
from .spellings import translate

Values = dict[str, Any]
SERVED_NAME = "--served-model-name"
# Minimum similarity of a misspelt option to a suggested one, by difflib's measure.
CLOSE = 0.8


class PartCommand(HelpfulCommand):
    """A command that accepts other servers' spellings, and rejects several models: click would use
    the last of ``--model``, ``--m`` and ``--w``, which are one option, without an error."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # shell completion of an incomplete line
            return super().parse_args(ctx, args)
        args = translate(join_names(args), set(self._names()))
        try:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        except click.NoSuchOption as error:
            raise UsageError(f"{error.message} {_advice(ctx, error)}") from None
        models = [parameter for parameter in order if parameter.name == "model"]
        if len(models) > 1:
            names = ", ".join(models[0].opts)
            raise UsageError(f"the model is given twice: {names} are one option")
        return super().parse_args(ctx, args)

    def _names(self) -> Iterator[str]:
        for parameter in self.params:
            yield from (*parameter.opts, *parameter.secondary_opts)


class _ModelArgument(click.Argument):
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def _advice(ctx: click.Context, error: click.NoSuchOption) -> str:
    """The most similar option, or the commands that have this one."""
    group = ctx.find_root().command
    others = group.commands.items() if isinstance(group, click.Group) else ()
    commands = [
        name for name, one in others if any(error.option_name in p.opts for p in one.params)
    ]
    if commands:
        return f"It is an option of tandem {', '.join(commands)}."
    names = {name for parameter in ctx.command.params for name in parameter.opts}
    near = get_close_matches(error.option_name, names | own_options(group), 1, CLOSE)
    if near:
        return f"Did you mean {near[0]}?"
    word = error.option_name.lstrip("-")
    if len(word) > 1 and any(word in name for name in names):
        return f"{ctx.command_path} --help={word} shows the options that contain it."
    return f"{ctx.command_path} --help=all lists all."


def join_names(args: list[str]) -> list[str]:
    """Join the names of vLLM's form, ``MODEL --served-model-name A B``. Only after MODEL, since a
    word after a name could be the model."""
    if SERVED_NAME not in args or args[0].startswith("-"):
        return args
    first = args.index(SERVED_NAME) + 1
    end = next((i for i in range(first, len(args)) if args[i].startswith("-")), len(args))
    return [*args[:first], *filter(None, [",".join(args[first:end])]), *args[end:]]


def part_command(
    name: str,
    function: Callable[[Values], None],
    *configs: type,
    model: bool = True,
    only: Collection[str] = (),
    without: type | None = None,
    others: Sequence[click.Parameter] = (),
) -> PartCommand:
    """A command whose options are the fields of ``configs``, or ``only`` some of them, or all but
    those of ``without``, those of ``HubConfig``, and ``others``."""
    excluded = {item.name for item in fields(without)} if without is not None else set()
    params = [
        option
        for option in command_options(*configs, HubConfig)
        if option.name not in excluded
        and (not only or option.name in {*only, *(item.name for item in fields(HubConfig)), None})
    ]
    params += others
    if model:
        params.insert(0, _ModelArgument(["positional"], required=False, metavar="[MODEL]"))

    def run(**values: Any) -> None:
        argument = values.pop("positional", None)
        if argument is not None:
            values["model"] = _only_model(argument, values["model"])
        function(with_full_name(values))

    return PartCommand(name, params=params, callback=run, help=function.__doc__)


def with_full_name(values: Values) -> Values:
    """The options, with those of ``HubConfig`` merged into the model's name. The token is put into
    the environment, where the hub's client reads it, here and in parts. Raises ``UsageError``."""
    hub = fill(HubConfig, values)
    own = {item.name for item in fields(HubConfig)}
    values = {name: value for name, value in values.items() if name not in own}
    if token := hub.token():
        os.environ["HF_TOKEN"] = token
    model, file = values["model"], hub.weight_file
    if file is not None and not _of_model():
        model, file = file, None
    elif file is not None and Path(model).expanduser().is_dir():
        model, file = str(Path(model).expanduser() / file), None
    if model is None:
        return values
    name = full_name(model, file=file, revision=hub.revision, modelscope=hub.modelscope)
    return values | {"model": name}


def _of_model() -> bool:
    """True if ``--f`` is a file of the model in other options, rather than the model itself: on the
    command line it takes precedence over a model in the environment."""
    context = click.get_current_context()
    source = context.get_parameter_source("model")
    is_set = source is not click.core.ParameterSource.DEFAULT
    return _has_model_name() or (is_set and not on_command_line("weight_file"))


def _only_model(argument: str, option: str) -> str:
    if on_command_line("model"):
        raise UsageError(f"the model is given twice: {argument!r} and --model {option!r}")
    return argument


def on_command_line(name: str) -> bool:
    """True if the running command has this parameter on its command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def has_model() -> bool:
    """True if the command line has a model, as an argument or an option."""
    return _has_model_name() or on_command_line("weight_file")


def _has_model_name() -> bool:
    return on_command_line("model") or on_command_line("positional")


def environment_of_parts(root: click.Group) -> dict[str, str]:
    """This process's environment without Tandem's options, which the parts get as flags."""
    options = option_variables(root)
    return {name: value for name, value in os.environ.items() if name not in options}


def option_variables(root: click.Group) -> set[str]:
    """The environment variables of the options of all commands."""
    variables = [item.envvar for command in root.commands.values() for item in command.params]
    lists = [[names] if isinstance(names, str) else names or () for names in variables]
    return {name for names in lists for name in names}

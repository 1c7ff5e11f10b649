"""Turns configuration dataclasses into command-line options, and parsed options back into them.

Precedence: command line, then environment (``TANDEM_`` and the flag's name), then the YAML file of
``--config``, then the field's default.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import click

from ..errors import UsageError

T = TypeVar("T")

# How alike two names are of which one is probably the other misspelt.
CLOSE = 0.87
SECRET = re.compile("token|key|tls|secret|password", re.IGNORECASE)


def command_options(*configs: type) -> list[click.Parameter]:
    """One option a field, and ``--config``. Earlier classes win where names meet."""
    seen: dict[str, click.Parameter] = {}
    for config in configs:
        hints = typing.get_type_hints(config)
        for item in dataclasses.fields(config):
            if item.name not in seen:
                seen[item.name] = _option(item, hints[item.name])
    known = {name: _yaml_names(param) for name, param in seen.items()}

    def load(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            own = {p.name: _yaml_names(p) for p in ctx.command.params if _is_plain_option(p)}
            ctx.default_map = read_yaml(Path(value), own | known, _options_of_all(ctx))

    file = click.Option(
        ["--config"],
        callback=load,
        is_eager=True,
        expose_value=False,
        envvar="TANDEM_CONFIG",
        metavar="FILE",
        help="YAML file with any of these options, by their names.",
    )
    return [file, *seen.values()]


def fill(config: type[T], values: dict[str, Any]) -> T:
    """The dataclass from parsed options."""
    assert dataclasses.is_dataclass(config)
    names = [item.name for item in dataclasses.fields(config)]
    return config(**{name: values[name] for name in names if name in values})


def to_arguments(config: Any) -> list[str]:
    """The flags that give another process the same configuration; defaults are left out."""
    arguments: list[str] = []
    for item in dataclasses.fields(config):
        value, flag = getattr(config, item.name), item.metadata["flags"][0]
        if value == item.default or value is None:
            continue
        if isinstance(value, bool):
            arguments.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            arguments.append(f"{flag}={value}")
    return arguments


def check_unknown(where: str, name: str, known: Collection[str]) -> None:
    """Warn of an option that no command has: a newer release may have it, and share its
    configuration with this one.

    Raises ``UsageError`` when it is close to an option's name, so probably meant to be that one, or
    may have been meant as a secret, without which a door would be open.
    """
    near = difflib.get_close_matches(name, known, 1, CLOSE)
    if near:
        raise UsageError(f"{where}: {name} is an option of no command; did you mean {near[0]}?")
    if SECRET.search(name):
        raise UsageError(
            f"{where}: {name} is an option of no command, but looks like a secret; correct its "
            f"name or remove it"
        )
    click.echo(f"tandem: {where}: {name} is an option of no command; it is ignored", err=True)


def read_yaml(
    path: Path, known: dict[str, set[str]], of_all: Collection[str] = ()
) -> dict[str, Any]:
    """Options from a YAML file; those that only other commands have (``of_all``) are skipped.
    Raises ``UsageError`` naming the file and the key that is wrong."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path} is not YAML: {str(error).splitlines()[0]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path} must map option names to values")
    by_key = {key: name for name, keys in known.items() for key in keys}
    result: dict[str, Any] = {}
    for key, value in content.items():
        name = by_key.get(str(key))
        if name is None:
            if key == "config":
                raise UsageError(f"--config {path}: unknown option 'config' in a file")
            if str(key) not in of_all:
                check_unknown(f"--config {path}", str(key), {*by_key, *of_all})
            continue
        if name in result:
            raise UsageError(f"--config {path}: {key!r} is given twice under different names")
        if isinstance(value, (dict, list)):
            raise UsageError(f"--config {path}: {key!r} must be one value, not {value!r}")
        result[name] = value if isinstance(value, bool) else str(value)
    return {name: value for name, value in result.items() if value != "None"}


def _options_of_all(context: click.Context) -> set[str]:
    """The names, as YAML files have them, of the options of every command."""
    group = context.find_root().command
    commands = group.commands.values() if isinstance(group, click.Group) else ()
    parameters = (parameter for command in commands for parameter in command.params)
    return {name for parameter in parameters for name in _yaml_names(parameter)}


class _Secret(click.Option):
    """An empty variable is one that somebody meant to fill: taken for none, as click does with
    others, it would open what it was to lock."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        empty = os.environ.get(str(self.envvar)) == ""
        return "" if empty else super().resolve_envvar_value(ctx)


def _is_plain_option(parameter: click.Parameter) -> bool:
    """Whether a file may have it; --config itself it may not."""
    return isinstance(parameter, click.Option) and parameter.expose_value


def _yaml_names(parameter: click.Parameter) -> set[str]:
    names = {flag.removeprefix("--") for flag in parameter.opts}
    return names | {name.replace("-", "_") for name in names}


def _option(item: dataclasses.Field[Any], hint: Any) -> click.Option:
    meta = item.metadata
    flags = list(meta["flags"])
    kind = _plain(hint)
    own = "TANDEM_" + flags[0].removeprefix("--").upper().replace("-", "_")
    env = [own, *meta["environment"]] if meta["environment"] else own
    shown = f"  [env: {', '.join([own, *meta['environment']])}]"
    if kind is bool:
        switch = "/".join([flags[0], "--no-" + flags[0].removeprefix("--")])
        return click.Option(
            [switch, item.name],
            default=item.default,
            envvar=env,
            help=meta["help"] + shown,
            show_default=item.default is True,
        )
    made = _Secret if meta["secret"] else click.Option
    return made(
        [*flags, item.name],
        type=_type(kind, meta),
        default=item.default,
        envvar=env,
        help=meta["help"] + shown,
        show_default=item.default is not None,
    )


def _type(kind: type, meta: Any) -> Any:
    if meta["choices"]:
        return click.Choice(meta["choices"])
    if kind is int:
        return click.IntRange(meta["minimum"], meta["maximum"])
    if kind is float:
        return click.FloatRange(meta["minimum"], meta["maximum"])
    return str


def _plain(hint: Any) -> type:
    """``int | None`` is an int that may be left out."""
    if isinstance(hint, types.UnionType):
        (kind,) = [part for part in typing.get_args(hint) if part is not type(None)]
        return typing.cast(type, kind)
    return typing.cast(type, hint)

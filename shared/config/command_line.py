"""Conversion of configuration dataclasses to command-line options, and back.

Precedence: command line, environment (``TANDEM_`` and the flag's name), YAML file of ``--config``,
default.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ..errors import UsageError
from ..host_port import without_brackets
from .fields import range_in_words
from .refused_options import REFUSED

T = TypeVar("T")

# The groups of --help: the options that each class declares.
GROUPS = {
    "ConnectionConfig": ("server", "the server and its model"),
    "ChatConfig": ("chat", "messages and their display"),
    "CompleteConfig": ("prompts", "prompts and results"),
    "RunBatchConfig": ("batch", "files with requests and results"),
    "RequestConfig": ("request", "sampling parameters; the server has the defaults"),
    "ServeConfig": ("processes", "the processes that a command starts"),
    "EngineConfig": ("engine", "the model, its devices and memory, and scheduling"),
    "HostsConfig": ("hosts", "one node on several hosts"),
    "HubConfig": ("hub", "models on a hub: their versions, and access to them"),
    "RouterConfig": ("http", "the HTTP server, its limits, and placement"),
    "AccessConfig": ("access", "keys, rate limits, and allowed web pages"),
    "BatchConfig": ("batches", "stored responses, files and batches"),
    "SamplingConfig": ("sampling", "default parameters of requests"),
    "NodeConfig": ("node", "a node's addresses and its routers"),
    "McpConfig": ("mcp", "MCP servers, whose tools the router calls"),
    "HandoffConfig": ("handoff", "transfer of KV between nodes"),
    "SecurityConfig": ("security", "TLS and tokens between the parts"),
    "TelemetryConfig": ("logs", "logs and traces"),
}
FILE_GROUP = ("file", "all of these in one file")
NO_GROUP = ("options", "")
# Suffixes of the names of options whose values are files.
FILES = ("config", "_dir", "_file", "_path", "input", "model", "output")

# Minimum similarity of a name to an option that it probably misspells.
CLOSE = 0.87
# Options in the sections of vllm-lite's files, with their names here.
SECTIONED = {
    "allow_origins": "allowed_origins",
    "api_keys": "api_key",
    "api_keys_file": "api_key_file",
    "kv_quantization": "kv_cache_dtype",
    "max_batch_size": "max_num_seqs",
    "num_kv_blocks": "num_gpu_blocks_override",
    "rate_limit_requests": "requests_per_minute",
    "shutdown_drain_grace_secs": "shutdown_delay",
}
# Maximum number of options in an error.
MAX_NAMES = 8
SECRET = re.compile("token|key|tls|secret|password", re.IGNORECASE)


def command_options(*configs: type) -> list[click.Parameter]:
    """One option per field, and ``--config``. If names collide, the earlier class takes
    precedence."""
    options: dict[str, click.Parameter] = {}
    for config in configs:
        hints = typing.get_type_hints(config)
        for item in dataclasses.fields(config):
            if item.name not in options:
                parameter = options[item.name] = _option(item, hints[item.name])
                parameter.group = _group_of(config, item.name)
    names = {name: _yaml_names(param) for name, param in options.items()}

    def load(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            own = {p.name: _yaml_names(p) for p in ctx.command.params if _is_plain_option(p)}
            ctx.default_map = read_yaml(Path(value), own | names, _names_of_all(ctx))

    file = ConfigOption(
        ["--config"],
        callback=load,
        is_eager=True,
        expose_value=False,
        envvar="TANDEM_CONFIG",
        metavar="FILE",
        help="YAML file with any of these options, by their names.",
    )
    file.group = FILE_GROUP
    return [file, *options.values()]


def fill(config: type[T], values: dict[str, Any]) -> T:
    """Build the dataclass from parsed options."""
    assert dataclasses.is_dataclass(config)
    names = [item.name for item in dataclasses.fields(config)]
    return config(**{name: values[name] for name in names if name in values})


def to_arguments(config: Any, *, without: Collection[str] = ()) -> list[str]:
    """The flags that reproduce a configuration in another process, except defaults and the fields
    ``without``."""
    arguments: list[str] = []
    for item in dataclasses.fields(config):
        value, flag = getattr(config, item.name), item.metadata["flags"][0]
        if value == item.default or value is None or item.name in without:
            continue
        if isinstance(value, bool):
            arguments.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            arguments.append(f"{flag}={value}")
    return arguments


def check_variable(name: str, options: Collection[str]) -> None:
    """Warn about a variable that is no option's. It may be another program's: Kubernetes sets
    variables named after each Service.

    Raises ``UsageError`` if the name resembles an option, is that of another server's unsupported
    option, or looks like a secret, which must not be ignored.
    """
    if problem := _misspelt("environment", name, options):
        raise UsageError(problem)
    if SECRET.search(name):
        raise UsageError(
            f"environment: {name} is not an option of any command, but looks like a secret; "
            "correct its name or remove it"
        )
    click.echo(
        f"tandem: environment: {name} is not an option of any command and is ignored", err=True
    )


def _misspelt(where: str, name: str, options: Collection[str]) -> str:
    """The error for a name that resembles an option or is another server's; else empty."""
    flag = "--" + name.removeprefix("TANDEM_").lower().replace("_", "-")
    if flag in REFUSED:
        return f"{where}: {name} is not supported: {REFUSED[flag]}"
    near = difflib.get_close_matches(name, options, 1, CLOSE)
    if near:
        return f"{where}: {name} is not an option of any command; did you mean {near[0]}?"
    return ""


def _unknown(where: str, key: str, value: object, options: Collection[str]) -> str:
    """The error for a key of a file that is no option of any command."""
    if isinstance(value, dict) and value:
        names = [_flat_name(str(name), options) for name in value]
        return (
            f"{where}: {key!r} is a section, which is not supported: write its options at the top "
            f"level, by their names ({', '.join(names[:MAX_NAMES])})"
        )
    name = _flat_name(key, options)
    if name in options:
        return f"{where}: {key} is not an option of any command; use {name}"
    return _misspelt(where, key, options) or (
        f"{where}: {key} is not an option of any command; tandem serve --help=all lists them"
    )


def _flat_name(name: str, options: Collection[str]) -> str:
    """Our name of an option in a section of another server's file."""
    return name if name in options else SECTIONED.get(name, f"{name}: not supported")


def read_yaml(
    path: Path, keys: dict[str, set[str]], others: Collection[str] = ()
) -> dict[str, Any]:
    """Options from a YAML file, by the ``keys`` of each; the keys of ``others``, which are options
    of other commands, are skipped. Raises ``UsageError`` with the file and the invalid key."""
    import yaml

    try:
        content = _unambiguous_loader()(path.read_text(encoding="utf-8-sig")).get_single_data()
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except UsageError as error:
        raise UsageError(f"--config {path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path} is not YAML: {str(error).splitlines()[0]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path} must map option names to values")
    by_key = {key: name for name, own in keys.items() for key in own}
    result: dict[str, Any] = {}
    for key, value in content.items():
        name = by_key.get(str(key))
        if key == "config":
            raise UsageError(f"--config {path}: unknown option 'config' in a file")
        if name is None and str(key) not in others:
            raise UsageError(_unknown(f"--config {path}", str(key), value, {*by_key, *others}))
        if isinstance(value, (dict, list)):
            raise UsageError(f"--config {path}: {key!r} must be one value, not {value!r}")
        if value is None:
            raise UsageError(f"--config {path}: {key!r} has no value; give one or remove the line")
        if name is None:
            continue
        if name in result:
            raise UsageError(f"--config {path}: {key!r} is given twice under different names")
        result[name] = value if isinstance(value, bool) else str(value)
    return result


def _unambiguous_loader() -> Any:
    """YAML's safe loader, except that it rejects duplicate keys instead of using the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise UsageError(f"{key!r} is given twice")
            return dict(super().construct_mapping(node, deep))

    return Loader


def _names_of_all(context: click.Context) -> set[str]:
    """The YAML names of the options of every command."""
    group = context.find_root().command
    commands = group.commands.values() if isinstance(group, click.Group) else ()
    parameters = (parameter for command in commands for parameter in command.params)
    return {name for parameter in parameters for name in _yaml_names(parameter)}


class ConfigOption(click.Option):
    """An option of a field, with the name and the description of its group."""

    group: tuple[str, str] = NO_GROUP

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if (self.name or "").endswith(FILES):
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)


class IntRange(click.IntRange):
    """An integer between two bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not an integer.", param, ctx)
        return int(_checked(self, number, param, ctx))


class NumberRange(click.FloatRange):
    """A number between two bounds; NaN is rejected."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return _checked(self, number, param, ctx)


class _Host(click.types.StringParamType):
    """A host to listen on, in the form of sockets: without brackets."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return without_brackets(super().convert(value, param, ctx))


def _checked(
    kind: IntRange | NumberRange,
    number: float,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> float:
    low = -math.inf if kind.min is None else kind.min
    high = math.inf if kind.max is None else kind.max
    under = number <= low if kind.min_open else number < low
    over = number >= high if kind.max_open else number > high
    if under or over:
        words = range_in_words(kind.min, kind.max, above=kind.min_open, below=kind.max_open)
        kind.fail(f"{number} is out of range: it must be {words}.", param, ctx)
    return number


class _Secret(ConfigOption):
    """An option whose empty variable is kept, and rejected later. To click, empty means missing,
    which would leave the server unprotected."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        names = [self.envvar] if isinstance(self.envvar, str) else self.envvar or ()
        empty = any(os.environ.get(name) == "" for name in names)
        return "" if empty else super().resolve_envvar_value(ctx)


def _is_plain_option(parameter: click.Parameter) -> bool:
    """True for options that a file may have; not for ``--config`` itself."""
    return isinstance(parameter, click.Option) and parameter.expose_value


def _yaml_names(parameter: click.Parameter) -> set[str]:
    names = {flag.removeprefix("--") for flag in parameter.opts}
    return names | {name.replace("-", "_") for name in names}


def _group_of(config: type, name: str) -> tuple[str, str]:
    declaring = [c.__name__ for c in config.__mro__ if name in inspect.get_annotations(c)]
    return GROUPS.get(declaring[0], NO_GROUP)


def _option(item: dataclasses.Field[Any], hint: Any) -> ConfigOption:
    meta = item.metadata
    flags = list(meta["flags"])
    kind = _plain(hint)
    own = "TANDEM_" + flags[0].removeprefix("--").upper().replace("-", "_")
    env = [own, *meta["environment"]] if meta["environment"] else own
    if kind is bool:
        switch = "/".join([flags[0], "--no-" + flags[0].removeprefix("--")])
        return ConfigOption(
            [switch, item.name],
            default=item.default,
            envvar=env,
            help=meta["help"],
            show_default=item.default is True,
        )
    option_class = _Secret if meta["secret"] else ConfigOption
    return option_class(
        [*flags, item.name],
        type=_type(kind, meta),
        default=item.default,
        envvar=env,
        help=meta["help"],
        show_default=item.default is not None,
    )


def _type(kind: type, meta: Any) -> Any:
    if meta["choices"]:
        return click.Choice(meta["choices"])
    if kind is int:
        return IntRange(meta["minimum"], meta["maximum"])
    if kind is float:
        return NumberRange(meta["minimum"], meta["maximum"])
    return _Host() if meta["host"] else str


def _plain(hint: Any) -> type:
    """The type of an optional field: ``int`` for ``int | None``."""
    if isinstance(hint, types.UnionType):
        (kind,) = [part for part in typing.get_args(hint) if part is not type(None)]
        return typing.cast(type, kind)
    return typing.cast(type, hint)

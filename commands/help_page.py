"""Help of commands with many options: in groups, readable at 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from ..shared.config.command_line import (
    FILE_GROUP,
    GROUPS,
    NO_GROUP,
    IntRange,
    NumberRange,
)

# A command with more options only shows the common ones, and the names of its groups.
MANY = 40
ALL = "all"
INDENT = 6
# Groups that a client command only needs if it starts a server.
OF_MODELS = ("engine", "hub")
TITLES = {"http": "HTTP", "mcp": "MCP"}
# The most used options of ``tandem serve``.
COMMON = (
    "model",
    "weight_file",
    "revision",
    "served_model_name",
    "host",
    "port",
    "api_key",
    "max_model_len",
    "prefill_nodes",
    "decode_nodes",
    "devices",
    "dtype",
    "kv_cache_dtype",
    "pd_server",
    "pd_client",
    "pd_url",
    "join",
    "temperature",
    "interactive",
    "prompts",
    "config",
)


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """The options declared by one class of the configuration."""

    name: str
    about: str
    options: list[click.Option] = field(default_factory=list)


class HelpfulCommand(click.Command):
    """A command whose ``--help`` accepts the name of a group or of an option."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        names = self.get_help_option_names(ctx)
        if self._help_option is None:
            self._help_option = click.Option(
                names,
                is_flag=False,
                flag_value="",
                is_eager=True,
                expose_value=False,
                callback=self._show,
                metavar="[TOPIC]",
                help="Show this page; --help=all shows every option, --help=TOPIC one group or "
                "option.",
            )
        return self._help_option

    def _show(self, ctx: click.Context, _: click.Parameter, topic: str | None) -> None:
        if topic is None or ctx.resilient_parsing:
            return
        click.echo(self.get_help(ctx) if not topic else self.help_about(ctx, topic))
        ctx.exit()

    def help_about(self, ctx: click.Context, topic: str) -> str:
        """The help of a group or an option. Raises ``click.UsageError`` for another topic."""
        name = topic.lstrip("-").replace("_", "-").lower()
        groups = option_groups(self.params)
        formatter = ctx.make_formatter()
        for group in groups:
            if name in (ALL, group.name.replace(" ", "-")):
                write_group(formatter, group)
        if name == ALL:
            self.format_usage(ctx, head := ctx.make_formatter())
            return f"{head.getvalue()}\n{formatter.getvalue()}".rstrip("\n")
        if not formatter.getvalue():
            options = [option for group in groups for option in group.options]
            matches = _matching(options, name)
            if not matches:
                raise click.UsageError(
                    f"--help={topic}: no such option or group; the groups are "
                    f"{', '.join(group.name for group in groups)}"
                )
            _write_options(formatter, matches)
        return formatter.getvalue().rstrip("\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = option_groups(self.params)
        names = [group.name for group in groups]
        models = [group for group in groups if "server" in names and group.name in OF_MODELS]
        if not models and sum(len(group.options) for group in groups) <= MANY:
            for group in groups:
                write_group(formatter, group, titled=len(groups) > 1)
            return
        if models:
            for group in groups:
                if group not in models:
                    write_group(formatter, group)
            groups = models
        else:
            options = {option.name: option for group in groups for option in group.options}
            common = [options[name] for name in COMMON if name in options]
            write_group(formatter, OptionGroup("common options", "", common))
        self.write_more(ctx, formatter, groups)

    def write_more(
        self, ctx: click.Context, formatter: click.HelpFormatter, groups: list[OptionGroup]
    ) -> None:
        """Append the names of groups, and the commands that show them."""
        with formatter.section("More groups of options"):
            formatter.write_dl([(g.name, f"{len(g.options)}: {g.about}") for g in groups])
        path = ctx.command_path
        first = groups[0].name.split()[0]
        one = groups[0].options[0].opts[0].lstrip("-")
        with formatter.section("More"):
            formatter.write_dl(
                [
                    (f"{path} --help=all", "every option"),
                    (f"{path} --help={first}", "a group of options"),
                    (f"{path} --help={one}", "an option, or all that contain the word"),
                ]
            )
        formatter.write_paragraph()
        formatter.write_text(
            "Every option can also be set by an environment variable (--max-model-len by "
            "TANDEM_MAX_MODEL_LEN), or in the YAML file of --config."
        )


class HelpfulGroup(click.Group):
    """A group whose commands are listed by ``sections``, with the whole first sentence of each."""

    command_class = HelpfulCommand
    group_class = type

    def __init__(
        self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.sections = sections or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in option_groups(self.get_params(ctx)):
            write_group(formatter, group)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rest = dict(sorted(self.commands.items()))
        for title, names in self.sections.items():
            _write_commands(formatter, title, {name: rest.pop(name) for name in names})
        if rest:
            _write_commands(formatter, "Commands", rest)


def _write_commands(
    formatter: click.HelpFormatter, title: str, commands: dict[str, click.Command]
) -> None:
    with formatter.section(title):
        formatter.write_dl([(name, _first_sentence(one)) for name, one in commands.items()])


def _first_sentence(command: click.Command) -> str:
    text = " ".join((command.help or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def option_groups(params: Iterable[click.Parameter]) -> list[OptionGroup]:
    """The options of a command by group."""
    groups: dict[str, OptionGroup] = {}
    for option in params:
        if isinstance(option, click.Option) and not option.hidden:
            name, about = getattr(option, "group", NO_GROUP)
            groups.setdefault(name, OptionGroup(name, about)).options.append(option)
    order = [name for name, _ in (NO_GROUP, *GROUPS.values(), FILE_GROUP)]
    # Groups that only this command has come first, in the order of its options.
    return sorted(groups.values(), key=lambda g: order.index(g.name) if g.name in order else -1)


def _matching(options: list[click.Option], word: str) -> list[click.Option]:
    """The option with this name, or else those whose names contain it."""
    names = {id(o): [name.lstrip("-") for name in (*o.opts, *o.secondary_opts)] for o in options}
    exact = [option for option in options if word in names[id(option)]]
    return exact or [o for o in options if any(word in name for name in names[id(o)])]


def title_of(group: OptionGroup) -> str:
    """The name of a group as a title."""
    return TITLES.get(group.name) or group.name[:1].upper() + group.name[1:]


def write_group(formatter: click.HelpFormatter, group: OptionGroup, *, titled: bool = True) -> None:
    """Append a group's title and options."""
    formatter.write_paragraph()
    formatter.write(f"{title_of(group) if titled else 'Options'}:\n")
    if group.about and titled:
        _write_text(formatter, group.about, 2)
    _write_options(formatter, group.options)


def _write_options(formatter: click.HelpFormatter, options: Iterable[click.Option]) -> None:
    for option in options:
        _write_text(formatter, _heading(option), 2)
        _write_text(formatter, " ".join(_explanation(option)), INDENT)


def _write_text(formatter: click.HelpFormatter, text: str, indent: int) -> None:
    space = " " * indent
    lines = textwrap.wrap(
        text,
        formatter.width,
        initial_indent=space,
        subsequent_indent=space,
        break_on_hyphens=False,
        break_long_words=False,
    )
    formatter.write("\n".join(lines) + "\n")


def _heading(option: click.Option) -> str:
    names = ", ".join((*option.opts, *option.secondary_opts))
    return names if option.is_flag else f"{names} {_value(option)}"


def _value(option: click.Option) -> str:
    """The placeholder of an option's value."""
    if option.metavar:
        return option.metavar
    kinds: dict[type[Any], str] = {
        IntRange: "N",
        NumberRange: "X",
        click.Choice: "NAME",
    }
    return kinds.get(type(option.type), "TEXT")


def _explanation(option: click.Option) -> Iterator[str]:
    yield option.help or ""
    if isinstance(option.type, click.Choice):
        yield f"One of: {', '.join(option.type.choices)}."
    default = option.to_info_dict()["default"]
    if option.show_default and isinstance(default, (bool, int, float, str)):
        yield f"[default: {_format(default, option)}]"
    variables = [] if isinstance(option.envvar, str) else list(option.envvar or ())[1:]
    if variables:
        yield f"[also: {', '.join(variables)}]"


def _format(default: Any, option: click.Option) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)

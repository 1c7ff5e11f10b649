"""The options of ``tandem serve --pd-server``, which only starts a prefill node."""

from __future__ import annotations

from dataclasses import fields

import click

from ..shared.config import RouterConfig, ServeConfig
from ..shared.errors import UsageError

# Options of the router and the launcher that a prefill node has too.
USED_BY_PD_SERVER = {
    "pd_server",
    "pd_url",
    "prefill_gpu_share",
    "model",
    "ignore_config_keys",
    "hf_overrides",
    "served_model_name",
    "drain_timeout",
    "insecure",
    "stats_interval",
}


def reject_unused() -> None:
    """Raise ``UsageError`` for options on the command line that --pd-server does not use. In files
    and the environment they are allowed, because both sides may share those."""
    context = click.get_current_context()
    other = {item.name for config in (ServeConfig, RouterConfig) for item in fields(config)}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        is_ours = source is click.core.ParameterSource.COMMANDLINE
        if is_ours and parameter.name in other - USED_BY_PD_SERVER:
            raise UsageError(
                f"{parameter.opts[0]} is not used with --pd-server, which starts one prefill node "
                f"and no router; --pd-url sets the node's address"
            )

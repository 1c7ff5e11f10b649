"""``tandem serve --pd-server``: one prefill node in this process, kept alive."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any

import click

from ..config import NodeConfig, prefill_addresses
from ..errors import StartupError, UsageError
from ..host_port import split_host_port
from ..unix_sockets import folder_of, reserved_folder
from .cluster import Restarts
from .serve import SAME_HOST

Values = dict[str, Any]
# Runs a prefill node until it ends, and calls back with its address once it serves.
RunPrefillNode = Callable[[Values, Callable[[str], None]], None]


def serve_prefill(values: Values, run: RunPrefillNode) -> None:
    """Serve at the one address of ``--pd-url``. Raises ``UsageError`` or ``StartupError``."""
    url = values["pd_url"] or SAME_HOST
    addresses = prefill_addresses(url)
    if len(addresses) != 1:
        raise UsageError(f"--pd-url {url!r}: a prefill node listens on one address")
    host, port = addresses[0], "0"
    if not folder_of(host):
        host, port = split_host_port(host)
    common = {name: values[name] for name in ("drain_timeout", "stats_interval")}
    node = NodeConfig(host=host, port=int(port), **common)
    with reserved_folder(host):
        _keep(values | vars(node), run)


def _keep(values: Values, run: RunPrefillNode) -> None:
    """Run the node, and restart it at the same address if it loses its ranks."""
    restarts, served_at = Restarts(), ""
    while True:
        start = inf

        def ready(address: str) -> None:
            nonlocal start, served_at
            start, served_at = time.monotonic(), address

        try:
            run(values, ready)
            return
        except StartupError as error:
            if not served_at:
                raise
            pause = restarts.pause(time.monotonic() - start)
            click.echo(f"tandem: {error}; {restarts.outlook(pause)}", err=True)
            if pause is None:
                raise
        if not folder_of(served_at):
            values = values | {"port": int(split_host_port(served_at)[1])}
        time.sleep(pause)

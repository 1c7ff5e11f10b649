"""``tandem serve --pd-server``: the address of its prefill node, also after a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tandem.__main__ import cli
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.launch import pd_server
from tandem.shared.launch.pd_server import serve_prefill


class Runs:
    """A prefill node that fails with each of ``failures``, then runs once more."""

    def __init__(self, *failures: str, at: str = "") -> None:
        self.failures = list(failures)
        self.values: list[dict[str, Any]] = []
        self.at = at

    def __call__(self, values: dict[str, Any], ready: Callable[[str], None]) -> None:
        self.values.append(values)
        ready(self.at)
        if self.failures:
            raise StartupError(self.failures.pop(0))


def parse_arguments(*arguments: str) -> dict[str, Any]:
    return cli.commands["serve"].make_context("serve", ["--pd-server", *arguments]).params


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ([], "127.0.0.1", 8100),
        (["--pd-url=10.0.0.7:9000"], "10.0.0.7", 9000),
        (["--pd-url=[::1]:18185"], "::1", 18185),
        (["--pd-url=tcp://[fd00::7]:9000"], "fd00::7", 9000),
        (["--pd-url=prefill.example:9000"], "prefill.example", 9000),
    ],
)
def test_it_listens_at_its_one_address(url: list[str], host: str, port: int) -> None:
    run = Runs()
    serve_prefill(parse_arguments(*url), run)
    assert [(values["host"], values["port"]) for values in run.values] == [(host, port)]


@pytest.mark.parametrize("url", ["::1:18185", "127.0.0.1", "a:1,b:2"])
def test_an_address_that_it_cannot_listen_on_is_named(url: str) -> None:
    with pytest.raises(UsageError, match="--pd-url"):
        serve_prefill(parse_arguments(f"--pd-url={url}"), Runs())


def test_it_restarts_at_the_port_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_server.time, "sleep", lambda seconds: None)
    run = Runs("the ranks are lost", at="[::1]:41234")
    serve_prefill(parse_arguments("--pd-url=[::1]:0"), run)
    assert [(values["host"], values["port"]) for values in run.values] == [
        ("::1", 0),
        ("::1", 41234),
    ]

"""Several routers of one launcher: their ports, their shares, and messages about them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.__main__ import cli
from tandem.shared.config import RouterConfig
from tandem.shared.config.command_line import fill
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.launch.cluster import ProcessSpec
from tandem.shared.launch.routers import Routers, configs_of
from tandem.shared.process import acceptor
from tandem.shared.process.lifeline import ROUTER_NUMBER


def parse(arguments: list[str], command: str = "router") -> dict[str, Any]:
    return cli.commands[command].make_context(command, arguments).params


class Started:
    """A stand-in for a launched cluster, which starts nothing; its parts announce ports."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def start(self, name: str, arguments: list[str], **environment: str) -> ProcessSpec:
        part: Any = ProcessSpec(name, arguments, environment, None, None, 0)  # type: ignore[arg-type]
        self.parts.append(part)
        return part

    def wait_starting(self, part: ProcessSpec, deadline: float) -> dict[str, int]:
        return {"registry": 1000 + self.parts.index(part)}

    def wait_ready(self, part: ProcessSpec, deadline: float) -> dict[str, int]:
        number = self.parts.index(part)
        return {"http": 1, "registry": 1000 + number, "metrics": 2000 + number}

    def config(self, number: int) -> RouterConfig:
        command, *arguments = self.parts[number].arguments
        return fill(RouterConfig, parse(arguments, command))


@contextlib.contextmanager
def routers(*flags: str) -> Iterator[tuple[Routers, Started]]:
    started: Any = Started()
    with contextlib.closing(Routers(started, parse([*flags]))) as launched:
        launched.start(0.0)
        yield launched, started


def test_several_routers_share_the_http_port_and_have_other_ports_of_their_own() -> None:
    flags = ("--router-workers=3", "--port=0", "--registry-port=9001", "--metrics-port=9101")
    with routers(*flags) as (launched, started):
        configs = [started.config(number) for number in range(3)]
        assert [part.name for part in launched.parts] == ["router-0", "router-1", "router-2"]
        numbers = [part.environment[ROUTER_NUMBER] for part in launched.parts]
        assert numbers == ["0", "1", "2"]
        (port,) = {config.port for config in configs}
        assert port and [config.registry_port for config in configs] == [9001, 9002, 9003]
        assert [config.metrics_port for config in configs] == [9101, 9102, 9103]
        assert launched.registries == ["127.0.0.1:1000", "127.0.0.1:1001", "127.0.0.1:1002"]
        # Each router may listen on the port, other processes may not.
        shared = [acceptor.listen("127.0.0.1", port, 1, shared=True) for _ in range(3)]
        with pytest.raises(OSError, match="in use"):
            acceptor.listen("127.0.0.1", port, 1)
        for each in shared:
            each.close()


def test_one_that_is_restarted_gets_the_ports_that_it_had() -> None:
    with routers("--router-workers=2", "--port=0", "--registry-port=0", "--metrics-port=0") as (
        launched,
        started,
    ):
        assert started.config(1).registry_port == started.config(1).metrics_port == 0
        assert [ports["metrics"] for ports in launched.wait_ready(0.0)] == [2000, 2001]
        again = [started.config(number) for number in range(2)]
        assert [config.registry_port for config in again] == [1000, 1001]
        assert [config.metrics_port for config in again] == [2000, 2001]
        # With a random port, batches are not kept: their folder would not be found again.
        assert {config.batch_dir for config in again} == {"off"}


def test_one_router_starts_with_its_options() -> None:
    with routers("--port=0", "--max-connections=7") as (launched, _):
        launched.wait_ready(0.0)
        (part,) = launched.parts
        assert part.name == "router" and part.environment == {}
        assert part.arguments == ["router", "--port=0", "--max-connections=7"]


def test_a_port_in_use_is_reported_before_a_router_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with (
            pytest.raises(StartupError, match=rf"cannot listen on 127.0.0.1:{port} for HTTP"),
            routers("--router-workers=2", f"--port={port}"),
        ):
            pass


def test_a_second_launcher_does_not_join_the_port_of_the_first() -> None:
    with routers("--router-workers=2", "--port=0") as (_, started):
        port = started.config(0).port
        serving = acceptor.listen("127.0.0.1", port, 1, shared=True)
        with (
            contextlib.closing(serving),
            pytest.raises(StartupError, match="choose another --host or --port"),
            routers("--router-workers=2", f"--port={port}"),
        ):
            pass


@pytest.mark.parametrize(
    "flags",
    [
        ["--registry-port=65535"],
        ["--registry-port=8001", "--metrics-port=8002"],
        ["--port=8002"],
    ],
)
def test_ports_that_meet_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match="--router-workers 2 takes 2 ports from --registry-port"):
        configs_of(fill(RouterConfig, parse(["--router-workers=2", *flags])))


def test_what_all_may_hold_is_divided() -> None:
    flags = ["--router-workers=4", "--max-connections=10", "--max-concurrent-requests=8"]
    flags += ["--max-held-body-bytes=4096", "--max-body-bytes=2048"]
    front = fill(RouterConfig, parse(flags))
    share = configs_of(front)[0]
    assert (share.max_connections, share.max_concurrent_requests) == (3, 2)
    assert share.max_held_body_bytes == 2048, "a request of the largest size fits"
    assert share.max_held_prompt_tokens == front.max_held_prompt_tokens // 4
    assert share.router_workers == 4 and share.batch_dir is None

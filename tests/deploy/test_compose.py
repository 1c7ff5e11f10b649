"""``deploy/compose*.yaml``, against our commands and against themselves."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from tandem.shared.errors import UsageError

from . import deployment as d

SERVICES = [
    pytest.param(path, name, id=f"{path.stem}-{name}")
    for path in d.COMPOSE_FILES
    for name in d.compose_names(path)
]


@pytest.mark.parametrize(("path", "name"), SERVICES)
def test_every_flag_and_value_is_one_the_command_takes(path: Path, name: str) -> None:
    part = d.compose_part(path, name)
    part.parse()
    flags = {argument.partition("=")[0] for argument in part.arguments[1:]}
    # click takes unambiguous beginnings of flags too: those break when another flag is added.
    assert flags <= d.options_of(part.command)


def test_an_unknown_flag_or_variable_would_be_noticed() -> None:
    with pytest.raises(UsageError):
        d.Container("nowhere", ("router", "--no-such-flag=1")).parse()
    with pytest.raises(click.UsageError):
        d.Container("nowhere", ("router",), {"TANDEM_NO_SUCH": "1"}).parse()


@pytest.mark.parametrize("path", d.COMPOSE_FILES, ids=lambda path: path.stem)
def test_only_the_router_is_published_and_on_loopback(path: Path) -> None:
    published = {name: s["ports"] for name, s in d.services(path).items() if "ports" in s}
    assert set(published) == {"router"}
    for entry in published["router"]:
        address, _, port = entry.split(":")
        assert address == "127.0.0.1"
        assert int(port) in d.compose_part(path, "router").ports


@pytest.mark.parametrize(("path", "name"), SERVICES)
def test_services_are_probed_drained_and_found_at_their_ports(path: Path, name: str) -> None:
    service, part = d.services(path)[name], d.compose_part(path, name)
    probe = service["healthcheck"]["test"][-1]
    compile(probe, "healthcheck", "exec")
    url = re.search(r"http://127\.0\.0\.1:(\d+)/ready", probe)
    assert url is not None and int(url[1]) in part.ports
    options = part.parse()
    longest = options["drain_timeout"] + options.get("shutdown_delay", 0)
    assert int(service["stop_grace_period"].removesuffix("s")) > longest
    assert options["insecure"] and options["host"] == "0.0.0.0"
    if part.command != "router":
        router = d.compose_part(path, "router").parse()
        assert options["advertise"] == f"{name}:{options['port']}"
        assert options["join"] == f"router:{router['registry_port']}"
        assert service["networks"] == ["inside"]
        assert options["threads"] == service["cpus"]


@pytest.mark.parametrize(("path", "name"), SERVICES)
def test_compiled_kernels_can_be_loaded(path: Path, name: str) -> None:
    """Docker mounts a tmpfs with noexec by default."""
    service = d.services(path)[name]
    assert service["read_only"] and service["tmpfs"] == ["/tmp:exec"]
    assert "cache:/cache" in service["volumes"]


def test_the_toy_has_two_nodes_of_each_kind() -> None:
    path = d.DEPLOY / "compose.yaml"
    kinds = [d.compose_part(path, name).command for name in d.compose_names(path)]
    assert sorted(kinds) == ["decode-node"] * 2 + ["prefill-node"] * 2 + ["router"]


def test_nodes_on_two_gpus_share_what_cuda_ipc_needs() -> None:
    services = d.services(d.DEPLOY / "compose.gpu.yaml")
    prefill, decode = services["prefill"], services["decode"]
    owner = prefill["pid"].removeprefix("service:")
    for service in (prefill, decode):
        assert service["pid"] == service["ipc"] == f"service:{owner}"
    assert services[owner]["ipc"] == "shareable" and "pid" not in services[owner]
    assert "shm_size" in services[owner] and "shm_size" not in prefill | decode
    parts = [d.compose_part(d.DEPLOY / "compose.gpu.yaml", name) for name in ("prefill", "decode")]
    assert [part.parse()["devices"] for part in parts] == ["0", "1"]
    for service in (prefill, decode):
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices["device_ids"] == ["0", "1"]


def test_no_node_dies_with_another() -> None:
    """The end of a process namespace's first process kills all others in it, so none of ours is."""
    services = d.services(d.DEPLOY / "compose.gpu.yaml")
    owners = {s["pid"].removeprefix("service:") for s in services.values() if "pid" in s}
    assert owners and not owners & {*d.compose_names(d.DEPLOY / "compose.gpu.yaml")}
    for owner in owners:
        # With Docker's init: `sleep` as the first process would ignore SIGTERM, and reap nothing.
        assert services[owner]["entrypoint"] == ["sleep", "infinity"] and services[owner]["init"]
        assert services[owner]["network_mode"] == "none" and services[owner]["restart"]


@pytest.mark.parametrize("path", d.COMPOSE_FILES, ids=lambda path: path.stem)
def test_a_node_drains_for_as_long_in_either_role(path: Path) -> None:
    parts = [d.compose_part(path, name) for name in d.compose_names(path)]
    nodes = [part for part in parts if part.command != "router"]
    assert len({part.parse()["drain_timeout"] for part in nodes}) == 1


def test_the_router_of_each_serves_the_model_of_its_nodes() -> None:
    for path in d.COMPOSE_FILES:
        models = {d.compose_part(path, name).parse()["model"] for name in d.compose_names(path)}
        assert len(models) == 1

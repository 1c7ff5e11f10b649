"""The address that a node announces to a router, without --advertise."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.shared.config import NodeConfig
from tandem.shared.errors import UsageError
from tandem.shared.node import announced_address as module
from tandem.shared.node.announced_address import announced_address

HERE, HERE_6 = "10.0.0.7", "2001:db8:1::7"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with an outside address of each family, and the names that it can resolve. Returns
    the families that have a route to other machines."""
    ways = ["4", "6"]

    def source(family: int, address: tuple[Any, ...]) -> str:
        to = str(address[0])
        if to.startswith("127.") or to in ("::1", HERE, HERE_6):
            return to
        if ("6" if ":" in to else "4") not in ways:
            raise OSError("Network is unreachable")
        return HERE_6 if ":" in to else HERE

    monkeypatch.setattr(module, "_source", source)
    return ways


@pytest.mark.parametrize(
    ("host", "router", "announced"),
    [
        ("10.0.0.9", "10.0.0.1:8001", "10.0.0.9:5"),
        ("node.example", "127.0.0.1:8001", "node.example:5"),
        ("2001:db8::9", "10.0.0.1:8001", "[2001:db8::9]:5"),
        ("0.0.0.0", "10.0.0.1:8001", f"{HERE}:5"),
        ("::", "10.0.0.1:8001", f"{HERE}:5"),
        ("0.0.0.0", "[2001:db8::1]:8001", f"[{HERE_6}]:5"),
        # A local router passes the address on to nodes on other machines.
        ("0.0.0.0", "127.0.0.1:8001", f"{HERE}:5"),
        ("0.0.0.0", "localhost:8001", f"{HERE}:5"),
        ("::", "[::1]:8001", f"{HERE}:5"),
        ("0.0.0.0", f"{HERE}:8001", f"{HERE}:5"),
        ("127.0.0.1", "127.0.0.1:8001", "127.0.0.1:5"),
        ("::1", "[::1]:8001", "[::1]:5"),
        ("localhost", "localhost:8001", "localhost:5"),
        # The router's address is one of this machine's.
        ("127.0.0.1", f"{HERE}:8001", "127.0.0.1:5"),
    ],
)
async def test_the_address_leads_back_from_the_router(
    host: str, router: str, announced: str
) -> None:
    assert await announced_address(host, 5, router) == announced


async def test_a_machine_without_a_way_out_has_its_loopback(machine: list[str]) -> None:
    machine.remove("4")
    assert await announced_address("0.0.0.0", 5, "127.0.0.1:8001") == f"[{HERE_6}]:5"
    machine.clear()
    assert await announced_address("0.0.0.0", 5, "127.0.0.1:8001") == "127.0.0.1:5"
    with pytest.raises(OSError, match="unreachable"):
        await announced_address("0.0.0.0", 5, "10.0.0.1:8001")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_loopback_is_not_announced_to_another_machine(host: str) -> None:
    with pytest.raises(UsageError, match=rf"--host {host} .*--host {HERE}.*--advertise"):
        await announced_address(host, 5, "10.0.0.1:8001")


async def test_a_name_that_does_not_resolve_is_named() -> None:
    with pytest.raises(OSError, match=r"no-such-host\.invalid does not resolve"):
        await announced_address("0.0.0.0", 5, "no-such-host.invalid:8001")


@pytest.mark.parametrize("address", ["0.0.0.0:8100", "[::]:8100"])
def test_an_address_that_nobody_can_call_is_not_advertised(address: str) -> None:
    with pytest.raises(UsageError, match="others cannot reach"):
        NodeConfig(advertise=address).advertised  # noqa: B018

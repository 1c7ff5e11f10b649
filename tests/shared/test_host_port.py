"""Hosts and ports as people write them."""

from __future__ import annotations

import pytest

from tandem.shared.host_port import (
    bracketed,
    is_loopback,
    is_wildcard,
    join_host_port,
    loopback_ip,
    split_host_port,
    without_brackets,
)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:8100", "127.0.0.1", "8100"),
        ("node-1.example:8100", "node-1.example", "8100"),
        ("[::1]:8100", "::1", "8100"),
        ("[::ffff:127.0.0.1]:8100", "::ffff:127.0.0.1", "8100"),
        ("[fe80::1%eth0]:8100", "fe80::1%eth0", "8100"),
        (":8100", "", "8100"),
        ("localhost", "localhost", ""),
        ("[::1]", "::1", ""),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, host: str, port: str) -> None:
    assert split_host_port(address) == (host, port)
    if host and port:
        assert join_host_port(host, port) == address


@pytest.mark.parametrize(
    "text", ["::1:8100", "::1", "[::1]8100", "[::1", "::1]:8100", "[localhost]:8100"]
)
def test_what_could_be_split_in_two_ways_is_not_split(text: str) -> None:
    assert split_host_port(text) == ("", "")


@pytest.mark.parametrize(
    ("host", "in_url", "in_socket"),
    [
        ("::1", "[::1]", "::1"),
        ("[::1]", "[::1]", "::1"),
        ("fe80::1%eth0", "[fe80::1%eth0]", "fe80::1%eth0"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost", "localhost"),
    ],
)
def test_brackets_come_and_go_but_once(host: str, in_url: str, in_socket: str) -> None:
    assert (bracketed(host), without_brackets(host)) == (in_url, in_socket)
    assert join_host_port(host, 1) == f"{in_url}:1"


@pytest.mark.parametrize(
    ("host", "ip"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.1.2.3", "127.1.2.3"),
        ("localhost", "127.0.0.1"),
        ("LocalHost.", "127.0.0.1"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("::1%lo", "::1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("[::ffff:7f00:1]", "127.0.0.1"),
    ],
)
def test_loopback_however_it_is_written(host: str, ip: str) -> None:
    assert is_loopback(host) and loopback_ip(host) == ip


@pytest.mark.parametrize(
    "host",
    [
        *("", "0.0.0.0", "::", "10.0.0.1", "::2", "fe80::1%lo", "::ffff:10.0.0.1", "example"),
        # Names that anybody may register.
        *("127.example.com", "127.0.0.1.example.com", "localhost.example.com"),
    ],
)
def test_others_may_reach_everything_else(host: str) -> None:
    assert not is_loopback(host) and loopback_ip(host) == ""


def test_a_unix_socket_is_this_machines() -> None:
    assert is_loopback("unix:/run/tandem/control.sock")


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "[::]", "0:0::0", "::ffff:0.0.0.0"])
def test_all_interfaces(host: str) -> None:
    assert is_wildcard(host) and not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "10.0.0.0"])
def test_one_interface(host: str) -> None:
    assert not is_wildcard(host)

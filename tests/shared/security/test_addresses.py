"""Addresses that nodes may announce: allow-listed shapes."""

from __future__ import annotations

import pytest

from tandem.shared.security.addresses import is_candidate, is_host_port


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:80",
        "localhost:1",
        "prefill-0.tandem-prefill.svc.cluster.local.:65535",
        "my_host:8100",
        "[::1]:8100",
        "[fe80::1%eth0]:8100",
    ],
)
def test_a_host_and_a_port_is_an_address(address: str) -> None:
    assert is_host_port(address) and is_candidate(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "h",
        ":80",
        "h:",
        "h:0",
        "h:65536",
        "h:+80",
        "h:8 0",
        "h:８０",
        "unix:/run/x.sock:80",
        "unix:/run/x.sock?q:80",
        "unix:/run/x.sock#q:80",
        "unix:/run/control.sock?q:80",
        "unix-abstract:x:80",
        "dns:h:80",
        "dns://1.2.3.4:53/h:80",
        "ipv4:1.2.3.4:80",
        "ipv6:[::1]:80",
        "vsock:2:80",
        "xds:///h:80",
        "::1:80",
        "[::1]x:80",
        "[h]:80",
        "-h:80",
        "h/x:80",
        "h%41:80",
        "user@h:80",
        "h\n:80",
        "h" * 254 + ":80",
    ],
)
def test_whatever_else_grpc_would_resolve_is_not(address: str) -> None:
    assert not is_host_port(address) and not is_candidate(address)


def test_a_candidate_may_also_be_the_socket_of_a_meeting_folder() -> None:
    assert is_candidate("unix:/run/tandem/control.sock")
    assert not is_host_port("unix:/run/tandem/control.sock")
    for wrong in (
        "unix:/run/docker.sock",
        "unix:run/control.sock",
        "unix:///run/victim.sock?x=/control.sock",
        "unix:/run/victim.sock#/control.sock",
        "unix:/run/%76/control.sock",
        "unix:/" + "x" * 200 + "/control.sock",
    ):
        assert not is_candidate(wrong)

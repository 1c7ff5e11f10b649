"""What a head tells the other hosts of its node at its end."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tandem import EngineConfig
from tandem.shared.config import SecurityConfig
from tandem.shared.errors import StartupError
from tandem.shared.node import other_hosts as module
from tandem.shared.node.other_hosts import other_hosts
from tandem.shared.node.process import _StoppedError
from tandem.shared.security.credentials import read_credentials

CONFIG = EngineConfig(nnodes=2, master_addr="127.0.0.2", tensor_parallel_size=2, device="cpu")


@pytest.mark.parametrize(
    ("error", "lost", "reason"),
    [
        (None, "", ""),
        (_StoppedError(), "", ""),
        (StartupError("there is no GPU"), "", "there is no GPU"),
        (KeyError("layers"), "", "it failed: KeyError('layers')"),
        (None, "rank 1 is lost", "rank 1 is lost"),
    ],
)
async def test_other_hosts_end_well_only_with_a_head_that_does(
    error: Exception | None, lost: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Hosts:
        def __init__(self, *_: Any) -> None: ...

        async def listen(self) -> None: ...

        async def close(self, reason: str) -> None:
            told.append(reason)

    monkeypatch.setattr(module, "OtherHosts", Hosts)
    credentials = read_credentials(SecurityConfig(cluster_token="t"))
    with pytest.raises(type(error)) if error is not None else contextlib.nullcontext():
        async with other_hosts(CONFIG, credentials, lambda: None, lambda: lost):
            if error is not None:
                raise error
    assert told == [reason]

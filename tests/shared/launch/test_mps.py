"""``--prefill-gpu-share``: whom it limits, and when it is refused."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from tandem import __main__
from tandem.__main__ import cli
from tandem.shared.config import EngineConfig
from tandem.shared.errors import UsageError
from tandem.shared.launch.gpus import engines_of, gpus_by_node
from tandem.shared.launch.mps import LIMIT, limit_of_prefill


def test_a_limit_needs_a_running_mps_and_no_limit_of_all_nodes(
    mps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limit_of_prefill(40, shares=True) == {LIMIT: "40"}
    assert limit_of_prefill(None, shares=False) == {}
    with monkeypatch.context() as exported:
        exported.setenv(LIMIT, "50")
        with pytest.raises(UsageError, match=f"{LIMIT} is 50 in the environment.*unset it"):
            limit_of_prefill(40, shares=True)
    mps.unlink()
    with pytest.raises(UsageError, match=rf"40 needs NVIDIA's MPS.* not run at {mps.parent}; star"):
        limit_of_prefill(40, shares=True)


def test_nodes_that_share_a_gpu_by_mps_do_not_take_turns(mps: Path) -> None:
    names, engines = ["a", "b"], engines_of(EngineConfig(), 2, (0,), share=True)
    assert len(list(gpus_by_node(names, engines))) == 2
    mps.unlink()
    assert "unless NVIDIA's MPS runs" in list(gpus_by_node(names, engines))[2]


@pytest.mark.parametrize("percent", ["0", "101", "half"])
def test_a_share_is_a_percentage(percent: str) -> None:
    with pytest.raises(click.BadParameter):
        cli.commands["serve"].make_context("serve", [f"--prefill-gpu-share={percent}"])


@pytest.mark.usefixtures("mps")
def test_a_prefill_node_of_its_own_command_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[str | None] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(__main__, "_run_node", lambda *_: limits.append(os.environ.get(LIMIT)))
    flags = ["serve", "--pd-server", "--prefill-gpu-share=40"]
    with pytest.raises(UsageError, match="none does"):
        cli.main(flags, standalone_mode=False)
    cli.main([*flags, "--nodes-per-device=2"], standalone_mode=False)
    assert limits == ["40"]

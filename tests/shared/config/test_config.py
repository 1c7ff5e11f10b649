"""Automatic options are resolved once, and contradictions are rejected."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tandem.__main__ import cli
from tandem.shared.config import EngineConfig, HandoffConfig
from tandem.shared.config.fields import split_addresses
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.kv.planning import (
    CPU,
    CUDA,
    NodeDevice,
    RankDevice,
    ResolvedEngine,
    resolve_engine,
)


def resolve(free: int = 1 << 20, **options: Any) -> ResolvedEngine:
    config = EngineConfig(**options)
    device = NodeDevice((RankDevice(CPU, "a CPU", free, free),))
    return resolve_engine(
        config, context=1000, bytes_per_block=1024, free_bytes=free, device=device
    )


def test_the_cache_is_as_large_as_memory_allows_and_the_length_follows() -> None:
    resolved = resolve(free=100 * 1024)
    assert (resolved.num_blocks, resolved.max_model_len) == (30, 480)
    assert resolve(free=1 << 30, max_num_seqs=2).num_blocks == 2 * 63
    assert resolve(block_size=1, num_blocks=2, max_model_len=2).max_model_len == 2


@pytest.mark.parametrize(
    ("free", "options", "word"),
    [
        (1 << 20, {"max_model_len": 1001}, "context of 1000"),
        (1024, {}, "no memory for one KV block"),
        (1 << 20, {"num_blocks": 1025}, "use at most 1024"),
        (1 << 20, {"num_blocks": 2, "max_model_len": 64}, "token slots"),
    ],
)
def test_what_does_not_fit_is_refused(free: int, options: dict[str, Any], word: str) -> None:
    with pytest.raises(StartupError, match=word):
        resolve(free, **options)


def test_a_node_that_shares_its_device_says_so_when_its_part_is_too_small() -> None:
    device = NodeDevice((RankDevice(CPU, "a CPU", 1, 1),), nodes=3)
    for config in (
        EngineConfig(kv_fraction=0.1),
        EngineConfig(num_blocks=99),
        EngineConfig(max_model_len=999),
    ):
        with pytest.raises(StartupError, match=r"fewer nodes .*--nodes-per-device is 3"):
            resolve_engine(
                config, context=1000, bytes_per_block=1024, free_bytes=4096, device=device
            )


def test_a_share_of_the_gpu_goes_to_the_cache_whole_and_means_nothing_on_a_cpu() -> None:
    facts = {"context": 1000, "bytes_per_block": 1024, "free_bytes": 1 << 20}
    config = EngineConfig(gpu_memory_utilization=0.5, max_num_seqs=1)
    resolved = {
        kind: resolve_engine(config, device=NodeDevice((RankDevice(kind, "a", 1, 1),)), **facts)
        for kind in (CPU, CUDA)
    }
    assert (resolved[CPU].num_blocks, resolved[CUDA].num_blocks) == (63, 1024)
    with pytest.raises(UsageError, match=r"--kv-fraction and --gpu-memory-utilization .* one"):
        EngineConfig(kv_fraction=0.5, gpu_memory_utilization=0.5)


def test_devices_and_ranks_must_agree() -> None:
    assert EngineConfig(devices="0,1").world_size == 2
    assert EngineConfig(tensor_parallel_size=3).world_size == 3
    for devices in ("0,0", "x"):
        with pytest.raises(UsageError, match="--d"):
            _ = EngineConfig(devices=devices).world_size
    with pytest.raises(UsageError, match="drop one"):
        _ = EngineConfig(devices="0,1", tensor_parallel_size=3).world_size


def test_addresses() -> None:
    assert split_addresses("--join", "a:1, [::1]:2") == ("a:1", "[::1]:2")
    for wrong in ("a", "::1:8001", "[::1]", "a:65536", "a:８", ":1", "[a]:1"):
        with pytest.raises(UsageError, match=re.escape(f"--join '{wrong}' is not host:port")):
            split_addresses("--join", f"b:1,{wrong}")


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        *(("serve", flag) for flag in ("host", "registry-host", "metrics-host", "kv-host")),
        ("decode-node", "host"),
    ],
)
def test_a_host_to_listen_on_may_have_brackets(command: str, flag: str) -> None:
    values = cli.commands[command].make_context(command, [f"--{flag}=[::1]"]).params
    assert values[flag.replace("-", "_")] == "::1"


def test_advertised_ports_follow_the_first() -> None:
    assert HandoffConfig(kv_port=8200).kv_advertised(0) is None
    config = HandoffConfig(kv_advertise="kv.example:8200")
    assert config.kv_advertised(0) == ("tcp://kv.example:8200", "tcp://kv.example:8201")
    assert config.kv_advertised(3) == ("tcp://kv.example:8206", "tcp://kv.example:8207")
    config = HandoffConfig(kv_advertise="[fd00::5]:8200")
    assert config.kv_advertised(0) == ("tcp://[fd00::5]:8200", "tcp://[fd00::5]:8201")


@pytest.mark.parametrize("value", ["kv.example", "a:1,b:2", "a:0", "a:65535", "a:65530"])
def test_ports_that_cannot_be_are_not_advertised(value: str) -> None:
    with pytest.raises(UsageError, match=f"--kv-advertise '{value}'"):
        HandoffConfig(kv_advertise=value).kv_advertised(4)

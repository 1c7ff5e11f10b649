"""The start of an engine: the head reads its model, and plans once it knows the ranks' devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem import EngineConfig
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.config import HandoffConfig
from tandem.shared.engine import start as engine
from tandem.shared.engine.messages import LoadFormats, RankEndpoints, RankSettings, TokenMasks
from tandem.shared.engine.plan import PRIVATE_SEQS, SlotLimits, StepLimits
from tandem.shared.engine.start import (
    DataPlaneOptions,
    NodeIdentity,
    _with_end_tokens,
    start_engine,
)
from tandem.shared.errors import ModelError
from tandem.shared.kv.planning import CPU, CUDA, RankDevice, RankMemory
from tandem.shared.weights.source import open_source, read_spec

ADDED = [{"id": 5, "content": "<end>"}, {"id": 7, "content": "</s>"}, {"id": 10**6, "content": "x"}]


@pytest.mark.parametrize(
    ("eos_token", "added", "ends"),
    [
        ("<end>", ADDED, (2, 5)),
        ({"content": "</s>", "lstrip": False}, ADDED, (2, 7)),
        ("x", ADDED, (2,)),  # beyond the vocabulary
        ("unheard of", ADDED, (2,)),
        (None, ADDED, (2,)),
        ("<end>", None, (2,)),
        ("<end>", ["<end>", {"content": "<end>", "id": "5"}, {}], (2,)),
    ],
)
def test_every_end_token_that_the_folder_names_counts(
    tmp_path: Path, eos_token: Any, added: Any, ends: tuple[int, ...]
) -> None:
    spec = read_spec(builtin_model_path())
    assert _with_end_tokens(spec, open_source(tmp_path)) == spec
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert _with_end_tokens(spec, open_source(tmp_path)).eos_token_ids == ends


class LoadingRanks:
    """Ranks on a device of the test's choice, which note what they are to load."""

    def __init__(self, kind: str) -> None:
        self.device = RankDevice(kind, "a device", 1 << 34, 1 << 34)
        self.formats = LoadFormats("", "")

    async def start(self, settings: list[RankSettings]) -> list[RankDevice]:
        self.settings = settings
        self.started = len(settings)
        return [self.device] * self.started

    async def load(self, formats: LoadFormats, limits: StepLimits) -> list[RankMemory]:
        self.formats, self.limits = formats, limits
        step = 0 if self.device.kind == CPU else 1 << 30
        return [RankMemory(1 << 33, 1 << 30, 1 << 20, step)] * self.started

    async def allocate(self, num_blocks: int, limits: SlotLimits) -> list[RankEndpoints]:
        return []

    def send_masks(self, masks: TokenMasks) -> None:
        raise AssertionError("nothing is computed here")

    async def stop(self) -> None:
        pass


async def planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, **options: Any
) -> tuple[engine.NodeEngine, LoadFormats]:
    """A node of a model that was saved in float16, on this kind of device."""
    config = json.loads((builtin_model_path() / "config.json").read_text())
    spelled = {key: "float16" for key in ("dtype", "torch_dtype") if key in config}
    (tmp_path / "config.json").write_text(json.dumps(config | spelled))
    ranks = LoadingRanks(kind)
    monkeypatch.setattr(engine, "MultiprocessExecutor", lambda *_, **__: ranks)
    core = await start_engine(
        EngineConfig(model=str(tmp_path), max_num_seqs=65536, load_format="dummy", **options),
        NodeIdentity("node", 1),
    )
    return core, ranks.formats


async def test_without_device_the_plan_follows_the_device_that_ranks_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The head cannot know before its ranks say it."""
    plans = {}
    for kind in (CUDA, CPU):
        node, formats = await planned(monkeypatch, tmp_path, kind)
        resolved = node.resolved
        assert formats == LoadFormats(node.weight_format, node.kv_dtype)
        plans[kind] = (node.kv_dtype, resolved.num_blocks, resolved.max_num_batched_tokens)
    blocks = (1 << 33) // (1 << 20)
    assert plans[CUDA] == ("float16", blocks - 1024, 8192)  # without a step's memory
    assert plans[CPU] == ("bfloat16", int(blocks * 0.3), 512)


async def test_options_win_over_what_a_device_suggests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {"kv_fraction": 0.5, "max_num_batched_tokens": 99, "dtype": "float32"}
    for kind in (CUDA, CPU):
        node, formats = await planned(monkeypatch, tmp_path, kind, **options)
        free = 8192 if kind == CPU else 8192 - 1024
        assert (node.resolved.num_blocks, node.resolved.max_num_batched_tokens) == (free // 2, 99)
        assert formats == LoadFormats("float32", "float32")


async def test_a_rank_learns_the_largest_steps_before_the_cache_is_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = LoadingRanks(CUDA)
    monkeypatch.setattr(engine, "MultiprocessExecutor", lambda *_, **__: ranks)
    config = EngineConfig(model=str(builtin_model_path()), load_format="dummy", max_num_seqs=3)
    node = await start_engine(config, NodeIdentity("node", 1))
    assert ranks.limits == StepLimits(8192, 3 + PRIVATE_SEQS, node.spec.max_position)


async def test_config_keys_are_ignored_by_heads_and_ranks_alike_and_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((builtin_model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"query_scale": 2.0}))
    ranks = LoadingRanks(CPU)
    monkeypatch.setattr(engine, "MultiprocessExecutor", lambda *_, **__: ranks)
    identity = NodeIdentity("node", 1)
    options: dict[str, Any] = {"model": str(tmp_path), "load_format": "dummy"}
    with pytest.raises(ModelError, match="--ignore-config-keys query_scale"):
        await start_engine(EngineConfig(**options), identity)
    await start_engine(EngineConfig(**options, ignore_config_keys="other, query_scale"), identity)
    assert ranks.settings[0].ignored_config_keys == ("other", "query_scale")
    assert "other, query_scale of " in caplog.text


async def test_overrides_of_the_config_reach_the_ranks_and_change_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((builtin_model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    ranks = LoadingRanks(CPU)
    monkeypatch.setattr(engine, "MultiprocessExecutor", lambda *_, **__: ranks)
    option_sets: list[dict[str, Any]] = [{}, {"hf_overrides": '{"rms_norm_eps": 0.5}'}]
    plain, other = [
        await start_engine(
            EngineConfig(model=str(tmp_path), load_format="dummy", **options),
            NodeIdentity("node", 1),
        )
        for options in option_sets
    ]
    assert ranks.settings[0].hf_overrides == '{"rms_norm_eps": 0.5}'
    assert other.fingerprint != plain.fingerprint
    assert "--hf-overrides: rms_norm_eps of " in caplog.text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "auto"),
        ({"device": "cuda"}, "triton"),
        ({"device": "cuda", "decode_kernel": "torch"}, "torch"),
        ({"decode_kernel": "triton"}, "triton"),
    ],
)
def test_a_requested_gpu_decodes_by_triton_by_default(
    options: dict[str, str], expected: str
) -> None:
    assert engine._decode_kernel(EngineConfig(**options)) == expected  # type: ignore[arg-type]


def test_every_rank_gets_its_limit_of_peers(tmp_path: Path) -> None:
    options = DataPlaneOptions(handoff=HandoffConfig(max_peers=7), listen=True)
    settings = engine._rank_settings(EngineConfig(), NodeIdentity("node", 1), tmp_path, 0, options)
    assert settings.data_plane is not None and settings.data_plane.max_peers == 7


@pytest.mark.parametrize(("nodes", "shares"), [(None, False), (1, False), (2, True)])
def test_ranks_share_a_gpu_that_is_for_several_nodes(
    tmp_path: Path, nodes: int | None, shares: bool
) -> None:
    config = EngineConfig(nodes_per_device=nodes)
    settings = engine._rank_settings(config, NodeIdentity("node", 1), tmp_path, 0, None)
    assert settings.shares_device == shares

"""Brings up the engine of a node: ranks, block pool, scheduler, core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..config import EngineConfig, HandoffConfig
from ..config.kv_dtypes import kv_format
from ..errors import ModelError, PeerRefusedError, StartupError
from ..kv.block_pool import BlockPool
from ..kv.planning import NodeDevice, ResolvedEngine, resolve_engine
from ..models.fingerprint import model_fingerprint
from ..models.registry import read_json, read_spec
from ..models.spec import DecoderSpec, kv_heads_by_rank, tensor_parallel_problem
from ..process.cores import share_of_cores
from ..process.threads import in_thread
from ..telemetry.logs import log_settings
from ..text.special_tokens import special_tokens
from ..weights.locate import display_name, locate_model
from .core import EngineCore
from .executor import RankPool
from .pace import Pace
from .scheduler import Scheduler

log = logging.getLogger("tandem.node")


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Who a node is: a name, and one random number a process start."""

    node_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class NodeEngine:
    """A running engine and what the node needs to know of it."""

    core: EngineCore
    ranks: RankPool
    spec: DecoderSpec
    folder: Path
    name: str
    resolved: ResolvedEngine
    fingerprint: dict[str, str]
    weight_dtype: str
    kv_dtype: str
    endpoints: list[list[str]]  # bulk and control of each rank
    curve_keys: list[str]  # public, one a rank; empty without CURVE
    world_size: int

    def kv_heads(self, ranks: int) -> list[range]:
        """The KV heads that each of so many ranks of this model holds.

        Raises ``PeerRefusedError`` when it cannot be split so.
        """
        problem = tensor_parallel_problem(self.spec, ranks) if ranks else "there are no ranks"
        if problem:
            raise PeerRefusedError(f"a peer with {ranks} ranks: {problem}")
        return kv_heads_by_rank(self.spec, ranks)


async def start_engine(
    config: EngineConfig,
    identity: NodeIdentity,
    *,
    handoff: HandoffConfig | None = None,
    listen: bool = False,
    curve: bool = False,
    on_event: Callable[[int, bytes], None] = lambda rank, data: None,
    on_lost: Callable[[str], None] = lambda reason: None,
) -> NodeEngine:
    """Load the model on its ranks and plan the cache. The caller runs ``core.run()``.

    ``handoff`` gives the ranks a data plane, which accepts connections when ``listen`` is set, and
    makes CURVE keys when ``curve`` is.
    Raises ``ModelError`` or ``StartupError``; nothing is left running then.
    """
    folder = await in_thread(lambda: locate_model(config.model))  # it may be a long download
    spec = await in_thread(lambda: _read_spec(config, folder))
    size = config.world_size
    problem = tensor_parallel_problem(spec, size)
    if problem:
        raise ModelError(f"{folder} cannot be split over {size} ranks: {problem}")
    ranks = RankPool(on_event, on_lost, load_seconds=config.load_timeout)
    try:
        settings = [
            _rank_settings(config, identity, folder, rank, size, handoff, listen, curve)
            for rank in range(size)
        ]
        device = NodeDevice(tuple(await ranks.start(settings)), config.nodes_per_device or 1)
        formats = _formats(config, spec, device)
        memory = await ranks.load(formats)
        resolved = resolve_engine(
            config,
            context=spec.max_position,
            bytes_per_block=max(m.bytes_per_block for m in memory),
            free_bytes=device.cache_bytes(memory, config.gpu_memory_utilization),
            device=device,
        )
        _log_plan(device, resolved)
        ends = await ranks.allocate(resolved.num_blocks)
    except BaseException:
        await ranks.stop()
        raise
    pool = BlockPool(
        resolved.num_blocks,
        resolved.block_size,
        enable_prefix_cache=config.enable_prefix_caching,
        prefix_cache_max_blocks=resolved.prefix_cache_max_blocks,
    )
    scheduler = Scheduler(
        pool,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_num_seqs=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        max_waiting=config.max_waiting,
        policy=config.scheduling_policy,
        eos_token_ids=spec.eos_token_ids,
    )
    return NodeEngine(
        core=EngineCore(scheduler, ranks, on_lost, _pace(config)),
        ranks=ranks,
        spec=spec,
        folder=folder,
        name=config.served_model_name or display_name(config.model),
        resolved=resolved,
        fingerprint=model_fingerprint(spec, folder),
        weight_dtype=formats["dtype"],
        kv_dtype=formats["kv_dtype"],
        endpoints=[end[:2] for end in ends],
        curve_keys=[key for end in ends for key in end[2:] if key],
        world_size=size,
    )


def _read_spec(config: EngineConfig, folder: Path) -> DecoderSpec:
    """The spec of the model, and a warning if the user asked for a part of it to be ignored."""
    ignored = config.ignored_config_keys
    spec = read_spec(folder, ignored)
    if ignored:
        log.warning(
            "--ignore-config-keys: %s of %s are ignored; if one of them changes what the model "
            "computes, its answers are wrong",
            ", ".join(sorted(ignored)),
            folder / "config.json",
        )
    return _with_every_end(spec, folder)


def _with_every_end(spec: DecoderSpec, folder: Path) -> DecoderSpec:
    """The spec with the tokenizer's end token too.

    A chat model ends its turns with that one, while config.json is often still the base model's. An
    id beyond the vocabulary is never drawn, and has no logit that ``min_tokens`` could forbid.
    """
    ends = (*spec.eos_token_ids, *_tokenizer_ends(folder))
    usable = (token for token in ends if 0 <= token < spec.vocab_size)
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(usable)))


def _tokenizer_ends(folder: Path) -> list[int]:
    """The id of the token that tokenizer_config.json calls the end.

    As plain JSON: a head has no other use for a tokenizer, and loading one takes longer than all
    that it does before its ranks start.
    """
    named, listed = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not named.is_file() or not listed.is_file():
        return []
    text = special_tokens(read_json(named)).get("eos_token")
    added = None if text is None else read_json(listed).get("added_tokens")
    tokens = [token for token in added or () if isinstance(token, dict)]
    ids = (token.get("id") for token in tokens if token.get("content") == text)
    return [token for token in ids if isinstance(token, int)]


def _pace(config: EngineConfig) -> Pace:
    return Pace(None if config.itl_target is None else config.itl_target / 1000)


def _formats(config: EngineConfig, spec: DecoderSpec, device: NodeDevice) -> dict[str, str]:
    """The number formats of weights and cache, by torch's names."""
    dtype = spec.dtype_for(config.dtype, on_cpu=device.on_cpu)
    return {"dtype": dtype, "kv_dtype": kv_format(config.kv_cache_dtype, dtype)}


def _log_plan(device: NodeDevice, resolved: ResolvedEngine) -> None:
    for rank, each in enumerate(device.ranks):
        log.info("rank %d runs on %s before the weights are loaded", rank, each)
    slots = resolved.num_blocks * resolved.block_size
    budget = resolved.max_num_batched_tokens
    log.info("the KV cache holds %d tokens, a step computes up to %d", slots, budget)


def _decode_kernel(config: EngineConfig) -> str:
    """Whoever asks for a GPU is not given a slow one in silence."""
    if config.decode_kernel == "auto" and config.device == "cuda":
        return "triton"
    return config.decode_kernel


def _rank_settings(
    config: EngineConfig,
    identity: NodeIdentity,
    folder: Path,
    rank: int,
    size: int,
    handoff: HandoffConfig | None,
    listen: bool,
    curve: bool,
) -> dict[str, Any]:
    ids = config.device_ids
    if ids and config.device == "cpu":
        raise StartupError(f"--d {config.devices} names CUDA devices, but --device is cpu")
    data_plane = None
    if handoff is not None:
        data_plane = {
            "node_id": identity.node_id,
            "epoch": identity.epoch,
            "host": handoff.kv_host if listen else None,
            "port": handoff.kv_port_of(rank),
            "staging_bytes": handoff.staging_bytes,
            "carrier": handoff.carrier,
            "curve": curve,
            "max_peers": handoff.max_peers,
        }
    return {
        "folder": str(folder),
        "device": config.device if not ids else "cuda",
        "device_index": ids[rank] if ids else rank,
        "rank": rank,
        "size": size,
        "block_size": config.block_size,
        "load_format": config.load_format,
        "ignored_config_keys": sorted(config.ignored_config_keys),
        "seed": config.seed,
        "threads": config.threads or share_of_cores(size),
        "cpu_kernels": config.cpu_kernels,
        "decode_kernel": _decode_kernel(config),
        "data_plane": data_plane,
        "log": asdict(replace(log_settings(), rank=str(rank))),
    }

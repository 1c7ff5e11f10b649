"""The start of a node's engine: ranks, block pool, scheduler, core."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import EngineConfig, HandoffConfig
from ..config.fields import served_names
from ..errors import ModelError, PeerRefusedError, RequestError, StartupError, UsageError
from ..handoff.plane.canary import coarsest
from ..handoff.plane.messages import Event
from ..host_port import is_loopback
from ..kv.block_pool import BlockPool
from ..kv.layout import heads_by_rank
from ..kv.planning import (
    NodeDevice,
    RankDevice,
    RankMemory,
    ResolvedEngine,
    check_gpu_memory,
    resolve_engine,
)
from ..models.fingerprint import model_fingerprint
from ..models.spec import DecoderSpec, Scorer, tensor_parallel_problem
from ..process.threads import in_thread, share_of_cores
from ..scoring import ROUTES, Scoring
from ..telemetry.logs import log_settings
from ..text.tokenizer_files import TokenizerFiles
from ..weights.digest import weights_digest
from ..weights.in_situ import InSitu
from ..weights.locate import display_name
from ..weights.obtain import ObtainedModel, obtain_model
from ..weights.source import WeightSource
from .core import EngineCore
from .executor import MultiprocessExecutor
from .formats import formats_for
from .messages import DataPlaneSettings, HostJoins, RankSettings
from .other_hosts import OtherHosts
from .plan import PRIVATE_SEQS, SlotLimits, StepLimits
from .scheduling.prefill_pacer import PrefillPacer
from .scheduling.scheduler import Scheduler
from .scheduling.steps_in_flight import MAX_STEPS
from .structured.compiler import GrammarCompiler, load_backend

log = logging.getLogger("tandem.node")


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A node's name, and a random number that differs with each start of its process."""

    node_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class NodeEngine:
    """A running engine and its properties, for the node around it."""

    core: EngineCore
    ranks: MultiprocessExecutor
    spec: DecoderSpec
    model_path: Path
    name: str
    resolved: ResolvedEngine
    fingerprint: dict[str, str]
    weight_format: str  # the coarsest format in which weights are stored or computed
    kv_dtype: str
    endpoints: list[tuple[str, str]]  # bulk and control of each rank
    curve_keys: list[str]  # public, one a rank; empty without CURVE
    world_size: int
    grammars: GrammarCompiler
    generates: bool = True

    @property
    def scoring(self) -> Scoring | None:
        """How the model scores two texts; ``None`` for one that generates text."""
        return self.spec.scoring or (None if self.generates else "vectors")

    def check_generates(self) -> None:
        """Raise ``RequestError`` if the model has no head to generate with."""
        if not self.generates:
            if self.spec.classifier is not None:
                raise self._only_scores("model_cannot_generate")
            raise RequestError(
                f"The model {self.name} has no lm_head, so that it serves embeddings only; use "
                f"{ROUTES['vectors']}.",
                param="model",
                code="model_cannot_generate",
            )

    def check_embeds(self) -> None:
        """Raise ``RequestError`` if the model scores or labels texts instead of embedding them."""
        if self.spec.classifier is not None:
            raise self._only_scores("model_cannot_embed")

    def scorer(self) -> Scorer:
        """The classifier. Raises ``RequestError`` if the model has none."""
        if self.spec.classifier is None:
            raise RequestError(
                f"The model {self.name} has no classifier that scores or labels texts.",
                param="model",
                code="model_cannot_score",
            )
        return self.spec.classifier

    def check_scores(self) -> None:
        """Raise ``RequestError`` if the model cannot score pairs of texts."""
        if self.scoring is None:
            self.scorer()
        if self.scoring == "labels":
            raise RequestError(
                f"The model {self.name} has a classifier of {len(self.scorer().labels)} labels, "
                f"which scores no pairs of texts; use {ROUTES['labels']}.",
                param="model",
                code="model_cannot_score",
            )

    def _only_scores(self, code: str) -> RequestError:
        return RequestError(
            f"The model {self.name} has a classifier, which only scores or labels texts; use "
            f"{ROUTES[self.scoring or 'labels']}.",
            param="model",
            code=code,
        )

    def kv_heads(self, ranks: int) -> list[tuple[range, ...]]:
        """The KV heads of each rank, layer by layer, when this model is split over ``ranks``.

        Raises ``PeerRefusedError`` if that is impossible.
        """
        problem = tensor_parallel_problem(self.spec, ranks) if ranks else "there are no ranks"
        if problem:
            raise PeerRefusedError(f"a peer with {ranks} ranks: {problem}")
        return heads_by_rank(self.spec, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaneOptions:
    """Options for ranks with a data plane: ``listen`` for connections, and use ``curve``."""

    handoff: HandoffConfig
    listen: bool = False
    curve: bool = False


async def start_engine(
    config: EngineConfig,
    identity: NodeIdentity,
    *,
    data_plane: DataPlaneOptions | None = None,
    hosts: OtherHosts | None = None,
    on_event: Callable[[int, Event], None] = lambda rank, event: None,
    on_lost: Callable[[str], None] = lambda reason: None,
) -> NodeEngine:
    """Load the model on its ranks and plan the cache. The caller runs ``core.run()``, and closes
    ``hosts``, which ``--nnodes`` needs.

    Raises ``ModelError`` or ``StartupError``; nothing is left running then.
    """
    if config.several_hosts and hosts is None:
        raise UsageError(f"--nnodes {config.nnodes}: only a node can have ranks on several hosts")
    model = await in_thread(lambda: obtain_model(config))  # may be a long download
    path, source = model.path, model.source
    _warn_of_oddities(config, model)
    spec = await in_thread(lambda: _with_end_tokens(model.spec, source))
    ranks = MultiprocessExecutor(on_event, on_lost, load_seconds=config.load_timeout, hosts=hosts)
    # Beside the loading of the ranks: reading a large vocabulary takes half a second.
    grammars = _grammars(source, spec)
    reading = asyncio.gather(in_thread(lambda: fingerprint_of(model)), grammars.prepare())
    try:
        settings = [
            _rank_settings(config, identity, path, rank, data_plane)
            for rank in range(config.ranks_per_host)
        ]
        if hosts is not None:
            fingerprint, _ = await reading
            weights = await in_thread(lambda: weights_field(config, model))
            for host in await hosts.join(fingerprint | weights):
                settings += _settings_there(settings, host.about, data_plane)
        devices = await ranks.start(settings)
        check_kinds(devices)
        device = NodeDevice(tuple(devices), config.nodes_per_device or 1, config.nnodes)
        formats = formats_for(config, spec, devices)
        memory = await ranks.load(formats, step_limits(config, spec, device))
        resolved = _resolve(config, spec, device, memory)
        endpoints = await ranks.allocate(resolved.num_blocks, _slot_limits(resolved))
        fingerprint, _ = await reading
    except BaseException:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await ranks.stop()
        raise
    core = EngineCore(
        _scheduler(config, spec, resolved),
        ranks,
        on_lost,
        _pacer(config),
        max_steps=MAX_STEPS if plans_ahead(config, device) else 1,
    )
    return NodeEngine(
        core=core,
        ranks=ranks,
        spec=spec,
        model_path=path,
        name=next(iter(served_names(config.served_model_name)), display_name(config.model)),
        resolved=resolved,
        fingerprint=fingerprint,
        weight_format=coarsest([formats.dtype, *_block_formats(config, source, spec)]),
        kv_dtype=formats.kv_dtype,
        endpoints=[(rank.bulk, rank.control) for rank in endpoints],
        curve_keys=[rank.key for rank in endpoints if rank.key],
        world_size=config.world_size,
        grammars=grammars,
        generates=model.generates,
    )


def fingerprint_of(model: ObtainedModel) -> dict[str, str]:
    """The fields in which both nodes of a handoff must agree, and all hosts of a node."""
    spec = _with_end_tokens(model.spec, model.source)
    return model_fingerprint(spec, _tokenizer_of(model.source))


def weights_field(config: EngineConfig, model: ObtainedModel) -> dict[str, str]:
    """The further field in which all hosts of a node must agree, whose ranks compute one model:
    unless the weights are random, a digest of them."""
    if config.load_format == "dummy":
        return {}
    return {"weights": weights_digest(model.source.stored())}


def check_kinds(devices: list[RankDevice]) -> None:
    """Raise ``StartupError`` if the ranks' devices are of several kinds."""
    for rank, device in enumerate(devices):
        if device.kind != devices[0].kind:
            raise StartupError(
                f"rank {rank} runs on {device.name}, rank 0 on {devices[0].name}: all ranks need "
                f"the same kind of device; see --device"
            )


def _block_formats(config: EngineConfig, source: WeightSource, spec: DecoderSpec) -> frozenset[str]:
    """The block formats of the weights, in their files or from ``--isq``."""
    return source.block_formats() if config.isq is None else InSitu(config.isq, spec).names()


def _resolve(
    config: EngineConfig, spec: DecoderSpec, device: NodeDevice, memory: list[RankMemory]
) -> ResolvedEngine:
    """Plan a cache and steps that fit the ranks' memory."""
    for index, each in enumerate(device.ranks):
        log.info("rank %d runs on %s before the weights are loaded", index, each)
    if not device.on_cpu:
        for index, one in enumerate(memory):
            log.info("rank %d takes %s", index, one)
    check_gpu_memory(config, device, memory)
    resolved = resolve_engine(
        config,
        context=spec.max_position,
        bytes_per_block=max(rank.bytes_per_block for rank in memory),
        free_bytes=device.cache_bytes(memory, device.gpu_share(config)),
        device=device,
    )
    slots = resolved.num_blocks * resolved.block_size
    budget = resolved.max_num_batched_tokens
    log.info("the KV cache holds %d tokens, a step computes at most %d", slots, budget)
    return resolved


def step_limits(config: EngineConfig, spec: DecoderSpec, device: NodeDevice) -> StepLimits:
    """The largest steps that a head may plan, before it knows how long a sequence the cache
    holds."""
    return StepLimits(
        config.max_num_batched_tokens or device.token_budget,
        (config.max_num_seqs or device.max_num_seqs) + PRIVATE_SEQS,
        config.max_model_len or spec.max_position,
    )


def _slot_limits(resolved: ResolvedEngine) -> SlotLimits:
    blocks = -(-resolved.max_model_len // resolved.block_size)
    return SlotLimits(resolved.max_num_seqs + PRIVATE_SEQS, blocks)


def _scheduler(config: EngineConfig, spec: DecoderSpec, resolved: ResolvedEngine) -> Scheduler:
    pool = BlockPool(
        resolved.num_blocks,
        resolved.block_size,
        # Bidirectional attention makes a token's KV depend on the whole prompt.
        enable_prefix_cache=config.enable_prefix_caching and not spec.bidirectional,
        prefix_cache_max_blocks=resolved.prefix_cache_max_blocks,
    )
    return Scheduler(
        pool,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_num_seqs=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        max_waiting=config.max_waiting,
        policy=config.scheduling_policy,
        eos_token_ids=spec.eos_token_ids,
        whole_prompts=spec.bidirectional,
    )


def _warn_of_oddities(config: EngineConfig, model: ObtainedModel) -> None:
    """Warn of ignored or replaced keys of the model's config, and of a model without a head."""
    if ignored := config.ignored_config_keys:
        log.warning(
            "--ignore-config-keys: %s of %s are ignored; if one of them changes what the model "
            "computes, its output is wrong",
            ", ".join(sorted(ignored)),
            model.source.config().file,
        )
    if overrides := config.config_overrides:
        log.warning(
            "--hf-overrides: %s of %s are replaced; what the model computes follows from them",
            ", ".join(sorted(overrides)),
            model.source.config().file,
        )
    if not model.generates and model.spec.classifier is None:
        log.warning("%s has no lm_head: it serves embeddings only", model.path)


def _with_end_tokens(spec: DecoderSpec, source: WeightSource) -> DecoderSpec:
    """The spec with the tokenizer's end tokens as well.

    A chat model ends its turns with them, while its config.json often has the base model's. Ids
    beyond the vocabulary are dropped: they are never drawn, and ``min_tokens`` cannot block them.
    """
    ends = (*spec.eos_token_ids, *source.end_tokens())
    usable = (token for token in ends if 0 <= token < spec.vocab_size)
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(usable)))


def _grammars(source: WeightSource, spec: DecoderSpec) -> GrammarCompiler:
    return GrammarCompiler(
        lambda: load_backend(_tokenizer_of(source), spec.vocab_size, spec.eos_token_ids)
    )


def _tokenizer_of(source: WeightSource) -> TokenizerFiles | None:
    """The tokenizer's files; ``None`` without any, which prompts of token ids do not need."""
    try:
        return source.tokenizer_files()
    except ModelError as error:
        log.info("no tokenizer: %s", error)
        return None


def _pacer(config: EngineConfig) -> PrefillPacer:
    return PrefillPacer(None if config.itl_target is None else config.itl_target / 1000)


def plans_ahead(config: EngineConfig, device: NodeDevice) -> bool:
    """Resolve ``--async-scheduling``. Auto is off where the head would compete for a core with
    torch's operators, which gain nothing."""
    if config.async_scheduling != "auto":
        return config.async_scheduling == "on"
    ranks = config.ranks_per_host
    threads = (config.threads or share_of_cores(ranks)) * ranks
    return not device.on_cpu or config.cpu_kernels == "compiled" or threads < share_of_cores(1)


def _decode_kernel(config: EngineConfig) -> str:
    """With ``--device cuda``, auto means Triton's kernel or an error, never the slow one."""
    if config.decode_kernel == "auto" and config.device == "cuda":
        return "triton"
    return config.decode_kernel


def _rank_settings(
    config: EngineConfig,
    identity: NodeIdentity,
    path: Path,
    rank: int,
    data_plane: DataPlaneOptions | None,
) -> RankSettings:
    ids = config.device_ids
    return RankSettings(
        model_path=str(path),
        device=config.device if not ids else "cuda",
        device_index=ids[rank] if ids else rank,
        shares_device=(config.nodes_per_device or 1) > 1,
        rank=rank,
        size=config.world_size,
        block_size=config.block_size,
        load_format=config.load_format,
        isq=config.isq,
        ignored_config_keys=tuple(sorted(config.ignored_config_keys)),
        hf_overrides=config.hf_overrides,
        max_model_len=config.max_model_len,
        seed=config.seed,
        threads=config.threads or share_of_cores(config.ranks_per_host),
        enforce_eager=config.enforce_eager,
        cpu_kernels=config.cpu_kernels,
        decode_kernel=_decode_kernel(config),
        data_plane=None if data_plane is None else _data_plane(data_plane, identity, rank),
        log=replace(log_settings(), rank=str(rank)),
    )


def _settings_there(
    here: list[RankSettings], host: HostJoins, options: DataPlaneOptions | None
) -> list[RankSettings]:
    """The settings of another host's ranks: those of the head's, except for what is the host's."""
    settings = []
    for index, each in enumerate(here):
        rank = host.node_rank * len(here) + index
        plane = each.data_plane
        if plane is not None and options is not None:
            listens = plane.host is not None and not is_loopback(plane.host)
            plane = replace(
                plane,
                host=host.address if listens else plane.host,
                port=options.handoff.kv_port_of(rank),
            )
        settings.append(
            replace(
                each,
                rank=rank,
                model_path=host.model_path,
                device=host.device,
                device_index=host.devices[index] if host.devices else index,
                threads=host.threads,
                data_plane=plane,
                log=replace(each.log, rank=str(rank)),
            )
        )
    return settings


def _data_plane(options: DataPlaneOptions, identity: NodeIdentity, rank: int) -> DataPlaneSettings:
    return DataPlaneSettings(
        node_id=identity.node_id,
        epoch=identity.epoch,
        host=options.handoff.kv_host if options.listen else None,
        port=options.handoff.kv_port_of(rank),
        staging_bytes=options.handoff.staging_bytes,
        carrier=options.handoff.carrier,
        curve=options.curve,
        max_peers=options.handoff.max_peers,
    )

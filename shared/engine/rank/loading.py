"""Builds a rank from the head's settings: the model on its device, the cache, the data plane.

Everything heavy is imported here, so that a rank that ends at once never pays for it.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ....kernels.errors import KernelUnavailableError
from ...config.fields import json_object
from ...config.kv_dtypes import SCALED_AS_A_WHOLE
from ...errors import StartupError
from ...handoff.carriers.carrier_option import allows, not_possible
from ...handoff.carriers.cuda_ipc import NAME as CUDA_IPC
from ...handoff.carriers.cuda_ipc import NO_GPU
from ...handoff.carriers.cuda_ipc.cuda_driver import CudaDriver
from ...handoff.carriers.cuda_ipc.torch_device import Gpu, marker
from ...handoff.carriers.device import DEVICE_BYTES, DeviceError
from ...handoff.plane.messages import Event
from ...kv.backing import Backing
from ...kv.cache import KVCache
from ...kv.layout import UNSCALED, WholeScales
from ...kv.planning import CPU, CUDA, RankMemory, bytes_per_block
from ...models.decoder import Decoder
from ...models.parallel import TensorParallel
from ...models.registry import spec_of
from ...weights import load
from ...weights.footprint import parameter_sizes
from ...weights.kv_scales import read_kv_scales
from ...weights.source import open_source
from ...weights.transfer import in_words
from ..device import device_named, operators_for
from ..device_memory import free_memory, report
from ..messages import LoadFormats, RankSettings
from .runner import ModelRunner, lacks_memory, runner_of

if TYPE_CHECKING:
    from ...handoff.plane.data_plane import DataPlane

RENDEZVOUS_SECONDS = 60
_LOOPBACKS = {"lo", "lo0"}  # Linux and macOS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights on their device, before the cache is planned."""

    model: Decoder
    block_size: int
    kv_dtype: torch.dtype
    tp: TensorParallel
    kv_scales: WholeScales = UNSCALED

    @property
    def device(self) -> torch.device:
        return self.model.place.device

    @property
    def bytes_per_block(self) -> int:
        return bytes_per_block(
            self.model.spec, self.block_size, self.kv_dtype, self.tp.size, self.tp.rank
        )

    def runner(self, num_blocks: int) -> ModelRunner:
        """Raises ``StartupError`` when the cache does not fit after all."""
        try:
            cache = KVCache(
                self.model.spec,
                num_blocks=num_blocks,
                block_size=self.block_size,
                dtype=self.kv_dtype,
                device=self.device,
                tp_rank=self.tp.rank,
                tp_size=self.tp.size,
                operators=self.model.place.operators,
                whole_scales=self.kv_scales,
            )
        except (RuntimeError, MemoryError) as error:
            size = num_blocks * self.bytes_per_block
            raise StartupError(
                f"the KV cache of {num_blocks} blocks ({size} bytes) cannot be allocated: "
                f"{str(error).splitlines()[0]}; lower --kv-fraction"
            ) from None
        try:
            return runner_of(self.model, cache, self.tp)
        except KernelUnavailableError as error:
            raise StartupError(
                f"Triton's decode kernel cannot run on {self.device}: {error}; it needs a C "
                f"compiler, and libraries loaded from TRITON_CACHE_DIR or the temporary folder "
                f"(no noexec); or use --decode-kernel torch, which is slow in large batches"
            ) from None


def open_device(settings: RankSettings) -> torch.device:
    """Open the device that the settings name. Raises ``StartupError``."""
    device = device_named(settings.device, settings.device_index)
    if device.type == CPU and settings.carrier == CUDA_IPC:
        raise not_possible(CUDA_IPC, NO_GPU)
    return device


def bind_threads(settings: RankSettings, device: torch.device) -> None:
    """Give each thread of the compiled kernels a core, if the node's ranks have a thread for each.

    Threads that exist already, of the data plane for one, still run anywhere.
    """
    if device.type != CPU or settings.cpu_kernels == "torch" or settings.threads == 1:
        return
    from ....kernels.cpu.thread_cores import bind, usable_cores

    cores = usable_cores()
    if settings.threads * settings.size == len(cores):
        first = settings.rank * settings.threads
        bind(cores[first : first + settings.threads])


def load_model(settings: RankSettings, formats: LoadFormats, device: torch.device) -> LoadedModel:
    """Load this rank's part of the model, after meeting the other ranks if there are any."""
    torch.set_num_threads(settings.threads)
    tp = _meet(settings, device)
    overrides = json_object("--hf-overrides", settings.hf_overrides)
    operators = operators_for(
        device, cpu_kernels=settings.cpu_kernels, decode_kernel=settings.decode_kernel
    )
    try:
        model = load.load_model(
            settings.model_path,
            dtype=formats.dtype,
            device=device,
            tp=tp,
            load_format=settings.load_format,
            ignored_keys=frozenset(settings.ignored_config_keys),
            overrides=overrides,
            max_model_len=settings.max_model_len,
            seed=settings.seed,
            isq=settings.isq,
            operators=operators,
        )
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise _too_large(settings, formats, device) from None
    kv_scales = UNSCALED
    if formats.kv_dtype in SCALED_AS_A_WHOLE and settings.load_format != "dummy":
        kv_scales = read_kv_scales(settings.model_path, model.spec, overrides)
        _tell(kv_scales)
    kv_dtype = getattr(torch, formats.kv_dtype)
    return LoadedModel(model, settings.block_size, kv_dtype, tp, kv_scales)


def _too_large(settings: RankSettings, formats: LoadFormats, device: torch.device) -> StartupError:
    """The error for weights that do not fit the device, with the memory that they take."""
    remedy = "free its memory, choose another one with --d, or split the model over several"
    if device.type == CPU:
        remedy = "free some, or serve a smaller or a quantised version of the model"
    taken = ""
    if settings.load_format != "dummy":
        source = open_source(
            settings.model_path, json_object("--hf-overrides", settings.hf_overrides)
        )
        ignored = frozenset(settings.ignored_config_keys)
        spec = spec_of(source.config(), ignored, settings.max_model_len)
        sizes = parameter_sizes(source, spec, formats.dtype, settings.size, settings.isq)
        taken = f" {in_words(sum(each.nbytes for each in sizes))} of"
    return StartupError(f"the{taken} weights do not fit: {report(device)}; {remedy}")


def _tell(kv_scales: WholeScales) -> None:
    if kv_scales:
        log.info("KV is cached in fp8 with the checkpoint's scales")
    else:
        log.info("KV is cached in fp8 with scale 1: the checkpoint has no scales of K and V")


def memory_of(loaded: LoadedModel, carrier: str) -> RankMemory:
    """The memory that is left once the weights are loaded."""
    device = loaded.device
    plane = data_plane_bytes(carrier, device)
    taken = plane
    if device.type == CUDA:
        torch.cuda.empty_cache()  # frees the memory that only loading needed
        taken += torch.cuda.memory_reserved(device)
    free = max(0, free_memory(device) - plane)
    return RankMemory(free, taken, loaded.bytes_per_block)


def data_plane_bytes(carrier: str, device: torch.device) -> int:
    """Bytes of a GPU that ``free_memory`` counts and the cache must leave to the data plane."""
    return DEVICE_BYTES if device.type == CUDA and allows(carrier, CUDA_IPC) else 0


def backing_of(cache: KVCache) -> Backing | None:
    """A started ``Backing``, which populates the cache's memory ahead of use; ``None`` on devices
    whose memory is there from the start."""
    if cache.device.type != CPU:
        return None
    backing = Backing((each for layer in cache.layers for each in layer), cache.block_size)
    backing.start()
    return backing


def layer_marker(device: torch.device) -> Callable[[], Callable[[], None]] | None:
    """See ``ComputedLayers``; ``None`` on devices that compute a layer before it is announced."""
    return marker(device) if device.type == "cuda" else None


def start_data_plane(
    settings: RankSettings, cache: KVCache, on_event: Callable[[Event], None]
) -> DataPlane:
    """Open this rank's end of the data plane. Raises ``StartupError``."""
    # The carriers' libraries are installed only where KV is handed over.
    from ...handoff.carriers.staging import DEFAULT_SLOT_BYTES
    from ...handoff.plane.data_plane import DataPlane
    from ...handoff.plane.settings import DataPlaneConfig

    plane = settings.data_plane
    assert plane is not None
    config = DataPlaneConfig(
        node_id=plane.node_id,
        epoch=plane.epoch,
        rank=settings.rank,
        tp_size=settings.size,
        listen_host=plane.host,
        listen_port=plane.port,
        carrier=plane.carrier,
        curve=plane.curve,
        max_peers=plane.max_peers,
        staging_slots=max(2, plane.staging_bytes // DEFAULT_SLOT_BYTES),
    )
    device = _gpu(cache.device, config.carrier)
    data_plane = DataPlane(config, cache, on_event, device=device)
    data_plane.start()
    return data_plane


def _gpu(device: torch.device, carrier: str) -> Gpu | None:
    """The GPU as the data plane uses it, if it can. Raises ``StartupError``."""
    if device.type != "cuda":
        return None
    try:
        return Gpu(CudaDriver(device.index or 0), device)
    except DeviceError as error:  # another vendor's GPU, which torch calls cuda too
        if carrier == CUDA_IPC:
            raise not_possible(CUDA_IPC, str(error)) from None
        log.warning("KV of this GPU is transferred through the host: %s", error)
        return None


def _meet(settings: RankSettings, device: torch.device) -> TensorParallel:
    if settings.size == 1:
        return TensorParallel()
    _stay_on_this_host()
    try:
        torch.distributed.init_process_group(
            "nccl" if device.type == CUDA else "gloo",
            init_method=settings.rendezvous,
            rank=settings.rank,
            world_size=settings.size,
            timeout=datetime.timedelta(seconds=RENDEZVOUS_SECONDS),
            # With it NCCL connects at once: missing libraries are noticed now, and its memory is
            # taken before the cache is planned.
            device_id=device if device.type == CUDA else None,
        )
        control = torch.distributed.new_group(backend="gloo")
    except (RuntimeError, ValueError) as error:
        raise StartupError(
            f"rank {settings.rank} did not meet the other {settings.size - 1} at "
            f"{settings.rendezvous} within {RENDEZVOUS_SECONDS} s: {str(error).splitlines()[0]}"
        ) from None
    return TensorParallel(settings.rank, settings.size, control=control)


def _stay_on_this_host() -> None:
    """Ranks of a node share a host, so they listen for each other on loopback only. Otherwise gloo
    takes the address of the host's name, and NCCL that of any interface. The environment wins."""
    names = {name for _, name in socket.if_nameindex()}
    for name in _LOOPBACKS & names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)

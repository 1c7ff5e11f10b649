"""A rank's end of the data plane. It imports the carriers' libraries, which are installed only
where KV is handed over."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ....kernels.streams import use_background_stream
from ...handoff.carriers.cuda_ipc import NAME as CUDA_IPC
from ...handoff.carriers.cuda_ipc.cuda_driver import CudaDriver
from ...handoff.carriers.cuda_ipc.torch_device import Gpu
from ...handoff.carriers.device import DeviceError
from ...handoff.carriers.option import not_possible
from ...handoff.carriers.staging import DEFAULT_SLOT_BYTES
from ...handoff.plane.endpoint import DataPlane
from ...handoff.plane.messages import Event
from ...handoff.plane.settings import DataPlaneConfig
from ...kv.cache import KVCache
from ...kv.planning import CUDA
from ..messages import RankSettings

log = logging.getLogger(__name__)


def start_data_plane(
    settings: RankSettings, cache: KVCache, on_event: Callable[[Event], None]
) -> DataPlane:
    """Open this rank's end of the data plane. Raises ``StartupError``."""
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
    if cache.mark is not None:
        cache.mark()()  # the plane's stream must not overtake the zeros of a new cache
    data_plane = DataPlane(
        config,
        cache,
        on_event,
        device=device,
        # Also without ``device``: a thread's kernels run on torch's first GPU unless it is told.
        on_thread=lambda: use_background_stream(cache.device),
    )
    data_plane.start()
    return data_plane


def _gpu(device: torch.device, carrier: str) -> Gpu | None:
    """The GPU for the data plane; ``None`` if it cannot use it. Raises ``StartupError``."""
    if device.type != CUDA:
        return None
    try:
        return Gpu(CudaDriver(device.index or 0), device)
    except DeviceError as error:  # another vendor's GPU, which torch calls cuda too
        if carrier == CUDA_IPC:
            raise not_possible(CUDA_IPC, str(error)) from None
        log.warning("KV of this GPU is transferred through the host: %s", error)
        return None

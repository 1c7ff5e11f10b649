"""Messages between the head process and its ranks, and their codec.

A rank opens its device, loads its weights, allocates its cache, and then executes steps; the reply
to each request is its own type or ``Failed``. Commands and events of the data plane
(``plane/messages.py``) and pings may come at any time. No torch here: the head does not load it.

A launcher on another host joins the head before its ranks do, and keeps its connection to the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from ..handoff.plane.messages import Command, Event
from ..handoff.wire.codec import Codec
from ..kv.planning import RankDevice, RankMemory
from ..telemetry.logs import LogSettings
from .plan import SlotLimits, StepFailure, StepLimits, StepPlan, StepResult, TokenMasks

MAX_MESSAGE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaneSettings:
    """The part of a rank's ``DataPlaneConfig`` that the head decides. ``host`` is ``None`` for a
    rank that does not listen."""

    node_id: str
    epoch: int
    host: str | None
    port: int
    staging_bytes: int
    carrier: str
    curve: bool
    max_peers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The head's settings for one rank, independent of the rank's device.

    ``rendezvous`` is the address at which several ranks meet. ``data_plane`` is ``None`` on nodes
    that hand over no KV. ``shares_device``: other nodes may use its GPU.
    """

    model_path: str
    device: str
    device_index: int = 0
    shares_device: bool = False
    rank: int = 0
    size: int = 1
    rendezvous: str = ""
    block_size: int = 16
    load_format: str = "auto"
    isq: str | None = None
    ignored_config_keys: tuple[str, ...] = ()
    hf_overrides: str | None = None
    max_model_len: int | None = None
    seed: int = 0
    threads: int = 1
    enforce_eager: bool = False
    cpu_kernels: str = "torch"
    decode_kernel: str = "auto"
    data_plane: DataPlaneSettings | None = None
    log: LogSettings = field(default_factory=LogSettings)

    @property
    def carrier(self) -> str:
        """The value of ``--carrier``; empty on nodes that hand over no KV."""
        return "" if self.data_plane is None else self.data_plane.carrier


@dataclass(frozen=True, slots=True)
class LoadFormats:
    """The dtypes of weights and KV cache, by torch's names."""

    dtype: str
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class RankEndpoints:
    """Endpoints of a rank's data plane, and its public CURVE key (empty without CURVE)."""

    bulk: str
    control: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class KVSending:
    """The transfer and attempt that take the KV of one sequence of a step."""

    sequence_id: int
    transfer_id: int
    attempt: int


# ---- head to rank ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenDevice:
    settings: RankSettings


@dataclass(frozen=True, slots=True)
class LoadModel:
    formats: LoadFormats
    limits: StepLimits  # for which a GPU's memory is measured


@dataclass(frozen=True, slots=True)
class AllocateCache:
    num_blocks: int
    limits: SlotLimits


@dataclass(frozen=True, slots=True)
class ExecuteStep:
    plan: StepPlan
    sending: list[KVSending]


@dataclass(frozen=True, slots=True)
class Ping:
    pass


# ---- rank to head ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceOpened:
    device: RankDevice


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    memory: RankMemory


@dataclass(frozen=True, slots=True)
class CacheAllocated:
    """The rank is ready for steps. ``endpoints`` is ``None`` without a data plane."""

    endpoints: RankEndpoints | None


@dataclass(frozen=True, slots=True)
class StepDone:
    """Rank 0 has a result; every rank has a failure if its step raised.

    The counts of collectives begun and ended since the start show whether the ranks can continue
    together after a failure.
    """

    result: StepResult | None
    failure: StepFailure | None
    collectives_begun: int
    collectives_ended: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The reply to a ping: the number of layers computed since the start."""

    layers: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request before the first step failed, or the rank rejects the head's version."""

    category: Literal["model", "startup", "internal"]
    reason: str


# ---- other hosts -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSecrets:
    """PEMs for TLS, empty without it, the ``name`` in certificates if it is not the host's, and the
    accepted tokens, of which a joiner uses the first."""

    tokens: tuple[str, ...] = field(repr=False)
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authority: bytes = field(default=b"", repr=False)
    name: str = ""


@dataclass(frozen=True, slots=True)
class JoinHead:
    """Launcher to its rank, over a socket pair that lives as long as the launcher: the head's
    address and the rank's number."""

    host: str
    port: int
    secrets: JoinSecrets
    rank: int


@dataclass(frozen=True, slots=True)
class RankJoins:
    """Rank to head."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJoins:
    """Launcher to head: what must be equal on all hosts, and what is this host's own.

    ``address`` is this host's on the route to the head. ``devices`` are CUDA's numbers, one for
    each rank; empty: as ``device`` says.
    """

    node_rank: int
    nnodes: int
    size: int
    versions: str
    fingerprint: dict[str, str]
    address: str
    model_path: str
    device: str
    devices: tuple[int, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class HostAccepted:
    """Head to launcher: all hosts have joined, so start the ranks."""


@dataclass(frozen=True, slots=True)
class HostRefused:
    """Head to launcher, which ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostStops:
    """Launcher to head: it got a signal, so the node is to drain."""


@dataclass(frozen=True, slots=True)
class KillRank:
    """Head to launcher."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """Launcher to head; ``status`` is that of ``subprocess``."""

    rank: int
    status: int


@dataclass(frozen=True, slots=True)
class HeadEnds:
    """Head to launcher, which ends too. ``reason`` is empty unless the node has failed."""

    reason: str


FromLauncher = HostJoins | HostStops | RankEnded
ToLauncher = HostAccepted | HostRefused | KillRank | HeadEnds
ToRank = (
    JoinHead | OpenDevice | LoadModel | AllocateCache | ExecuteStep | TokenMasks | Command | Ping
)
Reply = DeviceOpened | ModelLoaded | CacheAllocated | StepDone | Failed
FromRank = Reply | Event | Pong | RankJoins
RankMessage = ToRank | FromRank | FromLauncher | ToLauncher

# Both directions share a codec, so that one version covers them.
CODEC: Codec[RankMessage] = Codec(
    (
        OpenDevice,
        LoadModel,
        AllocateCache,
        ExecuteStep,
        TokenMasks,
        *get_args(Command),
        Ping,
        DeviceOpened,
        ModelLoaded,
        CacheAllocated,
        StepDone,
        *get_args(Event),
        Pong,
        Failed,
        JoinHead,
        RankJoins,
        *get_args(FromLauncher),
        *get_args(ToLauncher),
    ),
    MAX_MESSAGE_BYTES,
)

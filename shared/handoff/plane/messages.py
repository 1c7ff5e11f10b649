"""Commands of a head to its ranks' data planes, and the events in reply.

Commands are handled in order; each names a transfer and an attempt, and repeating one has no
effect. A rank may have several parts in one transfer, each with another rank of the peer
(``peer_rank``); LayerReady and the cancels apply to all of them.

Every OpenSend ends in exactly one of SendFinished, SendFailed, Cancelled; every Expect in exactly
one of Received, ReceiveFailed, Cancelled; every Compare in one of Compared, ReceiveFailed. After
that event the plane neither reads nor writes the blocks of that part, so the head may free them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...causes import Cause
from ..wire.head_parts import HeadRun
from .stats import DataPlaneStats

# Use the carrier's default.
WINDOW_OF_CARRIER = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSend:
    """Prefill side: send [first_token, end_token) of some heads of each layer to a decode rank, as
    layers become ready, in ``dtype``.

    ``first_tokens``: the first token of each layer, if not ``first_token`` (``layer_windows.py``).
    """

    transfer_id: int
    attempt: int
    peer_node: str
    peer_epoch: int
    peer_rank: int
    block_table: tuple[int, ...]
    first_token: int
    end_token: int
    heads: tuple[HeadRun, ...]
    dtype: str
    first_tokens: tuple[int, ...] = ()
    window_bytes: int = WINDOW_OF_CARRIER
    progress_seconds: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReady:
    """Prefill side: these cells are computed. Tokens outside the transfer are ignored."""

    transfer_id: int
    attempt: int
    first_layer: int
    end_layer: int
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelSend:
    transfer_id: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """Decode side: blocks are reserved; take [first_token, end_token) from a prefill rank.

    ``deadline_seconds``: when the request ends, and with it the attempt. ``heads`` and
    ``first_tokens``: see OpenSend. ``key``: see ``Endpoints``.
    """

    transfer_id: int
    attempt: int
    peer_node: str
    peer_epoch: int
    peer_rank: int
    bulk: str
    control: str
    block_table: tuple[int, ...]
    first_token: int
    end_token: int
    heads: tuple[HeadRun, ...]
    first_tokens: tuple[int, ...] = ()
    key: str = ""
    window_bytes: int = WINDOW_OF_CARRIER
    deadline_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelExpect:
    transfer_id: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Decode side: compare the same tokens in two block tables (see ``canary.py``).

    ``rounding``: the coarsest dtype of weights and KV on either side. ``exact_layers``: the number
    of layers before the output of any router.
    """

    transfer_id: int
    attempt: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    first_token: int
    end_token: int
    rounding: str
    exact_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitKeys:
    """Prefill side: admit only dialers with these CURVE keys. ``version`` counts these lists."""

    version: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysAdmitted:
    """This list of keys is in force."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expecting:
    """The peer is connected and frames will be accepted: the head may now open the transfer."""

    transfer_id: int
    attempt: int
    peer_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFinished:
    """The receiver confirmed everything, ``exposed_seconds`` after the last layer."""

    transfer_id: int
    attempt: int
    peer_rank: int
    bytes: int
    exposed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """``cause`` is one of ``Cause``, for metrics."""

    transfer_id: int
    attempt: int
    peer_rank: int
    reason: str
    cause: str = Cause.OTHER.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Every cell arrived once, intact, and is in its block."""

    transfer_id: int
    attempt: int
    peer_rank: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveFailed:
    """``retriable``: another attempt, with this peer or another, may succeed. A comparison that
    failed has no peer; its ``peer_rank`` is 0. ``cause`` is one of ``Cause``."""

    transfer_id: int
    attempt: int
    peer_rank: int
    reason: str
    retriable: bool
    cause: str = Cause.OTHER.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The difference with the highest ratio on this rank."""

    transfer_id: int
    attempt: int
    layer: int
    component: str
    largest: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The reply to a cancel, even of an unknown attempt."""

    transfer_id: int
    attempt: int
    side: Literal["send", "receive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJoined:
    """A connection is established. ``note``: why it does not use a better carrier."""

    node_id: str
    epoch: int
    rank: int
    carrier: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """A connection ended, or could not be made; its transfers fail by events of their own, with
    the same cause."""

    node_id: str
    epoch: int
    rank: int
    reason: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneFailed:
    """The data-plane thread itself has failed. No event follows."""

    reason: str


Command = OpenSend | LayerReady | CancelSend | Expect | CancelExpect | Compare | AdmitKeys
Event = (
    Expecting
    | SendFinished
    | SendFailed
    | Received
    | ReceiveFailed
    | Compared
    | Cancelled
    | KeysAdmitted
    | PeerJoined
    | PeerLost
    | PlaneFailed
    | DataPlaneStats
)

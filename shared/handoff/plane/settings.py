"""The identity and resources of a rank on the data plane."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...config.limits import MAX_PEERS
from ..carriers.device import DEVICE_SLOT_BYTES, DEVICE_SLOTS
from ..carriers.option import AUTO
from ..carriers.ranks import CarrierSettings
from ..carriers.staging import DEFAULT_SLOT_BYTES
from ..carriers.zeromq.sockets import Timing
from ..wire.greeting import PeerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaneConfig:
    """``listen_host`` None: the rank only receives. Otherwise it listens on ``listen_port`` and the
    next one (0: any two free ports). ``curve``: peers are authenticated by keys."""

    node_id: str
    epoch: int
    rank: int = 0
    tp_size: int = 1
    listen_host: str | None = "127.0.0.1"
    listen_port: int = 0
    carrier: str = AUTO
    curve: bool = False
    slot_bytes: int = DEFAULT_SLOT_BYTES
    staging_slots: int = 64
    device_slot_bytes: int = DEVICE_SLOT_BYTES
    device_slots: int = DEVICE_SLOTS
    max_commands: int = 65_536
    max_peers: int = MAX_PEERS
    timing: Timing = field(default_factory=Timing)

    @property
    def peer(self) -> PeerKey:
        return PeerKey(node_id=self.node_id, epoch=self.epoch, rank=self.rank)

    @property
    def carrier_settings(self) -> CarrierSettings:
        sends = self.listen_host is not None
        return CarrierSettings(
            carrier=self.carrier,
            sends=sends,
            slots=self.staging_slots if sends else 2,
            slot_bytes=self.slot_bytes,
            device_slots=self.device_slots,
            device_slot_bytes=self.device_slot_bytes,
        )

    @property
    def max_payload(self) -> int:
        """The largest payload of a frame. Sockets limit their messages as well."""
        return max(self.slot_bytes, self.device_slot_bytes)

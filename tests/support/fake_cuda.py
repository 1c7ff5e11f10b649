"""A machine with two GPUs, as torch describes it, and the settings of a rank on it."""

from __future__ import annotations

from typing import Any

import torch

from tandem.shared.engine.messages import DataPlaneSettings, RankSettings

GIB = 1 << 30


class FakeCuda:
    """The functions of ``torch.cuda`` that ranks call, for a machine with two GPUs."""

    def __init__(self) -> None:
        self.current = -1
        self.capability = (9, 0)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        self.current = index

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return self.capability

    def get_arch_list(self) -> list[str]:
        return ["sm_75", "sm_90"]

    def get_device_name(self, device: torch.device) -> str:
        return f"Fake {device.index}"

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 70 * GIB, 80 * GIB


def settings(device: str, index: int = 0, carrier: str = "auto", **others: Any) -> RankSettings:
    plane = DataPlaneSettings(
        node_id="n",
        epoch=1,
        host=None,
        port=0,
        staging_bytes=0,
        carrier=carrier,
        curve=False,
        max_peers=1,
    )
    return RankSettings(
        model_path="", device=device, device_index=index, data_plane=plane, **others
    )

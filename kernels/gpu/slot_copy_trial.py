"""Trial of the Triton copies of slots, before they are relied on."""

from __future__ import annotations

from functools import cache

import torch

from ..reference.cache import IndexedCopies
from .trials import passes


class TritonSlotCopies(IndexedCopies):
    """``SlotCopies`` by Triton where it can, else by torch: memory of the host, and rows that are
    no multiple of 16 bytes, such as scales."""

    def gather(self, held_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor) -> None:
        """See ``SlotCopies``."""
        if not _copied(held_KND, slots_T, rows_KTD, scatter=False):
            super().gather(held_KND, slots_T, rows_KTD)

    def scatter(
        self, held_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor
    ) -> None:
        """See ``SlotCopies``."""
        if not _copied(held_KND, slots_T, rows_KTD, scatter=True):
            super().scatter(held_KND, slots_T, rows_KTD)


def _copied(
    held_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor, *, scatter: bool
) -> bool:
    from .slot_copy import copy_slots, takes

    if held_KND.device != rows_KTD.device or not takes(held_KND) or not takes(rows_KTD):
        return False
    copy_slots(held_KND, slots_T, rows_KTD, scatter=scatter)
    return True


@cache
def works(row_bytes: int, device: torch.device) -> bool:
    """Return whether the copies of rows of this size compile and are right on this device; log why
    if they are not."""
    if device.type == "cpu":
        return False
    return passes(
        lambda: first_difference(row_bytes, device),
        "torch copies KV for the handoff, because of Triton",
    )


def first_difference(row_bytes: int, device: torch.device) -> str:
    """How Triton's copies differ from torch's; empty if they do not."""
    copies, expected = TritonSlotCopies(), IndexedCopies()
    random = torch.Generator().manual_seed(0)
    shape = (2, 99, row_bytes)
    held = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8).to(device)
    slots = torch.randperm(99, generator=random)[:37].to(device)
    found, wanted = (held.new_zeros(2, 37, row_bytes) for _ in range(2))
    copies.gather(held, slots, found)
    back, wanted_back = (held.new_zeros(shape) for _ in range(2))
    copies.scatter(back, slots, found)
    if device.type == "meta":  # nothing is computed there
        return ""
    expected.gather(held, slots, wanted)
    expected.scatter(wanted_back, slots, wanted)
    if not torch.equal(found, wanted):
        return "gathered rows differ"
    return "" if torch.equal(back, wanted_back) else "scattered rows differ"

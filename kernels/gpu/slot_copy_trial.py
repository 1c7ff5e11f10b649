"""Trial of the Triton copies of slots, before they are used."""

from __future__ import annotations

from functools import cache

import torch

from ..reference.cache import IndexedCopies
from .trials import passes


class TritonSlotCopies(IndexedCopies):
    """``SlotCopies`` by Triton, except for host memory and for rows that are not a multiple of 16
    bytes, such as scales."""

    def gather(
        self, cache_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor
    ) -> None:
        """See ``SlotCopies``."""
        if not _try_copy(cache_KND, slots_T, rows_KTD, scatter=False):
            super().gather(cache_KND, slots_T, rows_KTD)

    def scatter(
        self, cache_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor
    ) -> None:
        """See ``SlotCopies``."""
        if not _try_copy(cache_KND, slots_T, rows_KTD, scatter=True):
            super().scatter(cache_KND, slots_T, rows_KTD)


def _try_copy(
    cache_KND: torch.Tensor, slots_T: torch.Tensor, rows_KTD: torch.Tensor, *, scatter: bool
) -> bool:
    from .slot_copy import copy_slots, takes

    if cache_KND.device != rows_KTD.device or not takes(cache_KND) or not takes(rows_KTD):
        return False
    copy_slots(cache_KND, slots_T, rows_KTD, scatter=scatter)
    return True


@cache
def works(row_bytes: int, device: torch.device) -> bool:
    """True if the copies of rows of this size compile and are correct on this device; logs the
    reason if not."""
    if device.type == "cpu":
        return False
    return passes(
        lambda: first_difference(row_bytes, device),
        "torch copies KV for the handoff, because of Triton",
    )


def first_difference(row_bytes: int, device: torch.device) -> str:
    """The difference between Triton's copies and torch's; empty if there is none."""
    copies, expected = TritonSlotCopies(), IndexedCopies()
    random = torch.Generator().manual_seed(0)
    shape = (2, 99, row_bytes)
    cached = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8).to(device)
    slots = torch.randperm(99, generator=random)[:37].to(device)
    rows, expected_rows = (cached.new_zeros(2, 37, row_bytes) for _ in range(2))
    copies.gather(cached, slots, rows)
    scattered, expected_back = (cached.new_zeros(shape) for _ in range(2))
    copies.scatter(scattered, slots, rows)
    if device.type == "meta":  # nothing is computed there
        return ""
    expected.gather(cached, slots, expected_rows)
    expected.scatter(expected_back, slots, expected_rows)
    if not torch.equal(rows, expected_rows):
        return "gathered rows differ"
    return "" if torch.equal(scattered, expected_back) else "scattered rows differ"

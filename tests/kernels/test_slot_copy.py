"""The Triton copies of slots against torch's: on a GPU if there is one, else as Triton interprets
them. Without Triton they are skipped."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.gpu import slot_copy_trial
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.gpu.slot_copy_trial import TritonSlotCopies, first_difference, works
from tandem.kernels.reference.cache import IndexedCopies

pytest.importorskip("triton")

from tandem.kernels.gpu import slot_copy
from tandem.kernels.gpu.slot_copy import takes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
META = torch.device("meta")


def anything(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes."""
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE).view(dtype)


@pytest.mark.parametrize("count", [1, 19, 300])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        *((torch.bfloat16, dim) for dim in (8, 24, 128, 576)),
        *((FP8, 64), (torch.int8, 128), (torch.float32, 4), (torch.float32, 80)),
    ],
)
def test_rows_are_those_of_the_slots(
    dtype: torch.dtype, dim: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel alone: torch would be another implementation."""
    monkeypatch.setattr(IndexedCopies, "gather", None)
    monkeypatch.setattr(IndexedCopies, "scatter", None)
    copies, cache = TritonSlotCopies(), anything((3, 400, dim), dtype)[1:]
    slots = torch.randperm(401, device=DEVICE)[1 : 1 + count].clamp(max=399)
    rows = anything((2, count, dim), dtype)
    copies.gather(cache, slots, rows)
    plain, result = cache.view(torch.uint8), rows.view(torch.uint8)
    assert torch.equal(result, plain[:, slots])
    back = anything((2, 400, dim), dtype)
    expected = back.view(torch.uint8).clone()
    expected[:, slots] = result
    copies.scatter(back, slots, rows)
    assert torch.equal(back.view(torch.uint8), expected)


def test_nothing_is_copied_for_no_slot() -> None:
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    TritonSlotCopies().gather(anything((2, 9, 16), FP8), none, anything((2, 0, 16), FP8))


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(lambda: torch.zeros(2, 3, 1, device=DEVICE), id="scales"),
        pytest.param(lambda: torch.zeros(2 * 3 * 8 + 1, device=DEVICE)[1:].view(2, 3, 8), id="odd"),
        pytest.param(lambda: torch.zeros(2, 5, 8, device=DEVICE)[:, 1:4], id="a part"),
    ],
)
def test_what_does_not_suit_the_kernel_is_left_to_torch(rows: object) -> None:
    target = rows()  # type: ignore[operator]
    assert not takes(target)
    cache = torch.randn(2, 9, target.shape[2], device=DEVICE)
    slots = torch.tensor([7, 0, 3], device=DEVICE)
    TritonSlotCopies().gather(cache, slots, target)
    assert torch.equal(target, cache[:, slots])
    empty = torch.zeros_like(cache)
    TritonSlotCopies().scatter(empty, slots, target)
    assert torch.equal(empty[:, slots], target)


@pytest.mark.parametrize("size", [4, 16, 256, 48])
def test_the_trial_passes(size: int) -> None:
    assert first_difference(size, DEVICE) == ""


@pytest.mark.parametrize("reason", ["gathered rows differ", RuntimeError("no C compiler")])
def test_copies_that_are_wrong_are_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: object
) -> None:
    def differ(row_bytes: int, device: torch.device) -> str:
        if isinstance(reason, Exception):
            raise reason
        return str(reason) if row_bytes == 48 else ""

    operators, gpu = GpuOperators(), torch.device("cuda", 0)
    monkeypatch.setattr(slot_copy_trial, "first_difference", differ)
    works.cache_clear()
    assert type(operators.prepare_slot_copies(frozenset({16, 48}), gpu)) is IndexedCopies
    assert str(reason) in caplog.text
    assert type(operators.prepare_slot_copies(frozenset({16}), torch.device("cpu"))) is (
        IndexedCopies
    )
    if isinstance(reason, str):
        assert isinstance(operators.prepare_slot_copies(frozenset({16}), gpu), TritonSlotCopies)
    works.cache_clear()


@pytest.mark.parametrize("wrong", ["gathered", "scattered"])
def test_wrong_copies_are_found(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    copy = slot_copy.copy_slots

    def careless(
        cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, *, scatter: bool
    ) -> None:
        copy(cache, slots, rows, scatter=scatter)
        if scatter == (wrong == "scattered"):
            (cache if scatter else rows)[1, 5] += 1

    monkeypatch.setattr(slot_copy, "copy_slots", careless)
    assert first_difference(16, DEVICE) == f"{wrong} rows differ"

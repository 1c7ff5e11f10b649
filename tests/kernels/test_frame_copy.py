"""The Triton copies of frames against torch's: on a GPU if there is one, else as Triton interprets
them. Without Triton they are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.kernels.reference.cache import IndexedFrames
from tandem.kernels.row_sums import row_sums
from tandem.kernels.signatures import FrameCells

pytest.importorskip("triton")

from tandem.kernels.gpu import frame_copy, frame_copy_trial
from tandem.kernels.gpu.frame_copy_trial import first_difference
from tandem.kernels.gpu.operators import GpuOperators
from tandem.kernels.gpu.triton_frames import TritonFrames

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK, BLOCKS, HEADS = 16, 20, 3
KINDS = {
    "bfloat16": (((torch.bfloat16, 128),) * 2,),
    "fp8": (((torch.float8_e4m3fn, 64),) * 2,),
    "int8": (((torch.float32, 1),) * 2 + ((torch.int8, 32),) * 2,),
    "narrow": (((torch.bfloat16, 10), (torch.bfloat16, 6)),),
    "latent": (((torch.bfloat16, 256), (torch.bfloat16, 32)),),
    "layers that differ": (((torch.bfloat16, 80),) * 2, ((torch.float32, 24),)),
}


def anything(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes."""
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE).view(dtype)


def cache(kinds: Any) -> list[list[torch.Tensor]]:
    """Two layers of each kind."""
    return [
        [anything((HEADS, BLOCKS * BLOCK, dim), dtype) for dtype, dim in kind]
        for kind in kinds
        for _ in range(2)
    ]


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "end"), [(0, 1), (7, 26), (16, 48), (3, 70)])
@pytest.mark.parametrize(
    ("layers", "heads"), [(range(2), range(HEADS)), (range(1, 2), range(1, 2))]
)
def test_frames_and_their_sums_are_those_of_torch(
    kind: str, first: int, end: int, layers: range, heads: range
) -> None:
    source = cache(KINDS[kind])
    if kind == "layers that differ":
        layers = range(layers.start + 2, layers.stop + 2)
    blocks = torch.randperm(BLOCKS, dtype=torch.int32, device=DEVICE)
    cells = FrameCells(layers, heads, blocks, first, end)
    token = sum(dim * dtype.itemsize for dtype, dim in KINDS[kind][-1])
    size = len(layers) * len(heads) * (end - first) * token
    frame, expected = (anything((size,), torch.uint8) for _ in range(2))
    sums = TritonFrames(source, BLOCK).pack(cells, frame)
    assert IndexedFrames(source, BLOCK).pack(cells, expected) is None
    assert torch.equal(frame, expected)
    assert sums is not None and torch.equal(sums, row_sums(expected))

    target = cache(KINDS[kind])
    copies = [[each.clone() for each in layer] for layer in target]
    sums = TritonFrames(target, BLOCK).scatter(cells, expected)
    IndexedFrames(copies, BLOCK).scatter(cells, expected)
    assert sums is not None and torch.equal(sums, row_sums(expected))
    for layer, copied in zip(target, copies, strict=True):
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(layer, copied, strict=True))


def test_nothing_is_copied_of_no_token() -> None:
    cells = FrameCells(range(2), range(1), torch.zeros(1, dtype=torch.int32, device=DEVICE), 5, 5)
    frame = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    sums = TritonFrames(cache(KINDS["fp8"]), BLOCK).pack(cells, frame)
    assert sums is not None and not len(sums)


@pytest.mark.parametrize("kinds", [[(64, 64)], [(1, 1, 32, 32)], [(3,), (5, 4)]], ids=str)
def test_the_trial_passes(kinds: Any) -> None:
    assert first_difference(kinds, 16, DEVICE) == ""


@pytest.mark.parametrize("reason", ["sums differ", RuntimeError("no C compiler")])
def test_copies_that_are_wrong_are_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: object
) -> None:
    def differ(*_: Any) -> str:
        if isinstance(reason, Exception):
            raise reason
        return str(reason)

    monkeypatch.setattr(frame_copy_trial, "first_difference", differ)
    frame_copy_trial._works.cache_clear()
    layers = [[torch.empty(1, 16, 8, device="meta")]]
    copies = GpuOperators().prepare_frame_copies(layers, 16)
    assert type(copies) is IndexedFrames and str(reason) in caplog.text
    frame_copy_trial._works.cache_clear()


def test_tokens_that_are_not_whole_words_are_left_to_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = [[torch.empty(1, 16, 3, dtype=torch.int8, device="meta")]]
    assert type(GpuOperators().prepare_frame_copies(layers, 16)) is IndexedFrames
    assert "tokens of [3] bytes" in caplog.text


@pytest.mark.parametrize("wrong", ["packed frames", "scattered tokens", "sums"])
def test_wrong_copies_are_found(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    copy = frame_copy.copy_frame

    def careless(*args: Any, scatter: bool) -> torch.Tensor:
        sums = copy(*args, scatter=scatter)
        if wrong == "sums":
            return sums + scatter
        if not scatter and wrong == "packed frames":
            args[-1][7] += 1
        if scatter and wrong == "scattered tokens":
            args[-1][7] += 1
            sums = copy(*args, scatter=True)
            args[-1][7] -= 1
            return sums * 0 + row_sums(args[-1])
        return sums

    monkeypatch.setattr(frame_copy, "copy_frame", careless)
    assert first_difference([(4,)], 16, DEVICE) == f"{wrong} differ"

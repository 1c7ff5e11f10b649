"""The decode kernels against the reference: on a GPU if there is one, else as Triton interprets
them, and compiled for GPUs that are not here.

Without Triton, as beside some builds of torch, they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.kernels.attention_metadata import (
    AttentionConfig,
    AttentionParams,
    DecodeMetadata,
    SequenceMetadata,
    decode_metadata,
)
from tandem.kernels.gpu.decode_trial import largest_error, limit
from tandem.kernels.reference.attention import paged_attention
from tandem.kernels.reference.cache import write_cache, write_kv
from tandem.tests.support.extent import selected

pytest.importorskip("triton")

from tandem.kernels.gpu.paged_decode import SPLIT, paged_decode

# Otherwise tests/conftest.py makes Triton interpret them.
INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FP8 = torch.float8_e4m3fn
# Of the result, by the type in which products are taken.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KINDS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, FP8),
    (torch.float32, FP8),
    (torch.bfloat16, torch.float32),
]
# Each type over whole contexts, and each window in one type.
WINDOWS = [7, SPLIT + 3]
CASES = selected(
    [*((kind, None) for kind in KINDS), *((KINDS[0], window) for window in WINDOWS)],
    full=[(kind, window) for kind in KINDS[1:] for window in WINDOWS],
)
BLOCK, BLOCKS = 4, 600


@pytest.fixture(autouse=True)
def whole_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use float32, because Triton's interpreter multiplies the bits of bfloat16."""
    torch.manual_seed(0)
    if INTERPRETED:
        import triton.language as tl
        from triton.runtime.interpreter import InterpreterBuilder

        dot = InterpreterBuilder.create_dot

        def wide(self: Any, a: Any, b: Any, *rest: Any) -> Any:
            narrow = tl.bfloat16
            a, b = (
                self.create_fp_ext(x, tl.float32) if x.dtype.scalar == narrow else x for x in (a, b)
            )
            return dot(self, a, b, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", wide)
    yield


class PagedCase:
    """Sequences of some lengths, a row of each, whose blocks lie anywhere. What was not written is
    poisoned, and so is the result."""

    def __init__(
        self,
        lengths: list[int],
        kind: tuple[torch.dtype, torch.dtype],
        heads: int,
        kv: int,
        dim: int,
    ) -> None:
        q_dtype, dtype = kind
        cache = torch.full((2, kv, BLOCKS * BLOCK, dim), torch.nan, device=DEVICE).to(dtype)
        self.keys, self.values = cache
        free = torch.randperm(BLOCKS).tolist()
        self.contexts = []
        for row, length in enumerate(lengths):
            table = [free.pop() for _ in range(-(-length // BLOCK))]
            slots = [table[t // BLOCK] * BLOCK + t % BLOCK for t in range(length)]
            k, v = torch.randn(2, length, kv, dim, device=DEVICE)
            write_kv(self.keys, self.values, torch.tensor(slots, device=DEVICE), k, v)
            # Every second row of the step belongs to another sequence.
            rows = slice(2 * row, 2 * row + 1)
            self.contexts.append(SequenceMetadata(rows, length - 1, table, BLOCK))
        self.q = torch.randn(2 * len(lengths), heads, dim, device=DEVICE).to(q_dtype)

    def decodes(self) -> DecodeMetadata:
        decodes = decode_metadata(self.contexts, DEVICE)
        assert decodes is not None
        return decodes

    def run(self, window: int | None) -> torch.Tensor:
        out = torch.full_like(self.q, 77.0)
        params = AttentionParams(self.q.shape[-1] ** -0.5, window)
        paged_decode(self.q, self.keys, self.values, self.decodes(), params, out)
        assert (out[1::2] == 77.0).all()
        return out[::2]

    def expected(self, window: int | None) -> torch.Tensor:
        params = AttentionParams(self.q.shape[-1] ** -0.5, window)
        return paged_attention(self.q, self.keys, self.values, self.contexts, params)[::2]


@pytest.mark.parametrize(("kind", "window"), CASES, ids=str)
def test_each_row_attends_to_its_own_sequence(
    kind: tuple[torch.dtype, torch.dtype], window: int | None
) -> None:
    case = PagedCase([1, 19, SPLIT, SPLIT + 1, 989], kind, 6, 2, 24)
    got, expected = case.run(window), case.expected(window)
    assert got.dtype == kind[0]
    least = max(TOLERANCE[got.dtype], TOLERANCE[case.q.dtype])
    torch.testing.assert_close(got.float(), expected.float(), atol=least, rtol=least)


@pytest.mark.parametrize(("heads", "kv", "dim"), [(1, 1, 8), (3, 3, 64), (20, 1, 80), (4, 2, 256)])
def test_heads_of_any_number_and_size(heads: int, kv: int, dim: int) -> None:
    case = PagedCase([99, 3], (torch.float32, torch.float32), heads, kv, dim)
    torch.testing.assert_close(case.run(None), case.expected(None), atol=1e-5, rtol=1e-5)


def test_more_parts_than_are_weighed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.kernels.gpu.paged_decode.SPLIT", 16)
    monkeypatch.setattr("tandem.kernels.gpu.paged_decode.MOST_PARTS", 40)
    case = PagedCase([1000, 17], (torch.float32, torch.float32), 2, 1, 16)
    torch.testing.assert_close(case.run(None), case.expected(None), atol=1e-5, rtol=1e-5)


def test_a_row_is_the_same_in_any_batch() -> None:
    case = PagedCase([700, 5, 989], (torch.float32, torch.float32), 4, 2, 16)
    whole, contexts = case.run(None), case.contexts
    for row in range(3):
        case.contexts = contexts[row : row + 1]
        assert torch.equal(case.run(None)[row], whole[row])


def test_queries_may_be_a_part_of_wider_rows() -> None:
    case = PagedCase([30], (torch.float32, torch.float32), 4, 2, 16)
    wide = torch.randn(2, 7, 16, device=DEVICE)
    case.q = wide[:, 1:5]
    torch.testing.assert_close(case.run(None), case.expected(None), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, which interprets
def test_keys_that_are_not_numbers_show_in_the_output() -> None:
    """The sampler refuses such a sequence; it must not become a token."""
    for kind in KINDS:
        case = PagedCase([40, 40], kind, 2, 1, 16)
        slot = case.contexts[0].block_table[3] * BLOCK
        case.keys[:, slot] = torch.nan
        assert case.run(None).isnan().all(dim=-1).all(dim=-1).tolist() == [True, False]


def test_every_code_of_fp8_is_read_as_torch_reads_it() -> None:
    case = PagedCase([256], (torch.float32, FP8), 1, 1, 16)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8)
    codes = torch.where(codes.float().isnan(), 0.0, codes.float()).to(FP8)
    slots = torch.tensor(case.contexts[0].block_table, device=DEVICE)[:, None] * BLOCK
    slots = (slots + torch.arange(BLOCK, device=DEVICE)).flatten()
    write_cache(case.values, slots, codes.float()[:, None, None].expand(-1, 1, 16))
    torch.testing.assert_close(case.run(None), case.expected(None), atol=1e-4, rtol=1e-5)


def test_what_a_rank_tries_at_its_start_finds_them_right() -> None:
    for q_dtype, dtype in KINDS:
        shape = AttentionConfig(DEVICE, q_dtype, dtype, 4, 2, 16, 16, AttentionParams(0.25))
        assert largest_error(shape) < limit(shape)


def test_they_compile_for_gpus_that_are_not_here() -> None:
    command = [sys.executable, "-P", "-m", "tandem.tests.kernels.compile_ahead"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"80", "90", "100"}

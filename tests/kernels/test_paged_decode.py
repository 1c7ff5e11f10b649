"""The decode kernels against the reference: on a GPU if there is one, else as Triton interprets
them.

Without Triton, as beside some builds of torch, they are skipped.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

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
from tandem.kernels.scaled import INT8, ScaledKV
from tandem.tests.kernels.paged_cache import (
    DEVICE,
    FP8,
    INTERPRETED,
    NOT_NUMBERS,
    TOLERANCE,
    poisoned_cache,
)
from tandem.tests.support.extent import selected

pytest.importorskip("triton")

from tandem.kernels.gpu import paged_decode as kernels
from tandem.kernels.gpu.paged_decode import paged_decode
from tandem.tests.kernels.interpreted import interpret_whole_products

KINDS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, FP8),
    (torch.float32, FP8),
    (torch.bfloat16, torch.float32),
    (torch.float32, INT8),
    (torch.bfloat16, INT8),
    (torch.float16, INT8),
]
# Tokens of a part, of which the interpreter takes half as long as of the usual ones: several tiles
# of each type. Parts of the usual size are tried as a rank tries them.
SPLIT, USUAL_SPLIT = 256, kernels.SPLIT
TRIED = selected(
    [KINDS[0], KINDS[1], KINDS[2], (torch.bfloat16, FP8), (torch.float32, INT8)], full=KINDS
)
# Of scores, and so small that it bends most of them.
CAP = 1.5
# Each type over whole contexts; a cap in types of each width, and each window in one.
WINDOWS = [7, SPLIT + 3]
CASES = selected(
    [
        *((kind, None, None) for kind in KINDS),
        *((kind, None, CAP) for kind in (KINDS[0], KINDS[3], KINDS[7])),
        *((KINDS[0], window, None) for window in WINDOWS),
    ],
    full=[(kind, window, cap) for kind in KINDS for window in WINDOWS for cap in (None, CAP)],
)
BLOCK, BLOCKS = 4, 600


@pytest.fixture(autouse=True)
def whole_products(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if INTERPRETED:
        monkeypatch.setattr(kernels, "SPLIT", SPLIT)
        interpret_whole_products(monkeypatch)


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
        whole_scales: tuple[float | None, float | None] = (None, None),
    ) -> None:
        q_dtype, dtype = kind
        shape = (kv, BLOCKS * BLOCK, dim)
        self.keys, self.values = (poisoned_cache(shape, dtype, scale) for scale in whole_scales)
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
        self.sinks: torch.Tensor | None = None

    def decodes(self) -> DecodeMetadata:
        decodes = decode_metadata(self.contexts, DEVICE)
        assert decodes is not None
        return decodes

    def params(self, window: int | None, cap: float | None) -> AttentionParams:
        return AttentionParams(self.q.shape[-1] ** -0.5, window, cap, self.sinks is not None)

    def run(self, window: int | None = None, cap: float | None = None) -> torch.Tensor:
        out, params = torch.full_like(self.q, 77.0), self.params(window, cap)
        paged_decode(self.q, self.keys, self.values, self.decodes(), params, out, self.sinks)
        assert (out[1::2] == 77.0).all()
        return out[::2]

    def expected(self, window: int | None = None, cap: float | None = None) -> torch.Tensor:
        kv, params = (self.keys, self.values), self.params(window, cap)
        with sdpa_kernel(SDPBackend.MATH):  # others multiply float32 less exactly
            return paged_attention(self.q, *kv, self.contexts, params, sinks_H=self.sinks)[::2]


@pytest.fixture(params=[False, True], ids=["by bits", "by hardware"])
def converts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to widen fp8, of which a GPU that is there may have one only."""
    converts = bool(request.param)
    if converts and not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not convert fp8")
    monkeypatch.setattr(kernels, "converts_fp8", lambda: converts)
    return converts


def check_rows(
    kind: tuple[torch.dtype, torch.dtype], window: int | None, cap: float | None
) -> None:
    case = PagedCase([1, 19, SPLIT, SPLIT + 1], kind, 6, 2, 24)
    result, expected = case.run(window, cap), case.expected(window, cap)
    assert result.dtype == kind[0]
    tolerance = max(TOLERANCE[result.dtype], TOLERANCE[case.q.dtype])
    torch.testing.assert_close(result.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("kind", "window", "cap"), CASES, ids=str)
def test_each_row_attends_to_its_own_sequence(
    kind: tuple[torch.dtype, torch.dtype], window: int | None, cap: float | None
) -> None:
    check_rows(kind, window, cap)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (7, None), (SPLIT + 3, CAP)])
def test_a_sink_counts_once_however_many_parts_there_are(
    window: int | None, cap: float | None
) -> None:
    """Sinks of any size: one that counts for nothing, and one beside which all tokens do."""
    case = PagedCase([1, 19, SPLIT, 2 * SPLIT + 1], (torch.float32, torch.float32), 6, 2, 24)
    case.sinks = torch.tensor([-1e4, -3.0, 0.0, 3.0, 60.0, 1e4], device=DEVICE)
    result, expected = case.run(window, cap), case.expected(window, cap)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    assert not result[:, 5].any() and result[:, 0].any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[1] == FP8], ids=str)
def test_fp8_is_widened_either_way(kind: tuple[torch.dtype, torch.dtype], converts: bool) -> None:
    check_rows(kind, None, None)


@pytest.mark.parametrize("cap", [None, CAP])
def test_keys_and_values_of_fp8_may_have_a_scale_each(cap: float | None, converts: bool) -> None:
    case = PagedCase([300, SPLIT + 1], (torch.float32, FP8), 4, 2, 24, (0.013, 3.7e-3))
    result, expected = case.run(cap=cap), case.expected(cap=cap)
    # Products with codes of fp16 hardware are exact; the reference multiplies K and V first.
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12, 1e35])
def test_queries_of_any_size_attend_to_fp8(size: float, converts: bool) -> None:
    """Products are taken in fp16, which has neither the largest nor the smallest of bfloat16."""
    case = PagedCase([300], (torch.bfloat16, FP8), 4, 2, 64)
    case.q *= size
    case.q[0, 1] = 0
    expected = case.expected()
    assert expected.isfinite().all()
    torch.testing.assert_close(case.run().float(), expected.float(), atol=2e-2, rtol=2e-2)


@NOT_NUMBERS
def test_a_query_that_is_not_a_number_shows_in_the_output_of_its_head(converts: bool) -> None:
    for wrong in (torch.nan, torch.inf):
        case = PagedCase([40], (torch.bfloat16, FP8), 2, 1, 16)
        case.q[0, 1, 3] = wrong
        assert case.run().isnan().all(dim=-1).tolist() == [[False, True]]


@pytest.mark.parametrize("size", [1e-9, 1e5])
def test_values_of_int8_may_have_scales_of_any_size(size: float) -> None:
    case = PagedCase([300], (torch.bfloat16, INT8), 4, 2, 32)
    assert isinstance(case.values, ScaledKV)
    case.values.scales.mul_(size)
    result, expected = (each.float() / size for each in (case.run(), case.expected()))
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("heads", "kv", "dim"), [(1, 1, 8), (3, 3, 64), (20, 1, 80), (4, 2, 256)])
def test_heads_of_any_number_and_size(heads: int, kv: int, dim: int) -> None:
    case = PagedCase([99, 3], (torch.float32, torch.float32), heads, kv, dim)
    torch.testing.assert_close(case.run(), case.expected(), atol=1e-5, rtol=1e-5)


def test_more_parts_than_are_weighed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.kernels.gpu.paged_decode.SPLIT", 16)
    monkeypatch.setattr("tandem.kernels.gpu.paged_decode.MAX_SPLITS", 40)
    case = PagedCase([1000, 17], (torch.float32, torch.float32), 2, 1, 16)
    torch.testing.assert_close(case.run(), case.expected(), atol=1e-5, rtol=1e-5)


def test_a_row_is_the_same_in_any_batch() -> None:
    case = PagedCase([700, 5, 989], (torch.float32, torch.float32), 4, 2, 16)
    whole, contexts = case.run(), case.contexts
    for row in range(3):
        case.contexts = contexts[row : row + 1]
        assert torch.equal(case.run()[row], whole[row])


def test_queries_may_be_a_part_of_wider_rows() -> None:
    case = PagedCase([30], (torch.float32, torch.float32), 4, 2, 16)
    wide = torch.randn(2, 7, 16, device=DEVICE)
    case.q = wide[:, 1:5]
    torch.testing.assert_close(case.run(), case.expected(), atol=1e-5, rtol=1e-5)


@NOT_NUMBERS
def test_keys_that_are_not_numbers_show_in_the_output(converts: bool) -> None:
    """The sampler refuses such a sequence; it must not become a token."""
    for kind in KINDS:
        case = PagedCase([40, 40], kind, 2, 1, 16)
        slot = case.contexts[0].block_table[3] * BLOCK
        keys = case.keys.scales if isinstance(case.keys, ScaledKV) else case.keys
        assert isinstance(keys, torch.Tensor)
        keys[:, slot] = torch.nan
        assert case.run().isnan().all(dim=-1).all(dim=-1).tolist() == [True, False]


def test_every_code_of_fp8_is_read_as_torch_reads_it(converts: bool) -> None:
    case = PagedCase([256], (torch.float32, FP8), 1, 1, 16)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8)
    codes = torch.where(codes.float().isnan(), 0.0, codes.float()).to(FP8)
    slots = torch.tensor(case.contexts[0].block_table, device=DEVICE)[:, None] * BLOCK
    slots = (slots + torch.arange(BLOCK, device=DEVICE)).flatten()
    write_cache(case.values, slots, codes.float()[:, None, None].expand(-1, 1, 16))
    torch.testing.assert_close(case.run(), case.expected(), atol=1e-4, rtol=1e-5)


def test_what_a_rank_tries_at_its_start_finds_them_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over parts of the usual size, in each type of queries and of a cache."""
    monkeypatch.setattr(kernels, "SPLIT", USUAL_SPLIT)
    for q_dtype, dtype in TRIED:
        shape = AttentionConfig(DEVICE, q_dtype, dtype, 4, 2, 16, 16, AttentionParams(0.25))
        assert largest_error(shape) < limit(shape)
    with_sinks = replace(shape, params=AttentionParams(0.25, window=128, sinks=True))
    assert 0 < largest_error(with_sinks) < limit(with_sinks)

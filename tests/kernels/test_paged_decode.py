"""The decode kernels against the reference: on a GPU if there is one, else as Triton interprets
them.

Without Triton, as beside some builds of torch, they are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import unwrap
from typing import Any

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
from tandem.kernels.gpu import row_splits
from tandem.kernels.gpu.decode_trial import largest_error, limit
from tandem.kernels.gpu.paged_decode import paged_decode
from tandem.tests.kernels.interpreted import interpret_as_a_gpu_computes

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
SPLIT = kernels.MIN_SPLIT
H100_PROCESSORS = kernels.processors(torch.device("meta"))
TRIED = selected(
    [KINDS[0], KINDS[1], KINDS[2], (torch.bfloat16, FP8), (torch.float32, INT8)], full=KINDS
)
# Of scores, and so small that it bends most of them.
CAP = 1.5
# Each type over whole contexts; a cap in types of each width, and each window in one.
WINDOWS = [7, 2 * SPLIT + 3]
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
def interpreted_as_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    # Those that are kept for a GPU would be of what tests have patched before, or have not yet.
    monkeypatch.setattr(kernels, "constants", unwrap(kernels.constants))
    if INTERPRETED:
        # So few that each program attends to several splits.
        monkeypatch.setattr(kernels, "processors", lambda _: 5)
        interpret_as_a_gpu_computes(monkeypatch)


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
    case = PagedCase([1, 19, SPLIT, 2 * SPLIT + 7], kind, 6, 2, 24)
    result, expected = case.run(window, cap), case.expected(window, cap)
    assert result.dtype == kind[0]
    tolerance = max(TOLERANCE[result.dtype], TOLERANCE[case.q.dtype])
    torch.testing.assert_close(result.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("kind", "window", "cap"), CASES, ids=str)
def test_each_row_attends_to_its_own_sequence(
    kind: tuple[torch.dtype, torch.dtype], window: int | None, cap: float | None
) -> None:
    check_rows(kind, window, cap)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (7, None), (2 * SPLIT + 3, CAP)])
def test_a_sink_counts_once_however_many_parts_there_are(
    window: int | None, cap: float | None
) -> None:
    """Sinks of any size: one that counts for nothing, and one beside which all tokens do."""
    case = PagedCase([1, 19, SPLIT, 2 * SPLIT + 7], (torch.float32, torch.float32), 6, 2, 24)
    case.sinks = torch.tensor([-1e4, -3.0, 0.0, 3.0, 60.0, 1e4], device=DEVICE)
    result, expected = case.run(window, cap), case.expected(window, cap)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    assert not result[:, 5].any() and result[:, 0].any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[1] == FP8], ids=str)
def test_fp8_is_widened_either_way(kind: tuple[torch.dtype, torch.dtype], converts: bool) -> None:
    check_rows(kind, None, None)


@pytest.mark.parametrize("cap", [None, CAP])
def test_keys_and_values_of_fp8_may_have_a_scale_each(cap: float | None, converts: bool) -> None:
    case = PagedCase([300, SPLIT], (torch.float32, FP8), 4, 2, 24, (0.013, 3.7e-3))
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


def test_more_splits_than_are_combined_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MIN_SPLIT", 64)
    monkeypatch.setattr(kernels, "_BLOCK_S", 4)
    monkeypatch.setattr(kernels, "processors", lambda _: H100_PROCESSORS)
    case = PagedCase([700, 17], (torch.float32, torch.float32), 2, 1, 16)
    torch.testing.assert_close(case.run(), case.expected(), atol=1e-5, rtol=1e-5)


def test_a_row_is_the_same_in_any_batch() -> None:
    case = PagedCase([700, 5, 989], (torch.float32, torch.float32), 4, 2, 16)
    whole, contexts = case.run(), case.contexts
    for row in range(3):
        case.contexts = contexts[row : row + 1]
        assert torch.equal(case.run()[row], whole[row])


WORKSPACES = ("splits_L6", "num_work", "finished_RK", "partial_LHD", "lse_LH")


class _Recorded:
    """A kernel whose launches are recorded."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, ...]]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.launches.append((self.kernel, grid, arguments, constants))
            self.kernel[grid](*arguments, **constants)

        return launch


def captured(monkeypatch: pytest.MonkeyPatch, run: Callable[[], None]) -> Callable[[], None]:
    """A function that launches once more what ``run`` launches, with the same arguments."""
    if not INTERPRETED:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay
    launches: list[tuple[Any, ...]] = []
    with monkeypatch.context() as patch:
        for module, name in ((row_splits, "_list_splits"), (kernels, "_attend")):
            patch.setattr(module, name, _Recorded(getattr(module, name), launches))
        run()

    def replay() -> None:
        for kernel, _, arguments, _ in launches:
            for name, each in zip(kernel.arg_names, arguments, strict=False):
                if name in WORKSPACES:
                    each.fill_(torch.nan if each.is_floating_point() else 77)
        for kernel, grid, arguments, constants in launches:
            kernel[grid](*arguments, **constants)

    return replay


@pytest.mark.parametrize("window", [None, 2 * SPLIT + 3])
def test_a_replay_reads_lengths_and_tables_anew(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """As a CUDA graph replays the launches of a step, in whose other rows nothing decodes."""
    case = PagedCase([600, 40, 300, 99], (torch.float32, torch.float32), 6, 2, 24)
    case.run(window)  # compiles
    sequences, decodes = case.contexts, case.decodes()
    tables, out = decodes.tables.clone(), torch.full_like(case.q, 77.0)
    params = case.params(window, None)
    replay = captured(
        monkeypatch, lambda: paged_decode(case.q, case.keys, case.values, decodes, params, out)
    )
    for lengths in ((0, 17, 0, 1), (599, 40, 290, 98), (0, 0, 0, 0), (1, 0, 300, 0)):
        order = torch.randperm(4).tolist()  # of the tables
        decodes.tables[order] = tables
        for row, length in enumerate(lengths):
            # Whatever a row of padding says, it is not read.
            entry = [2 * row, order[row], length] if length else [1, -(1 << 30), 0]
            decodes.rows[row] = torch.tensor(entry, dtype=torch.int32)
        out.fill_(77.0)
        replay()
        case.contexts = [
            replace(sequence, start=length - 1)
            for sequence, length in zip(sequences, lengths, strict=True)
            if length
        ]
        decoding = [2 * row for row, length in enumerate(lengths) if length]
        assert (out[[row for row in range(8) if row not in decoding]] == 77.0).all()
        expected = case.expected(window)[[row // 2 for row in decoding]]
        torch.testing.assert_close(out[decoding], expected, atol=1e-5, rtol=1e-5)


def test_layers_with_the_same_window_share_a_list_of_splits() -> None:
    """And in it the count of a row's finished splits, which the last one sets back."""
    case = PagedCase([2 * SPLIT + 9, 5], (torch.float32, torch.float32), 4, 2, 16)
    decodes = case.decodes()
    for window in (None, 200, None, 200):
        out, params = torch.empty_like(case.q), case.params(window, None)
        paged_decode(case.q, case.keys, case.values, decodes, params, out)
        torch.testing.assert_close(out[::2], case.expected(window), atol=1e-5, rtol=1e-5)
    assert len(decodes.derived) == 2
    assert not any(finished.any() for _, _, finished in decodes.derived.values())


def listed(lengths: list[int], kv_heads: int = 8) -> torch.Tensor:
    """The splits of rows on an H100, [splits, 6]."""
    bf16 = torch.bfloat16
    fixed = kernels.constants(
        bf16, bf16, 32, kv_heads, 128, AttentionParams(1.0), 16, H100_PROCESSORS
    )
    rows = torch.tensor(
        [(7 * row, row, length) for row, length in enumerate(lengths)], dtype=torch.int32
    )
    tables = torch.zeros(len(lengths), 1, dtype=torch.int32)
    decodes = DecodeMetadata(rows.to(DEVICE), tables.to(DEVICE), 0, 16)
    splits, num_work, finished = row_splits.split_list(decodes, fixed.list_splits)
    assert len(splits) == len(lengths) * fixed.list_splits["MAX_SPLITS"]
    assert finished.shape == (len(lengths), kv_heads) and not finished.any()
    return splits[: int(num_work)].cpu()


def test_every_token_is_in_one_split() -> None:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(3000, (300,), generator=random).tolist()
    lengths[3:7] = [0, 383, 384, 100_000]
    splits = listed(lengths)
    tokens = splits[:, 3] - splits[:, 2]
    assert splits[0, 0] == 7 * 6 and tokens.min() >= 1
    assert tokens.tolist() == sorted(tokens.tolist(), reverse=True)
    assert (tokens[33:] <= 1.5 * SPLIT).all()  # the longest row's come first
    assert len(splits[:, 5].unique()) == len(splits)
    for row, length in enumerate(lengths):
        mine = splits[splits[:, 1] == row]
        mine = mine[mine[:, 5].argsort()]
        assert (mine[:, 0] == 7 * row).all()
        assert [0, *mine[:, 3].tolist()] == [*mine[:, 2].tolist(), length]
        assert (mine[:, 4] == len(mine)).all()


@pytest.mark.parametrize(
    ("lengths", "kv_heads"),
    [
        ([4096], 8),
        ([32 << 10], 8),
        ([32 << 10], 4),
        ([32 << 10, *[100] * 255], 8),
        ([*[100] * 255, 32 << 10], 8),
        ([8192] * 64, 8),
        ([1 + 600 * row // 255 for row in range(256)], 8),
        ([600 if row % 3 else 9 for row in range(256)], 8),
    ],
    ids=["4k", "32k", "32k 4", "32k first", "32k last", "64 of 8k", "all lengths", "two lengths"],
)
def test_splits_are_spread_over_a_gpu(lengths: list[int], kv_heads: int) -> None:
    """Program p of the grid runs on processor p, modulo their number."""
    splits = listed(lengths, kv_heads)
    tokens = (splits[:, 3] - splits[:, 2]).repeat_interleave(kv_heads)
    # A row of 4k is 16 splits in any batch, which read enough at once to keep the memory busy.
    assert len(tokens) >= (16 * 8 if lengths == [4096] else H100_PROCESSORS)
    loads = torch.zeros(H100_PROCESSORS)
    loads.index_add_(0, torch.arange(len(tokens)) % H100_PROCESSORS, tokens.float())
    if len(lengths) > 1:
        assert loads.max() < 1.2 * loads.mean()


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


def test_what_a_rank_tries_at_its_start_finds_them_right() -> None:
    """In each type of queries and of a cache."""
    for q_dtype, dtype in TRIED:
        shape = AttentionConfig(DEVICE, q_dtype, dtype, 4, 2, 16, 16, AttentionParams(0.25))
        assert largest_error(shape) < limit(shape)
    with_sinks = replace(shape, params=AttentionParams(0.25, window=128, sinks=True))
    assert 0 < largest_error(with_sinks) < limit(with_sinks)

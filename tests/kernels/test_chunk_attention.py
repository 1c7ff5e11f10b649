"""The kernel for chunks against the reference: on a GPU if there is one, else as Triton interprets
it.

Without Triton, as beside some builds of torch, they are skipped.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import unwrap

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandem.kernels.attention_metadata import (
    AttentionConfig,
    AttentionParams,
    ChunkMetadata,
    SequenceMetadata,
    chunk_metadata,
)
from tandem.kernels.reference.attention import paged_attention
from tandem.kernels.reference.cache import write_kv
from tandem.kernels.scaled import INT8, ScaledKV
from tandem.tests.kernels.paged_cache import (
    DEVICE,
    FP8,
    INTERPRETED,
    NOT_NUMBERS,
    TOLERANCE,
    poisoned_cache,
)

pytest.importorskip("triton")

from tandem.kernels.gpu import chunk_attention as kernels
from tandem.kernels.gpu import chunk_trial
from tandem.kernels.gpu.decode_trial import limit
from tandem.tests.kernels.interpreted import interpret_as_a_gpu_computes

FLOAT = (torch.float32, torch.float32)
KINDS = [
    FLOAT,
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, FP8),
    (torch.float32, FP8),
    (torch.bfloat16, torch.float32),
    (torch.float32, INT8),
    (torch.bfloat16, INT8),
]
BLOCK, BLOCKS = 5, 120
# Position of a chunk's first row, and its rows: no block of tokens ends where a chunk begins.
CHUNKS = [(0, 21), (93, 2), (31, 13)]
# So small that it bends most scores.
CAP = 1.5
EVERYTHING = AttentionParams(0.2)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of rows and blocks of tokens in a few rows and tokens."""
    torch.manual_seed(0)
    # Those that are kept for a GPU would be of what tests have patched before, or have not yet.
    monkeypatch.setattr(kernels, "constants", unwrap(kernels.constants))
    if INTERPRETED:
        interpret_as_a_gpu_computes(monkeypatch)
        for name in ("_MAX_M", "_MAX_N"):
            monkeypatch.setattr(kernels, name, 32)
        monkeypatch.setattr(kernels, "_MAX_N_FP32", 16)


class ChunkCase:
    """Chunks of a step, with a row of another sequence before each, whose blocks lie anywhere. What
    was not written is poisoned, and so is the result."""

    def __init__(
        self,
        chunks: list[tuple[int, int]] = CHUNKS,
        kind: tuple[torch.dtype, torch.dtype] = FLOAT,
        heads: int = 6,
        kv: int = 2,
        dim: int = 24,
        whole_scales: tuple[float | None, float | None] = (None, None),
    ) -> None:
        q_dtype, dtype = kind
        shape = (kv, BLOCKS * BLOCK, dim)
        self.keys, self.values = (poisoned_cache(shape, dtype, scale) for scale in whole_scales)
        free, rows = torch.randperm(BLOCKS).tolist(), 0
        self.sequences: list[SequenceMetadata] = []
        for start, count in chunks:
            length = start + count
            table = [free.pop() for _ in range(-(-length // BLOCK))]
            slots = [table[t // BLOCK] * BLOCK + t % BLOCK for t in range(length)]
            k, v = torch.randn(2, length, kv, dim, device=DEVICE)
            write_kv(self.keys, self.values, torch.tensor(slots, device=DEVICE), k, v)
            span = slice(rows + 1, rows + 1 + count)
            self.sequences.append(SequenceMetadata(span, start, table, BLOCK))
            rows = span.stop
        self.q = torch.randn(rows, heads, dim, device=DEVICE).to(q_dtype)
        self.sinks: torch.Tensor | None = None
        self.of_chunks = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
        for sequence in self.sequences:
            self.of_chunks[sequence.rows] = True

    def chunks(self) -> ChunkMetadata:
        chunks = chunk_metadata(self.sequences, DEVICE)
        assert chunks is not None
        return chunks

    def run(
        self, params: AttentionParams = EVERYTHING, span_ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.full_like(self.q, 77.0)
        kv = self.keys, self.values
        kernels.chunk_attention(
            self.q, *kv, self.chunks(), params, out, self.sinks, span_ends_T=span_ends
        )
        assert (out[~self.of_chunks] == 77.0).all()
        return out[self.of_chunks]

    def expected(self, params: AttentionParams = EVERYTHING) -> torch.Tensor:
        kv = self.keys, self.values
        with sdpa_kernel(SDPBackend.MATH):  # others multiply float32 less exactly
            out = paged_attention(self.q, *kv, self.sequences, params, sinks_H=self.sinks)
        return out[self.of_chunks]

    def check(self, params: AttentionParams = EVERYTHING) -> None:
        result, expected = self.run(params), self.expected(params)
        assert result.dtype == self.q.dtype
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(result.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_attend_to_their_own_sequence_up_to_themselves(
    kind: tuple[torch.dtype, torch.dtype],
) -> None:
    ChunkCase(kind=kind).check()


@pytest.mark.parametrize(
    "params",
    [
        replace(EVERYTHING, window=7),
        replace(EVERYTHING, window=40),
        replace(EVERYTHING, soft_cap=CAP),
        replace(EVERYTHING, soft_cap=CAP, window=7),
        replace(EVERYTHING, causal=False),
        replace(EVERYTHING, causal=False, window=7),
        replace(EVERYTHING, causal=False, window=40),
    ],
    ids=str,
)
def test_rows_attend_to_what_a_layer_lets_them(params: AttentionParams) -> None:
    for kind in (FLOAT, (torch.bfloat16, INT8)):
        ChunkCase(kind=kind).check(params)


@pytest.mark.parametrize("window", [None, 7])
def test_a_sink_counts_once(window: int | None) -> None:
    """Sinks of any size: one that counts for nothing, and one beside which all tokens do."""
    case = ChunkCase()
    case.sinks = torch.tensor([-1e4, -3.0, 0.0, 3.0, 60.0, 1e4], device=DEVICE)
    params = replace(EVERYTHING, window=window, sinks=True)
    case.check(params)
    result = case.run(params)
    assert not result[:, 5].any() and result[:, 0].any()


@pytest.mark.parametrize("cap", [None, CAP])
@pytest.mark.parametrize("converts", [False, True], ids=["by bits", "by hardware"])
def test_keys_and_values_of_fp8_may_have_a_scale_each(
    monkeypatch: pytest.MonkeyPatch, converts: bool, cap: float | None
) -> None:
    if converts and not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not convert fp8")
    monkeypatch.setattr(kernels, "converts_fp8", lambda: converts)
    case = ChunkCase(kind=(torch.bfloat16, FP8), whole_scales=(0.013, 3.7e-3))
    case.q *= 1e12 if cap is None else 1.0
    case.check(replace(EVERYTHING, scale=0.2 / 1e12 if cap is None else 0.2, soft_cap=cap))


@pytest.mark.parametrize("size", [1e-9, 1e5])
def test_values_of_int8_may_have_scales_of_any_size(size: float) -> None:
    """Also if those of other tokens have another."""
    case = ChunkCase([(64, 20)], kind=(torch.bfloat16, INT8))
    assert isinstance(case.values, ScaledKV)
    early = case.sequences[0].block_table[:7]
    slots = (torch.tensor(early)[:, None] * BLOCK + torch.arange(BLOCK)).flatten().to(DEVICE)
    for scale in (size, 1e-4 * size):
        case.values.scales.mul_(size)
        case.values.scales[:, slots] *= scale / size
        result, expected = (each.float() / size for each in (case.run(), case.expected()))
        torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)
        case.values.scales.div_(size)


@pytest.mark.parametrize(
    ("heads", "kv", "dim"), [(1, 1, 8), (3, 3, 64), (20, 1, 80), (40, 1, 16), (4, 2, 256)]
)
def test_heads_of_any_number_and_size(heads: int, kv: int, dim: int) -> None:
    ChunkCase([(9, 8), (0, 3)], heads=heads, kv=kv, dim=dim).check()


def test_each_program_finds_its_chunk() -> None:
    """However many chunks there are, and however few rows they have."""
    rows = torch.randint(2, 30, (11,)).tolist()
    ChunkCase([(0, count) for count in rows], heads=2, kv=1, dim=16).check()


def test_a_chunk_is_the_same_in_any_step() -> None:
    case = ChunkCase()
    whole, sequences = case.run(), case.sequences
    parts = whole.split([each.num_rows for each in sequences])
    for sequence, part in zip(sequences, parts, strict=True):
        case.sequences = [sequence]
        case.of_chunks[:] = False
        case.of_chunks[sequence.rows] = True
        assert torch.equal(case.run(), part)


def test_queries_may_be_a_part_of_wider_rows() -> None:
    case = ChunkCase()
    case.q = torch.randn(len(case.q), 9, 24, device=DEVICE)[:, 2:8]
    kv = case.keys, case.values
    out = torch.empty_like(case.q, memory_format=torch.contiguous_format)
    kernels.chunk_attention(case.q, *kv, case.chunks(), EVERYTHING, out)
    torch.testing.assert_close(out[case.of_chunks], case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_tokens_of_a_span_see_each_other(window: int | None) -> None:
    case = ChunkCase([(0, 21), (31, 30)], heads=2, kv=1, dim=16)
    spans = {0: [(0, 3), (8, 17)], 1: [(33, 60)]}
    ends = torch.zeros(len(case.q), dtype=torch.int32, device=DEVICE)
    masks = []
    for number, sequence in enumerate(case.sequences):
        token = torch.arange(sequence.end, device=DEVICE)
        position = token[sequence.start :, None]
        mask = (token <= position) & (token > position - (window or sequence.end))
        for first, end in spans[number]:
            inside = (position >= first) & (position < end)
            mask |= inside & (token > position) & (token < end)
            row = sequence.rows.start - sequence.start
            ends[row + first : row + end] = end
        masks.append(torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, -torch.inf)[None])
    kv, params = (case.keys, case.values), replace(EVERYTHING, causal=False)
    expected = paged_attention(case.q, *kv, case.sequences, params, biases=masks)
    result = case.run(replace(EVERYTHING, window=window), ends)
    torch.testing.assert_close(result, expected[case.of_chunks], atol=1e-5, rtol=1e-5)


@NOT_NUMBERS
def test_keys_that_are_not_numbers_show_in_the_output() -> None:
    """The sampler refuses such a sequence; it must not become a token."""
    for kind in (FLOAT, (torch.bfloat16, FP8), (torch.bfloat16, INT8)):
        case = ChunkCase([(20, 3), (20, 3)], kind, 2, 1, 16)
        slot = case.sequences[0].block_table[1] * BLOCK
        keys = case.keys.scales if isinstance(case.keys, ScaledKV) else case.keys
        assert isinstance(keys, torch.Tensor)
        keys[:, slot] = torch.nan
        assert case.run().isnan().all(dim=-1).all(dim=-1).tolist() == 3 * [True] + 3 * [False]


CONFIG = AttentionConfig(DEVICE, torch.float32, torch.float32, 4, 2, 16, 16, AttentionParams(0.25))


def test_the_trial_at_start_finds_the_kernel_right() -> None:
    assert 0 < chunk_trial.largest_error(CONFIG) < limit(CONFIG)
    params = AttentionParams(0.25, window=30, sinks=True)
    kind = replace(CONFIG, dtype=torch.bfloat16, cache_dtype=INT8, params=params)
    assert 0 < chunk_trial.largest_error(kind) < limit(kind)


def test_the_trial_finds_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunk_trial.works.cache_clear()
    monkeypatch.setattr(kernels, "chunk_attention", lambda *arguments: None)
    config = replace(CONFIG, block_size=8)
    assert chunk_trial.largest_error(config) == torch.inf
    monkeypatch.setattr(chunk_trial, "largest_error", lambda *_: 1.0)
    assert not chunk_trial.works(replace(config, device=torch.device("cuda")))
    assert "attends for chunks one by one" in caplog.text and "1 off" in caplog.text
    chunk_trial.works.cache_clear()

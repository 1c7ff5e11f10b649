"""The kernel for chunks over latents against the reference: on a GPU if there is one, else as
Triton interprets it. Without Triton, as beside some builds of torch, they are skipped."""

from __future__ import annotations

from dataclasses import replace
from inspect import unwrap

import pytest
import torch

from tandem.kernels.attention_metadata import (
    AttentionMetadata,
    ChunkMetadata,
    LatentConfig,
    SequenceMetadata,
    chunk_metadata,
    decode_metadata,
)
from tandem.kernels.operators import Operators
from tandem.kernels.reference.cache import write_cache
from tandem.kernels.reference.latent import absorbed_attention
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

from tandem.kernels.gpu import latent_chunks as kernels
from tandem.kernels.gpu import latent_trial
from tandem.kernels.gpu.decode_trial import limit
from tandem.kernels.gpu.operators import GpuOperators
from tandem.tests.kernels.interpreted import interpret_as_a_gpu_computes

FLOAT, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
KINDS = [
    *((FLOAT, FLOAT), (BF16, BF16), (HALF, HALF), (BF16, FLOAT), (BF16, FP8), (FLOAT, FP8)),
    *((FLOAT, INT8), (BF16, INT8), (HALF, INT8)),
]
BLOCK, BLOCKS, SCALE = 5, 120, 0.11
# Position of a chunk's first row, and its rows: no block of tokens ends where a chunk begins.
CHUNKS = [(0, 21), (93, 2), (31, 13)]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if INTERPRETED:
        interpret_as_a_gpu_computes(monkeypatch)


@pytest.fixture(params=[False, True], ids=["by bits", "by hardware"])
def converts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to widen fp8, of which a GPU that is there may have one only."""
    if request.param and not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not convert fp8")
    monkeypatch.setattr(kernels, "converts_fp8", lambda: request.param)
    monkeypatch.setattr(kernels, "constants", unwrap(kernels.constants))


class ChunkCase:
    """Chunks of a step, with a row of another sequence before each, whose blocks lie anywhere. What
    was not written is poisoned, and so is the result."""

    def __init__(
        self,
        chunks: list[tuple[int, int]] = CHUNKS,
        kind: tuple[torch.dtype, torch.dtype] = (FLOAT, FLOAT),
        heads: int = 3,
        dims: tuple[int, int, int, int] = (12, 8, 40, 20),
        whole_scale: float | None = None,
    ) -> None:
        q_dtype, dtype = kind
        nope, rope, width, value_dim = dims
        shape = 1, BLOCKS * BLOCK, width + rope
        self.latents = poisoned_cache(shape, dtype, whole_scale)
        free = torch.randperm(BLOCKS).tolist()
        self.sequences: list[SequenceMetadata] = []
        end = 0
        for first, count in ((start, rows) for chunk in chunks for start, rows in ((9, 1), chunk)):
            table = [free.pop() for _ in range(-(-(first + count) // BLOCK))]
            slots = [table[t // BLOCK] * BLOCK + t % BLOCK for t in range(first + count)]
            values = torch.randn(len(slots), 1, width + rope, device=DEVICE)
            write_cache(self.latents, torch.tensor(slots, device=DEVICE), values)
            self.sequences.append(SequenceMetadata(slice(end, end + count), first, table, BLOCK))
            end += count
        self.q = torch.randn(end, heads, nope + rope, device=DEVICE).to(q_dtype)
        up = torch.randn(heads, nope + value_dim, width, device=DEVICE) * width**-0.5
        self.k_up, self.v_up = up.to(q_dtype).split([nope, value_dim], dim=1)
        self.chunk_rows = torch.zeros(end, dtype=torch.bool, device=DEVICE)
        for sequence in self.sequences:
            self.chunk_rows[sequence.rows] = sequence.num_rows > 1

    def chunks(self) -> ChunkMetadata:
        chunks = chunk_metadata(self.sequences, DEVICE)
        assert chunks is not None
        return chunks

    def run(self, chunks: ChunkMetadata | None = None) -> torch.Tensor:
        """The sums of latents, [H, T, C], whose other rows stay poisoned."""
        wide = self.wide()
        sums = torch.full_like(wide, torch.nan)
        metadata = self.chunks() if chunks is None else chunks
        kernels.latent_chunks(self.q, wide, self.latents, metadata, SCALE, sums)
        return sums

    def wide(self) -> torch.Tensor:
        """Queries of latents, [H, T, C]."""
        return torch.bmm(self.q[..., : self.k_up.shape[1]].transpose(0, 1), self.k_up)

    def values(self, sums_HTC: torch.Tensor) -> torch.Tensor:
        """The output, [T, H, V]."""
        return torch.bmm(sums_HTC, self.v_up.mT).transpose(0, 1)

    def expected(self) -> torch.Tensor:
        inputs = self.q, self.latents, self.k_up, self.v_up
        return absorbed_attention(*inputs, self.sequences, SCALE)

    def check(self) -> None:
        sums, expected = self.run(), self.expected()
        assert sums[:, ~self.chunk_rows].isnan().all()
        result = self.values(sums)[self.chunk_rows].float()
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(
            result, expected[self.chunk_rows].float(), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_row_attends_to_its_own_latents_up_to_itself(
    kind: tuple[torch.dtype, torch.dtype],
) -> None:
    ChunkCase(kind=kind).check()


@pytest.mark.parametrize("kind", [(BF16, FP8), (FLOAT, FP8)], ids=str)
def test_fp8_is_widened_either_way(kind: tuple[torch.dtype, torch.dtype], converts: None) -> None:
    ChunkCase(kind=kind).check()


def test_latents_may_have_one_scale(converts: None) -> None:
    ChunkCase(kind=(FLOAT, FP8), whole_scale=0.013).check()


@pytest.mark.parametrize("heads", [1, 16, 17, 34])
@pytest.mark.parametrize("dims", [(8, 6, 24, 5), (3, 32, 64, 40)])
def test_heads_of_any_number_and_size(heads: int, dims: tuple[int, int, int, int]) -> None:
    for dtype in (FLOAT, HALF):
        ChunkCase([(0, 7), (50, 3)], (dtype, dtype), heads, dims).check()


@pytest.mark.parametrize("kind", [(BF16, FP8), (FLOAT, INT8), (HALF, HALF)], ids=str)
def test_latents_may_be_aligned_to_single_numbers(kind: tuple[torch.dtype, torch.dtype]) -> None:
    ChunkCase([(0, 7), (50, 3)], kind, 5, (8, 6, 25, 5)).check()


def test_many_short_chunks_and_a_long_one() -> None:
    ChunkCase([(3 * n, 2 + n % 3) for n in range(9)] + [(0, 99)]).check()


def test_sums_may_take_the_place_of_the_queries() -> None:
    case = ChunkCase()
    wide = case.wide()
    expected = case.run()[:, case.chunk_rows]
    kernels.latent_chunks(case.q, wide, case.latents, case.chunks(), SCALE, wide)
    assert torch.equal(wide[:, case.chunk_rows], expected)


def test_queries_may_be_a_part_of_wider_rows() -> None:
    case = ChunkCase()
    case.q = torch.randn(len(case.q), 71, device=DEVICE)[:, 3:63].view(len(case.q), 3, 20)
    case.check()


def test_empty_chunks_and_tables_of_other_sequences() -> None:
    """Tables may be rows of a wider tensor, in any order, and a chunk may have no rows."""
    case = ChunkCase()
    expected, chunks = case.run(), case.chunks()
    order = torch.tensor([2, 0, 1], device=DEVICE)
    wider = torch.full((6, chunks.tables.shape[1] + 3), 99_999, dtype=torch.int32, device=DEVICE)
    wider[1:4, :-3] = chunks.tables[order]
    entries = chunks.chunks.clone()
    entries[:, 2] = 1 + order.argsort().int()
    empty = entries[-1:].clone()
    empty[:, 0], empty[:, 1] = len(case.q), 0
    entries = torch.cat([entries, empty])
    result = case.run(replace(chunks, chunks=entries, tables=wider))
    torch.testing.assert_close(result, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1e-9, 1e5])
def test_scales_of_int8_may_have_any_size(size: float) -> None:
    for dtype in (BF16, FLOAT):
        case = ChunkCase(kind=(dtype, INT8))
        assert isinstance(case.latents, ScaledKV)
        case.latents.scales.mul_(size)
        case.q /= size
        result, expected = (
            each.float() / size for each in (case.values(case.run()), case.expected())
        )
        torch.testing.assert_close(
            result[case.chunk_rows], expected[case.chunk_rows], atol=2e-2, rtol=2e-2
        )


@NOT_NUMBERS
def test_latents_that_are_not_numbers_show_in_the_rows_that_see_them(converts: None) -> None:
    """The sampler refuses such a sequence; it must not become a token."""
    for kind in KINDS:
        case = ChunkCase(kind=kind)
        sequence = case.sequences[1]
        slot = int(sequence.block_table[2]) * BLOCK
        values = case.latents.scales if isinstance(case.latents, ScaledKV) else case.latents
        assert isinstance(values, torch.Tensor)
        values[:, slot] = torch.nan
        wrong = case.run().isnan().all(dim=-1)[:, case.chunk_rows].all(dim=0)
        # Rows that do not see it share a tile of sums with rows that do, if of one sequence.
        assert wrong[2 * BLOCK : sequence.num_rows].all(), kind
        assert not wrong[sequence.num_rows :].any(), kind


def test_a_step_has_chunks_and_rows_that_decode() -> None:
    """Either kernel may be there without the other."""
    case = ChunkCase()
    decodes = decode_metadata(case.sequences, DEVICE)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    inputs = case.q, case.latents, case.k_up, case.v_up
    expected = case.expected()
    for rows, chunks in ((decodes, case.chunks()), (None, case.chunks()), (decodes, None)):
        metadata = AttentionMetadata(case.sequences, slots, rows, chunks)
        result = GpuOperators().latent_attention(*inputs, metadata, SCALE)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_what_a_rank_tries_at_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def config(kind: tuple[torch.dtype, torch.dtype], device: torch.device) -> LatentConfig:
        return LatentConfig(device, *kind, 3, 12, 8, 40, 20, BLOCK)

    for kind in ((FLOAT, FLOAT), (BF16, FP8)):
        tried = config(kind, DEVICE)
        assert latent_trial.chunk_error(tried) < limit(tried)
    on_gpu = config((BF16, INT8), torch.device("cuda"))
    assert not GpuOperators().prepare_latent_chunks(config((FLOAT, FLOAT), torch.device("cpu")))
    assert not Operators().prepare_latent_chunks(on_gpu)
    monkeypatch.setattr(latent_trial, "chunk_error", lambda _: 0.9)
    latent_trial.takes_chunks.cache_clear()
    assert not GpuOperators().prepare_latent_chunks(on_gpu)
    assert "one by one, because of Triton: its results are 0.9 off" in caplog.text
    latent_trial.takes_chunks.cache_clear()

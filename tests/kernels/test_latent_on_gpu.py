"""Latent attention by Triton against the reference: on a GPU if there is one, else as Triton
interprets it. Without Triton it is skipped."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import numpy as np
import pytest
import torch

from tandem.kernels.attention_metadata import (
    AttentionMetadata,
    DecodeMetadata,
    LatentConfig,
    SequenceMetadata,
    decode_metadata,
)
from tandem.kernels.errors import KernelUnavailableError
from tandem.kernels.fp8 import FP8
from tandem.kernels.operators import Operators
from tandem.kernels.reference.cache import write_cache
from tandem.kernels.reference.latent import absorbed_attention
from tandem.kernels.scaled import INT8, CachedKV, ScaledKV, TensorScaledKV

pytest.importorskip("triton")

from tandem.kernels.gpu import latent_decode as kernels
from tandem.kernels.gpu import latent_store, latent_trial, split_rule
from tandem.kernels.gpu.decode_trial import limit
from tandem.kernels.gpu.latent_attention import attend_latents
from tandem.kernels.gpu.operators import GpuOperators
from tandem.tests.kernels.interpreted import interpret_as_a_gpu_computes
from tandem.tests.support import quick_interpreter

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FLOAT, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
KINDS = [
    *((FLOAT, FLOAT), (BF16, BF16), (HALF, HALF), (BF16, FP8)),
    *((FLOAT, FP8), (FLOAT, INT8), (BF16, INT8)),
]
# Of results, by the dtype in which products are taken.
TOLERANCE = {FLOAT: 1e-5, BF16: 2e-2, HALF: 3e-3}
H100_PROCESSORS = kernels.processors(torch.device("meta"))
WHOLE_SPLITS = (kernels, "MIN_SPLIT", kernels.MIN_SPLIT), (split_rule, "MAX_SPLITS", 64)
# Tokens of a split, and the most splits, of which the interpreter takes less long.
MIN_SPLIT, MAX_SPLITS = 64, 8
BLOCK, BLOCKS, SCALE = 4, 800, 0.11
NOT_NUMBERS = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "MIN_SPLIT", MIN_SPLIT)
    monkeypatch.setattr(split_rule, "MAX_SPLITS", MAX_SPLITS)
    # So few that each program attends to several splits.
    monkeypatch.setattr(kernels, "processors", lambda _: 5)
    monkeypatch.setattr(kernels, "constants", unwrap(kernels.constants))
    if INTERPRETED:
        interpret_as_a_gpu_computes(monkeypatch)


@pytest.fixture(params=[False, True], ids=["by bits", "by hardware"])
def converts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to widen fp8, of which a GPU that is there may have one only."""
    if request.param and not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not convert fp8")
    monkeypatch.setattr(kernels, "converts_fp8", lambda: request.param)


def poisoned(width: int, dtype: torch.dtype, scale: float | None = None) -> CachedKV:
    """A cache that nothing was written to."""
    shape = (1, BLOCKS * BLOCK, width)
    if dtype == INT8:
        scales = torch.full((*shape[:2], 1), torch.nan, device=DEVICE)
        return ScaledKV(torch.full(shape, 77, dtype=INT8, device=DEVICE), scales)
    values = torch.full(shape, torch.nan, device=DEVICE).to(dtype)
    return values if scale is None else TensorScaledKV(values, scale)


class LatentCase:
    """Sequences of some lengths, a row of each, whose blocks lie anywhere."""

    def __init__(
        self,
        lengths: list[int],
        kind: tuple[torch.dtype, torch.dtype] = (FLOAT, FLOAT),
        heads: int = 3,
        dims: tuple[int, int, int, int] = (12, 8, 40, 20),
        whole_scale: float | None = None,
    ) -> None:
        q_dtype, dtype = kind
        nope, rope, width, value_dim = dims
        self.latents = poisoned(width + rope, dtype, whole_scale)
        free = torch.randperm(BLOCKS).tolist()
        self.sequences = []
        for row, length in enumerate(lengths):
            table = [free.pop() for _ in range(-(-length // BLOCK))]
            slots = [table[t // BLOCK] * BLOCK + t % BLOCK for t in range(length)]
            values = torch.randn(length, 1, width + rope, device=DEVICE)
            write_cache(self.latents, torch.tensor(slots, device=DEVICE), values)
            self.sequences.append(SequenceMetadata(slice(row, row + 1), length - 1, table, BLOCK))
        self.q = torch.randn(len(lengths), heads, nope + rope, device=DEVICE).to(q_dtype)
        up = torch.randn(heads, nope + value_dim, width, device=DEVICE) * width**-0.5
        self.k_up, self.v_up = up.to(q_dtype).split([nope, value_dim], dim=1)

    def decodes(self) -> DecodeMetadata:
        decodes = decode_metadata(self.sequences, DEVICE)
        assert decodes is not None
        return decodes

    def run(self, decodes: DecodeMetadata | None = None) -> torch.Tensor:
        out = self.q.new_full((*self.q.shape[:2], self.v_up.shape[1]), 77.0)
        inputs = self.q, self.latents, self.k_up, self.v_up
        attend_latents(*inputs, decodes or self.decodes(), None, SCALE, out)
        return out

    def expected(self) -> torch.Tensor:
        inputs = self.q, self.latents, self.k_up, self.v_up
        return absorbed_attention(*inputs, self.sequences, SCALE)

    def check(self) -> None:
        result, expected = self.run(), self.expected()
        assert result.dtype == self.q.dtype
        tolerance = TOLERANCE[result.dtype]
        torch.testing.assert_close(result.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_row_attends_to_its_own_latents(kind: tuple[torch.dtype, torch.dtype]) -> None:
    LatentCase([1, 19, MIN_SPLIT, MIN_SPLIT + 1, 3 * MIN_SPLIT], kind).check()


@pytest.mark.parametrize("kind", [(BF16, FP8), (FLOAT, FP8)], ids=str)
def test_fp8_is_widened_either_way(kind: tuple[torch.dtype, torch.dtype], converts: None) -> None:
    LatentCase([5, MIN_SPLIT + 3], kind).check()


def test_latents_may_have_one_scale(converts: None) -> None:
    LatentCase([5, MIN_SPLIT + 3], (FLOAT, FP8), whole_scale=0.013).check()


@pytest.mark.parametrize("heads", [1, 17, 34])
@pytest.mark.parametrize("dims", [(8, 6, 24, 5), (3, 32, 64, 40)])
def test_heads_of_any_number_and_size(heads: int, dims: tuple[int, int, int, int]) -> None:
    for dtype in (FLOAT, HALF):
        LatentCase([70, 3], (dtype, dtype), heads, dims).check()


@pytest.mark.parametrize("kind", [(BF16, FP8), (FLOAT, INT8), (HALF, HALF)], ids=str)
def test_latents_may_be_aligned_to_single_numbers(kind: tuple[torch.dtype, torch.dtype]) -> None:
    LatentCase([70, 3], kind, 5, (8, 6, 25, 5)).check()


def test_splits_of_any_number_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever order they are finished; and the count of those is set back for the next
    layer."""
    lengths = [number * MIN_SPLIT - number % 3 for number in range(1, MAX_SPLITS + 2)]
    case = LatentCase(lengths, heads=3)
    decodes, expected = case.decodes(), case.expected()
    for seed in range(2):
        monkeypatch.setattr(quick_interpreter, "ORDER_SEED", seed)
        torch.testing.assert_close(case.run(decodes), expected, atol=1e-5, rtol=1e-5)
    ((splits, num_work, finished),) = decodes.derived.values()
    assert set(splits[: int(num_work), 4].tolist()) == set(range(1, MAX_SPLITS + 1))
    assert not finished[: partials(splits[: int(num_work)])].any()


def partials(splits: torch.Tensor, max_splits: int = MAX_SPLITS) -> int:
    """The partial results of splits that are listed: each has a place, the first ones that are."""
    at = splits[splits[:, 4] > 1, 5]
    places = (at // max_splits + at % max_splits).sort().values
    assert places.tolist() == list(range(len(places)))
    return len(places)


@pytest.mark.parametrize("kind", [(FLOAT, FLOAT), (BF16, INT8)], ids=str)
def test_a_row_has_the_same_result_in_any_batch(
    kind: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rows and padding are beside it, if they are not many, and in whichever order splits
    are finished."""
    case = LatentCase([5 * MIN_SPLIT, 9, 3 * MIN_SPLIT - 5, *[MIN_SPLIT] * 5], kind)
    together, decodes = case.run(), case.decodes()
    for number in range(3):
        monkeypatch.setattr(quick_interpreter, "ORDER_SEED", number)
        rows = torch.zeros(1 + 4 * number, 3, dtype=torch.int32, device=DEVICE)
        rows[number] = decodes.rows[number]
        alone = DecodeMetadata(rows, decodes.tables, decodes.max_seq_len, BLOCK)
        assert case.run(alone)[number].equal(together[number])


def test_steps_of_many_tokens_have_fewer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more partial results than there is room for, whatever the lengths."""
    monkeypatch.setattr(split_rule, "_SPLITS_PER_PROGRAM", 1)  # of 5 processors' 10 programs
    for lengths, used in (([700, 3, 300, *[150] * 9], 3), ([400] * 6, 12)):
        case = LatentCase(lengths)
        decodes = case.decodes()
        result = case.run(decodes)
        torch.testing.assert_close(result, case.expected(), atol=1e-5, rtol=1e-5)
        ((splits, num_work, finished),) = decodes.derived.values()
        assert partials(splits[: int(num_work)]) == used <= len(finished) == 14


LENGTHS = {
    "one of 100k": [100_000, *[500] * 255],
    "four of 32k": [*[2000] * 60, *[32_768] * 4],
    "64 of 4k": [4096] * 64,
    "all lengths": [1 + 8000 * row // 255 for row in range(256)],
}


@pytest.mark.parametrize(
    ("name", "heads", "bound"),
    [
        ("one of 100k", 16, 1.6),
        ("four of 32k", 16, 1.1),
        ("64 of 4k", 16, 1.1),
        ("all lengths", 16, 1.1),
        ("one of 100k", 128, 1.1),
        ("four of 32k", 128, 1.1),
        ("all lengths", 128, 1.1),
    ],
)
def test_splits_are_spread_over_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, heads: int, bound: float
) -> None:
    """Program p of the grid runs on processor p, modulo their number."""
    for module, constant, number in WHOLE_SPLITS:
        monkeypatch.setattr(module, constant, number)
    lengths = LENGTHS[name]
    monkeypatch.setattr(kernels, "processors", lambda _: H100_PROCESSORS)
    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(kernels, "_attend_latents", _Recorded(launches))
    rows = torch.tensor([(row, row, each) for row, each in enumerate(lengths)], dtype=torch.int32)
    tables = torch.zeros(len(lengths), 100_000 // 16, dtype=torch.int32, device=DEVICE)
    decodes = DecodeMetadata(rows.to(DEVICE), tables, 0, 16)
    wide = torch.empty(heads, len(lengths), 512, dtype=BF16, device=DEVICE)
    q, latents = wide.new_empty(len(lengths), heads, 192), wide.new_empty(1, 16, 576)
    kernels.latent_decode(q, wide, latents, decodes, 0.1, wide)
    ((splits, num_work, _),) = decodes.derived.values()
    splits = splits[: int(num_work)].cpu()
    tokens = splits[:, 3] - splits[:, 2]
    assert int(tokens.sum()) == sum(lengths)
    (launch,) = launches
    partial_PHC, (programs,) = launch["partial_PHC"], launch["grid"]
    assert partials(splits, launch["MAX_SPLITS"]) <= len(partial_PHC)
    assert partial_PHC.nbytes < 100e6
    tokens = tokens.repeat_interleave(launch["HEAD_BLOCKS"])
    processor = torch.arange(len(tokens)) % programs % H100_PROCESSORS
    loads = torch.zeros(H100_PROCESSORS).index_add_(0, processor, tokens.float())
    assert loads.max() < bound * loads.mean()


class _Recorded:
    """A kernel whose launches are recorded."""

    def __init__(self, launches: list[dict[str, Any]]) -> None:
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *tensors, **fixed: self.launches.append(
            {"grid": grid, "partial_PHC": tensors[8], **fixed}
        )


def test_queries_may_be_a_part_of_wider_rows() -> None:
    case = LatentCase([30, 7])
    case.q = torch.randn(2, 71, device=DEVICE)[:, 3:63].view(2, 3, 20)
    case.check()


def test_padding_is_not_attended_to_and_rows_may_have_any_place() -> None:
    case = LatentCase([40, 3 * MIN_SPLIT, 9])
    expected, decodes = case.expected(), case.decodes()
    rows = torch.tensor([[2, 2, 9], [0, 99, 0], [0, 0, 40], [1, 7, 0]], dtype=torch.int32)
    padded = DecodeMetadata(rows.to(DEVICE), decodes.tables, decodes.max_seq_len, BLOCK)
    result = case.run(padded)
    torch.testing.assert_close(result[::2], expected[::2], atol=1e-5, rtol=1e-5)


def test_lengths_are_read_on_the_device() -> None:
    """As in a graph, which is replayed with others."""
    case = LatentCase([40, 3 * MIN_SPLIT])
    decodes = case.decodes()
    wrong = DecodeMetadata(decodes.rows, decodes.tables, 1, BLOCK)
    torch.testing.assert_close(case.run(wrong), case.run(decodes), atol=0, rtol=0)


@pytest.mark.parametrize("size", [1e-9, 1e5])
def test_scales_of_int8_may_have_any_size(size: float) -> None:
    case = LatentCase([100], (BF16, INT8))
    assert isinstance(case.latents, ScaledKV)
    case.latents.scales.mul_(size)
    case.q /= size
    result, expected = (each.float() / size for each in (case.run(), case.expected()))
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)


@NOT_NUMBERS
def test_latents_that_are_not_numbers_show_in_the_output(converts: None) -> None:
    """The sampler refuses such a sequence; it must not become a token."""
    for kind in KINDS:
        case = LatentCase([40, 40], kind)
        slot = case.sequences[0].block_table[3] * BLOCK
        values = case.latents.scales if isinstance(case.latents, ScaledKV) else case.latents
        assert isinstance(values, torch.Tensor)
        values[:, slot] = torch.nan
        wrong = case.run().isnan().flatten(1)
        assert wrong[0].all() and not wrong[1].any()


# ---- storing -------------------------------------------------------------------------------------


def stored(
    kind: tuple[torch.dtype, torch.dtype], whole_scale: float | None, *, by_triton: bool
) -> tuple[torch.Tensor, CachedKV]:
    """Queries and a cache after rows of part of a product were written, one of them without a
    place."""
    dtype, cache_dtype = kind
    rows, heads, nope, rope, width = 7, 5, 10, 6, 40
    generator = torch.Generator().manual_seed(1)
    down = torch.randn(rows, heads * (nope + rope) + width + rope, generator=generator)
    down = (down * torch.logspace(-2, 3, rows)[:, None]).to(DEVICE, dtype)
    q, kv = down.split([heads * (nope + rope), width + rope], dim=-1)
    weight = torch.rand(width, generator=generator).to(DEVICE, dtype)
    angles = torch.randn(rows, 1, rope // 2, generator=generator).to(DEVICE)
    cos, sin = angles.cos(), angles.sin()
    cos_sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    latents = poisoned(width + rope, cache_dtype, whole_scale)
    slots = torch.randperm(BLOCKS * BLOCK, generator=generator)[:rows].to(DEVICE)
    store = latent_store.rope_and_cache_latent if by_triton else torch_store
    q_THD = q.view(rows, heads, nope + rope)
    return store(q_THD, kv, weight, 1e-5, cos_sin, latents, slots), latents


def torch_store(*arguments: Any) -> torch.Tensor:
    q, kv, weight, eps, cos_sin, latents, slots = arguments
    return Operators().rope_and_cache_latent(q, kv, weight, eps, cos_sin, (latents,), slots)


@pytest.mark.parametrize(
    ("kind", "whole_scale"), [*((kind, None) for kind in KINDS), ((BF16, FP8), 0.3)], ids=str
)
def test_latents_are_stored_as_torch_stores_them(
    kind: tuple[torch.dtype, torch.dtype], whole_scale: float | None
) -> None:
    (q, ours), (expected, theirs) = (
        stored(kind, whole_scale, by_triton=by_triton) for by_triton in (True, False)
    )
    # Torch rounds the norm before it multiplies with the weight, and sums of two products twice.
    tolerance = {FLOAT: 1e-6, HALF: 1e-3, BF16: 8e-3}[kind[0]]
    torch.testing.assert_close(q.float(), expected.float(), atol=tolerance, rtol=tolerance)
    if isinstance(ours, ScaledKV):
        assert isinstance(theirs, ScaledKV)
        torch.testing.assert_close(ours.scales, theirs.scales, equal_nan=True, atol=0, rtol=8e-3)
        assert (ours.values.int() - theirs.values.int()).abs().max() <= 1
        return
    values, expected = (
        (each if isinstance(each, torch.Tensor) else each.values).float() for each in (ours, theirs)
    )
    step = 1 / 8 if kind[1] == FP8 else tolerance
    torch.testing.assert_close(values, expected, equal_nan=True, atol=step / 64, rtol=step)


def test_a_row_without_a_place_is_not_stored() -> None:
    q, kv = torch.randn(2, 3, 8, device=DEVICE), torch.randn(2, 14, device=DEVICE)
    latents = poisoned(14, FLOAT)
    assert isinstance(latents, torch.Tensor)
    angles = torch.ones(2, 1, 4, device=DEVICE), torch.zeros(2, 1, 4, device=DEVICE)
    slots = torch.tensor([-1, 5], device=DEVICE)
    weight = torch.ones(10, device=DEVICE)
    latent_store.rope_and_cache_latent(q, kv, weight, 1e-6, angles, latents, slots)
    assert latents[0].isnan().all(dim=-1).logical_not().nonzero().tolist() == [[5]]


def test_rows_between_vectors_are_left_to_torch() -> None:
    """Here, those of a product whose results begin with something else."""
    down, slots = torch.randn(2, 51, device=DEVICE), torch.tensor([3, 5], device=DEVICE)
    q, kv = down[:, 3:35].view(2, 4, 8), down[:, 35:]
    angles = torch.ones(2, 1, 4, device=DEVICE), torch.zeros(2, 1, 4, device=DEVICE)
    inputs = torch.ones(12, device=DEVICE), 1e-6, angles
    ours, theirs = torch.zeros(2, 1, 8, 16, device=DEVICE)
    assert not latent_store.takes(q, kv)
    assert latent_store.takes(q.clone(), kv.clone())
    operators = GpuOperators()
    operators._stores_latents = True
    operators.rope_and_cache_latent(q, kv, *inputs, (ours,), slots)
    Operators().rope_and_cache_latent(q, kv, *inputs, (theirs,), slots)
    assert ours.equal(theirs) and ours.any()


def test_fp8_is_rounded_as_torch_rounds_it() -> None:
    """Every step between two codes, its middle, and its neighbours."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (codes[1:] + codes[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(to)) for to in (-torch.inf, torch.inf)]
    x = torch.cat([codes, middles, *near, torch.tensor([448.0, 464.0, 1e9, 1e-20, 0.0])])
    x = torch.cat([x, -x])
    expected = x.clamp(-448, 448).to(FP8).float()
    # As rotated parts of latents, which an angle of zero leaves as they are.
    kv = torch.cat([torch.ones(1, 4), x[None]], dim=1).to(DEVICE)
    latents = torch.zeros(1, 1, kv.shape[1], device=DEVICE).to(FP8)
    angles = torch.ones(1, 1, len(x), device=DEVICE), torch.zeros(1, 1, len(x), device=DEVICE)
    latent_store.rope_and_cache_latent(
        torch.zeros(1, 1, len(x) + 1, device=DEVICE),
        kv,
        torch.ones(4, device=DEVICE),
        0.0,
        angles,
        latents,
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    assert torch.equal(latents[0, 0, 4:].float().cpu(), expected)


# ---- operators -----------------------------------------------------------------------------------


def test_decoding_rows_and_chunks_of_a_step_are_both_attended_to() -> None:
    case = LatentCase([30, 9, 20, 70])
    tables = [sequence.block_table for sequence in case.sequences]
    sequences = [
        SequenceMetadata(slice(0, 1), 29, tables[0], BLOCK),
        SequenceMetadata(slice(1, 10), 0, tables[1], BLOCK),
        SequenceMetadata(slice(10, 11), 19, tables[2], BLOCK),
        SequenceMetadata(slice(11, 14), 67, tables[3], BLOCK),
    ]
    q = torch.randn(14, 3, 20, device=DEVICE)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    metadata = AttentionMetadata(sequences, slots, decode_metadata(sequences, DEVICE))
    inputs = q, case.latents, case.k_up, case.v_up, metadata, SCALE
    result, expected = (each.latent_attention(*inputs) for each in (GpuOperators(), Operators()))
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def config(q_dtype: torch.dtype, dtype: torch.dtype, device: torch.device = DEVICE) -> LatentConfig:
    return LatentConfig(device, q_dtype, dtype, 3, 12, 8, 40, 20, BLOCK)


def test_what_a_rank_tries_at_its_start_finds_them_right() -> None:
    for q_dtype, dtype in KINDS:
        kind = config(q_dtype, dtype)
        assert latent_trial.decode_error(kind) < limit(kind)
        assert latent_trial.store_error(kind) < limit(kind)


def test_kernels_that_are_wrong_are_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = config(FLOAT, FLOAT, torch.device("cuda"))
    assert not GpuOperators().prepare_latent_decode(config(FLOAT, FLOAT, torch.device("cpu")))
    monkeypatch.setattr(latent_trial, "decode_error", lambda _: 0.9)
    monkeypatch.setattr(latent_trial, "store_error", lambda _: np.nan)
    for cached in (latent_trial.decodes, latent_trial.stores):
        cached.cache_clear()
    assert not GpuOperators().prepare_latent_decode(kind)
    assert "sequences decode one by one, because of Triton: its results are 0.9 off" in caplog.text
    assert "torch writes latents to the cache, because of Triton" in caplog.text
    with pytest.raises(KernelUnavailableError, match=r"its results are 0\.9 off"):
        GpuOperators(triton_required=True).prepare_latent_decode(kind)
    for cached in (latent_trial.decodes, latent_trial.stores):
        cached.cache_clear()

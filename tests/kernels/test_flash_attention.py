"""FlashAttention 3 of chunks, without a GPU that has it: torch's function is replaced by one that
does what its documentation says, and checks what the kernels ask of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tandem.kernels.attention_metadata import (
    AttentionConfig,
    AttentionMetadata,
    AttentionParams,
    SequenceMetadata,
    chunk_metadata,
    decode_metadata,
)
from tandem.kernels.fp8 import FP8
from tandem.kernels.reference.attention import paged_attention
from tandem.kernels.scaled import INT8

pytest.importorskip("triton")

from tandem.kernels.gpu import chunk_attention, chunk_trial, flash_attention, paged_decode
from tandem.kernels.gpu.operators import GpuOperators

ATTEND = "torch.nn.attention.varlen.varlen_attn_out"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FLOAT = torch.bfloat16, torch.float16, torch.float32
CONFIG = AttentionConfig(CUDA, BF16, BF16, 6, 2, 24, 7, AttentionParams(0.2))


def documented(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> None:
    """``varlen_attn_out`` over blocks. Rows that see no token become zeros."""
    assert cu_seq_k is None and seqused_k is not None and block_table is not None
    assert num_splits == 1 and enable_gqa and scale is not None
    for each in (cu_seq_q, seqused_k, block_table):
        assert each.dtype == torch.int32 and each.device == query.device
    assert cu_seq_q.is_contiguous() and seqused_k.is_contiguous() and block_table.stride(1) == 1
    assert len(cu_seq_q) - 1 == len(seqused_k) == len(block_table)
    for each in (out, query, key, value):
        assert each.stride(-1) == 1 and all(stride % 8 == 0 for stride in each.stride()[:-1])
        assert each.dtype == query.dtype
    assert out.shape == query.shape and key.shape == value.shape
    page, group = key.shape[1], query.shape[1] // key.shape[2]
    left, right = window_size
    borders = cu_seq_q.tolist()
    assert borders == sorted(borders) and borders[-1] <= len(query)
    for number, tokens in enumerate(seqused_k.tolist()):
        first, end = borders[number : number + 2]
        assert end - first <= max_q and tokens <= max_k
        blocks = block_table[number, : -(-tokens // page)].long()
        k, v = (
            each[blocks].flatten(0, 1)[:tokens].repeat_interleave(group, dim=1).float()
            for each in (key, value)
        )
        scores = torch.einsum("thd,shd->hts", query[first:end].float(), k) * scale
        # The last row stands at the last token.
        position = torch.arange(tokens - end + first, tokens)[:, None]
        token = torch.arange(tokens)
        hidden = torch.zeros(end - first, tokens, dtype=torch.bool)
        if left >= 0:
            hidden |= token < position - left
        if right >= 0:
            hidden |= token > position + right
        shares = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
        out[first:end] = torch.einsum("hts,shd->thd", shares, v).to(out.dtype)


@cache
def real() -> Any:
    """Torch's function. Its import takes a second, which workers without these tests save."""
    from torch.nn.attention import varlen

    return getattr(varlen, "varlen_attn_out", None)


@pytest.fixture(autouse=True)
def without_flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was found is forgotten, and torch's function is as documented."""
    if real() is None or "block_table" not in inspect.signature(real()).parameters:
        pytest.skip("torch has no attention over blocks")
    torch.manual_seed(0)
    monkeypatch.setattr(ATTEND, documented)
    found = flash_attention.available, flash_attention.works
    for each in found:
        each.cache_clear()
    yield
    for each in found:
        each.cache_clear()


class Machine:
    """A machine with a GPU, and with FlashAttention 3, whose trials are counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.capability, self.package, self.error = (9, 0), True, 0.0
        self.activated: list[str] = []
        self.tried: list[AttentionConfig] = []
        patch.setattr(torch.cuda, "get_device_capability", lambda _: self.capability)
        patch.setattr(flash_attention.importlib.util, "find_spec", lambda _: self.package or None)
        patch.setattr(torch.nn.attention, "activate_flash_attention_impl", self.activated.append)
        patch.setattr(flash_attention, "_largest_error", self._try)
        # The signature of torch's function is that of the real one.
        patch.setattr(ATTEND, real())

    def _try(self, config: AttentionConfig) -> float:
        self.tried.append(config)
        return self.error


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def step(
    chunks: list[tuple[int, int]], gaps: list[int], block_size: int
) -> tuple[list[SequenceMetadata], int]:
    """Sequences with blocks anywhere, for chunks with a first position and rows each, and so many
    decoding rows before each."""
    free = torch.randperm(400).tolist()
    sequences, row = list[SequenceMetadata](), 0
    for (start, rows), gap in zip(chunks, gaps, strict=True):
        for first, count in [(40, 1)] * gap + [(start, rows)]:
            table = [free.pop() for _ in range(-(-(first + count) // block_size))]
            sequences.append(SequenceMetadata(slice(row, row + count), first, table, block_size))
            row += count
    return sequences, row


@pytest.mark.parametrize("window", [None, 1, 9, 500])
@pytest.mark.parametrize(
    ("chunks", "gaps"),
    [
        ([(0, 2)], [0]),
        ([(33, 19)], [3]),
        ([(0, 37), (100, 3), (55, 20)], [0, 0, 0]),
        ([(0, 5), (61, 11), (0, 2), (7, 30)], [1, 2, 0, 5]),
    ],
)
def test_chunks_are_attended_as_by_the_reference(
    chunks: list[tuple[int, int]], gaps: list[int], window: int | None
) -> None:
    """With other rows between them, and queries that are a part of wider rows."""
    block_size, heads, kv, dim = (1, 7, 16)[len(chunks) % 3], 6, 2, 24
    sequences, rows = step(chunks, gaps, block_size)
    keys, values = torch.randn(2, kv, 400 * block_size, dim).to(BF16)
    q = torch.randn(rows + 2, heads + 2 * kv, dim).to(BF16)[:, :heads]
    params, metadata = AttentionParams(0.3, window), chunk_metadata(sequences, CPU)
    assert metadata is not None
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    flash_attention.flash_attention(q, keys, values, metadata, params, out)
    several = [sequence for sequence in sequences if sequence.num_rows > 1]
    expected = paged_attention(q, keys, values, several, params)
    for sequence in several:
        torch.testing.assert_close(
            out[sequence.rows], expected[sequence.rows], atol=0.03, rtol=0.02
        )
    # What was computed from the step's chunks serves all layers.
    (derived,) = metadata.derived.values()
    flash_attention.flash_attention(q, keys, values, metadata, params, out)
    assert all(map(torch.equal, derived, flash_attention.ragged(metadata)))
    assert list(metadata.derived.values()) == [derived]


def test_rows_of_encoders_see_both_sides() -> None:
    for window in (None, 5):
        sequences, rows = step([(0, 20), (0, 9)], [0, 0], 4)
        keys, values = torch.randn(2, 2, 1600, 16).to(FP16)
        q, params = torch.randn(rows, 4, 16).to(FP16), AttentionParams(0.3, window, causal=False)
        metadata = chunk_metadata(sequences, CPU)
        assert metadata is not None
        out = torch.empty_like(q)
        flash_attention.flash_attention(q, keys, values, metadata, params, out)
        expected = paged_attention(q.float(), keys.float(), values.float(), sequences, params)
        torch.testing.assert_close(out.float(), expected, atol=0.01, rtol=0.01)


def test_the_cache_is_read_where_it_is() -> None:
    cache = torch.randn(3, 10 * 16, 8)
    paged = flash_attention.paged(cache, 16)
    assert paged.shape == (10, 16, 3, 8) and paged.data_ptr() == cache.data_ptr()
    assert torch.equal(paged[4, 5], cache[:, 4 * 16 + 5])


def test_decoding_rows_between_chunks_keep_their_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention writes zeros there, before the decode kernel writes them."""
    monkeypatch.setattr(flash_attention, "works", lambda _: True)
    operators = GpuOperators()

    def decode(q: Any, keys: Any, values: Any, rows: Any, params: Any, out: Any, **_: Any) -> None:
        single = [each for each in sequences if each.num_rows == 1]
        paged_attention(q, keys, values, single, params, out=out)

    monkeypatch.setattr(paged_decode, "paged_decode", decode)
    sequences, rows = step([(0, 5), (61, 11), (7, 30)], [1, 2, 3], 7)
    keys, values = torch.randn(2, 2, 2800, 24).to(BF16)
    q = torch.randn(rows, 6, 24).to(BF16)
    metadata = AttentionMetadata(
        sequences,
        torch.empty(0, dtype=torch.int64),
        decode_metadata(sequences, CPU),
        chunk_metadata(sequences, CPU),
    )
    config = replace(CONFIG, device=CPU)
    assert operators.prepare_batched_chunks(config)
    actual = operators.paged_attention(q, keys, values, metadata, config.params)
    expected = paged_attention(q, keys, values, sequences, config.params)
    torch.testing.assert_close(actual, expected, atol=0.03, rtol=0.02)


def test_layers_that_it_does_not_support_keep_the_triton_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layer of a model is computed by what was prepared for it."""
    called: list[str] = []

    def record(name: str) -> Any:
        return lambda *_, **__: called.append(name)

    monkeypatch.setattr(flash_attention, "works", lambda config: config.params.soft_cap is None)
    monkeypatch.setattr(chunk_trial, "works", lambda _: True)
    monkeypatch.setattr(flash_attention, "flash_attention", record("flash"))
    operators = GpuOperators()
    monkeypatch.setattr(chunk_attention, "chunk_attention", record("triton"))
    sequences, rows = step([(0, 5)], [0], 7)
    keys, values = torch.randn(2, 2, 2800, 24).to(BF16)
    slots = torch.empty(0, dtype=torch.int64)
    metadata = AttentionMetadata(sequences, slots, chunks=chunk_metadata(sequences, CPU))
    plain, capped = AttentionParams(0.2), AttentionParams(0.2, soft_cap=5.0)
    assert operators.chunks_in_place
    for params in (plain, capped):
        assert operators.prepare_batched_chunks(replace(CONFIG, device=CPU, params=params))
    for params in (plain, capped, plain):
        operators.paged_attention(torch.randn(rows, 6, 24).to(BF16), keys, values, metadata, params)
    assert called == ["flash", "triton", "flash"] and not operators.chunks_in_place


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"dtype": FP16, "cache_dtype": FP16, "dim": 256}, ""),
        ({"params": AttentionParams(0.2, window=100)}, ""),
        ({"params": AttentionParams(0.2, causal=False)}, ""),
        ({"dtype": FLOAT, "cache_dtype": FLOAT}, "torch.float32"),
        ({"cache_dtype": FP8}, "float8"),
        ({"cache_dtype": INT8}, "int8"),
        ({"cache_dtype": FP16}, "float16"),
        ({"dim": 20}, "heads of 20"),
        ({"dim": 512}, "heads of 512"),
        ({"params": AttentionParams(0.2, soft_cap=30.0)}, "soft caps"),
        ({"params": AttentionParams(0.2, sinks=True)}, "sinks"),
    ],
)
def test_what_is_supported(machine: Machine, change: dict[str, Any], reason: str) -> None:
    config = replace(CONFIG, **change)
    assert reason in flash_attention.unsupported(config)
    assert flash_attention.works(config) == (not reason)
    # Without a layer that it computes, torch keeps its own kernels.
    assert machine.tried == ([] if reason else [config])
    assert machine.activated == ([] if reason else ["FA3"])


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_are_not_asked(
    machine: Machine, caplog: pytest.LogCaptureFixture, capability: tuple[int, int]
) -> None:
    machine.capability = capability
    with caplog.at_level("INFO"):
        assert not flash_attention.works(CONFIG)
    assert not caplog.text and not machine.activated
    for device in (CPU, torch.device("meta")):
        assert not flash_attention.works(replace(CONFIG, device=device))


def test_the_reason_is_logged_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(CONFIG, block_size=16)

    def logged() -> str:
        for each in (flash_attention.available, flash_attention.works):
            each.cache_clear()
        caplog.clear()
        with caplog.at_level("INFO"):
            assert not flash_attention.works(CONFIG) and not flash_attention.works(other)
        (record,) = caplog.records
        return record.getMessage()

    machine.package = False
    assert "flash-attn-3 is not installed" in logged()
    machine.package = True
    monkeypatch.setattr(ATTEND, lambda out, query, key, value: None)
    assert "install torch 2.12 or later" in logged()
    monkeypatch.delattr(ATTEND)
    assert "install torch 2.12 or later" in logged()
    assert not machine.activated and not machine.tried


def test_a_package_that_fails_or_errs_is_not_used(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.error = 0.3
    assert not flash_attention.works(CONFIG)
    assert "its results are 0.3 off" in caplog.text
    flash_attention.available.cache_clear()

    def fails(_: str) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", fails)
    assert not flash_attention.works(replace(CONFIG, dim=64))
    assert "libcudart.so.12" in caplog.text


def test_the_trial_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for params in (AttentionParams(0.2), AttentionParams(0.2, window=30)):
        kind = replace(CONFIG, device=CPU, params=params)
        assert flash_attention._largest_error(kind) < 0.03
    monkeypatch.setattr(flash_attention, "window_size", lambda _: (-1, -1))
    assert flash_attention._largest_error(kind) > 0.1
    monkeypatch.setattr(ATTEND, lambda *_, **__: None)
    assert flash_attention._largest_error(kind) == torch.inf


def test_torch_takes_the_arguments_that_are_passed() -> None:
    ours, theirs = inspect.signature(documented).parameters, inspect.signature(real()).parameters
    assert {name: (each.kind, each.default) for name, each in ours.items()} == {
        name: (each.kind, each.default) for name, each in theirs.items() if name != "return_aux"
    }


def test_a_step_on_a_gpu_waits_for_nothing() -> None:
    """Of the step's lengths only the device knows, and torch's operator takes the arguments."""
    meta = torch.device("meta")
    sequences, rows = step([(0, 5), (61, 11)], [1, 2], 16)
    chunks = chunk_metadata(sequences, meta)
    assert chunks is not None
    keys, values = torch.empty(2, 2, 400 * 16, 64, device=meta, dtype=BF16)
    q = torch.empty(rows, 4, 64, device=meta, dtype=BF16)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(ATTEND, real())
        out = torch.empty_like(q)
        flash_attention.flash_attention(q, keys, values, chunks, AttentionParams(0.1), out)

"""Absorbed and expanded latent attention against explicit keys and values, at odd sizes."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.attention_metadata import SequenceMetadata
from tandem.kernels.fp8 import FP8
from tandem.kernels.reference import latent
from tandem.kernels.reference.cache import write_cache

HEADS, NOPE, ROPE, WIDTH, BLOCK, SLOTS = 3, 10, 6, 40, 4, 1300
SCALE = 0.31
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3, FP8: 1e-5}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def scattered_slots(tokens: int, first: int = 0) -> list[int]:
    """Every second block, backwards."""
    return [first + 2 * index for index in range(-(-tokens // BLOCK))][::-1]


class LatentCase:
    """Latents, queries and matrices at random; unused slots are poisoned."""

    def __init__(
        self, dtype: torch.dtype, value_dim: int, contexts: list[SequenceMetadata]
    ) -> None:
        self.contexts = contexts
        rows = contexts[-1].rows.stop
        self.q = torch.randn(rows, HEADS, NOPE + ROPE)
        self.k_up, self.v_up = (
            torch.randn(HEADS, NOPE + value_dim, WIDTH).mul(0.2).split([NOPE, value_dim], dim=1)
        )
        self.latents = torch.full((1, SLOTS, WIDTH + ROPE), torch.nan).to(dtype)
        for context in contexts:
            slots = [
                context.block_table[token // BLOCK] * BLOCK + token % BLOCK
                for token in range(context.end)
            ]
            values = torch.randn(1, len(slots), WIDTH + ROPE)
            write_cache(self.latents, torch.tensor(slots), values.transpose(0, 1))

    def written_out(self) -> torch.Tensor:
        """In float64."""
        rows = []
        for context in self.contexts:
            latents = context.gather(self.latents.double(), 0, context.end)[0]
            q = self.q[context.rows].double()
            k = torch.einsum("hnc,lc->hln", self.k_up.double(), latents[:, :WIDTH])
            v = torch.einsum("hvc,lc->hlv", self.v_up.double(), latents[:, :WIDTH])
            k = torch.cat([k, latents[None, :, WIDTH:].expand(HEADS, -1, -1)], dim=-1)
            scores = torch.einsum("thd,hld->htl", q, k) * SCALE
            later = torch.ones(scores.shape[1:]).triu(context.start + 1).bool()
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            rows.append(torch.einsum("htl,hlv->thv", weights, v))
        return torch.cat(rows)

    def close(self, result: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.latents.dtype]
        torch.testing.assert_close(
            result.double(), self.written_out(), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("value_dim", [5, NOPE + ROPE, 19])
@pytest.mark.parametrize(("rows", "start"), [(1, 0), (1, 98), (7, 0), (19, 80), (99, 0), (600, 7)])
def test_both_ways_give_what_keys_and_values_do(
    dtype: torch.dtype, value_dim: int, rows: int, start: int
) -> None:
    """600 rows are more than a tile."""
    for blocks in (list(range(9, 170)), scattered_slots(start + rows)):
        case = LatentCase(
            dtype, value_dim, [SequenceMetadata(slice(0, rows), start, blocks, BLOCK)]
        )
        inputs = case.q, case.latents, case.k_up, case.v_up
        case.close(latent.absorbed_attention(*inputs, case.contexts, SCALE))
        case.close(latent.expanded_attention(*inputs, case.contexts[0], SCALE))


def test_heads_are_expanded_in_any_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LatentCase(
        torch.float32, 5, [SequenceMetadata(slice(0, 40), 3, scattered_slots(43), BLOCK)]
    )
    inputs = case.q, case.latents, case.k_up, case.v_up
    for size in (1, 2 * 4 * 43 * 16 * 4, 1 << 30):
        monkeypatch.setattr(latent, "_EXPANDED_BYTES", size)
        case.close(latent.expanded_attention(*inputs, case.contexts[0], SCALE))


def test_a_batch_is_attended_in_the_way_that_is_cheaper_for_each_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoding rows, a long chunk between them, and a short one over a long context."""
    contexts, row = [], 0
    for index, (rows, start) in enumerate([(1, 30), (1, 0), (120, 20), (1, 9), (3, 130), (90, 0)]):
        table = scattered_slots(start + rows, first=index % 2 + 70 * (index // 2))
        contexts.append(SequenceMetadata(slice(row, row + rows), start, table, BLOCK))
        row += rows
    case = LatentCase(torch.float32, 12, contexts)
    expanded = []
    whole = latent.expanded_attention

    def spy(*arguments: object) -> torch.Tensor:
        expanded.append(arguments[4])
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(latent, "expanded_attention", spy)
    inputs = case.q, case.latents, case.k_up, case.v_up
    case.close(latent.latent_attention(*inputs, contexts, SCALE))
    assert expanded == [contexts[2], contexts[5]]

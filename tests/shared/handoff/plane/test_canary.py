from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from tandem.kernels.block_formats import BLOCK_FORMATS
from tandem.shared.handoff.plane.canary import (
    Difference,
    canary_prompt,
    coarsest,
    tolerance,
    worst_difference,
)
from tandem.shared.handoff.plane.messages import Compare, Compared, ReceiveFailed
from tandem.tests.shared.handoff.support.memory_cache import MemoryCache, layer_of
from tandem.tests.shared.handoff.support.plane_pair import PlaneRank, make_cache

Value = Callable[[int, int, int, int, int], float]

LAYERS, HEADS, DIM, BLOCK = 3, 2, 4, 8
OURS, THEIRS, TOKENS = (5, 0, 3, 7), (1, 6, 2, 4), 30


def _cache() -> MemoryCache:
    layout = [layer_of(range(HEADS), 4 * DIM, "float32")] * LAYERS
    return MemoryCache(layout, num_blocks=8, block_size=BLOCK, kv_dtype="float32")


def _fill(cache: MemoryCache, table: tuple[int, ...], value: Value) -> None:
    """Write ``value(layer, side, head, token, dim)`` as float32 wherever the table points."""
    for layer in range(LAYERS):
        for token in range(TOKENS):
            numbers = [
                value(layer, side, head, token, dim)
                for side in range(2)
                for head in range(HEADS)
                for dim in range(DIM)
            ]
            cache.layers[layer][cache.row(table, token)] = array("f", numbers).tobytes()


def _plain(layer: int, side: int, head: int, token: int, dim: int) -> float:
    return math.sin(1 + layer + 3 * side + 5 * head + 7 * token + 11 * dim)


def _worst(theirs: Value, rounding: str = "float32", exact_layers: int = LAYERS) -> Difference:
    cache = _cache()
    _fill(cache, OURS, _plain)
    _fill(cache, THEIRS, theirs)
    compare = Compare(
        transfer_id=0,
        attempt=0,
        ours=OURS,
        theirs=THEIRS,
        first_token=0,
        end_token=TOKENS,
        rounding=rounding,
        exact_layers=exact_layers,
    )
    return worst_difference(cache, compare)


def test_the_same_kv_in_other_blocks_does_not_differ() -> None:
    worst = _worst(_plain)
    assert worst.largest == 0
    assert worst.ratio == 0


def test_rounding_is_allowed_and_what_exceeds_it_is_named() -> None:
    def rounded(layer: int, side: int, head: int, token: int, dim: int) -> float:
        return _plain(layer, side, head, token, dim) * (1 + 1e-6)

    assert 0 < _worst(rounded).ratio < 1

    def off(layer: int, side: int, head: int, token: int, dim: int) -> float:
        wrong = (layer, side, head, token, dim) == (2, 1, 1, 17, 3)
        return _plain(layer, side, head, token, dim) + 0.25 * wrong

    worst = _worst(off)
    assert (worst.layer, worst.component) == (2, "V")
    assert worst.largest == pytest.approx(0.25, rel=1e-5)
    assert worst.ratio > 1


@pytest.mark.parametrize(
    "layout",
    [
        lambda layer, side, head, token, dim: _plain(layer, side, 1 - head, token, dim),
        lambda layer, side, head, token, dim: _plain(layer, 1 - side, head, token, dim),
        lambda layer, side, head, token, dim: _plain(layer, side, head, token ^ 1, dim),
        lambda layer, side, head, token, dim: _plain(layer, side, head, token, dim ^ 1),
        lambda layer, side, head, token, dim: _plain(2 - layer, side, head, token, dim),
    ],
    ids=["heads", "K and V", "tokens", "dims", "layers"],
)
def test_another_order_of_the_same_numbers_is_detected(layout: Value) -> None:
    assert _worst(layout).ratio > 100


def test_a_value_that_is_no_number_is_too_much() -> None:
    assert _worst(lambda *at: math.nan if at == (1, 0, 0, 0, 0) else _plain(*at)).ratio == math.inf


@pytest.mark.parametrize(
    ("rounding", "off"), [("float16", 1e-3), ("bfloat16", 8e-3), ("float8_e4m3fn", 0.06)]
)
def test_coarser_formats_allow_more(rounding: str, off: float) -> None:
    """One rounding of the format passes, eight times its tolerance does not."""
    for scale, fits in ((off, True), (30 * off, False)):
        worst = _worst(lambda *at, scale=scale: _plain(*at) * (1 + scale), rounding)
        assert worst.ratio > 0 and (worst.ratio < 1) == fits
    assert worst.limit == pytest.approx(tolerance(rounding, worst.layer), rel=0.01)
    assert tolerance(rounding, 3) == 2 * tolerance(rounding, 0)
    assert _worst(lambda *at: _plain(*at) * (1 + off)).ratio > 1


def test_another_layout_is_detected_in_deep_models_and_coarse_dtypes() -> None:
    def transposed(layer: int, side: int, head: int, *at: int) -> float:
        return _plain(layer, side, 1 - head, *at)

    rounding = "float8_e4m3fn"
    assert _worst(transposed, rounding).largest > tolerance(rounding, 1000)
    # In four bits, deep layers may differ as much, and the first ones decide.
    assert _worst(transposed, "Q4_0").ratio > 2


def test_behind_a_router_some_tokens_may_differ_but_not_nearly_all() -> None:
    """In the last layer alone; elsewhere each token counts, as does a value that is no number."""

    def sent_elsewhere(many: int, from_layer: int, value: float) -> Any:
        return lambda layer, side, head, token, dim: (
            value if layer >= from_layer and token < many else _plain(layer, side, head, token, dim)
        )

    assert _worst(sent_elsewhere(26, 2, 9.0), exact_layers=2).ratio == 0
    assert _worst(sent_elsewhere(27, 2, 9.0), exact_layers=2).ratio > 100
    assert _worst(sent_elsewhere(1, 1, 9.0), exact_layers=2).layer == 1
    assert _worst(sent_elsewhere(1, 2, math.nan), exact_layers=2).ratio == math.inf


def test_the_coarsest_format_counts_and_one_that_is_not_known_has_four_bits() -> None:
    assert coarsest(["float32", "float32"]) == "float32"
    assert coarsest(["float16", "float32", "bfloat16"]) == "bfloat16"
    assert coarsest(["float8_e4m3fn", "bfloat16"]) == "float8_e4m3fn"
    assert coarsest(["bfloat16", "Q8_0", "Q6_K"]) == "Q6_K"
    assert coarsest(["float32", "IQ4_XS"]) == "Q4_0"
    assert coarsest(["Q4_1", "Q2_K", "NF4"]) == "Q2_K"
    for name, format in BLOCK_FORMATS.items():
        assert 8 * format.nbytes / format.values > 4 or coarsest([name, "Q4_0"]) == name


def test_the_prompt_is_the_same_everywhere_and_fits() -> None:
    prompt = canary_prompt(50_000, 4096)
    assert prompt == canary_prompt(50_000, 512)
    assert len(set(prompt)) == len(prompt) == 31
    assert all(0 <= token < 50_000 for token in prompt)
    assert len(canary_prompt(512, 3)) == 2


def test_a_rank_compares_two_block_tables_on_command() -> None:
    with PlaneRank("d", listen_host=None, cache=make_cache(dtype="float32")) as rank:
        compare: dict[str, Any] = {
            "rounding": "float32",
            "exact_layers": LAYERS,
            "transfer_id": 4,
            "attempt": 0,
            "first_token": 0,
            "end_token": 9,
        }
        rank.plane.submit(Compare(ours=(1, 2), theirs=(1, 2), **compare))
        same = rank.log.wait(Compared, 4)
        assert same.largest == 0 < same.limit
        rank.plane.submit(Compare(ours=(1, 2), theirs=(999,), **{**compare, "transfer_id": 5}))
        assert "comparing failed" in rank.log.wait(ReceiveFailed, 5).reason

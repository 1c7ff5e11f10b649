"""The fused kernels between the products of a layer against the reference: on a GPU if there is
one, else as Triton interprets them. Without Triton they are skipped.

The interpreter truncates to bfloat16 instead of rounding, so there each rounding may be one unit
off. In float16 results show where a kernel rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from tandem.kernels.activations import Activation
from tandem.kernels.fp8 import FP8
from tandem.kernels.operators import Operators
from tandem.kernels.scaled import INT8, CachedKV, ScaledKV, TensorScaledKV
from tandem.kernels.signatures import CosSin, RopeConfig
from tandem.tests.support.extent import selected

pytest.importorskip("triton")

from tandem.kernels.gpu import activation as gated
from tandem.kernels.gpu import fused_trial, norm, rope_store
from tandem.kernels.gpu.operators import GpuOperators

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = torch.float32, torch.float16, torch.bfloat16
# Relative to a result's magnitude, or to one below it: sums in another order, one unit, and one
# unit for each rounding.
TOLERANCE = {
    torch.float32: 1e-6,
    torch.float16: 2**-10,
    torch.bfloat16: (6 if INTERPRETED else 1) * 2**-7,
}
SLOTS = 40
reference = Operators()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == expected.dtype
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit, equal_nan=True)


# ---- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 19), (3, 96), (2, 576), (0, 64)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = (random(rows, width, dtype=dtype) for _ in range(2))
    weight = random(width, dtype=dtype)
    close(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    if dtype != torch.bfloat16 or not INTERPRETED:
        assert total.equal(residual + x)
    close(total, residual + x, dtype)
    close(normed, reference.rms_norm(total, weight, 1e-6), dtype)


def test_norms_of_parts_of_rows() -> None:
    x, weight = random(7, 200)[:, 40:104], random(64)
    assert norm.takes(x) and not x.is_contiguous()
    close(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), torch.float32)
    total = norm.add_rms_norm(x, x.contiguous(), weight, 1e-6)[1]
    assert total.equal(2 * x) and total.is_contiguous()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(lambda: random(3, 65)[:, 1:], id="between vectors"),
        pytest.param(lambda: random(64, 3).t(), id="transposed"),
        pytest.param(lambda: random(2, 3, 64), id="heads"),
    ],
)
def test_what_does_not_suit_the_norm_is_left_to_torch(
    rows: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_trial, "norm_works", lambda *_: True)
    operators, x, weight = GpuOperators(), rows(), random(64)
    operators.prepare_norm(64, x.dtype, DEVICE)
    assert not norm.takes(x)
    assert operators.rms_norm(x, weight, 1e-6).equal(reference.rms_norm(x, weight, 1e-6))
    ours = operators.add_rms_norm(x, x, weight, 1e-6)
    expected = reference.add_rms_norm(x, x, weight, 1e-6)
    assert all(map(torch.equal, ours, expected))


# ---- activations ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gated_activations(activation: Activation, dtype: torch.dtype) -> None:
    """Of odd widths, also wider than a program, and of values so large that exponentials are not
    finite."""
    for rows, width in ((3, 19), (2, 1500), (0, 8)):
        x = 2 * random(rows, 2 * width, dtype=dtype)
        x[:1, :3] = torch.tensor([-200.0, 200.0, float("nan")])
        # torch's own gelu is 1e-6 off in float32.
        exact = reference.act_and_mul(x.double() if dtype == torch.float32 else x, activation)
        close(gated.act_and_mul(x, activation), exact.to(dtype), dtype)


# ---- rotation and cache --------------------------------------------------------------------------


def angles(rows: int, rotated: int) -> CosSin:
    turns = 10 * random(rows, 1, rotated // 2)
    return turns.cos().repeat(1, 1, 2), torch.cat([-turns.sin(), turns.sin()], dim=-1)


def poisoned(kv_heads: int, dim: int, kind: object) -> CachedKV:
    """A component of a cache, full of numbers that no test writes."""
    dtype = kind if isinstance(kind, torch.dtype) else FP8
    values = torch.full((kv_heads, SLOTS, dim), 99.0, device=DEVICE).to(dtype)
    if kind == INT8:
        return ScaledKV(values, torch.full((kv_heads, SLOTS, 1), 99.0, device=DEVICE))
    return TensorScaledKV(values, 0.37) if kind == "scaled fp8" else values


def numbers(cached: CachedKV) -> torch.Tensor:
    return cached.float() if isinstance(cached, torch.Tensor) else cached.dequantized()


def codes(cached: CachedKV) -> torch.Tensor:
    """In the order of their numbers."""
    values = cached if isinstance(cached, torch.Tensor) else cached.values
    if values.dtype == INT8:
        return values.int()
    bits = values.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


KINDS = ["same", FP8, "scaled fp8", INT8]
SHAPES = [
    # query heads, KV heads, dimensions, rotated, normed
    (4, 2, 64, 64, True),
    (5, 1, 80, 32, False),
    (3, 3, 96, 96, True),
    (9, 3, 128, 128, False),
    (34, 2, 64, 0, True),
    (2, 1, 256, 256, True),
    (1, 1, 6, 4, True),
]
COMBINATIONS = list(enumerate(itertools.product(SHAPES[:3], DTYPES, KINDS)))


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        # In a short run each dtype with each kind of cache, on one shape after another.
        *selected(
            [case for number, case in COMBINATIONS if number // 12 == number % 3],
            full=[case for number, case in COMBINATIONS if number // 12 != number % 3],
        ),
        *((shape, torch.float16, kind) for shape in SHAPES[3:] for kind in ("same", INT8)),
        (SHAPES[0], torch.bfloat16, torch.float16),
        (SHAPES[0], torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_rotated_heads_are_cached(
    shape: tuple[int, int, int, int, bool], dtype: torch.dtype, kind: object
) -> None:
    """Rows are parts of wider ones. Codes may differ by one where sums in another order, or a
    product with the inverse of a scale, are on the other side of a tie."""
    heads, kv_heads, dim, rotated, normed = shape
    kind, rows = dtype if kind == "same" else kind, 5
    qkv = random(rows, heads + 2 * kv_heads + 3, dim, dtype=dtype)[:, 2:-1]
    weight = random(heads + kv_heads, dim, dtype=dtype) if normed else None
    slots = torch.randperm(SLOTS, device=DEVICE)[:rows]
    turns = angles(rows, rotated)
    ours, expected = (
        (poisoned(kv_heads, dim, kind), poisoned(kv_heads, dim, kind)) for _ in range(2)
    )
    if not rope_store.takes(qkv, turns):  # a few dimensions between vectors
        qkv = qkv.contiguous()
    q = rope_store.rope_and_cache_kv(qkv, weight, 1e-6, turns, ours, slots)
    close(q, reference.rope_and_cache_kv(qkv, weight, 1e-6, turns, expected, slots), dtype)
    truncated = INTERPRETED and torch.bfloat16 in (dtype, kind)
    for actual, right in zip(ours, expected, strict=True):
        if actual.dtype.itemsize == 1:
            differ = (codes(actual) - codes(right)).abs()
            assert truncated or (differ.max() <= 1 and differ.float().mean() < 1e-3)
        wide = TOLERANCE[torch.bfloat16 if truncated else dtype]
        wide += {FP8: 0.13, INT8: 0.02}.get(actual.dtype, 0)
        torch.testing.assert_close(numbers(actual), numbers(right), rtol=wide, atol=wide)


def test_angles_between_others_are_left_to_torch() -> None:
    qkv, wide = random(3, 4, 16), angles(3, 16)
    assert rope_store.takes(qkv, wide)
    apart = wide[0][..., :12], wide[1][..., :12]
    assert not rope_store.takes(qkv, apart)


@pytest.mark.parametrize("kind", [FP8, "scaled fp8", INT8], ids=str)
def test_values_are_quantised_as_by_torch(kind: object) -> None:
    """Of all magnitudes: e4m3 saturates, has ties, subnormal numbers and NaN; int8 a vector of
    zeros."""
    v = torch.cat([random(300, 8) * 10.0**power for power in range(-4, 4)])
    ties = torch.arange(1, 1 << 11, device=DEVICE).float()[: 8 * 255].view(-1, 8) * 2.0**-10
    v = torch.cat([v, ties, 8 * ties, 3000 * ties, torch.zeros(1, 8, device=DEVICE)])
    if kind != INT8:
        v[0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 448, 464, -465, 2.0**-6, -0.0])
    heads = len(v)
    qkv = torch.cat([torch.zeros(1 + heads, 8, device=DEVICE), v])[None]
    slots, caches = torch.tensor([3], device=DEVICE), []
    for write in (rope_store.rope_and_cache_kv, reference.rope_and_cache_kv):
        keys, values = (poisoned(heads, 8, kind) for _ in range(2))
        write(qkv, None, 1e-6, angles(1, 0), (keys, values), slots)
        caches.append(values)
    ours, expected = caches
    nan = numbers(expected).isnan()
    assert numbers(ours).isnan().equal(nan)
    differ = (codes(ours) - codes(expected)).abs()[~nan]
    if kind == FP8:
        assert not differ.any()
    else:
        assert differ.max() <= 1 and differ.float().mean() < 1e-3
    if isinstance(ours, ScaledKV) and isinstance(expected, ScaledKV):
        torch.testing.assert_close(ours.scales, expected.scales, rtol=1e-6, atol=0)


def test_padding_is_not_cached() -> None:
    kind = torch.float32
    cache = poisoned(2, 16, kind), poisoned(2, 16, kind)
    slots = torch.tensor([-1, 3, -1], device=DEVICE)
    rope_store.rope_and_cache_kv(random(3, 6, 16), None, 1e-6, angles(3, 16), cache, slots)
    for each in map(numbers, cache):
        written = (each != 99).any(-1).any(0)
        assert written.nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("normed", [False, True])
def test_queries_alone(normed: bool) -> None:
    q, turns = random(4, 7, 48)[:, :5], angles(4, 32)
    weight = random(5, 48) if normed else None
    close(
        rope_store.rope_queries(q, weight, 1e-6, turns),
        reference.rope_queries(q, weight, 1e-6, turns),
        torch.float32,
    )
    assert rope_store.rope_queries(q[:0], weight, 1e-6, angles(0, 32)).shape == (0, 5, 48)


# ---- trials --------------------------------------------------------------------------------------

KIND = RopeConfig(
    device=torch.empty(0, device=DEVICE).device,  # with its number, as tensors have it
    dtype=torch.float32,
    cache_dtype=torch.float32,
    has_scale=False,
    heads=3,
    kv_heads=2,
    dim=16,
    rotated=8,
    normed=True,
)


@pytest.mark.parametrize(
    "config",
    [
        KIND,
        KIND._replace(cache_dtype=INT8, normed=False),
        KIND._replace(cache_dtype=FP8, has_scale=True, rotated=0),
        KIND._replace(cache_dtype=None, kv_heads=0, dtype=torch.float16),
        KIND._replace(cache_dtype=torch.bfloat16, dtype=torch.bfloat16),
    ],
    ids=lambda config: f"{config.dtype} {config.cache_dtype}",
)
def test_trials_of_rotations_pass(config: RopeConfig) -> None:
    assert fused_trial.rope_problem(config) == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_trials_of_norms_and_activations_pass(dtype: torch.dtype) -> None:
    limit = fused_trial._LIMITS[dtype]
    assert fused_trial.norm_error(96, dtype, DEVICE) < limit
    assert fused_trial.activation_error("gelu_tanh", 48, dtype, DEVICE) < limit


@pytest.mark.parametrize("wrong", ["queries", "keys", "values"])
def test_a_wrong_rotation_is_found(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    rotate = rope_store.rope_and_cache_kv

    def careless(*args: Any) -> torch.Tensor:
        q, (keys, values) = rotate(*args), args[4]
        {"queries": q, "keys": keys, "values": values}[wrong][1, 0] += 1
        return q

    monkeypatch.setattr(rope_store, "rope_and_cache_kv", careless)
    assert "off" in fused_trial.rope_problem(KIND)


@pytest.mark.parametrize("reason", ["wrong", RuntimeError("no C compiler")], ids=str)
def test_kernels_that_fail_their_trial_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: object
) -> None:
    def broken(*args: Any, **_: Any) -> torch.Tensor:
        if isinstance(reason, Exception):
            raise reason
        return torch.zeros(1)

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(fused_trial, "norm_error", broken)
    monkeypatch.setattr(fused_trial, "activation_error", broken)
    monkeypatch.setattr(fused_trial, "rope_problem", broken)
    if reason == "wrong":
        monkeypatch.setattr(fused_trial, "norm_error", lambda *_: 1.0)
        monkeypatch.setattr(fused_trial, "activation_error", lambda *_: 1.0)
        monkeypatch.setattr(fused_trial, "rope_problem", lambda _: "its results are 1 off")
    trials = fused_trial.norm_works, fused_trial.activation_works, fused_trial.rope_works
    for trial in trials:
        trial.cache_clear()
    operators = GpuOperators()
    operators.prepare_norm(64, torch.float32, gpu)
    operators.prepare_act_and_mul("silu", 32, torch.float32, gpu)
    operators.prepare_rope(KIND._replace(device=gpu))
    for trial in trials:
        trial.cache_clear()
    expected = "no C compiler" if isinstance(reason, Exception) else "its results are 1 off"
    assert [expected in record.getMessage() for record in caplog.records] == [True] * 3
    monkeypatch.setattr(norm, "rms_norm", None)
    monkeypatch.setattr(gated, "act_and_mul", None)
    x = random(2, 64)
    assert operators.rms_norm(x, x[0], 1e-6).equal(reference.rms_norm(x, x[0], 1e-6))
    assert operators.act_and_mul(x, "silu").equal(reference.act_and_mul(x, "silu"))


def test_operators_use_kernels_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no others: what was not tried would be compiled in a step."""
    for name in ("norm_works", "activation_works", "rope_works"):
        monkeypatch.setattr(fused_trial, name, lambda *_: True)
    operators = GpuOperators()
    operators.prepare_norm(64, torch.float32, DEVICE)
    operators.prepare_act_and_mul("silu", 32, torch.float32, DEVICE)
    operators.prepare_rope(KIND)
    called: list[str] = []
    kernels = (norm, "rms_norm"), (norm, "add_rms_norm"), (gated, "act_and_mul")
    for module, name in (*kernels, (rope_store, "rope_and_cache_kv"), (rope_store, "rope_queries")):
        monkeypatch.setattr(module, name, lambda *_, name=name: called.append(name))
    for width in (64, 32):
        x, turns = random(2, width), angles(2, 8)
        operators.rms_norm(x, x[0], 1e-6)
        operators.add_rms_norm(x, x, x[0], 1e-6)
        operators.act_and_mul(x, "silu")
        cache = poisoned(2, width // 4, torch.float32), poisoned(2, width // 4, torch.float32)
        qkv, slots = random(2, 7, width // 4), torch.arange(2, device=DEVICE)
        weight = random(5, width // 4)
        operators.rope_and_cache_kv(qkv, weight, 1e-6, turns, cache, slots)
        operators.rope_queries(qkv, None, 1e-6, turns)
    assert called == ["rms_norm", "add_rms_norm", "act_and_mul", "rope_and_cache_kv"]

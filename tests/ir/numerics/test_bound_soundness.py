"""Error rules are sound: every result of a legal target is within the bound."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.core.types import TensorType, bf16, bool_, f16, f32, f64, fp6_e2m3, fp8_e4m3, fp8_e5m2, int32, tf32
from tessera.interp.bound import apply_with_bounds, compare_with_bound
from tessera.ir.numerics.conversion import convert
from tessera.ir.numerics.error_model import find_rounding_model, find_ulp_bound
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ir.rules import REGISTRY

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import bound_orders  # noqa: E402
import legal_evaluations  # noqa: E402
from legal_evaluations import combine_in_some_order, scan_in_some_order  # noqa: E402

SHAPE = (4, 6)
FLOATS = (f64, f32, f16, bf16)
NARROW = (tf32, fp8_e4m3, fp8_e5m2, fp6_e2m3)
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, np.inf, -np.inf, np.nan, 1e-45, 1e30, 65504.0])
ARITHMETIC = ("add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "maximum", "minimum")
UNARY = ("neg", "abs", "floor", "ceil", "round", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "erf")
UNARY += ("sin", "cos", "expm1", "log1p", "atan")
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")

fast = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def op_of(name):
    return REGISTRY[f"ts.{name}"]


def operand(rng, dtype, shape=SHAPE):
    """What a target holds, and a reference with a radius that reaches it."""
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4)
    x = np.where(rng.random(shape) < 0.15, rng.choice(SPECIAL, shape), x)
    x = np.where(rng.random(shape) < 0.2, np.round(x), x)
    held = convert(x, dtype)
    wide = held.astype(np.float64)
    radius = np.where(np.isfinite(wide), np.abs(wide), 0.0) * rng.choice([0, 0, 1e-6, 1e-3, 0.3, 2.0], shape)
    value = np.where(radius > 0, wide + radius * rng.uniform(-0.99, 0.99, shape), wide)
    return held, IntervalArray(value, radius)


def bound_of(name, dtypes, operands, attrs=None):
    """An op's types and its bound."""
    op, types = op_of(name), tuple(TensorType(b.shape, t) for b, t in zip(operands, dtypes, strict=True))
    results = op.result_types(types, attrs or {})
    return op, types, results, apply_with_bounds(op, types, results, attrs or {}, operands)[0]


def evaluations(rng, name, op, types, results, attrs, held):
    """Legal results: as stored, as kept wider, and as far off as the table of ulps allows."""
    yield op.execute(types, results, attrs, held)[0]
    with np.errstate(all="ignore"):
        exact = op.ref(*(convert(h, f64) for h in held), **attrs)
        kept, model = (
            op.ref(*(convert(h, types[0].compute) for h in held), **attrs),
            find_rounding_model(results[0].dtype),
        )
        yield np.clip(kept, -model.top, model.top) if model.saturates else kept
        if (op.ulps or 0) > 0.5 and types[0].dtype is not f64:
            ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
            ulp = np.where(np.isfinite(ulp), ulp, 0)
            off = exact + rng.uniform(-1, 1, exact.shape) * (find_ulp_bound(op, f32) - 0.5) * ulp
            yield convert(convert(off, f32), results[0].dtype)


def check(seed, name, count, dtype, attrs=None):
    rng = np.random.default_rng(seed)
    held, operands = zip(*(operand(rng, dtype) for _ in range(count)), strict=True)
    op, types, results, bound = bound_of(name, [dtype] * count, operands, attrs)
    for legal in evaluations(rng, name, op, types, results, attrs or {}, list(held)):
        assert compare_with_bound(legal, bound).ok, (compare_with_bound(legal, bound), bound, legal)


@pytest.mark.parametrize("dtype", FLOATS + NARROW, ids=str)
@pytest.mark.parametrize("name", ARITHMETIC)
@fast
@given(seed=seeds)
def test_arithmetic_is_sound(name, dtype, seed):
    check(seed, name, 2, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
@fast
@given(seed=seeds)
def test_function_is_sound(name, dtype, seed):
    check(seed, name, 1, dtype)


@pytest.mark.parametrize("name", COMPARISONS)
@fast
@given(seed=seeds)
def test_comparison_is_sound(name, seed):
    rng = np.random.default_rng(seed)
    x, bx = operand(rng, f32)
    y, by = operand(rng, f32)
    y = np.where(rng.random(SHAPE) < 0.5, x, y)
    by = IntervalArray(np.where(y == x, y, by.value), np.where(y == x, 0, by.radius))
    op, types, results, bound = bound_of(name, [f32] * 2, [bx, by])
    assert compare_with_bound(op.execute(types, results, {}, [x, y])[0], bound).ok


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ("max", "min", "argmax", "argmin"))
@fast
@given(seed=seeds, axis=st.sampled_from([-1, -2]), keepdims=st.booleans())
def test_extreme_is_sound(name, dtype, seed, axis, keepdims):
    check(seed, name, 1, dtype, {"axis": axis if "arg" in name else (axis,), "keepdims": keepdims})


def in_some_order(rng, terms, accumulate):
    """A sum along the first axis as a target may do it: any order, rounded at each step."""
    parts = [convert(t, accumulate) for t in rng.permutation(terms)]
    while len(parts) > 1:
        i = rng.integers(len(parts) - 1)
        parts[i : i + 2] = [convert(parts[i].astype(np.float64) + parts[i + 1].astype(np.float64), accumulate)]
    return parts[0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@fast
@given(seed=seeds, n=st.integers(1, 40))
def test_sum_is_sound(dtype, seed, n):
    rng = np.random.default_rng(seed)
    held, x = operand(rng, dtype, (n, 3))
    *_, results, bound = bound_of("sum", [dtype], [x], {"axis": (-2,), "keepdims": False})
    with np.errstate(all="ignore"):
        total = in_some_order(rng, held.astype(np.float64), results[0].accumulate)
        assert compare_with_bound(total, bound).ok
        assert compare_with_bound(convert(total, dtype), bound).ok


@pytest.mark.parametrize("fused", (False, True), ids=("rounded", "fused"))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@fast
@given(seed=seeds, n=st.integers(1, 24))
def test_dot_is_sound(dtype, fused, seed, n):
    rng = np.random.default_rng(seed)
    (a, left), (b, right) = operand(rng, dtype, (2, n)), operand(rng, dtype, (n, 3))
    *_, results, bound = bound_of("dot", [dtype] * 2, [left, right], {"dtype": dtype})
    wide = results[0].accumulate
    with np.errstate(all="ignore"):
        products = a.astype(np.float64).T[:, :, None] * b.astype(np.float64)[:, None, :]
        total = in_some_order(rng, products if fused else convert(products, wide).astype(np.float64), wide)
        assert compare_with_bound(total, bound).ok, (compare_with_bound(total, bound), total, bound)
        assert compare_with_bound(convert(total, dtype), bound).ok


@pytest.mark.parametrize("target", (f32, f16, bf16, int32, bool_), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@fast
@given(seed=seeds)
def test_cast_is_sound(dtype, target, seed):
    check(seed, "cast", 1, dtype, {"dtype": target})


@fast
@given(seed=seeds)
def test_where_is_sound(seed):
    rng = np.random.default_rng(seed)
    (x, bx), (y, by) = operand(rng, f32), operand(rng, f32)
    taken, unsure = rng.random(SHAPE) < 0.5, rng.random(SHAPE) < 0.3
    condition = IntervalArray(taken ^ (unsure & (rng.random(SHAPE) < 0.5)), unsure.astype(float))
    *_, bound = bound_of("where", [bool_, f32, f32], [condition, bx, by])
    assert compare_with_bound(np.where(taken, x, y), bound).ok


ORDERED = {
    "cumsum": (np.add, {"axis": -2}), "cumprod": (np.multiply, {"axis": -2}),
    "sum": (np.add, {"axis": (-2,), "keepdims": False}), "prod": (np.multiply, {"axis": (-2,), "keepdims": False}),
}  # fmt: skip
SPREADS = (0.0, 1.0, 6.0, 36.0)  # decimal orders of magnitude


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ORDERED)
@settings(max_examples=50, deadline=None)
@given(seed=seeds, n=st.integers(1, 33), spread=st.sampled_from(SPREADS))
def test_every_order_is_within_the_bound(name, dtype, seed, n, spread):
    """Sums, products and their prefixes, also where partial results overflow or vanish in one order only."""
    rng = np.random.default_rng(seed)
    join, attrs = ORDERED[name]
    x = rng.normal(size=(n, 8)) * 10.0 ** rng.uniform(-spread, spread, (n, 8))
    x = np.where(rng.random(x.shape) < 0.02, rng.choice(SPECIAL, x.shape), x)
    held = convert(x, dtype)
    op, types, results, bound = bound_of(name, [dtype], [IntervalArray(held)], attrs)
    wide = results[0].accumulate.numpy
    parts = [p.astype(wide) for p in held]
    with np.errstate(all="ignore"):
        for _ in range(5):
            found = scan_in_some_order(rng, parts, join) if "cum" in name else combine_in_some_order(rng, parts, join)
            legal = convert(np.asarray(found), dtype)
            agreement = compare_with_bound(legal, bound)
            assert agreement.ok, (agreement, legal, bound)
        assert compare_with_bound(op.execute(types, results, attrs, [held])[0], bound).ok


def test_the_bound_of_a_product_is_tight():
    """The same products within few roundings; overflow and NaN are known where no order can avoid them."""
    nan, inf = np.nan, np.inf
    x = np.float32([[1.5, 2.5, 1e30, 0.0, inf, inf, nan, 1e30], [3.1, -1.1, 1e30, 2.0, -2.0, 0.0, 0.0, 1e-30]])
    *_, bound = bound_of("prod", [f32], [IntervalArray(x)], {"axis": (-2,), "keepdims": False})
    np.testing.assert_array_equal(bound.value[2:7], [inf, 0.0, -inf, nan, nan])
    assert (bound.radius[2:7] == 0).all() and (bound.radius[[0, 1, 7]] < 1e-6).all()


@pytest.mark.parametrize("name", ["softmax", "var", "matmul", "scatter_add", "cumsum"])
def test_whole_programs_in_random_orders(name):
    for dtype in ("f32", "f16"):
        found = bound_orders.examine(name, dtype, 2000, 1)
        assert found["evaluations"] >= 2000 and found["outside"] == 0 and found["bits"] > 6


def test_an_order_that_leaves_a_part_out_is_outside(monkeypatch):
    def forgetful(rng, parts, join):
        return combine_in_some_order(rng, parts[:-1], join)

    monkeypatch.setattr(legal_evaluations, "combine_in_some_order", forgetful)
    assert bound_orders.examine("sum", "f32", 2000, 1)["outside"] > 0

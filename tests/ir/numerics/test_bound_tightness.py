"""Error bounds are tight enough to find bugs, and exact where nothing rounds."""

import numpy as np
import pytest

import tessera as ts
from conformance.run import find_guarded_engine
from tessera.core.types import (  # fmt: skip
    Policy,
    TensorType,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    flush_denormals,
    fp4,
    fp8_e4m3,
    int8,
    int32,
    int64,
    saturate,
    tf32,
    toward_zero,
)
from tessera.interp.bound import apply_with_bounds, compare_with_bound
from tessera.ir.numerics.error_model import find_rounding_model, find_ulp_bound, gamma
from tessera.ir.numerics.interval_arithmetic import IntervalArray, to_interval
from tessera.ir.rules import REGISTRY
from tessera.runtime.program import prepare


def bound(name, *operands, dtype=f32, attrs=None, policy=None):
    """One op in bound mode on operands of one element type."""
    op, lifted = REGISTRY[f"ts.{name}"], [to_interval(x) for x in operands]
    types = tuple(TensorType(b.shape, dtype, policy) for b in lifted)
    return apply_with_bounds(op, types, op.result_types(types, attrs or {}), attrs or {}, lifted)[0]


def relative(b):
    return float(np.max(b.radius / np.abs(b.value)))


RNG = np.random.default_rng(0)
POSITIVE = RNG.uniform(0.5, 2, (8, 64)).astype(np.float32)
KEEP = {"axis": (-1,), "keepdims": False}


def test_dot_of_64():
    assert relative(bound("dot", POSITIVE, POSITIVE.T, attrs={"dtype": f32})) < 1e-5
    assert relative(bound("dot", POSITIVE, POSITIVE.T, dtype=bf16, attrs={"dtype": bf16})) < 0.005


def test_dot_covers_the_product_of_both_errors():
    one = IntervalArray(np.zeros((1, 1)), np.ones((1, 1)))
    assert bound("dot", one, one, attrs={"dtype": f32}).radius >= 1


def test_sum_and_functions():
    assert relative(bound("sum", POSITIVE, attrs=KEEP)) < 1e-5
    for op in REGISTRY.values():
        if op.ulps is not None and len(op.operands) == 1:
            assert relative(bound(op.__name__, POSITIVE)) < 16 * 2.0**-22
    assert relative(bound("mul", POSITIVE, POSITIVE)) < 2.0**-23
    assert relative(bound("div", POSITIVE.astype("f8"), POSITIVE.astype("f8"), dtype=f64)) < 2.0**-51


@pytest.mark.parametrize("name", ("add", "sub", "mul"))
def test_arithmetic_on_small_whole_numbers_is_exact(name):
    x, y = np.arange(-8.0, 8, dtype="f4"), np.arange(16, dtype="f4")
    assert bound(name, x, y).exact and bound(name, x, y, dtype=bf16).exact


@pytest.mark.parametrize("name", ("maximum", "minimum", "less", "equal"))
def test_selection_is_exact(name):
    assert bound(name, POSITIVE, POSITIVE[::-1]).exact


def test_integers_are_exact_and_wrap_in_their_type():
    x = np.array([100, -100], np.int8)
    out = bound("add", x, x, dtype=int8)
    assert out.exact and out.value.dtype == np.int8 and out.value.tolist() == [-56, 56]
    assert bound("dot", x[None], x[:, None], dtype=int8, attrs={"dtype": int32}).value.tolist() == [[20000]]
    assert bound("sum", x, dtype=int8, attrs=KEEP).value.dtype == np.int64


def test_comparison_is_open_only_where_intervals_meet():
    x = IntervalArray(np.array([1.0, 2.0, 3.0]), np.full(3, 0.1))
    for name, want in {"less": [0, 1, 0], "equal": [0, 1, 0], "greater_equal": [0, 1, 0]}.items():
        assert bound(name, x, np.full(3, 2.05)).radius.tolist() == want


def test_rounding_functions_are_open_only_where_the_interval_crosses():
    x = IntervalArray(np.array([1.5, 1.95, 2.5]), np.full(3, 0.1))
    assert bound("floor", x).radius.tolist() == [0, 1, 0]
    assert bound("round", x).radius.tolist() == [1, 0, 1]
    assert bound("cast", x, attrs={"dtype": int32}).radius.tolist() == [0, 1, 0]


def test_argmax_counts_how_far_away_a_rival_is():
    x = IntervalArray(
        np.array([[1.0, 5.0, 2.0, 4.9], [1.0, 5.0, 2.0, 4.9]]), np.array([[0.2], [0.01]]) * np.ones((2, 4))
    )
    assert bound("argmax", x, attrs={"axis": -1, "keepdims": False}).radius.tolist() == [2, 0]


def test_gather_by_an_uncertain_index_is_not_known():
    out = apply_with_bounds(
        REGISTRY["ts.gather"],
        (TensorType((3, 2), f32), TensorType((2,), int64)),
        (TensorType((2, 2), f32),),
        {"axis": -2},
        [np.ones((3, 2)), IntervalArray(np.array([0, 2]), np.array([0.0, 1.0]))],
    )[0]
    assert out.radius.tolist() == [[0, 0], [np.inf, np.inf]]


def test_overflow():
    big = np.array([3e38, 60000.0], np.float32)
    f32_sum, f16_sum = bound("add", big, big), bound("add", big, big, dtype=f16)
    assert f32_sum.value[0] == np.inf and f32_sum.radius[0] == 0  # nothing is wider than what computes
    assert f16_sum.radius[1] == np.inf  # stored it is inf, kept as computed it is 120000
    assert bound("add", np.array([400.0]), np.array([400.0]), dtype=fp8_e4m3).radius[0] == np.inf
    assert bound("add", np.array([4.0]), np.array([4.0]), dtype=fp4).value[0] == 6


def test_overflow_on_the_way_of_a_sum():
    x = np.array([3e38, 3e38, -3e38], np.float32)
    assert bound("sum", x, attrs=KEEP).radius == np.inf


def test_constants_may_be_rounded_or_not():
    full = REGISTRY["ts.full"]
    out = apply_with_bounds(full, (), (TensorType((2,), f32),), {"shape": (2,), "value": 0.1, "dtype": f32}, [])[0]
    assert out.value[0] == 0.1 and out.radius[0] == abs(float(np.float32(0.1)) - 0.1)
    padded = bound("pad", np.ones(2, "f4"), attrs={"low": (1,), "high": (0,), "value": 0.1})
    assert padded.radius.tolist() == [out.radius[0], 0, 0]


def test_cast_rounds_once():
    assert bound("cast", np.array([1.0, 1 + 2.0**-9]), dtype=f64, attrs={"dtype": bf16}).radius[0] == 0
    assert bound("cast", np.array([2**53 + 1]), dtype=int64, attrs={"dtype": f64}).radius[0] >= 1
    assert bound("cast", np.array([True]), dtype=bool_, attrs={"dtype": f32}).exact


def test_formats():
    assert (
        find_rounding_model(f32).unit == 2.0**-24
        and find_rounding_model(bf16).unit == 2.0**-8
        and find_rounding_model(tf32).unit == 2.0**-11
    )
    assert find_rounding_model(f32, Policy(f32) @ toward_zero).unit == 2.0**-23
    assert find_rounding_model(f32, Policy(f32) @ flush_denormals).tiny == float(np.finfo(np.float32).tiny)
    assert find_rounding_model(fp4).saturates and not find_rounding_model(fp8_e4m3).infinite
    assert find_rounding_model(fp8_e4m3, Policy(fp8_e4m3) @ saturate).saturates
    assert gamma(3, 0.1) == pytest.approx(0.3 / 0.7) and gamma(10, 0.1) == np.inf


def test_a_narrower_compute_type_rounds_the_operands():
    policy = Policy(f32, compute=tf32)
    x = np.array([1 + 2.0**-20], np.float32)
    assert bound("mul", x, x, policy=policy).radius[0] > 2.0**-11 > bound("mul", x, x).radius[0]


def test_double_precision_rounds_correctly_where_ieee_says():
    assert find_ulp_bound(REGISTRY["ts.div"], f64) == find_ulp_bound(REGISTRY["ts.sqrt"], f64) == 0.5


def test_a_cast_that_only_flushes_gives_zero():
    """What lies below the least normal number becomes 0, and so do sums of such numbers, on every engine."""
    x = np.float32([3e-39, 1e-38, -2e-39, 2e-38, 1.0])
    program = prepare(ts.jit(lambda x: ts.sum(ts.cast(x, ts.f32 @ ts.flush_denormals)[:3])), (x,))
    (bound,) = program.bounds()
    assert compare_with_bound(program.run("graph")[0], bound).ok and program.run("graph")[0] == 0
    assert bound.value == 0 and bound.radius == 0 and find_guarded_engine("llvm").run(program)[0] == 0


def bounds_of(function, *arrays):
    return prepare(ts.jit(function), arrays).bounds()[0]


def test_a_result_lies_between_the_roundings_of_the_ends():
    """In f16 near 1 the step is 2^-10: what is certain to round to 1 is 1, what may round to two numbers is not."""
    x = np.float16([1.0, 1.0 + 2.0**-10])
    sure = bounds_of(lambda x: ts.sin(x * 0.0) + x, x)
    assert sure.radius.max() == 0 and sure.value.tolist() == [1.0, 1.0 + 2.0**-10]
    tie = bounds_of(lambda x: ts.cast(ts.cast(x, dtype=ts.f32) * np.float32(1 + 2.0**-11), dtype=ts.f16), x[:1])
    assert tie.radius[0] == 0  # 1 + 2^-11 is exact in f32, and rounds to even
    open_ = bounds_of(
        lambda x: ts.cast(ts.exp(ts.cast(x, dtype=ts.f32) * 0.0) * np.float32(1 + 2.0**-11), dtype=ts.f16), x[:1]
    )
    assert 2.0**-12 < open_.radius[0] < 2.0**-9  # either neighbour


@pytest.mark.parametrize(("value", "want"), [(1e6, np.inf), (-1e6, -np.inf), (65503.0, 65504.0), (1e-9, 0.0)])
def test_what_surely_overflows_or_vanishes_is_certain(value, want):
    found = bounds_of(lambda x: ts.cast(x, dtype=ts.f16), np.float32([value]))
    assert found.radius[0] == 0 and found.value[0] == want
    between = bounds_of(lambda x: ts.cast(ts.exp(x * 0.0) * value, dtype=ts.f16), np.float32([1.0]))
    assert between.radius[0] == 0 and between.value[0] == want


def test_whole_numbers_are_summed_without_an_error():
    x = np.arange(-50, 50, dtype=np.float32).reshape(10, 10) / 8
    for function in (lambda x: ts.sum(x, axis=1), lambda x: x @ x.T, lambda x: ts.cumsum(x, axis=0)):
        assert bounds_of(function, x).radius.max() == 0
        assert bounds_of(function, x * np.float32(0.1)).radius.min() > 0  # no common power of two
        assert bounds_of(function, x + np.float32(2**22)).radius.max() > 0  # beyond 24 bits
        assert bounds_of(lambda x, f=function: f(ts.exp(x)), x).radius.min() > 0  # operands that are not exact


def test_exact_operations_in_f64():
    x = np.array([1.0, 0.1, -3.0, 0.0])
    assert (
        bounds_of(lambda x: x - 0.5, x).radius.tolist()[::2] == [0, 0]
        and bounds_of(lambda x: x + 1e-17, x).radius[0] > 0
    )
    assert bounds_of(lambda x: ts.acos(x * 0.0 - 1.0), x).radius.max() < 1e-14
    assert bounds_of(lambda x: x / 3.0, x).radius[0] > 0 and bounds_of(lambda x: x / 4.0, x).radius.max() == 0


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_both_ends_count(side):
    """Around 1 the steps of f16 differ: 0.6 of the wider one reaches its neighbour on that side alone."""
    uncertain = IntervalArray(np.array([side]), np.array([0.6 * 2.0**-10]))
    types, results = (TensorType((1,), f32),), (TensorType((1,), f16),)
    for final in (True, False):
        (found,) = apply_with_bounds(REGISTRY["ts.cast"], types, results, {"dtype": f16}, [uncertain], final=final)
        assert found.radius[0] == pytest.approx(2.0**-10)


def test_sums_of_products_of_eight_bits_are_not_exact():
    """Matrix units add them with fewer bits than the accumulator has; whole numbers of 16 bits have exact sums."""
    found = {}
    for dtype in (bf16, fp8_e4m3):
        types = (TensorType((2, 6), dtype), TensorType((6, 3), dtype))
        operands = [np.ones(t.shape, dtype.numpy) * 2 for t in types]
        op = REGISTRY["ts.dot"]
        results = op.result_types(types, {"dtype": f32})
        found[dtype] = apply_with_bounds(op, types, results, {"dtype": f32}, operands)[0].radius
    assert not found[bf16].any() and (found[fp8_e4m3] > 0).all()

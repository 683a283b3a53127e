"""Bound mode over whole Graph functions: composites against their parts, control flow, comparing."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
import tessera.ops  # noqa: F401
from conformance.inputs import edge_values
from tessera.core.errors import ExecutionError, ShapeError
from tessera.core.types import TensorType, bf16, bool_, f16, f32, f64, int64
from tessera.frontend.jit.tracing import Jit
from tessera.interp import bound, graph
from tessera.interp.bound import compare_with_bound
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Function, Value
from tessera.ir.numerics.conversion import convert
from tessera.ir.numerics.interval_arithmetic import IntervalArray, interval_ends
from tessera.ir.rewrite import expand_composites
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import attention, elementwise, nn, reduce
from tessera.ops.tensor.basic import full
from tessera.runtime.program import prepare

FLOATS = (f64, f32, f16, bf16)
COMPOSITES = {
    "relu": nn.relu,
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu_tanh": lambda x: nn.gelu(x, approximate="tanh"),
    "softmax": nn.softmax,
    "softmax_axis": lambda x: nn.softmax(x, axis=0),
    "log_softmax": nn.log_softmax,
    "normalize": nn.normalize,
    "rms_norm": lambda x: nn.rms_norm(x),
    "mean": lambda x: reduce.mean(x, axis=1),
    "var": lambda x: reduce.var(x, axis=0, correction=1),
    "attention": lambda x: attention.scaled_dot_product_attention(x, x, x, causal=True),
}


@pytest.mark.parametrize("scale", (1, 30))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("program", COMPOSITES.values(), ids=COMPOSITES)
def test_composite_lies_within_the_bound_of_its_parts(program, dtype, scale):
    x = convert(np.random.default_rng(scale).normal(size=(6, 8)) * scale, dtype)
    function = Jit(program).trace(x).function
    (limit,) = bound.run(function, [x])
    for version in (function, expand_composites(function)):
        agreement = bound.compare_with_bound(graph.run(version, [x])[0], limit)
        assert agreement.ok and not agreement.useless and not agreement.ambiguous_share, agreement


@pytest.mark.parametrize("storage", [bf16, f16], ids=str)
def test_stochastic_rounding_goes_to_either_neighbour_in_storage(storage):
    """The sum has a number between two of storage: in the type of the computation it is exact."""
    x, y = np.ones(64, storage.numpy), np.full(64, 2.0**-12, storage.numpy)

    def add(x, y):
        rounded = [ts.cast(v, storage @ ts.stochastic_round) for v in (x, y)]
        return rounded[0] + rounded[1]

    function = Jit(add).trace(x, y).function
    (limit,) = bound.run(function, [x, y])
    step = 2.0**-7 if storage == bf16 else 2.0**-10
    low, *_, high = interval_ends(limit)
    assert (low <= 1).all() and (high >= 1 + step).all() and (high < 1 + 3 * step).all()
    assert bound.compare_with_bound(graph.run(function, [x, y])[0], limit).ok


def test_an_infinity_times_what_has_a_sign_is_known():
    x, y = np.array([[np.inf, 1], [0.5, 2]], np.float32), np.array([[0.3, 0.7], [1.1, 0.9]], np.float32)
    for function in (lambda x, y: x @ ts.exp(y), lambda x, y: (ts.exp(y) @ x.T).T):
        (limit,) = bound.run(Jit(function).trace(x, y).function, [x, y])
        low, *_, high = interval_ends(limit)
        assert (low[0] == np.inf).all() and np.isfinite(high[1]).all()
    far = np.full((2, 2), np.pi, np.float32)  # rounded, its sine has either sign
    (limit,) = bound.run(Jit(lambda x, y: x @ ts.sin(ts.exp(y))).trace(x, far).function, [x, np.log(far)])
    assert np.isinf(limit.radius[0]).all()


def test_a_wrong_answer_is_found():
    x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    function = Jit(nn.softmax).trace(x).function
    (limit,) = bound.run(function, [x])
    right = graph.run(function, [x])[0]
    assert not bound.compare_with_bound(right * np.float32(1 + 1e-5), limit).ok
    assert not bound.compare_with_bound(np.roll(right, 1, axis=-1), limit).ok


def test_a_quotient_of_numbers_rounded_down_is_known():
    """No rounding crosses a whole number here: the bound says which it is, for quotients of either sign."""
    x, y = np.array([-3, 3, -7.5, 7.5, -0.5, 1e-3], "f4"), np.array([2, 2, 2, -2, 3, -3], "f4")
    (limit,) = bound.run(Jit(lambda x, y: x // y).trace(x, y).function, [x, y])
    np.testing.assert_array_equal(limit.value, np.floor(x.astype("f8") / y))
    np.testing.assert_array_equal(limit.radius, np.zeros(6))


EXTREMES = [
    s * v for s in (1.0, -1.0) for v in (0.0, 5e-324, 2.0**-1022, 2.0**-52, 1.0, 1 + 2.0**-52, 3.7, 1.7e308, np.inf)
]


@given(st.floats() | st.sampled_from(EXTREMES), st.floats() | st.sampled_from(EXTREMES))
def test_a_remainder_is_known_where_its_quotient_overflows(x, y):
    function = Jit(elementwise.remainder).trace(np.zeros(1), np.zeros(1)).function
    (limit,) = bound.run(function, [np.array([x]), np.array([y])])
    known = np.isfinite(x) and np.isfinite(y) and y != 0
    exact = Fraction(x) - Fraction(y) * (Fraction(x) // Fraction(y)) if known else None
    assert np.isnan(limit.value[0]) == (np.isnan(x + y) or np.isinf(x) or y == 0)
    assert exact is None or abs(float(exact) - limit.value[0]) <= limit.radius[0]
    assert not np.isnan(limit.radius[0])


def test_a_bool_is_unknown_where_0_lies_within_the_interval():
    """A quarter of the least subnormal is 0 in f32 and not in the reference; both ends of its interval are true."""
    (limit,) = bound.run(
        Jit(lambda x: ts.cast(x * 0.25, dtype=ts.bool)).trace(x := np.full(1, 1e-45, "f4")).function, [x]
    )
    assert limit.value[0] and limit.radius[0] == 1 and not np.asarray(ts.cast(ts.Tensor(x) * 0.25, dtype=ts.bool))[0]
    (limit,) = bound.run(Jit(lambda x: ts.cast(x * 3.0, dtype=ts.bool)).trace(x := np.ones(1, "f4")).function, [x])
    assert limit.value[0] and not limit.radius[0]


def test_integers_that_may_wrap_have_bounds_that_say_so():
    """A rounding before the conversion decides between 126 and 127, and 127 + 1 is -128."""
    x = np.full(1, 127.0, "f4")
    near = lambda x: ts.cast(ts.floor(ts.exp(ts.log(x))), dtype=ts.int8)  # noqa: E731

    def dot(x):
        return ts.reshape(ts.dot(near(x)[None], near(x)[:, None], dtype=ts.int8), (1,))

    wrapping = {
        "+": lambda x: near(x) + 1, "-": lambda x: -near(x) - 3, "*": lambda x: near(x) * 2,
        "abs": lambda x: abs(-near(x) - 3), "@": dot,
    }  # fmt: skip
    for name, program in wrapping.items():
        (limit,) = bound.run(Jit(program).trace(x).function, [x])
        low, high = (np.ravel(e)[0] for e in interval_ends(limit))
        assert low <= -128 and high >= 127, name
    for program in (lambda x: near(x) - 1, lambda x: -near(x), lambda x: ts.cast(near(x), dtype=ts.int32) * 2 + 1):
        (limit,) = bound.run(Jit(program).trace(x).function, [x])
        assert limit.radius[0] <= 5  # no legal value wraps


def test_symbolic_sizes():
    traced = Jit(lambda x: nn.softmax(x) * 2.0).trace(Tensor["B", 4, f32])
    x = np.ones((3, 4), np.float32)
    assert bound.run(traced.function, [x])[0].shape == (3, 4)
    with pytest.raises(ShapeError, match="axis 1: expected 4, received 5"):
        bound.run(traced.function, [np.ones((3, 5), np.float32)])


def scalar(dtype):
    return Value(TensorType((), dtype))


def region(build, *params):
    """A block made by `build` from its parameters."""
    builder = Builder()
    with builder.active():
        out = build(*(Tensor(p) for p in params))
    return builder.block(params, [t.data for t in out])


def loop(op, inputs, regions, results):
    """A function of one node with regions."""
    builder = Builder()
    node = builder.add(op, inputs, types=tuple(results), regions=tuple(regions))
    return Function("loop", Block(tuple(inputs), (node,), node.results))


def test_for_carries_bounds():
    body = region(lambda i, x: [elementwise.exp(x)], scalar(int64), scalar(f32))
    function = loop(control_flow.for_, [scalar(int64) for _ in range(3)] + [scalar(f32)], [body], [TensorType((), f32)])
    args = [np.int64(0), np.int64(2), np.int64(1), np.float32(0.1)]
    (out,) = bound.run(function, args)
    assert out.value == np.exp(np.exp(np.float64(np.float32(0.1)))) and 0 < out.radius < 1e-5


def test_while_runs_until_its_condition_fails():
    test = region(lambda x: [x < 10.0], scalar(f32))
    body = region(lambda x: [x * 2.0], scalar(f32))
    function = loop(control_flow.while_, [scalar(f32)], [test, body], [TensorType((), f32)])
    assert bound.run(function, [np.float32(3)])[0].value == 12


def test_a_branch_needs_certainty():
    branches = [region(lambda k=k: [full(shape=(), value=k)]) for k in (1, 2)]
    function = loop(control_flow.if_, [scalar(bool_)], branches, [TensorType((), f32)])
    assert bound.run(function, [np.True_])[0].value == 1 and bound.run(function, [np.False_])[0].value == 2
    with pytest.raises(ExecutionError, match="rounding may change"):
        bound.run(function, [IntervalArray(np.array(True), np.array(1.0))])


def test_compare_reports_the_worst_place():
    limit = IntervalArray(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.1, 0.0]))
    found = bound.compare_with_bound(np.array([1.05, 2.2, 3.0]), limit)
    assert not found.ok and found.where == (1,) and found.worst_share == pytest.approx(2)
    assert str(found) == "at [1]: the error is 2 times its bound"
    assert bound.compare_with_bound(np.array([1.0, 2.0, 3.0 + 1e-9]), limit).worst_share == np.inf


@pytest.mark.parametrize(
    ("result", "radius", "says"),
    (
        (3.5, 0.0, "at [0]: the error is 0.5, and its bound is 0"),
        (3.5, np.nan, "at [0]: the error is 0.5, and its bound is nan"),
        (
            np.nan,
            0.1,
            "at [0]: the error is inf, and its bound is 0.1, 1 NaN of 1 elements, unlike the reference at [0]",
        ),
    ),
)
def test_compare_says_a_bound_without_a_ratio(result, radius, says):
    found = bound.compare_with_bound(np.array([result]), IntervalArray(np.array([3.0]), np.array([radius])))
    assert not found.ok and str(found) == says


def test_compare_special_values():
    limit = IntervalArray(np.array([np.nan, np.inf, -np.inf]))
    assert bound.compare_with_bound(np.float32([np.nan, np.inf, -np.inf]), limit).ok
    for wrong in ([1, np.inf, -np.inf], [np.nan, -np.inf, -np.inf], [np.nan, 3e38, -np.inf]):
        assert not bound.compare_with_bound(np.float32(wrong), limit).ok


def test_compare_overflow_to_the_right_infinity_is_not_ambiguous():
    limit = IntervalArray(np.array([1e6, -1e6, 1e6, 1e6]), np.full(4, np.inf))
    found = bound.compare_with_bound(np.array([np.inf, -np.inf, 1e6, -np.inf]), limit)
    assert found.ok and found.ambiguous_share == 0.5


def test_compare_says_when_a_bound_is_useless():
    assert bound.compare_with_bound(np.ones(4), IntervalArray(np.ones(4), np.full(4, 0.6))).useless
    assert not bound.compare_with_bound(np.ones(4), IntervalArray(np.ones(4), np.full(4, 0.4))).useless
    # A zero among larger values has no relative error; its size is theirs.
    assert not bound.compare_with_bound(np.eye(4), IntervalArray(np.eye(4), np.full((4, 4), 1e-6))).useless
    assert bound.compare_with_bound(np.ones(2, bool), IntervalArray(np.ones(2, bool), np.ones(2))).useless
    assert not bound.compare_with_bound(np.zeros(0), IntervalArray(np.zeros(0))).useless


def test_compare_shapes():
    with pytest.raises(ShapeError, match="another shape"):
        bound.compare_with_bound(np.ones(2), IntervalArray(np.ones(3)))


@pytest.mark.parametrize("shapes", [((64, 9), (64, 9)), ((1, 7, 30), (5, 7, 1)), ((400,), (1,)), ((1, 1), (3, 90))])
@pytest.mark.parametrize(
    "op", [elementwise.add, elementwise.mul, elementwise.div, elementwise.maximum, elementwise.less]
)
def test_a_pointwise_op_gives_the_same_in_blocks(op, shapes, monkeypatch, rng):
    operands = [IntervalArray(rng.normal(size=s), rng.uniform(0, 0.1, s) * (rng.random(s) < 0.7)) for s in shapes]
    whole = np.broadcast_shapes(*shapes)
    types = tuple(TensorType(whole, f32) for _ in shapes)
    results = (op.result_types(types, {})[0],)
    (want,) = bound.apply_with_bounds(op, types, results, {}, operands)
    monkeypatch.setattr(bound, "BLOCK_ELEMENTS", 8)
    (found,) = bound.apply_with_bounds(op, types, results, {}, operands)
    assert found.value.tobytes() == want.value.tobytes() and found.radius.tobytes() == want.radius.tobytes()
    assert found.shape == whole and found.dtype == want.dtype


@given(st.floats(-1e300, 1e300), st.floats(0, 1e300), st.sampled_from([1.0, 2.0**-52, 1e-310]))
def test_the_ends_of_an_interval_lie_outside_it(value, radius, scale):
    value, radius = value * scale, radius * scale
    ends = interval_ends(IntervalArray(np.float64(value), np.float64(radius)))
    low, high = (Fraction(float(e)) for e in (ends[0], ends[-1]))
    assert low <= Fraction(value) - Fraction(radius) and Fraction(value) + Fraction(radius) <= high
    slack = Fraction(2) ** -50 * (abs(Fraction(value)) + Fraction(radius)) + Fraction(2) ** -1073
    assert high - low <= 2 * Fraction(radius) + 2 * slack


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_updates_of_one_place_may_be_added_in_any_order(dtype):
    """Found by fuzzing: the bound was that of one addition of an exact sum; targets add one by one."""
    x = edge_values("positive", 0, (3, 64), dtype)
    add = ts.jit(lambda x: ts.scatter_add(x, ts.Tensor([0] * 20), ts.ones((20, 64), dtype=x.dtype), axis=0))
    (bound,) = prepare(add, (x,)).bounds()
    one_by_one = x.copy()
    for _ in range(20):
        one_by_one[0] += 1
    assert compare_with_bound(one_by_one, bound).ok and (dtype == "f64" or np.any(one_by_one[0] != bound.value[0]))
    assert not bound.radius[1:].any() and np.array_equal(bound.value[1:], x[1:])
    moved = one_by_one * (1 + 64 * np.finfo(x.dtype).eps)
    assert not compare_with_bound(moved.astype(x.dtype), bound).ok


def test_an_update_whose_place_is_not_known_may_be_anywhere():
    def add(x, y):
        place = ts.cast(ts.reshape(y, (1,)) * 30.0 - y * 20.0, dtype=ts.int64)  # 1, or by rounding 0
        return ts.scatter_add(x, place, ts.full((1,), 5.0), axis=0)

    zeros = np.zeros(3, np.float32)
    (bound,) = prepare(ts.jit(add), (zeros, np.float32(0.1))).bounds()
    for place in range(3):
        assert compare_with_bound(np.eye(3, dtype=np.float32)[place] * 5, bound).ok
    (sure,) = prepare(ts.jit(add), (zeros, np.float32(0.15))).bounds()
    assert compare_with_bound(np.float32([0.0, 5.0, 0.0]), sure).ok and not sure.radius.any()

"""Index analysis: affine forms, intervals and divisors hold for every value that random index programs compute."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.core.types import bool_, f16, f32, f64, int32, int64, scalar, uint8, uint64
from tessera.interp import graph
from tessera.ir.analysis import (
    MAX_DIVISOR,
    UNBOUNDED,
    AffineAnalysis,
    AffineForm,
    IntervalAnalysis,
    find_divisor,
    multiply_endpoints,
)
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Value
from tessera.ir.rewrite import UseDef
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

BINARY = (e.add, e.sub, e.mul, e.maximum, e.minimum)


@st.composite
def index_programs(draw):
    """A random Graph function of two int64 scalars, all of whose values are results; and values for the scalars."""
    builder, params = Builder(), [Value(scalar(int64), name) for name in "ij"]
    values = list(params)
    for _ in range(draw(st.integers(1, 8))):
        pick = st.sampled_from(values)
        kind = draw(st.sampled_from(("number", "binary", "unary", "divide")))
        if kind == "number":
            attrs = {"shape": (), "value": draw(st.integers(-20, 20)), "dtype": int64}
            values.append(builder.add(basic.full, [], attrs).out)
        elif kind == "unary":
            values.append(builder.add(draw(st.sampled_from((e.neg, e.abs))), [draw(pick)]).out)
        elif kind == "divide":
            by = builder.add(basic.full, [], {"shape": (), "value": draw(st.integers(1, 9)), "dtype": int64}).out
            op = draw(st.sampled_from((e.floor_divide, e.remainder)))
            values += [by, builder.add(op, [draw(pick), by]).out]
        else:
            values.append(builder.add(draw(st.sampled_from(BINARY)), [draw(pick), draw(pick)]).out)
    arguments = [np.int64(draw(st.integers(-50, 50))) for _ in params]
    return Function("index", builder.block(params, values)), arguments


def run(function, arguments):
    """The number that each value has."""
    found = graph.run(function, [np.array(a) for a in arguments])
    return {v: int(a) for v, a in zip(function.results, found, strict=True)}


@settings(max_examples=80, deadline=None)
@given(program=index_programs())
def test_an_affine_form_has_the_value_of_its_index(program):
    function, arguments = program
    numbers, analysis = run(function, arguments), AffineAnalysis(UseDef(function))
    for value, number in numbers.items():
        form = analysis.find_form(value)
        if abs(number) < 2**40:
            assert form.constant + sum(c * numbers[v] for v, c in form.scalars.items()) == number
        assert not form.ramps


@settings(max_examples=80, deadline=None)
@given(program=index_programs())
def test_an_interval_holds_the_value_of_its_index(program):
    function, arguments = program
    analysis = IntervalAnalysis(UseDef(function), None)
    for param, number in zip(function.params, arguments, strict=True):
        analysis.known[param] = (min(-3, int(number)), max(4, int(number)))
    for value, number in run(function, arguments).items():
        low, high = analysis.of(value)
        assert low <= number <= high


@settings(max_examples=80, deadline=None)
@given(program=index_programs())
def test_a_divisor_divides_the_value_of_its_index(program):
    function, arguments = program
    uses = UseDef(function)
    for value, number in run(function, arguments).items():
        assert number % find_divisor(uses, value) == 0 or abs(number) >= 2**62


def test_ramps_follow_the_axes_of_a_block():
    builder = Builder()
    along = builder.add(shape.iota, [], {"shape": (8,), "axis": -1, "dtype": int64}).out
    column = builder.add(shape.reshape, [along], {"shape": (8, 1)}).out
    block = builder.add(basic.broadcast_to, [column], {"shape": (8, 4)}).out
    twice = builder.add(e.add, [block, block]).out
    flat = builder.add(shape.reshape, [twice], {"shape": (32,)}).out
    analysis = AffineAnalysis(builder.producers)
    assert analysis.find_form(twice) == AffineForm(0, {}, {-2: 2})
    assert analysis.find_form(twice).upper_bound_of_block((8, 4)) == 14
    assert analysis.find_form(flat) is None  # the position along one axis is not linear in that along the other
    one = builder.add(shape.iota, [], {"shape": (1,), "axis": -1, "dtype": int64}).out
    assert analysis.find_form(one).is_constant


def test_a_uniform_block_keeps_its_form_under_every_reshape():
    builder = Builder()
    block = builder.add(basic.full, [], {"shape": (2, 6), "value": 5, "dtype": int64}).out
    other = builder.add(shape.reshape, [block], {"shape": (4, 3)}).out
    assert AffineAnalysis(builder.producers).find_form(other) == AffineForm(5)


def test_integers_that_may_wrap_have_forms_only_on_request():
    builder, x = Builder(), Value(scalar(int32), "x")
    total = builder.add(e.add, [x, x]).out
    wide = builder.add(basic.cast, [total], {"dtype": int64}).out
    assert AffineAnalysis(builder.producers).find_form(total) is None
    assert AffineAnalysis(builder.producers).find_form(wide) == AffineForm(0, {wide: 1})
    assert AffineAnalysis(builder.producers, narrow=True).find_form(wide) == AffineForm(0, {x: 2})
    assert IntervalAnalysis(builder.producers, None).of(wide) == (-(2**31), 2**31 - 1)


@pytest.mark.parametrize(
    ("source", "known", "target", "found"),
    [
        (int64, (0, 90), int32, (0, 90)),
        (int64, (0, 1 << 31), int32, (-(1 << 31), (1 << 31) - 1)),  # may wrap
        (int64, (-3, 5), uint8, (0, 255)),
        (int64, (-3, 5), uint64, UNBOUNDED),
        (int64, (0, math.inf), uint64, (0, math.inf)),
        (uint64, (0, 1 << 63), int64, UNBOUNDED),
        (uint64, (0, 7), int64, (0, 7)),
        (uint8, (0, 255), int64, (0, 255)),
        (f32, (-2.5, 9.5), int32, (-2, 9)),
        (f32, UNBOUNDED, int32, (-(1 << 31), (1 << 31) - 1)),
        (f32, (0, math.inf), int64, UNBOUNDED),
    ],
)
def test_casts_keep_what_fits(source, known, target, found):
    builder, x = Builder(), Value(scalar(source), "x")
    analysis = IntervalAnalysis(builder.producers, None)
    analysis.known[x] = known
    assert analysis.of(builder.add(basic.cast, [x], {"dtype": target}).out) == found


def test_program_ids_are_bounded_by_the_grid():
    builder = Builder()
    first, third = (builder.add(tile.program_id, [], {"axis": axis}).out for axis in (0, 2))
    size, local = (builder.add(op, []).out for op in (tile.grid_size, tile.local_id))
    known = IntervalAnalysis(builder.producers, (6, 2))
    assert (known.of(first), known.of(third)) == ((0, 5), (0, 0))
    unknown = IntervalAnalysis(builder.producers, None)
    assert [unknown.of(v) for v in (first, size, local)] == [(0, math.inf), (1, math.inf), (0, math.inf)]
    assert known.find_unproven_axes([first, third], (3, 4), (8, 3)) == (1,)


def test_a_product_with_0_is_0():
    ends = ((0, math.inf), (-math.inf, 0), (0, 5), (1, 7), (7, 1), (-3, math.inf))
    assert [multiply_endpoints(*each) for each in ends] == [0, 0, 0, 7, 7, -math.inf]


def test_a_quotient_by_a_negative_number_falls_without_end():
    builder = Builder()
    place = builder.add(tile.program_id, [], {"axis": 0}).out
    less = builder.add(basic.full, [], {"shape": (), "value": -2, "dtype": int64}).out
    quotient = builder.add(e.floor_divide, [place, less]).out
    assert IntervalAnalysis(builder.producers, None).of(quotient) == (-math.inf, 0)
    assert IntervalAnalysis(builder.producers, (6,)).of(quotient) == (-3, 0)


def test_the_last_iteration_bounds_the_index_of_a_loop():
    loop = make_loop(0, 10, 4)
    analysis = IntervalAnalysis(loop.producers, None)
    analysis.loop(loop.node)
    index = loop.node.regions[0].params[0]
    assert analysis.of(index) == (0, 8)
    assert find_divisor({**loop.producers, index: loop.node}, index) == 4


def make_loop(*bounds):
    builder, index = Builder(), Value(scalar(int64), "i")
    args = [builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out for n in bounds]
    region = Function("body", Builder().block([index], [])).body
    builder.node = builder.add(control_flow.for_, args, types=(), regions=(region,))
    return builder


def test_divisors_of_casts_choices_and_zero():
    builder, flag, x = Builder(), Value(scalar(bool_), "flag"), Value(scalar(f32), "x")
    eight, twelve, zero = (
        builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out for n in (8, 12, 0)
    )
    chosen = builder.add(e.where, [flag, eight, twelve]).out
    narrow = builder.add(basic.cast, [chosen], {"dtype": int32}).out
    truncated = builder.add(basic.cast, [x], {"dtype": int64}).out
    found = [find_divisor(builder.producers, v) for v in (chosen, narrow, truncated, zero, x)]
    assert found == [4, 4, 1, MAX_DIVISOR, 1]


def test_ramps_do_not_survive_a_reshape_to_other_sizes():
    builder = Builder()
    along = builder.add(shape.iota, [], {"shape": (6,), "axis": -1, "dtype": int64}).out
    block = builder.add(basic.broadcast_to, [along], {"shape": (2, 6)}).out
    other = builder.add(shape.reshape, [block], {"shape": (3, 4)}).out
    assert AffineAnalysis(builder.producers).find_form(other) is None


def test_a_loop_whose_first_index_varies_may_reach_its_end():
    builder, index = Builder(), Value(scalar(int64), "i")
    first = builder.add(tile.program_id, [], {"axis": 0}).out
    end, step = (builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out for n in (10, 4))
    region = Function("body", Builder().block([index], [])).body
    loop = builder.add(control_flow.for_, [first, end, step], types=(), regions=(region,))
    analysis = IntervalAnalysis(builder.producers, (4,))
    analysis.loop(loop)
    assert analysis.of(index) == (0, 9)  # program 1 reaches 9, program 0 only 8


def test_the_result_of_a_loop_has_not_the_divisor_of_its_index():
    builder, index, total = Builder(), Value(scalar(int64), "i"), Value(scalar(int64), "total")
    zero, end, step = (builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out for n in (0, 8, 4))
    region = Function("body", Builder().block([index, total], [total])).body
    loop = builder.add(control_flow.for_, [zero, end, step, end], types=(total.type,), regions=(region,))
    assert find_divisor(builder.producers, loop.results[0]) == 1


def test_sums_of_narrow_integers_that_may_wrap_are_any_number_of_their_type():
    builder = Builder()
    most = builder.add(basic.full, [], {"shape": (), "value": 2**31 - 1, "dtype": int32}).out
    total = builder.add(e.add, [most, most]).out
    assert IntervalAnalysis(builder.producers, None).of(total) == (-(2**31), 2**31 - 1)


@pytest.mark.parametrize(("dtype", "limits"), [(int32, (-(2**31), 2**31 - 1)), (uint8, (0, 255)), (int64, UNBOUNDED)])
def test_values_of_unknown_origin_lie_in_their_type(dtype, limits):
    builder, x = Builder(), Value(scalar(dtype), "x")
    five = builder.add(basic.full, [], {"shape": (), "value": 5, "dtype": dtype}).out
    least = builder.add(e.minimum, [x, five]).out
    analysis = IntervalAnalysis(builder.producers, None)
    assert (analysis.of(x), analysis.of(least)) == (limits, (limits[0], 5))


@pytest.mark.parametrize(
    ("dtype", "known", "limits"),
    [
        (int64, (-5, 3), (0, 5)),
        (int64, (2, 7), (2, 7)),
        (int64, (-9, -4), (4, 9)),
        (int32, None, (-(2**31), 2**31 - 1)),  # the least integer has itself
        (int32, (-(2**31) + 1, 0), (0, 2**31 - 1)),
        (int64, None, UNBOUNDED),
        (int64, (-math.inf, 3), UNBOUNDED),
    ],
)
def test_absolute_values_lie_between_the_nearest_and_the_farthest_from_0(dtype, known, limits):
    builder, x = Builder(), Value(scalar(dtype), "x")
    size = builder.add(e.abs, [x]).out
    analysis = IntervalAnalysis(builder.producers, None)
    analysis.known |= {} if known is None else {x: known}
    assert analysis.of(size) == limits


FLOAT_OPS = [e.add, e.sub, e.mul, e.maximum, e.minimum]


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_an_interval_holds_the_rounded_value_of_a_float(seed, dtype):
    """Numbers made of an index, as places of a resampled image, in f32 as NumPy computes them."""
    rng, builder, kind = np.random.default_rng(seed), Builder(), dtype.numpy.type
    count = int(rng.integers(1, 3000))
    index = builder.add(shape.iota, [], {"shape": (count,), "axis": -1, "dtype": int64}).out
    numbers = {builder.add(basic.cast, [index], {"dtype": dtype}).out: np.arange(count).astype(kind)}
    for _ in range(8):
        op, value = FLOAT_OPS[rng.integers(len(FLOAT_OPS))], float(kind(rng.normal() * 10.0 ** rng.integers(-3, 3)))
        constant = builder.add(basic.full, [], {"shape": (count,), "value": value, "dtype": dtype}).out
        known = list(numbers)
        x = known[rng.integers(len(known))]
        y, second = (constant, kind(value)) if rng.random() < 0.7 else (known[-1], numbers[known[-1]])
        numbers[builder.add(op, [x, y]).out] = op.ref(numbers[x], np.broadcast_to(second, (count,)))
    analysis = IntervalAnalysis(builder.producers, None)
    for value, found in numbers.items():
        low, high = analysis.of(value)
        assert low <= found.min() and found.max() <= high < math.inf
        whole = builder.add(basic.cast, [value], {"dtype": int64}).out
        low, high = analysis.of(whole)
        assert low <= np.trunc(found).min() and np.trunc(found).max() <= high


def test_floats_that_may_be_no_numbers_have_no_interval():
    builder, x, n = Builder(), Value(scalar(f32), "x"), Value(scalar(int32), "n")
    zero, huge = (builder.add(basic.full, [], {"shape": (), "value": v, "dtype": f32}).out for v in (0.0, 3e38))
    large = builder.add(e.mul, [huge, huge]).out
    narrow = builder.add(basic.cast, [n], {"dtype": f16}).out
    analysis = IntervalAnalysis(builder.producers, None)
    for value in (builder.add(e.maximum, [x, zero]).out, large, builder.add(e.mul, [large, zero]).out, narrow):
        assert analysis.of(value) == (-math.inf, math.inf)
        assert analysis.of(builder.add(basic.cast, [value], {"dtype": int64}).out) == (-math.inf, math.inf)

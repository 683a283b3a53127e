"""Variances of long rows from the moments of their parts: the same numbers, and rows are read once."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.codegen.ptx.generator import PLAN
from tessera.interp import graph
from tessera.interp.tile import interpreter
from tessera.ir.core import Module
from tessera.lower.passes import moment_merging
from tessera.lower.passes.moment_merging import divide_rows, merge_moments
from tessera.lower.pipeline import lower

SHORT = replace(PLAN, row_limit=64)


@pytest.fixture
def short(monkeypatch):
    """Rows of more than 64 elements are long, and parts have 8 to 32."""
    monkeypatch.setattr(moment_merging, "LEAST_PART", 8)
    monkeypatch.setattr(moment_merging, "MOST_PART", 32)
    monkeypatch.setattr(moment_merging, "LEAST_ROW", 4)
    monkeypatch.setattr(moment_merging, "FILLED_PART", 16)


def trace(function, *args):
    return ts.jit(function).trace(*args).function


def find_steps(function, *args, plan=SHORT):
    return dict(lower(Module("graph", (trace(function, *args),)), plan))


def find_before(function, *args):
    """The function before the pass."""
    steps = lower(Module("graph", (trace(function, *args),)), SHORT)
    return next(module.main for name, module in steps if name == "vector products")


def is_merged(function, *args):
    before = find_before(function, *args)
    return merge_moments(before, SHORT) is not before


def standardise(x, axes):
    mean = ts.mean(x, axis=axes, keepdims=True)
    return (x - mean) * ts.rsqrt(ts.mean((x - mean) ** 2, axis=axes, keepdims=True) + 1e-6)


CASES = (
    (lambda x: ts.var(x, axis=(0, 2, 3)), (4, 3, 8, 5)),
    (lambda x: ts.var(x, axis=-1, correction=1), (3, 80)),
    (lambda x: ts.var(x), (6, 40)),
    (lambda x: standardise(x, (2,)), (2, 3, 96)),
    (lambda x: standardise(x, (0, 2)), (8, 3, 32)),
    (lambda x: standardise(x * 2 + 1, (1, 2)), (3, 4, 40)),
    (lambda x: ts.softmax(x, axis=-1), (3, 80)),
    (lambda x: ts.log_softmax(x * 30, axis=-1), (2, 3, 96)),
    (lambda x: ts.logsumexp(x, axis=(1, 2)), (3, 4, 40)),
    (lambda x: ts.softmax(x * -2 + 1, axis=-1), (3, 97)),  # a prime: the last part lacks elements
    (lambda x: ts.logsumexp(x, axis=(1, 2)), (3, 7, 23)),
)


@pytest.mark.parametrize(("function", "shape"), CASES)
def test_the_numbers_stay(short, function, shape):
    x = 3 + np.random.default_rng(0).standard_normal(shape)
    assert is_merged(function, x)
    (got,) = interpreter.run(find_steps(function, x)["tile"], [x])
    np.testing.assert_allclose(got, function(ts.Tensor(x)).numpy(), rtol=1e-12, atol=1e-14)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_rows(data):
    shape = tuple(data.draw(st.lists(st.sampled_from((1, 2, 3, 8, 33, 64)), min_size=1, max_size=3)))
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    x = 5 + np.random.default_rng(1).standard_normal(shape)
    before = find_before(lambda x: ts.var(x, axis=axes), x)
    (got,) = graph.run(merge_moments(before, replace(PLAN, row_limit=1)), [x])
    np.testing.assert_allclose(got, x.var(axis=axes), rtol=1e-12, atol=1e-15)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_sums_of_exponentials_of_any_numbers(data):
    """Infinities, NaN, parts of minus infinity alone, and numbers whose exponentials no float holds."""
    number = st.sampled_from((0.0, 1.0, -2.5, 900.0, -900.0, math.inf, -math.inf, -math.inf, math.nan))
    size = data.draw(st.sampled_from((32, 37)))  # the last part of a prime lacks elements
    x = np.array(data.draw(st.lists(number, min_size=2 * size, max_size=2 * size))).reshape(2, size)
    part = data.draw(st.integers(0, 4))
    x[0, 8 * part : 8 * part + 8] = data.draw(number)
    x[1] = np.where(np.isnan(x[1]), -math.inf, x[1])
    function = data.draw(st.sampled_from((ts.softmax, ts.log_softmax, ts.logsumexp)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moment_merging, "LEAST_PART", 8)
        patch.setattr(moment_merging, "MOST_PART", 8)
        patch.setattr(moment_merging, "FILLED_PART", 8)
        before = find_before(lambda x: function(x, axis=-1), x)
        merged = merge_moments(before, replace(PLAN, row_limit=16))
    assert merged is not before
    with np.errstate(all="ignore"):
        for got, want in zip(graph.run(merged, [x]), graph.run(before, [x]), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)


def test_a_large_mean_costs_no_digits(short):
    """The sum of squares less the square of the sum would be noise here."""
    x = (1e4 + np.random.default_rng(2).standard_normal((2, 96))).astype("f4")
    module = find_steps(lambda x: ts.var(x, axis=1), x)["tile"]
    np.testing.assert_allclose(interpreter.run(module, [x])[0], x.astype("f8").var(axis=1), rtol=1e-4)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: ts.var(x, axis=0), (96, 5)),  # no rows
        (lambda x: ts.var(x, axis=1), (2, 64)),  # a program holds a row
        (lambda x: ts.var(x, axis=1), (2, 97)),  # a prime
        (lambda x: ts.sum((x - 1) * (x - 1), axis=1), (2, 96)),  # the centre needs no sum
        (lambda x: ts.var(ts.transpose(x), axis=1), (96, 2)),  # parts would be copied
        (lambda x: ts.sum(ts.exp(x - 1.0), axis=1), (2, 96)),  # the centre needs no maximum
        (lambda x: ts.sum(ts.exp(x - ts.max(x) * 2), axis=(0, 1)), (2, 96)),  # nor is it the maximum
        (lambda x: ts.sum(ts.exp(x - ts.mean(x, axis=1, keepdims=True)), axis=1), (2, 96)),
    ],
)
def test_what_stays_as_it_is(short, function, shape):
    assert not is_merged(function, np.ones(shape))


def test_parts_fill_threads():
    assert divide_rows((7, 512, 512), (1, 2)) == moment_merging.RowParts((7,), 32, 8192)
    assert divide_rows((7, 100000), (1,)).length == 4000  # nearer to a power of two than 6250, and whole vectors
    assert divide_rows((2, 3, 49), (0, 2)) == moment_merging.RowParts((2, 3), 1, 49)
    assert divide_rows((2, 8209), (1,), fills=True) == moment_merging.RowParts((2,), 5, 2048, 5 * 2048 - 8209)
    assert divide_rows((2, 8209), (1,)) is None and divide_rows((2, 16), (1,)) is None


def test_a_gpu_reads_the_rows_twice():
    """Once for the moments, once for the result; before, each sum read them."""
    x = np.ones((2, 2, 40000), "f4")
    module = find_steps(lambda x: standardise(x, (0, 2)), x, plan=PLAN)["tile"]
    launches = [n for n in module.main.body.nodes if n.op.name == "host.launch"]
    long = [sum(math.prod(v.type.shape) == x.size for v in n.args) for n in launches]
    assert long == [1, 0, 2]  # the moments; their combination; the rows and the result


@pytest.mark.parametrize("size", [40000, 40009])
@pytest.mark.parametrize(("function", "read"), [(ts.softmax, [1, 0, 2]), (ts.logsumexp, [1, 0])])
def test_a_gpu_reads_the_rows_of_a_softmax_twice(function, read, size):
    x = np.ones((3, size), "f4")
    module = find_steps(lambda x: function(x, axis=-1), x, plan=PLAN)["tile"]
    launches = [n for n in module.main.body.nodes if n.op.name == "host.launch"]
    assert [sum(math.prod(v.type.shape) == x.size for v in n.args) for n in launches] == read


@pytest.mark.parametrize(("size", "launches"), [(60_000, 1), (70_000, 2)])
def test_narrow_rows_are_merged_where_they_are_long_in_memory(size, launches):
    """A GPU holds 120 KB of f16 beside its registers."""
    x = np.ones((300, size), "f2")
    module = find_steps(lambda x: ts.logsumexp(x, axis=-1), x, plan=PLAN)["tile"]
    assert sum(n.op.name == "host.launch" for n in module.main.body.nodes) == launches


@pytest.mark.parametrize(("size", "launched"), [(128, [1, 1, 0, 2]), (62, [1, 1, 2])])
def test_results_of_a_convolution_are_read_twice(size, launched):
    """Of an epilogue with a number for each channel, whose rows may not be cut: its results are memory, and no copy.

    They are the only array of this size beside the result: the norm computes the distances from the mean again.
    """

    def program(x, w, b):
        y = ts.sigmoid((ts.conv2d(x, w) + b) * b)
        return ts.group_norm(y, 2)

    x, w, b = np.ones((2, 4, size + 2, size + 2), "f4"), np.ones((16, 4, 3, 3), "f4"), np.ones((16, 1, 1), "f4")
    module = find_steps(program, x, w, b, plan=PLAN)["tile"]
    launches = [n for n in module.main.body.nodes if n.op.name == "host.launch"]
    held = [sum(math.prod(v.type.shape) == 2 * 16 * size * size for v in n.args) for n in launches]
    assert held == launched  # the convolution; the moments; their combination; the norm
    (got,) = interpreter.run(module, [v := np.random.default_rng(3).standard_normal(x.shape).astype("f4"), w / 36, b])
    want = program(*map(ts.Tensor, (v, w / 36, b))).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)

"""Long reductions with few results are reduced in parts: the results stay NumPy's, and the programs become many."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.llvm import TILING_PLAN
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.generator import PLAN
from tessera.core.types import TensorType, f32
from tessera.interp.tile import interpreter
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Module, Value
from tessera.ir.rewrite import UseDef
from tessera.lower.passes import reduction_splitting
from tessera.lower.pipeline import lower
from tessera.ops.tensor import reduce
from tessera.ops.tensor import shape as shape_ops
from tessera.runtime import driver

REDUCTIONS = (
    (lambda x: ts.sum(x), (700,)),
    (lambda x: ts.sum(x), (641,)),
    (lambda x: ts.max(x), (30, 23)),
    (lambda x: ts.min(x, axis=1), (3, 257)),
    (lambda x: ts.sum(x, axis=0), (500, 5)),
    (lambda x: ts.sum(x, axis=(0, 2), keepdims=True), (40, 2, 11)),
    (lambda x: ts.sum(ts.exp(x)), (641,)),
    (lambda x: ts.max(x * 2, axis=0), (641, 2)),
    (lambda x: ts.mean(x, axis=-1), (2, 640)),
    (lambda x: ts.softmax(x, axis=-1), (2, 643)),
)


@pytest.fixture
def short(monkeypatch):
    """Reductions of more than 128 elements are split, in parts of at least 16."""
    monkeypatch.setattr(reduction_splitting, "MIN_SERIAL_ELEMENTS", 128)
    monkeypatch.setattr(reduction_splitting, "SMALL_REDUCTION", 0)
    monkeypatch.setattr(reduction_splitting, "MIN_PART_ELEMENTS", 16)
    monkeypatch.setattr(reduction_splitting, "PART_MULTIPLE", 8)


def compile_tile(function, *args, plan=PLAN):
    return list(lower(Module("graph", (ts.jit(function).trace(*args).function,)), plan))[-1][1]


def find_grids(module):
    return [math.prod(n.attrs["grid"]) for n in module.main.body.nodes if n.op.name == "host.launch"]


@pytest.mark.parametrize(("function", "shape"), REDUCTIONS)
def test_parts_give_the_same(short, function, shape):
    x = np.random.default_rng(0).standard_normal(shape)
    whole = compile_tile(function, x, plan=replace(PLAN, parallel=None))
    module = compile_tile(function, x)
    assert max(find_grids(module)) > max(find_grids(whole))
    want = function(ts.Tensor(x)).numpy()
    for run in (lambda m, a: interpreter.run(m, a), lambda m, a: BACKEND.interpreter(BACKEND.emit(m, {}))(a)):
        np.testing.assert_allclose(run(module, [x])[0], want, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "f4", "i4", "i1", "u1", "i8"])
@pytest.mark.parametrize("size", [640, 641])
@pytest.mark.parametrize("function", [ts.sum, ts.max, ts.min])
def test_every_type(short, function, size, dtype):
    x = (np.random.default_rng(0).integers(0, 9, size) + (0 if dtype == "u1" else -4)).astype(dtype)
    for program in (function, lambda x: function(-x if np.dtype(dtype).kind != "u" else x)):
        (ours,) = interpreter.run(compile_tile(program, x), [x])
        want = program(ts.Tensor(x)).numpy()
        assert ours.dtype == want.dtype
        np.testing.assert_array_equal(ours.astype("f8"), want.astype("f8"))


@pytest.mark.parametrize("function", [ts.sum, ts.max, ts.min])
def test_nan_and_infinities(short, function):
    for value in (np.nan, np.inf, -np.inf):
        x = np.zeros(641, "f4")
        x[640] = value
        for program in (function, lambda x: function(ts.abs(x) * 1.0)):
            (ours,) = interpreter.run(compile_tile(program, x), [x])
            np.testing.assert_array_equal(ours, program(ts.Tensor(x)).numpy())


@pytest.mark.parametrize(
    ("function", "shape", "programs"),
    [
        (ts.sum, (8192, 8192), 500),
        (lambda x: ts.sum(x, axis=0), (1_000_000, 64), 400),
        (lambda x: ts.max(x, axis=1), (4, 10_000_019), 400),
        (lambda x: ts.sum(x, axis=-1), (4096, 4096), 4096),
        (ts.sum, (100, 100), 1),
    ],
)
def test_programs_of_known_sizes(function, shape, programs):
    module = compile_tile(function, np.broadcast_to(np.zeros((), "f4"), shape))
    assert programs <= find_grids(module)[0] <= max(2 * programs, 528)
    assert len(find_grids(module)) == (2 if programs not in (1, 4096) else 1)  # a rest is reduced beside the parts


@pytest.mark.parametrize("function", [ts.softmax, ts.log_softmax])
@pytest.mark.parametrize("shape", [(2, 700, 8), (3, 1031, 5)])
def test_exponents_are_computed_again(monkeypatch, function, shape):
    """A softmax along an outer axis whose reductions are split keeps no array of its size but the result."""
    monkeypatch.setattr(reduction_splitting, "MIN_SERIAL_ELEMENTS", 64)
    monkeypatch.setattr(reduction_splitting, "SMALL_REDUCTION", 0)
    monkeypatch.setattr(reduction_splitting, "MIN_PART_ELEMENTS", 16)
    x = np.random.default_rng(0).normal(size=shape).astype("f4") * 9
    lowered = driver.lower(ts.jit(lambda x: function(x, axis=1)).trace(x).function, "ptx")
    held = [n.attrs["shape"] for n in lowered["schedule"].main.body.nodes if n.op.name == "host.alloc"]
    assert held and all(np.prod(each) < x.size for each in held)
    wide = np.exp(x - x.max(1, keepdims=True).astype("f8"))
    want = wide / wide.sum(1, keepdims=True)
    for level in ("schedule", "tile", "target"):
        (ours,) = driver.run_level(lowered, level, [x], "ptx")
        wanted = want if function is ts.softmax else np.log(want)
        np.testing.assert_allclose(ours, wanted, rtol=2e-6, atol=1e-6, err_msg=level)


def test_a_vector_product_along_memory_has_programs_enough():
    """Each result of x Wᵀ is a program of its own; those of x W are reached by columns, in few programs, and split."""
    x, w = np.zeros((1, 768), np.float32), np.zeros((2304, 768), np.float32)
    assert len(find_grids(compile_tile(lambda x, w: x @ w.T, x, w, plan=TILING_PLAN))) == 1
    assert len(find_grids(compile_tile(lambda x, w: x @ w, x, w.T.copy(), plan=TILING_PLAN))) == 2
    few = np.zeros((3, 1 << 20), np.float32)
    assert len(find_grids(compile_tile(lambda x, w: x @ w.T, few[:1], few, plan=TILING_PLAN))) == 2
    many = np.broadcast_to(np.float32(0), (12, 1 << 18))
    assert len(find_grids(compile_tile(lambda x, w: x @ w.T, many[:1], many, plan=TILING_PLAN))) == 1


MERGED = {  # shapes before and after a reshape, and the elements of whole inner axes of each axis
    "of three": ((6, 10, 14, 3), (840, 3), {-1: (), -2: (14, 140)}),
    "each of two": ((4, 5, 6, 7), (20, 42), {-1: (7,), -2: (5,)}),
    "with one of one element": ((4, 5, 1), (20,), {-1: (5,)}),
    "divided": ((24, 3), (4, 6, 3), {-1: ()}),
    "neither": ((4, 6), (3, 8), {}),
}


def split_merged(before, after, plan):
    """The sum along the first axis of a slice that is reshaped, and the function of its parts."""
    x, builder = Value(TensorType((before[0] + 1, *before[1:]), f32), "x"), Builder()
    attrs = {"start": (0,) * len(before), "stop": before, "step": (1,) * len(before)}
    part = builder.add(shape_ops.slice_, [x], attrs).out
    merged = builder.add(shape_ops.reshape, [part], {"shape": after}).out
    total = builder.add(reduce.sum, [merged], {"axis": (-len(after),), "keepdims": False}).out
    function = Function("f", builder.block([x], [total]))
    return merged, function, reduction_splitting.split_reductions(function, plan)


@pytest.mark.parametrize("name", MERGED)
def test_merged_axes(name):
    before, after, wanted = MERGED[name]
    merged, function, _ = split_merged(before, after, PLAN)
    uses = UseDef(function)
    assert reduction_splitting.find_merged_axes(uses, merged) == wanted
    assert reduction_splitting.find_merged_axes(uses, function.params[0]) == {}


@pytest.mark.parametrize(("most", "parts"), [(7, (7, 120)), (11, (10, 84))])
def test_parts_are_whole_axes_of_what_is_reshaped(short, most, parts):
    """Other parts of about this length are blocks of no slice of it: 6 parts of 140 are of one of (6, 10, 14, 3)."""
    for before, wanted in (((840, 3), parts), ((6, 10, 14, 3), (6, 140))):
        *_, split = split_merged(before, (840, 3), replace(PLAN, reduction_parts=most))
        assert (*wanted, 3) in {n.attrs["shape"] for n in split.body.nodes if n.op is shape_ops.reshape}

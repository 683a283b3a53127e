"""Blocks that several loops use: stored by the loops of the reduction that reads them first, or computed again."""

import re

import ml_dtypes
import numpy as np
import pytest
from test_loop_fusion import numbers
from tilekernels import Kernel, agree

from tessera.codegen.llvm import BACKEND
from tessera.codegen.llvm.passes.bufferisation import BufferisationPlan
from tessera.core.types import bf16, f32, f64
from tessera.ops.tensor import basic, reduce, shape
from tessera.ops.tensor import elementwise as e

KINDS = [f32, f64, bf16]


def finite(dtype, *size, seed=0):
    """Numbers from -3 to 3."""
    return np.clip(np.nan_to_num(numbers(dtype, *size, seed=seed).astype(np.float64)), -3, 3).astype(dtype.numpy)


def finish(k, arrays, out, *more):
    """The program with its results, and the arrays that it runs on."""
    results = [np.zeros(v.type.shape, v.type.dtype.numpy) for v in (out, *more)]
    k.params += Kernel(*results).params
    for ref, v in zip(k.params[-len(results) :], (out, *more), strict=True):
        k.store(ref, v)
    return k.module(), [*arrays, *results]


def softmax_like(k, x, reduced=reduce.sum, axis=-1):
    """exp(x) over a number of its row or column, and the numbers."""
    made = k(e.exp, x)
    total = k(reduced, made, axis=(axis,), keepdims=True)
    return k(e.div, made, k.broadcast(total, *made.type.shape)), total


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("size", [(2, 1), (3, 7), (5, 33), (2, 200), (17, 16), (4, 3, 19)], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_values_that_a_reduction_reads_first(size, axis, dtype):
    x = finite(dtype, *size)
    k = Kernel(x)
    agree(*finish(k, [x], *softmax_like(k, k.load(k.params[0]), axis=axis)), rtol=2e-2 if dtype is bf16 else 1e-5)


def test_the_loop_of_the_sum_stores():
    x = finite(f32, 8, 128)
    k = Kernel(x)
    module, _ = finish(k, [x], *softmax_like(k, k.load(k.params[0])))
    text = BACKEND.emit(module, {}).text("kernels.ll")
    body = next(part for part in re.split(r"\nloop\d+:", text) if "@llvm.fmuladd" in part or "fadd" in part)
    assert re.search(r"store <16 x float> .*, ptr %p", body) or BACKEND.capabilities.vector_bytes != 64


@pytest.mark.parametrize("reduced", [reduce.sum, reduce.max, reduce.min], ids=lambda o: o.name)
def test_two_values_and_one_that_no_reduction_reads(reduced):
    """The last is computed by a loop of its own, between the others."""
    x, y = finite(f32, 6, 40), np.abs(finite(f32, 6, 40, seed=1))
    k = Kernel(x, y)
    a, b = k(e.exp, k.load(k.params[0])), k(e.sqrt, k.load(k.params[1]))
    other = k(e.exp, k(e.add, a, k.const(1.0, f32, (6, 40))))
    first = k(reduced, k(e.mul, a, b), axis=(-1,), keepdims=True)
    second = k(reduce.sum, k(e.neg, a), axis=(-1,), keepdims=True)
    rest = k(e.add, k(e.mul, a, k.broadcast(first, 6, 40)), k(e.mul, b, k.broadcast(second, 6, 40)))
    turned = k(reduce.sum, k(e.mul, other, other), axis=(-2,), keepdims=True)
    agree(*finish(k, [x, y], rest, k(e.mul, other, k.broadcast(turned, 6, 40))), rtol=1e-5, atol=1e-3)


def test_values_behind_where_are_stored_in_whole():
    x = finite(f32, 4, 50)
    k = Kernel(x)
    made = k(e.exp, k(e.minimum, k.load(k.params[0]), k.const(1.0, f32, (4, 50))))
    places = k(shape.iota, shape=(4, 50), axis=1, dtype=f32)
    chosen = k(e.where, k(e.less, places, k.const(9.0, f32, (4, 50))), made, k.const(0.0, f32, (4, 50)))
    total = k(reduce.sum, chosen, axis=(-1,), keepdims=True)
    agree(*finish(k, [x], k(e.mul, made, k.broadcast(total, 4, 50)), total), rtol=1e-5)


def test_memory_that_is_overwritten_in_between():
    """A block that was loaded before its memory is written is stored before, too."""
    x = finite(f32, 5, 32)
    k = Kernel(x)
    made = k(e.exp, k.load(k.params[0]))
    k.store(k.params[0], k.const(7.0, f32, (5, 32)))
    total = k(reduce.sum, made, axis=(-1,), keepdims=True)
    agree(*finish(k, [x], k(e.div, made, k.broadcast(total, 5, 32)), total), rtol=1e-5)


def test_in_a_loop_the_blocks_of_each_round_are_its_own():
    x = finite(f32, 12, 48)
    k = Kernel(x)

    def step(i, total):
        made = k(e.exp, k.load(k.params[0], i, 0, shape=(4, 48)))
        row = k(reduce.sum, made, axis=(-1,), keepdims=True)
        return k.add(total, k(e.div, made, k.broadcast(row, 4, 48)))

    (total,) = k.loop(0, 12, 4, [k.const(0.0, f32, (4, 48))], step)
    agree(*finish(k, [x], total), rtol=1e-5)


def test_cheap_values_of_stored_ones_are_computed_again():
    x = finite(f32, 4, 64)
    k = Kernel(x)
    made = k(e.exp, k.load(k.params[0]))
    less = k(e.neg, made)
    sums = [k(reduce.sum, v, axis=(-1,), keepdims=True) for v in (k(e.mul, less, made), less)]
    out = k(e.add, k(e.mul, made, k.broadcast(sums[0], 4, 64)), k.broadcast(sums[1], 4, 64))
    module, _ = finish(k, [x], out)
    stored = BufferisationPlan(module.functions[1], {}).stored
    assert made in stored and less not in stored


def test_bits_do_not_depend_on_the_width_of_other_blocks():
    """A sum in f32 of a block that is kept in bf16: all of its lanes are stored."""
    x = np.linspace(-2, 2, 3 * 21).reshape(3, 21).astype(ml_dtypes.bfloat16)
    k = Kernel(x)
    made = k(e.exp, k.load(k.params[0]))
    wide = k(basic.cast, made, dtype=f32)
    total = k(reduce.sum, wide, axis=(-1,), keepdims=True)
    agree(*finish(k, [x], k(e.mul, k(basic.cast, made, dtype=f32), k.broadcast(total, 3, 21)), made), rtol=2e-2)


def test_a_block_that_is_reshaped_and_written_back_is_not_copied():
    """Each element is read before it is overwritten: reshapes keep the order of elements."""
    x, y = finite(f32, 3, 64), finite(f32, 64)
    k = Kernel(x, y)
    place = k.const(1), k.const(0)
    flat = k(shape.reshape, k.load(k.params[0], *place, shape=(1, 64)), shape=(64,))
    made = k(e.add, flat, k.load(k.params[1]))
    k.store(k.params[0], k(shape.reshape, made, shape=(1, 64)), *place)
    module = k.module()
    assert not BufferisationPlan(module.functions[1], {}).stored
    agree(module, [x, y])

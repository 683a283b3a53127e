"""Reductions of many rows: several rows at a time, their lanes combined together, contraction, prefetched streams."""

import re

import numpy as np
import pytest
from test_loop_fusion import numbers
from test_reductions import finished, reduced
from tilekernels import Kernel, agree

import tessera as ts
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.codegen.llvm import BACKEND
from tessera.codegen.llvm.table import reductions
from tessera.core.types import f32, f64, int8, int16, uint8, uint16
from tessera.interp.tile import interpreter
from tessera.ops.tensor import basic, reduce
from tessera.ops.tensor import elementwise as e
from tessera.runtime.driver import lower

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 33)).astype(np.float32)


def text_of(module):
    return emit_artifact(get_backend("llvm"), module, {}).text("kernels.ll")


def graph_text(function, *arrays):
    return text_of(lower(ts.jit(function).trace(*arrays).function, "llvm")["tile"])


# Lanes of several rows combined together.


@pytest.mark.parametrize("columns", [2, 3, 8, 16, 17, 32, 33])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 17, 18, 33])
def test_short_rows_of_every_size(rows, columns):
    x = RNG.integers(-99, 99, (rows, columns)).astype(np.float32)  # sums without rounding errors
    agree(*reduced(reduce.sum, x, (-1,)))
    agree(*reduced(reduce.max, x, (-1,), keepdims=True))
    agree(*reduced(reduce.argmin, x, -1))


@pytest.mark.parametrize("dtype", [f64, int8, uint8, int16], ids=str)
@pytest.mark.parametrize("op", [reduce.sum, reduce.min, reduce.argmax], ids=lambda o: o.name)
def test_short_rows_of_other_types(op, dtype):
    x = numbers(dtype, 19, 11)
    agree(*reduced(op, x, -1 if op is reduce.argmax else (-1,)), rtol=1e-12 if op is reduce.sum else 0)


@pytest.mark.parametrize("rows", [16, 21])
def test_the_order_of_sums_is_that_of_single_rows(monkeypatch, rows):
    x = np.ascontiguousarray(X[:rows])
    module, arrays = reduced(reduce.sum, x, (-1,))
    together = [a.copy() for a in arrays]
    BACKEND.runtime(BACKEND.emit(module, {})).run(together)
    monkeypatch.setattr(reductions, "SHORT_ROW", 0)
    alone = [a.copy() for a in arrays]
    BACKEND.runtime(BACKEND.emit(module, {})).run(alone)
    np.testing.assert_array_equal(together[1], alone[1])


def test_long_rows_are_combined_one_by_one(monkeypatch):
    combined = []
    combine = reductions.combine_rows
    monkeypatch.setattr(reductions, "combine_rows", lambda *args: combined.append(args) or combine(*args))
    text_of(reduced(reduce.sum, RNG.normal(size=(16, 400)).astype(np.float32), (-1,))[0])
    assert not combined
    text_of(reduced(reduce.sum, X[:, :32].copy(), (-1,))[0])
    assert len(combined) == 1


# Unroll and jam.


@pytest.mark.parametrize("lanes", [3, 16, 40, 100])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
def test_rows_with_accumulators_of_their_own(rows, lanes):
    x = RNG.integers(-99, 99, (rows, 7, lanes)).astype(np.float32)
    agree(*reduced(reduce.sum, x, (-2,)))
    agree(*reduced(reduce.max, x, (-2,)))


def test_rows_together_give_what_each_gives_alone(monkeypatch):
    module, arrays = reduced(reduce.sum, RNG.normal(size=(6, 9, 16)).astype(np.float32), (-2,))
    together = [a.copy() for a in arrays]
    BACKEND.runtime(BACKEND.emit(module, {})).run(together)
    monkeypatch.setattr(reductions, "CHEAP_OPS", -1)
    alone = [a.copy() for a in arrays]
    BACKEND.runtime(BACKEND.emit(module, {})).run(alone)
    np.testing.assert_array_equal(together[1], alone[1])


# Contraction.


def test_products_are_fused_with_the_sums_they_enter():
    text = graph_text(lambda x, y: ts.sum(x * y, axis=1), X, X)
    assert "llvm.fmuladd" in text


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x * y + x,
        lambda x, y: ts.max(x * y + x, axis=1),
        lambda x, y: ts.sum(x * y - x, axis=1),
        lambda x, y: ts.sum(ts.exp(x * y + x), axis=1),
    ],
    ids=["pointwise", "maximum", "difference", "exponential"],
)
def test_other_products_are_rounded(function):
    assert "llvm.fmuladd" not in graph_text(function, X, X)


def test_differences_that_cancel_are_zero():
    loss = ts.jit(lambda x, w, y: ts.sum((x * w - y) ** 2), target="llvm")
    assert loss(X, X[::-1].copy(), X * X[::-1]).item() == 0.0


# Bits of narrow integers.


@pytest.mark.parametrize("dtype", [uint8, int8, uint16, int16], ids=str)
def test_bits_of_narrow_integers(dtype):
    kinds = np.iinfo(dtype.numpy)
    c = np.linspace(kinds.min, kinds.max, 256).astype(dtype.numpy).reshape(4, 64)
    k = Kernel(c)
    x = k.load(k.params[0])
    mask, shift = (k.const(v, dtype, (4, 64)) for v in (13, 3))
    fields = [k(e.bitwise_and, x, mask), k(e.shift_right, x, shift)]
    fields += [k(e.bitwise_and, k(e.shift_right, x, shift), mask), k(e.bitwise_xor, x, mask), k(e.bitwise_or, x, mask)]
    total = k(basic.cast, fields[0], dtype=f32)
    for n, field in enumerate(fields[1:]):
        total = k.add(k(e.mul, total, k.const(1.0 / (n + 2), f32, (4, 64))), k(basic.cast, field, dtype=f32))
    agree(*finished(k, total, c))


def test_two_fields_of_a_byte_are_widened_once():
    c, x = RNG.integers(0, 256, (8, 16)).astype(np.uint8), X[:8, :16].copy()
    text = graph_text(lambda c, x: ts.cast(c & 15, ts.f32) * x + ts.cast(c >> 4, ts.f32), c, x)
    assert len(re.findall(r"zext <\d+ x i8>", text)) == len(re.findall(r"load <\d+ x i8>", text)) > 0
    assert not re.search(r"uitofp <\d+ x i8>", text)


# Streams.


def rows_product(k, w, x, rows):
    """Sums of rows of a matrix times a vector: each program reads some rows."""
    start = k(e.mul, k(ts.ops.dialects.tile.program_id, axis=0), rows)
    product = k(
        e.mul, k.load(w, start, 0, shape=(rows, w.type.shape[1])), k.broadcast(k.load(x), rows, x.type.shape[0])
    )
    return start, k(reduce.sum, product, axis=(-1,), keepdims=False)


def make_product(n, columns):
    w, x = RNG.normal(size=(n, columns)).astype(np.float32), RNG.normal(size=columns).astype(np.float32)
    out = np.zeros(n, np.float32)
    k = Kernel(w, x, out)
    start, y = rows_product(k, k.params[0], k.params[1], 8)
    k.store(k.params[2], y, start)
    return k.module(grid=(n // 8,)), [w, x, out]


def test_rows_of_a_large_matrix_are_prefetched():
    module, arrays = make_product(256, 100)
    assert "llvm.prefetch" in text_of(module)
    found, wanted = ([a.copy() for a in arrays] for _ in range(2))
    BACKEND.interpreter(BACKEND.emit(module, {}))(found)
    interpreter.run(module, wanted)
    np.testing.assert_allclose(found[2], wanted[2], rtol=1e-4, atol=1e-4)
    agree(module, arrays, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("n", "columns"), [(32, 100), (8, 4000)], ids=["small", "one piece"])
def test_what_a_cache_holds_is_not_prefetched(n, columns):
    assert "llvm.prefetch" not in text_of(make_product(n, columns)[0])


def test_a_plain_sum_is_not_prefetched():
    """Only sums of products: a processor foresees one plain stream."""
    x = RNG.normal(size=(256, 100)).astype(np.float32)
    module = lower(ts.jit(lambda x: ts.sum(x, axis=1)).trace(x).function, "llvm")["tile"]
    assert "llvm.prefetch" not in text_of(module)

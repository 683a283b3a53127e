"""Matrix products of many shapes and types, alone and accumulated in a loop."""

import re

import ml_dtypes
import numpy as np
import pytest
from tilekernels import Kernel, agree

import tessera as ts
from tessera.codegen.llvm import BACKEND
from tessera.codegen.llvm.table.microkernels import choose_register_tile
from tessera.core.types import bf16, f16, f32, f64, int8, int32
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, contractions, shape
from tessera.ops.tensor import elementwise as e
from tessera.runtime.driver import lower

SHAPES = [
    (1, 1, 1),
    (8, 32, 16),
    (7, 5, 3),
    (13, 17, 33),
    (33, 64, 47),
    (16, 1, 96),
    (1, 40, 70),
    (70, 40, 1),
    (50, 9, 100),
]


def numbers(dtype, *size, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.integers(-9, 9, size) if dtype.is_integer else rng.normal(size=size)).astype(dtype.numpy)


def product(a, b, dtype, prepare=lambda k, x: x):
    out = np.zeros((*a.shape[:-1], b.shape[-1]), dtype.numpy)
    k = Kernel(a, b, out)
    x, y = (prepare(k, k.load(p)) for p in k.params[:2])
    k.store(k.params[2], k(contractions.dot, x, y, dtype=dtype))
    return k.module(), [a, b, out]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_shapes(m, k, n):
    agree(*product(numbers(f32, m, k), numbers(f32, k, n, seed=1), f32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vector", [16, 32])
def test_narrow_vectors(vector):
    agree(*product(numbers(f32, 13, 20), numbers(f32, 20, 37, seed=1), f32), 1e-5, 1e-5, vector_bytes=vector)


TYPES = [
    (f64, f64, 1e-12),
    (bf16, f32, 1e-5),
    (bf16, bf16, 8e-3),
    (f16, f16, 1e-3),
    (int8, int32, 0),
    (int32, int32, 0),
]


@pytest.mark.parametrize(("dtype", "out", "tolerance"), TYPES, ids=str)
def test_types(dtype, out, tolerance):
    agree(*product(numbers(dtype, 13, 20), numbers(dtype, 20, 37, seed=1), out), tolerance, tolerance)


def test_batch():
    agree(*product(numbers(f32, 2, 3, 9, 20), numbers(f32, 2, 3, 20, 21), f32), 1e-5, 1e-5)


def test_operands_computed():
    agree(*product(numbers(f32, 20, 24), numbers(f32, 24, 40), f32, lambda k, x: k(e.mul, x, x)), 1e-5, 1e-5)


def test_transposed():
    a, b, out = numbers(f32, 24, 20), numbers(f32, 40, 24), np.zeros((20, 40), np.float32)
    k = Kernel(a, b, out)
    x, y = (k(shape.permute, k.load(p), axes=(1, 0)) for p in k.params[:2])
    k.store(k.params[2], k(contractions.dot, x, y, dtype=f32))
    agree(k.module(), [a, b, out], 1e-5, 1e-5)


def matmul(m, n, depth, tile_m, tile_n, tile_k, dtype=f32, edge="clip"):
    """The usual kernel: a block of C for each program, accumulated over tiles of K."""
    a, b = numbers(dtype, m, depth), numbers(dtype, depth, n, seed=1)
    out = np.zeros((m, n), np.float32)
    k = Kernel(a, b, out)
    row = k(e.mul, k(tile.program_id, axis=0), tile_m)
    column = k(e.mul, k(tile.program_id, axis=1), tile_n)

    def step(i, acc):
        x = k.load(k.params[0], row, i, shape=(tile_m, tile_k), edge=edge)
        y = k.load(k.params[1], i, column, shape=(tile_k, tile_n), edge=edge)
        return k.add(acc, k(contractions.dot, x, y, dtype=f32))

    (acc,) = k.loop(0, depth, tile_k, [k.const(0.0, f32, (tile_m, tile_n))], step)
    k.store(k.params[2], acc, row, column, edge=edge)
    return k.module((-(-m // tile_m), -(-n // tile_n))), [a, b, out]


@pytest.mark.parametrize("sizes", [(64, 64, 64, 32, 32, 16), (50, 70, 45, 32, 32, 16), (33, 40, 64, 8, 40, 64)])
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_accumulated(sizes, dtype):
    agree(*matmul(*sizes, dtype=dtype), rtol=1e-5, atol=1e-5)


def test_the_sum_is_made_in_place():
    text = BACKEND.emit(matmul(64, 64, 64, 32, 32, 16)[0], {}).text("kernels.ll")
    assert ".add.ahead(" in text and ".set" not in text


@pytest.mark.parametrize(("depth", "ahead"), [(60, True), (256, False)])
def test_rows_of_the_next_tile_are_fetched(depth, ahead):
    """Not those that map to the same sets of the cache: they would displace each other."""
    a, b, out = numbers(f32, 40, depth), numbers(f32, depth, 48), np.zeros((40, 48), np.float32)
    k = Kernel(a, b, out)
    k.store(k.params[2], k(contractions.dot, *(k.load(p) for p in k.params[:2]), dtype=f32))
    agree(k.module(), [a, b, out], 1e-5, 1e-5)
    text = BACKEND.emit(k.module(), {}).text("kernels.ll")
    kernels = re.findall(r"define internal void @ts\.dot.*?\n}", text, re.DOTALL)
    assert kernels and all(("@llvm.prefetch" in kernel) == ahead for kernel in kernels)


def test_rescaled_accumulator():
    """acc * 0.5 + a @ b in a loop, as flash attention does."""
    a, b, out = numbers(f32, 20, 24), numbers(f32, 24, 40), np.zeros((20, 40), np.float32)
    k = Kernel(a, b, out)
    x, y = k.load(k.params[0]), k.load(k.params[1])
    half = k.const(0.5, f32, (20, 40))

    def step(i, acc):
        return k.add(k(contractions.dot, x, y, dtype=f32), k(e.mul, acc, half))

    (acc,) = k.loop(0, 5, 1, [k.const(1.0, f32, (20, 40))], step)
    k.store(k.params[2], acc)
    agree(k.module(), [a, b, out], 1e-5, 1e-5)


def test_accumulator_read_again():
    """The old accumulator is used after the new one exists: it must not be overwritten."""
    a, b, out = numbers(f32, 20, 24), numbers(f32, 24, 40), np.zeros((20, 40), np.float32)
    k = Kernel(a, b, out)
    x, y = k.load(k.params[0]), k.load(k.params[1])

    def step(i, acc, other):
        new = k.add(acc, k(contractions.dot, x, y, dtype=f32))
        return new, k.add(other, acc)

    zero = k.const(0.0, f32, (20, 40))
    _, other = k.loop(0, 4, 1, [zero, zero], step)
    k.store(k.params[2], other)
    agree(k.module(), [a, b, out], 1e-5, 1e-5)


def test_mixed_narrow_result():
    a, b = numbers(bf16, 20, 24), numbers(bf16, 24, 40)
    out = np.zeros((20, 40), ml_dtypes.bfloat16)
    k = Kernel(a, b, out)
    y = k(contractions.dot, k.load(k.params[0]), k.load(k.params[1]), dtype=bf16)
    k.store(k.params[2], k(e.add, y, y))
    agree(k.module(), [a, b, out], 8e-3, 8e-3)


def test_dot_of_cast():
    a, b, out = numbers(f16, 20, 24), numbers(f16, 24, 40), np.zeros((20, 40), np.float32)
    k = Kernel(a, b, out)
    x, y = (k(basic.cast, k.load(p), dtype=f32) for p in k.params[:2])
    k.store(k.params[2], k(contractions.dot, x, y, dtype=f32))
    agree(k.module(), [a, b, out], 1e-5, 1e-5)


@pytest.mark.parametrize(("m", "k", "n"), [(32, 32, 64), (20, 16, 80), (33, 64, 48), (40, 48, 128), (32, 30, 64)])
def test_right_operand_transposed(m, k, n):
    a, b, out = numbers(f32, m, k), numbers(f32, n, k, seed=1), np.zeros((m, n), np.float32)
    kernel = Kernel(a, b, out)
    x, y = kernel.load(kernel.params[0]), kernel(shape.permute, kernel.load(kernel.params[1]), axes=(1, 0))
    kernel.store(kernel.params[2], kernel(contractions.dot, x, y, dtype=f32))
    agree(kernel.module(), [a, b, out], 1e-5, 1e-5)
    agree(kernel.module(), [a, b, out], 1e-5, 1e-5, vector_bytes=32)


TURNED = [(True, False), (False, True), (True, True)]


ENDING = [(f32, 64), (f32, 32), (f64, 64), (bf16, 64), (f16, 64), (bf16, 32), (int32, 64), (int8, 64)]


@pytest.mark.in_turn("sizes")
@pytest.mark.parametrize("turned", [(False, False), *TURNED], ids=str)
@pytest.mark.parametrize(
    "sizes", [(50, 70, 45, 32, 32, 16), (33, 40, 67, 8, 40, 64), (21, 19, 35, 32, 64, 20)], ids=str
)
@pytest.mark.parametrize(("dtype", "vector"), ENDING, ids=str)
def test_tiles_end_past_the_operands(sizes, dtype, vector, turned):
    """Blocks that end past the arrays along both axes are packed by copies and transposes, with zeros behind."""
    m, n, depth, tile_m, tile_n, tile_k = sizes
    shapes = [(m, depth), (depth, n)]
    a, b = (numbers(dtype, *(s[::-1] if t else s), seed=i) for i, (s, t) in enumerate(zip(shapes, turned, strict=True)))
    to = {bf16: f32, f16: f32, int8: int32}.get(dtype, dtype)
    out = np.zeros((m, n), to.numpy)
    k = Kernel(a, b, out)
    row = k(e.mul, k(tile.program_id, axis=0), tile_m)
    column = k(e.mul, k(tile.program_id, axis=1), tile_n)

    def read(p, at, size, flip):
        if not flip:
            return k.load(p, *at, shape=size, edge="clip")
        return k(shape.permute, k.load(p, *at[::-1], shape=size[::-1], edge="clip"), axes=(1, 0))

    def step(i, acc):
        x = read(k.params[0], (row, i), (tile_m, tile_k), turned[0])
        y = read(k.params[1], (i, column), (tile_k, tile_n), turned[1])
        return k.add(acc, k(contractions.dot, x, y, dtype=to))

    (acc,) = k.loop(0, depth, tile_k, [k.const(0, to, (tile_m, tile_n))], step)
    k.store(k.params[2], acc, row, column, edge="clip")
    bound = 0 if dtype.is_integer else 1e-5
    agree(k.module((-(-m // tile_m), -(-n // tile_n))), [a, b, out], bound, bound, vector_bytes=vector)


@pytest.mark.parametrize("dtype", [f32, f16, bf16, int8], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_operands_are_packed_whole_registers_at_a_time(dtype, turned):
    """The end of a tile takes a mask for each register of a row, not a comparison for each element."""
    to = int32 if dtype == int8 else f32
    size = (40, 37) if turned else (37, 40)
    arrays = [numbers(dtype, *size), numbers(dtype, 40, 45, seed=1), np.zeros((37, 45), to.numpy)]
    k = Kernel(*arrays)
    x = k.load(k.params[0], shape=(40, 48) if turned else (48, 40), edge="clip")
    x = k(shape.permute, x, axes=(1, 0)) if turned else x
    y = k.load(k.params[1], shape=(40, 48), edge="clip")
    k.store(k.params[2], k(contractions.dot, x, y, dtype=to), edge="clip")
    text = BACKEND.emit(k.module(), {"vector_bytes": 64}).text("kernels.ll")
    assert "@ts.panel." in text and ("@ts.transpose." in text) == turned
    agree(k.module(), arrays, 1e-5, 1e-5)


def test_columns_are_transposed_not_gathered():
    k = Kernel(*(arrays := [numbers(f32, 40, 45), numbers(f32, 37, 45, seed=1), np.zeros((40, 37), np.float32)]))
    y = k(shape.permute, k.load(k.params[1], shape=(40, 45), edge="clip"), axes=(1, 0))
    out = k(contractions.dot, k.load(k.params[0]), y, dtype=f32)
    k.store(k.params[2], out, edge="clip")
    text = BACKEND.emit(k.module(), {"vector_bytes": 64}).text("kernels.ll")
    assert "ts.transpose" in text and "masked.gather" not in text
    agree(k.module(), arrays, 1e-5, 1e-5)


@pytest.mark.parametrize("turned", TURNED, ids=str)
def test_nothing_of_the_next_column_reaches_a_sum(turned):
    """Behind the end of a column lies the first element of the next one: NaN there is none of this column's."""
    m, n, depth = 20, 37, 45
    a, b, out = numbers(f32, m, depth), numbers(f32, depth, n, seed=1), np.zeros((m, n), np.float32)
    a[7, 0], b[0, 5] = np.nan, np.nan
    given = [np.ascontiguousarray(x.T) if t else x for x, t in zip((a, b), turned, strict=True)]
    k = Kernel(*given, out)

    def read(p, size, flip):
        x = k.load(p, shape=size[::-1] if flip else size, edge="clip")
        return k(shape.permute, x, axes=(1, 0)) if flip else x

    x, y = read(k.params[0], (32, 64), turned[0]), read(k.params[1], (64, 64), turned[1])
    k.store(k.params[2], k(contractions.dot, x, y, dtype=f32), edge="clip")
    BACKEND.runtime(BACKEND.emit(k.module(), {"vector_bytes": 64})).run([*given, out])
    np.testing.assert_array_equal(np.isnan(out), np.isnan(a @ b))


@pytest.mark.parametrize("registers", [16, 32])
def test_a_register_tile_fits_the_registers(registers):
    """Its sums, a row of the right operand, and two more: the left element and what is loaded next."""
    sizes = [(rows, vectors) for rows in (1, 2, 3, 6, 7, 12, 64) for vectors in (1, 2, 3, 4, 16)]
    for rows, vectors in sizes:
        r, v = choose_register_tile(rows, vectors, registers)
        assert r <= rows and v <= vectors and r * v + v + 2 <= registers
    assert choose_register_tile(64, 16, registers)[0] > 3  # large products hide the latency of their sums


def test_registers_are_spilled_to_an_aligned_stack():
    """Half of all stacks would put each spilled register of 64 bytes in two lines of the cache."""
    x, y = np.ones((130, 70), np.float32), np.ones((70, 90), np.float32)
    lowered = lower(ts.jit(lambda x, y: x @ y).trace(x, y).function, "llvm")["tile"]
    text = BACKEND.emit(lowered, {}).text("kernels.ll")
    (attributes,) = [line for line in text.splitlines() if line.startswith("attributes #0")]
    assert '"stackrealign"' in attributes

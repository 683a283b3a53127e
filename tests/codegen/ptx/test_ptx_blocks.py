"""Blocks of every type and odd shape: elementwise ops, memory access with masks and clipping, layout conversion."""

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, numbers, run

from tessera.core.types import (
    bf16,
    bool_,
    f16,
    f32,
    f64,
    fp4,
    fp6,
    fp6_e2m3,
    fp8_e4m3,
    fp8_e5m2,
    int4,
    int8,
    int16,
    int32,
    int64,
    uint8,
)
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

TYPES = (f64, f32, f16, bf16, int64, int32, int16, int8, uint8)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_arithmetic(dtype):
    def build(k, x, y, out):
        a, b = k.load(x), k.load(y)
        k.store(out, k(e.sub, k(e.mul, a, b), k(e.neg, a)))

    run(build, *(numbers(dtype, 5, 24, seed=i) for i in range(3)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("size", [1, 3, 33, 128, 1000, 4096])
def test_sizes(size, arch):
    run(lambda k, x, out: k.store(out, k.add(k.load(x), k.load(x))), numbers(f32, size), numbers(f32, size), arch=arch)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_clipped_edges(dtype):
    def build(k, x, out):
        i = k(e.mul, k(tile.program_id, axis=0), k.const(8))
        k.store(out, k.load(x, i, 3, shape=(8, 16), edge="clip"), i, 3, edge="clip")

    run(build, numbers(dtype, 21, 17), numbers(dtype, 21, 17, seed=1), grid=(3,))


def test_negative_indices_are_clipped():
    def build(k, x, out):
        k.store(out, k.load(x, -3, shape=(16,), edge="clip"), 2, edge="clip")

    run(build, numbers(f32, 9), numbers(f32, 12))


@pytest.mark.parametrize("dtype", (f32, bf16, int8), ids=str)
def test_masks(dtype):
    def build(k, x, out):
        i = k(shape.iota, shape=(40,), axis=0)
        mask = k(e.less, i, k.broadcast(k.const(29), 40))
        value = k.load(x, shape=(40,), rest=[mask, k.broadcast(k.const(7, dtype), 40)])
        k.store(out, value, rest=[k(e.less, i, k.broadcast(k.const(33), 40))])

    run(build, numbers(dtype, 40), numbers(dtype, 40, seed=1))


def test_transposed_through_memory():
    """What one thread wrote another reads: in the order of the program."""

    def build(k, x, out):
        v = k.load(x)
        k.store(out, k(shape.permute, v, axes=(1, 0)))
        again = k.load(out)
        k.store(x, k(shape.permute, again, axes=(1, 0)))

    run(build, numbers(f32, 24, 48), np.zeros((48, 24), np.float32))


@pytest.mark.parametrize(("here", "there"), [((6, 4), (8, 3)), ((4, 8), (32,)), ((3, 1, 5), (15,)), ((2, 6), (4, 3))])
def test_reshapes(here, there):
    run(lambda k, x, out: k.store(out, k(shape.reshape, k.load(x), shape=there)), numbers(f32, *here),
        numbers(f32, *there))  # fmt: skip


@pytest.mark.parametrize("dtype", (f32, int64, bool_), ids=str)
def test_broadcasts(dtype):
    def build(k, row, column, out):
        a, b = k.broadcast(k.load(row), 7, 20), k.broadcast(k.load(column), 7, 20)
        k.store(out, k(e.where, k(e.equal, a, b), a, b))

    run(build, numbers(dtype, 1, 20), numbers(dtype, 7, 1), numbers(dtype, 7, 20))


@pytest.mark.parametrize("dtype", (fp8_e4m3, fp8_e5m2, fp6, fp6_e2m3, fp4, int4), ids=str)
def test_small_elements(dtype):
    def build(k, x, out, back):
        v = k.load(x)
        k.store(out, k(basic.cast, v, dtype=dtype))
        k.store(back, k(basic.cast, k(basic.cast, v, dtype=dtype), dtype=f32))

    spread = [0.0, -0.0, 1e-6, 3e38] if dtype == int4 else [0.0, -0.0, 1e-6, 3e38, np.inf, -np.inf, np.nan]
    x = np.concatenate([numbers(f32, 121) * 20, numbers(f32, 40) * 1e-3, spread]).astype(np.float32)
    run(build, x, np.zeros(len(x), dtype.numpy), np.zeros(len(x), np.float32))


def test_gather_and_scatter():
    def build(k, x, places, out):
        i = k.load(places)
        k(tile.scatter, out, k(tile.gather, x, i), i)

    places = np.random.default_rng(0).permutation(50)
    run(build, numbers(f32, 50), places, np.zeros(50, np.float32))


@pytest.mark.parametrize("to", TYPES, ids=str)
@pytest.mark.parametrize("source", (f64, f32, bf16, int64, uint8, bool_), ids=str)
def test_casts(source, to):
    def build(k, x, out):
        k.store(out, k(basic.cast, k.load(x), dtype=to))

    run(build, numbers(source, 33), np.zeros(33, to.numpy))


@pytest.mark.parametrize("op", (e.floor_divide, e.remainder), ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", (f64, f32, int64, int32, int8, uint8), ids=str)
def test_division_rounded_down(op, dtype):
    def build(k, x, y, out):
        k.store(out, k(op, k.load(x), k.load(y)))

    y = numbers(dtype, 65, seed=2)
    y[y == 0] = 3
    run(build, numbers(dtype, 65), y, np.zeros(65, dtype.numpy))

"""Each piece of the kernel language, run by the interpreter and compared with NumPy."""

import math

import numpy as np
import pytest

from tessera import tile
from tessera.core.types import bf16, int32
from tessera.frontend.kernel import constexpr, kernel
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as ts

FACTOR = 3.0


def run(entry, *arrays, grid=(1,), group=1, **constants):
    """The last array after a launch."""
    entry[grid, group](*arrays, **constants)
    return arrays[-1]


def zeros(*shape, dtype="f4"):
    return np.zeros(shape, dtype)


@kernel
def arithmetic(x: Tensor["N"], out: Tensor["N"]):
    i = tile.program_id(0)
    v = x[i]
    out[i] = -v + 2 * v - v / 4.0 + v**2 % 3.0 + abs(v - 1.0) + FACTOR


def test_operators(rng):
    x = rng.random(8, dtype="f4")
    want = -x + 2 * x - x / 4 + x**2 % 3 + abs(x - 1) + FACTOR
    np.testing.assert_allclose(run(arithmetic, x, zeros(8), grid=(8,)), want, rtol=1e-6)


@kernel
def comparisons(x: Tensor["N", int32], out: Tensor["N", int32]):
    i = tile.program_id(0)
    v = x[i]
    inside = 2 < v <= 5
    odd = v % 2 == 1 and not v == 3
    out[i] = 1 if inside or odd else 0


def test_chains_and_logic():
    x = np.arange(9, dtype="i4")
    got = run(comparisons, x, zeros(9, dtype="i4"), grid=(9,))
    assert got.tolist() == [int(2 < v <= 5 or (v % 2 == 1 and v != 3)) for v in range(9)]


@kernel
def guarded(x: Tensor["N"], out: Tensor["M"]):
    i = tile.program_id(0)
    if i < N and x[i] > 0.5:
        out[i] = x[i] if i < N else 0.0
    else:
        out[i] = -1.0 if i >= N or x[i] < 0.25 else -2.0


def test_what_a_condition_guards_is_not_read(rng):
    x = rng.random(5, dtype="f4")
    want = [*np.where(x > 0.5, x, np.where(x < 0.25, -1, -2)), -1, -1, -1]
    np.testing.assert_allclose(run(guarded, x, zeros(8), grid=(8,)), want)


@kernel
def branches(x: Tensor["N"], out: Tensor["N"]):
    i = tile.program_id(0)
    v, label = x[i], 0.0
    if v < 0.3:
        label = 1
    elif v < 0.6:
        label = v * 10.0
    out[i] = label


def test_branches_join_numbers_and_tensors(rng):
    x = rng.random(16, dtype="f4")
    want = np.where(x < 0.3, 1, np.where(x < 0.6, x * 10, 0))
    np.testing.assert_allclose(run(branches, x, zeros(16), grid=(16,)), want, rtol=1e-6)


@kernel
def early(x: Tensor["N"], out: Tensor["M"]):
    i = tile.program_id(0)
    if i >= N:
        return
    if x[i] < 0.5:
        out[i] = 1.0
        return
    out[i] = 2.0


def test_early_return(rng):
    x = rng.random(6, dtype="f4")
    want = [*np.where(x < 0.5, 1, 2), 0, 0]
    np.testing.assert_array_equal(run(early, x, zeros(8), grid=(8,)), want)


@kernel
def compile_time(out: Tensor["N"], *, mode, sizes):
    if mode == "ramp":
        total = sum([n * n for n in sizes if n > 1])
        for i, n in enumerate(sizes):
            out[i] = n + total
    elif mode:
        assert False, f"never reached with {mode!r}"
    square = lambda v: v * v  # noqa: E731
    out[-1 + N] = square(math.sqrt(2.0)) if mode is not None else 0.0


def test_compile_time_values():
    assert run(compile_time, zeros(5), mode="ramp", sizes=(1, 2, 3)).tolist() == pytest.approx([14, 15, 16, 0, 2])
    assert run(compile_time, zeros(2), mode=None, sizes=()).tolist() == [0, 0]


def scaled(v, factor=2.0):
    """A device function with control flow of its own."""
    if v > 0.5:
        return v * factor
    return v


def pair(v):
    return v + 1.0, v - 1.0


@kernel
def devices(x: Tensor["N"], out: Tensor["N"]):
    i = tile.program_id(0)
    up, down = pair(scaled(x[i], factor=4.0))

    def product(a):
        return a * down

    out[i] = product(up)


def test_device_functions_are_read_into_the_kernel(rng):
    x = rng.random(9, dtype="f4")
    v = np.where(x > 0.5, x * 4, x)
    np.testing.assert_allclose(run(devices, x, zeros(9), grid=(9,)), (v + 1) * (v - 1), rtol=1e-5)


@kernel
def builtins(x: Tensor["N", int32], out: Tensor["N"]):
    i = tile.program_id(0)
    low, high = min(x[i], 3), max(x[i], 2, 4)
    out[i] = float(low) + float(high) + ts.exp(0.0) + math.exp(float(x[i]) * 0.0) + float(int(2.5)) + len(out)


def test_builtins():
    x = np.arange(6, dtype="i4")
    want = [min(v, 3) + max(v, 2, 4) + 1 + 1 + 2 + 6 for v in range(6)]
    assert run(builtins, x, zeros(6), grid=(6,)).tolist() == want


@kernel
def blocks(x: Tensor["M", "N"], out: Tensor["M"], scale: float, BM: constexpr = 4):
    rows = tile.load(x, shape=(BM, N))
    top = tile.max(rows, axis=1)
    spread = tile.sum(tile.exp(rows - top[:, None]), axis=1) * scale
    tile.store(out, tile.where(spread > 2.0, spread, tile.zeros((BM,))))


def test_blocks_and_scalar_arguments(rng):
    x, out = rng.standard_normal((8, 5)).astype("f4"), zeros(8)
    blocks[2](x, out, 0.5)
    want = np.exp(x - x.max(1, keepdims=True)).sum(1) * 0.5
    np.testing.assert_allclose(out, np.where(want > 2, want, 0), rtol=1e-6)


@kernel
def mixed(a: Tensor["M", "K", bf16], b: Tensor["K", "N", bf16], out: Tensor["M", "N", bf16]):
    acc = a @ b
    out += tile.cast(acc, bf16)


def test_matrix_products_accumulate_wide(rng):
    a, b = (rng.random(s).astype(bf16.numpy) for s in ((4, 8), (8, 4)))
    want = a.astype("f4") @ b.astype("f4")
    np.testing.assert_array_equal(run(mixed, a, b, zeros(4, 4, dtype=bf16.numpy)), want.astype(bf16.numpy))

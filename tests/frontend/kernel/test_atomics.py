"""Atomic updates against NumPy, what each gives back, and what bound mode refuses to judge."""

import numpy as np
import pytest

import tessera as ts
from conformance.tile.atomics.cases import bits, combined, elected, shared_histogram, tickets
from tessera import tile
from tessera.core.errors import DTypeError, ExecutionError
from tessera.core.types import as_dtype
from tessera.runtime.program import prepare


def test_combined(rng):
    x = rng.integers(-9, 9, (4, 20)).astype("i4")
    total = np.zeros((3, 3), "i4")
    combined[(4,)](x, total, N=20)
    parts = [x[:, k::3] for k in range(3)]
    assert total[0].tolist() == [p.sum() for p in parts] and total[1].tolist() == [max(p.max(), 0) for p in parts]
    assert total[2].tolist() == [min(p.min(), 0) for p in parts]


def test_bits(rng):
    x, words = rng.integers(-99, 99, 32), np.array([-1, 0, 5])
    bits[(4,), 8](x, words)
    want = [np.bitwise_and.reduce(x), np.bitwise_or.reduce(x), 5 ^ np.bitwise_xor.reduce(x)]
    assert words.tolist() == want


def test_a_histogram_in_shared_memory(rng):
    x, out = rng.integers(0, 5, 100).astype("i4"), np.zeros(5, "i4")
    shared_histogram[(1,), 32](x, out, B=5, N=100)
    assert out.tolist() == np.bincount(x, minlength=5).tolist()


def test_exchange_and_compare():
    out, order = np.arange(6), np.zeros(6, "i8")
    tickets[(6,)](out, order, N=6)
    assert out.tolist() == [100] * 6 and order.tolist() == [n + n + 1 + 100 for n in range(6)]
    owner, seen = np.array([0, 0, 9, 0], "i4"), np.zeros(16, "i4")
    elected[(1,), 16](owner, seen)
    assert owner.tolist() == [2, 6, 9, 14] and seen.tolist() == np.repeat(owner, 4).tolist()


@ts.kernel
def counter(total, out):
    out[tile.local_id()] = tile.atomic_add(total[0], 2)


def test_each_tile_sees_another_count():
    total, out = np.zeros(1, "i8"), np.zeros(8, "i8")
    counter[(1,), 8](total, out)
    assert total[0] == 16 and sorted(out.tolist()) == list(range(0, 16, 2))


def test_what_each_saw_is_not_known_in_bound_mode():
    program = prepare(counter, {"total": np.zeros(1, "i8"), "out": np.zeros(8, "i8")}, grid=(1,), group=8)
    total, out = program.bounds()
    assert total.exact and np.isinf(out.radius).all()


@ts.kernel
def summed(x, total, whole):
    value = tile.exp(x[tile.program_id(0)])
    tile.atomic_add(total[tile.program_id(0) % 3], value)
    tile.atomic_add(whole, value)


def test_the_bound_of_float_sums_covers_every_order(rng):
    """Sums in orders of any kind, in f32, of operands that are each off by up to their own bound."""
    x = (rng.random(60, dtype="f4") * 20 - 10).astype("f4")
    program = prepare(summed, {"x": x, "total": np.zeros(3, "f4"), "whole": np.zeros((), "f4")}, grid=(60,))
    total, whole = program.bounds()
    assert not total.exact and (total.radius < 1e-4 * total.value).all()
    for _ in range(30):
        order = rng.permutation(60)
        by_place, every = np.zeros(3, "f4"), np.float32(0)
        for i in order:
            value = np.exp(x[i])
            by_place[i % 3] += value
            every += value
        assert (np.abs(by_place - total.value) <= total.radius).all() and abs(every - whole.value) <= whole.radius
    np.testing.assert_allclose(program.run("device", "llvm")[0], total.value, rtol=1e-5)


@ts.kernel
def float_bits(x):
    tile.atomic_or(x[0], 1.0)


@ts.kernel
def float_cas(x):
    tile.atomic_cas(x[0], 0.0, 1.0)


@ts.kernel
def index_beside(x):
    tile.atomic_add(x, 2, 1.0)


def test_an_index_in_the_masks_place():
    with pytest.raises(DTypeError, match=r"the mask is not bool(?s:.)*atomic_add\(A\[index\], value\)"):
        index_beside[(1,)](np.zeros(4, np.float32))


@pytest.mark.parametrize("entry", [float_bits, float_cas])
def test_refusals(entry):
    with pytest.raises(DTypeError, match="needs integers"):
        entry[(1,)](np.zeros(1, "f4"))


@ts.kernel
def narrow(x, total, most, least, swapped):
    i = tile.program_id(0)
    tile.atomic_add(total[0], x[i])
    tile.atomic_max(most[0], x[i])
    tile.atomic_min(least[0], x[i])
    if i == 3:
        swapped[1] = tile.atomic_exchange(swapped[0], x[i])


@pytest.mark.parametrize("dtype", ["bf16", "f16", "fp8_e4m3"])
@pytest.mark.parametrize("engine", [("tile", "interp"), ("device", "llvm"), ("target", "llvm")])
def test_narrow_floats(dtype, engine):
    element = as_dtype(dtype).numpy
    x = np.arange(-4, 8).astype(element)  # whole numbers, whose sums are exact in any order
    given = {"x": x, "total": np.zeros(1, element), "most": np.full(1, -9, element), "least": np.full(1, 9, element)}
    program = prepare(narrow, {**given, "swapped": np.array([5, 0], element)}, grid=(12,))
    total, most, least, swapped = (a.astype("f4").tolist() for a in program.run(*engine))
    assert total == [18] and most == [7] and least == [-4] and swapped == [-1, 5]

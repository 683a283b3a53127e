"""Sorts and selections of long rows: the bitonic network and the rounds of minima agree with NumPy on every target."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.runtime import driver
from tessera.stdlib import row_sorting

DTYPES = ("f4", "f2", ml_dtypes.bfloat16, "i4", "u4", "i1", "u1", "?")
TARGETS = (("ptx", "tile"), ("ptx", "target"), ("llvm", "target"))


def draw(dtype, *shape, seed=0):
    """Elements with many equal ones; floats with NaNs, both zeros and infinities."""
    rng = np.random.default_rng(seed)
    info = None if np.dtype(dtype).kind in "fVb" else np.iinfo(dtype)
    x = rng.integers(-4 if info is None or info.min else 0, 5, shape).astype(dtype)
    if info is not None:
        x[rng.random(shape) < 0.1], x[rng.random(shape) < 0.1] = info.min, info.max
    elif np.dtype(dtype).kind != "b":
        for value in (np.nan, -0.0, np.inf, -np.inf):
            x[rng.random(shape) < 0.1] = value
    return x


def order(x, descending):
    """The stable order of rows by NumPy, with NaN as the largest."""
    wide = x.astype(np.float64)
    rank = np.where(np.isnan(wide), 2, np.where(wide == np.inf, 1, 0))
    value = np.where(rank, 0, wide) + 0.0
    keys = (-value, -rank) if descending else (value, rank)
    return np.lexsort(keys, axis=-1)


def has(names, *kernels):
    """Whether each kernel is among these tile functions, alone or fused with its neighbours."""
    return all(any(n.startswith(k) for n in names) for k in kernels)


def run(function, x, target, level, lowered=None):
    """The names of the kernels, and the results on a target; `lowered` is the target whose plan lowers the function."""
    levels = driver.lower(ts.jit(function).trace(x).function, lowered or target)
    return [f.name for f in levels["tile"].functions], driver.run_level(levels, level, [x], target)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sorts_of_every_type(dtype, descending):
    x = draw(dtype, 3, 77)
    names, (ours,) = run(lambda x: ts.argsort(x, axis=-1, descending=descending), x, "ptx", "target")
    assert has(names, "sort_chunks")
    np.testing.assert_array_equal(ours, order(x, descending))


@pytest.mark.parametrize("chunk", [4, 16, 64])
@pytest.mark.parametrize(("rows", "size"), [(1, 1000), (5, 129), (3, 256)])
def test_rows_of_several_chunks(monkeypatch, chunk, rows, size):
    monkeypatch.setattr(row_sorting, "MAX_CHUNK", chunk)
    x = draw("f4", rows, size)
    names, (ours,) = run(lambda x: ts.argsort(x, axis=-1), x, "ptx", "tile", "interp")
    assert has(names, "sort_chunks", "merge_far", "merge_near")
    np.testing.assert_array_equal(ours, order(x, False))


def test_the_text_of_merges(monkeypatch):
    monkeypatch.setattr(row_sorting, "MAX_CHUNK", 64)
    x = draw("f4", 2, 400)
    for level in ("tile", "target"):
        _, (ours,) = run(lambda x: ts.argsort(x, axis=-1, descending=True), x, "ptx", level, "interp")
        np.testing.assert_array_equal(ours, order(x, True))


@pytest.mark.in_turn("axis")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_top_places(target, largest, axis):
    x = draw("f4", 60, 50)
    names, (values, places) = run(lambda x: ts.topk(x, 7, axis=axis, largest=largest), x, *target)
    want = np.take(order(x.swapaxes(axis, -1), largest), range(7), -1).swapaxes(axis, -1)
    assert has(names, "select_first") and not has(names, "sort_chunks")
    np.testing.assert_array_equal(places, want)
    np.testing.assert_array_equal(values, np.take_along_axis(x, want, axis))


@pytest.mark.parametrize("count", [1, 5, 16])
def test_selections_in_several_rounds(monkeypatch, count):
    monkeypatch.setattr(row_sorting, "SELECT_CHUNK", 32)
    x = draw("i1", 2, 500)
    _, (values, places) = run(lambda x: ts.topk(x, count), x, "ptx", "tile")
    np.testing.assert_array_equal(places, order(x, True)[:, :count])
    np.testing.assert_array_equal(values, np.sort(x, axis=-1)[:, ::-1][:, :count])


def test_a_sort_with_another_reader_is_whole():
    x = draw("f4", 2, 40)
    names, (places, first) = run(lambda x: (p := ts.argsort(x, axis=-1), p[:, :3]), x, "ptx", "tile")
    assert not has(names, "select_first")
    np.testing.assert_array_equal(places, order(x, False))
    np.testing.assert_array_equal(first, order(x, False)[:, :3])


def test_derivatives_of_sorted_rows():
    x = np.random.default_rng(1).standard_normal((2, 50)).astype("f4")
    weight = np.arange(50, dtype="f4")
    gradient = ts.grad(lambda x: ts.sum(ts.sort(x, axis=-1) * ts.arange(50, dtype="f32")) + ts.sum(ts.topk(x, 3)[0]))
    _, (ours,) = run(gradient, x, "ptx", "tile")
    rank = np.argsort(np.argsort(x, -1), -1)
    np.testing.assert_allclose(ours, weight[rank] + (rank >= 47), rtol=1e-6)


def test_tf32_is_sorted_as_f32(rng):
    x = ts.Tensor(rng.standard_normal((2, 100)).astype("f4")).to(ts.tf32)
    for target in ("llvm", "ptx"):
        np.testing.assert_array_equal(ts.jit(ts.sort, target=target)(x).to(ts.f32), np.sort(np.asarray(x.to(ts.f32))))

"""Radix selection of sorted places and first elements of rows: equal to a stable sort on every target."""

from functools import cache

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.core.types import TensorType
from tessera.runtime import driver
from tessera.stdlib import launches, row_selection
from tests.stdlib.test_row_sorting import draw, has, order, run

DTYPES = ("f4", "f8", "f2", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "i8", "i4", "u4", "i1", "u1", "?")
TARGETS = (("ptx", "tile"), ("ptx", "target"), ("llvm", "target"))


def sort_places(x, descending):
    """The stable order of rows."""
    if x.dtype.kind == "i":
        return np.argsort(-1 - x if descending else x, axis=-1, kind="stable")
    return order(x, descending)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_selections_of_every_type(monkeypatch, dtype, descending):
    """Of each type one order as text and the other in the Tile interpreter, in turn."""
    monkeypatch.setattr(launches, "MAX_ROUND_ROW", 0)
    monkeypatch.setattr(launches, "MAX_ROUND_WORK", 0)
    x = draw(dtype, 2, 40)

    def select(x):
        places = ts.argsort(x, axis=-1, descending=descending)
        return places[:, 20:21], places[:, 39:], places[:, :1], places[:, :17]

    names, ours = run(select, x, "llvm", "target" if (DTYPES.index(dtype) + descending) % 2 else "tile")
    want = sort_places(x, descending)
    assert has(names, "find_places", "choose_first")
    for found, place in zip(ours, (slice(20, 21), slice(39, 40), slice(1), slice(17)), strict=True):
        np.testing.assert_array_equal(found, want[:, place])


@pytest.mark.parametrize("target", TARGETS)
def test_selections_on_every_target(monkeypatch, target):
    monkeypatch.setattr(row_selection, "WIDE_CHUNK", 64)
    x = draw("f4", 3, 200)
    names, (place, first) = run(lambda x: (ts.argsort(x)[:, 100:101], ts.topk(x * 1.0, 70)[1]), x, *target)
    assert has(names, "find_places", "choose_first")
    np.testing.assert_array_equal(place, order(x, False)[:, 100:101])
    np.testing.assert_array_equal(first, order(x, True)[:, :70])


@cache
def select_candidates(target, level):
    """What selects the first 5 of 300 elements by candidates."""
    select = ts.jit(lambda x: row_selection.select_front(x, 5, True, chunk=16, packed=16))
    levels = driver.lower(select.trace(np.zeros((2, 300), "f4")).function, target)
    assert has([f.name for f in levels["tile"].functions], "collect_candidates", "choose_first")
    return driver.compile_level(levels, level, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["drawn", "equal", "rising", "falling", "unknown"])
def test_candidates_up_to_a_bound(target, kind):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, 300)).astype("f4")
    x = {"equal": 0 * x, "rising": np.sort(x), "falling": -np.sort(-x), "unknown": x + np.nan}.get(kind, x)
    (ours,) = select_candidates(*target)([x])
    np.testing.assert_array_equal(ours, order(x, True)[:, :5])


@pytest.fixture
def few_lanes(monkeypatch):
    for name, value in {"LEAST_LANES": 16, "KEY_CHUNK": 32, "MAX_ROUNDS": 0, "MAX_LITTLE": 0}.items():
        monkeypatch.setattr(row_selection, name, value)


@cache
def select_sorted_candidates(programs, level):
    """What selects the first 6 of 700 elements by sorted candidates: one program for elements of all kinds."""
    levels = driver.lower(ts.jit(lambda x: ts.topk(x, 6)[1]).trace(np.zeros((2, 700), "f4")).function, "ptx")
    names = [f.name for f in levels["tile"].functions]
    assert has(names, "collect_keys", "sort_candidates") and has(names, "sort_keys") == (programs > 2)
    return driver.compile_level(levels, level, "ptx")


@pytest.mark.parametrize("level", ["tile", "target"])
@pytest.mark.parametrize("programs", [2, 1056])  # of two rows: one part of each, or several
@pytest.mark.parametrize("kind", ["drawn", "equal", "rising", "falling", "unknown", "few"])
def test_sorted_candidates(monkeypatch, few_lanes, kind, programs, level):
    """Of equal elements there are more candidates than one network sorts, of falling ones more than the larger one."""
    monkeypatch.setattr(row_selection, "PROGRAMS", programs)
    x = np.random.default_rng(5).standard_normal((2, 700)).astype("f4")
    few = np.where(np.arange(700) % 233 == 5, x, np.float32(-np.inf))
    kinds = {"equal": 0 * x, "rising": np.sort(x), "falling": -np.sort(-x), "unknown": x + np.nan, "few": few}
    x = kinds.get(kind, x)
    (ours,) = select_sorted_candidates(programs, level)([x])
    np.testing.assert_array_equal(ours, order(x, True)[:, :6])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in ("f8", "i8")])
def test_candidates_of_every_type(few_lanes, dtype):
    x = draw(dtype, 2, 90)
    names, (ours,) = run(lambda x: ts.argsort(x)[:, :7], x, "ptx", "tile")
    assert has(names, "collect_keys")
    np.testing.assert_array_equal(ours, sort_places(x, False)[:, :7])


@pytest.mark.parametrize(("shape", "count", "name"), [
    ((200, 5000), 8, "select_first"), ((2, 5000), 32, "select_first"), ((200, 5000), 9, "collect_keys"),
    ((1, 500_000), 300, "collect_keys"), ((600, 200), 40, "select_first"),
    ((8192, 80_000), 64, "select_first"), ((600, 1500), 600, "choose_first"),
])  # fmt: skip
def test_the_algorithm_that_is_the_fastest_is_chosen(shape, count, name):
    function = ts.jit(lambda x: ts.topk(x, count)[1]).trace(TensorType(shape, ts.f32)).function
    assert has([f.name for f in driver.lower(function, "ptx")["tile"].functions], name)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("size", [700, 701, 704])
def test_candidates_are_elements_of_their_row(size, descending):
    """Where the bound is the largest order, what lies past the end of a row does not exceed it either."""
    info = np.iinfo("i4")
    x = np.full((3, size), info.min if descending else info.max, "i4")

    def select(x):
        return row_selection.select_front(x, 5, descending, chunk=16, packed=16)

    names, (ours,) = run(select, x, "llvm", "tile")
    assert has(names, "collect_candidates")
    np.testing.assert_array_equal(ours, np.tile(np.arange(5), (3, 1)))


@pytest.mark.parametrize(("dtype", "size", "count", "rounds"), [
    ("f4", 300, 60, True), ("f2", 5000, 6, True), ("f4", 5000, 7, False), ("f8", 300, 2, False),
])  # fmt: skip
def test_the_first_of_short_rows_are_least_keys_one_after_the_other(dtype, size, count, rounds):
    x = draw(dtype, 3, size)
    x[0, 5:9], x[1, :] = np.nan, 1
    names, (places,) = run(lambda x: ts.topk(x, count)[1], x, "llvm", "target")
    assert has(names, "select_first") == rounds != has(names, "choose_first")
    np.testing.assert_array_equal(places, sort_places(x, True)[:, :count])


def test_few_elements_of_rows_are_not_sorted():
    x = draw("f4", 2, 100)
    function = ts.jit(lambda x: (ts.argsort(x)[:, :60], ts.argsort(-x)[:, 3:5])).trace(x).function
    names = [f.name for f in driver.lower(function, "llvm")["tile"].functions]
    assert not has(names, "choose_first") and not has(names, "find_places")

"""Gathers and scatters of rows: neighbours along the last axis are moved by one access where that is aligned."""

import re

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.runtime import driver

ROWS = np.array([5, -1, 0, 5, 63, -64, 17, *range(40)])


def build(function, *arrays):
    """The PTX text of a function, and its results in the emulator, which checks each access."""
    module = driver.lower(ts.jit(function).trace(*arrays).function, "ptx")["tile"]
    backend = get_backend("ptx")
    artifact = backend.emit(module, {})
    (text,) = (data for name, data in artifact.files.items() if name.endswith(".ptx"))
    return text, backend.sanitized(artifact)(list(arrays))[0]


LOADS = {16: "v4.b32", 8: "v2.b32", 2: "u16"}  # of so many bytes of f16; indices of int64 are b64


# The columns of the rows, what is taken of them, and the bytes of an access of f16.
COLUMNS = {
    "whole rows": (192, slice(None), 16),
    "rows of whole vectors": (200, slice(8, 136), 16),
    "pairs of vectors": (196, slice(4, 132), 8),
    "at odd places": (192, slice(1, 129), 2),
    "odd rows": (193, slice(0, 128), 2),
    "backwards": (192, slice(None, None, -1), 2),
    "every other": (192, slice(None, None, 2), 2),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_rows_are_gathered_in_vectors(name, rng):
    columns, taken, width = COLUMNS[name]
    x = rng.standard_normal((64, columns)).astype(np.float16)
    text, out = build(lambda x, i: x[i][:, taken], x, ROWS)
    np.testing.assert_array_equal(out, x[ROWS][:, taken])
    found = set(re.findall(r"ld\.global\.(\S*(?:u16|b32))", text))
    assert found == {LOADS[width]}


@pytest.mark.parametrize("rows", [1, 31, 47])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "?"])
def test_partial_tiles_of_rows(rows, dtype, rng):
    x = rng.integers(0, 2 if dtype == "?" else 100, (64, 96)).astype(dtype)
    _, out = build(lambda x, i: x[i], x, ROWS[:rows])
    np.testing.assert_array_equal(out, x[ROWS[:rows]])
    _, out = build(lambda x, i: ts.where(ts.greater(i, 0).reshape((-1, 1)), x[i], x[:rows]), x, ROWS[:rows])
    np.testing.assert_array_equal(out, np.where(ROWS[:rows, None] > 0, x[ROWS[:rows]], x[:rows]))


def test_a_slice_of_partial_tiles_is_scattered_in_vectors(rng):
    x, y = rng.standard_normal((1031, 16)).astype("f4"), rng.standard_normal((1021, 8)).astype("f4")
    function = ts.jit(lambda x, y: ts.update_slice(x, y, start=(0, 8))).trace(x, y).function
    module = driver.lower(function, "ptx", {"donated": frozenset({0})})["tile"]
    backend = get_backend("ptx")
    artifact = backend.emit(module, {})
    (text,) = (data for name, data in artifact.files.items() if name.endswith(".ptx"))
    assert '"tile.scatter"' not in text and "st.global.v4" in text.split(".entry")[-1]
    want = x.copy()
    want[:1021, 8:] = y
    np.testing.assert_array_equal(backend.sanitized(artifact)([x, y])[0], want)

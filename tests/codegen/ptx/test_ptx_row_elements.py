"""The element of a row at a place: a masked sum is a shuffle, whatever holds the row; the results are NumPy's."""

import re

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.contract import get_backend
from tessera.runtime.program import prepare


def emit_and_run(kernel, **given):
    """The text of PTX of a kernel's only program, and the array `out` after it."""
    program = prepare(kernel, given, "ptx", (1,))
    backend = get_backend("ptx")
    artifact = backend.emit(program.levels["tile"], {})
    (text,) = (data for name, data in artifact.files.items() if name.endswith(".ptx"))
    arrays = list(program.arrays)
    backend.sanitized(artifact)(arrays)
    return text, arrays[-1]


def read_places(shape, dtype, places, keepdims=True):
    """The elements of the rows of a block at places, by a masked sum: the text of PTX, and the results."""
    x = np.random.default_rng(0).normal(size=shape).astype(dtype) * 100
    rows, columns = shape
    kept = (rows, 1) if keepdims else (rows,)
    out = np.zeros(kept, dtype)

    @ts.kernel
    def read(x, places, out):
        block, at = x[0:rows, 0:columns], tile.reshape(places[0:rows], (rows, 1))
        along = tile.broadcast(tile.reshape(tile.arange(0, columns), (1, columns)), shape)
        chosen = tile.where(along == tile.broadcast(at, shape), block * 2, 0)
        found = tile.sum(chosen, axis=1, keepdims=keepdims)
        if keepdims:
            out[0:rows, 0:1] = found
        else:
            out[0:rows] = found

    text, out = emit_and_run(read, x=x, places=places, out=out)
    want = np.where(
        (places >= 0) & (places < columns), np.take_along_axis(x, places[:, None] % columns, 1)[:, 0] * 2, 0
    )
    np.testing.assert_array_equal(out.reshape(rows), want.astype(dtype))
    return text


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8"])
@pytest.mark.parametrize("shape", [(1, 32), (4, 32), (8, 4), (16, 8), (2, 64), (1, 64), (4, 23), (3, 5)], ids=str)
def test_elements_at_places_of_rows(shape, dtype):
    """Some places are outside: nothing is there."""
    rows, columns = shape
    places = np.random.default_rng(1).integers(-2, columns + 2, rows)
    places[0] = columns - 1
    text = read_places(shape, dtype, places)
    assert "shfl.sync.idx" in text and "shfl.sync.bfly" not in text


def test_places_far_outside():
    read_places((4, 32), "f4", np.array([1 << 32, -(1 << 32), (1 << 32) + 3, 3]))


def test_without_the_axis():
    assert "shfl.sync.idx" in read_places((4, 32), "f4", np.array([3, 31, 0, -1]), keepdims=False)


@pytest.mark.parametrize("shape", [(1, 2), (1, 128), (2, 3)], ids=str)
def test_other_rows_are_added_up(shape):
    assert "shfl.sync.idx" not in read_places(shape, "f4", np.zeros(shape[0], np.int64))


def test_a_sum_of_negative_zero_is_zero():
    x, out = np.full((1, 32), -0.0, "f4"), np.ones((1, 1), "f4")

    @ts.kernel
    def read(x, out):
        along = tile.reshape(tile.arange(0, 32), (1, 32))
        out[0:1, 0:1] = tile.sum(tile.where(along == 7, x[0:1, 0:32], 0), axis=1, keepdims=True)

    text, out = emit_and_run(read, x=x, out=out)
    assert re.search("shfl.sync.idx", text) and out == 0 and not np.signbit(out)

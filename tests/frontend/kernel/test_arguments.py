"""Arguments as users give them: constants that are written, arrays that may not be, and what is no argument."""

import sys

import numpy as np
import pytest
from engines import ENGINES, results

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, DTypeError, TraceError, UnsupportedSyntaxError

TARGETS = pytest.mark.parametrize("target", ["interp", "cpu"])


def double(x, o):
    i = tile.program_id(0)
    o[i] = x[i] * 2.0


@TARGETS
def test_a_constant_is_written_like_any_tensor(target):
    x, out = ts.ones((4,)), ts.zeros((4,))
    ts.kernel(target=target)(double)[4](x, out)
    assert out.tolist() == [2] * 4 and x.tolist() == [1] * 4 and ts.zeros((4,)).tolist() == [0] * 4


@TARGETS
def test_a_part_of_an_array_is_written_in_place(target):
    whole = np.zeros(8, "f4")
    ts.kernel(target=target)(double)[4](np.ones(4, "f4"), whole[::2])
    assert whole.tolist() == [2, 0] * 4


@TARGETS
def test_what_may_not_be_written_is_refused(target):
    held = np.zeros(4, "f4")
    held.flags.writeable = False
    entry = ts.kernel(target=target)(double)
    with pytest.raises(ArgumentError, match="`o` is written by the kernel, but is read-only"):
        entry[4](np.ones(4, "f4"), held)
    out = np.zeros(4, "f4")
    entry[4](held, out)  # read, it is fine


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((np.ones(4, object), np.ones(4)), DTypeError, "argument `x` holds no numbers"),
        ((np.array(["a"]), np.ones(4)), DTypeError, "argument `x` holds no numbers"),
    ],
)
def test_arrays_of_no_numbers(given, error, message):
    with pytest.raises(error, match=message):
        ts.kernel(double)[4](*given)


class Foreign:
    """An array of a library that is not NumPy, in host memory or elsewhere."""

    def __init__(self, array, error=None):
        self.array, self.error = array, error

    def __dlpack__(self, **options):
        if self.error:
            raise self.error
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@TARGETS
def test_arrays_of_other_libraries_are_written_in_place(target):
    x, out = np.ones(4, "f4"), np.zeros(4, "f4")
    ts.kernel(target=target)(double)[4](Foreign(x), Foreign(out))
    assert out.tolist() == [2] * 4
    with pytest.raises(DTypeError, match="argument `x` cannot be seen in place: it lies on a GPU"):
        ts.kernel(double)[4](Foreign(x, BufferError("it lies on a GPU")), out)


@pytest.mark.parametrize("grid", [1.5, "4", None, (2, 1.0), -1])
def test_grids_that_are_none(grid):
    entry = ts.kernel(double)
    if grid is None:
        return entry[grid](np.ones(4, "f4"), np.zeros(4, "f4"))  # the default launch
    with pytest.raises(ArgumentError, match="is not a grid size"):
        entry[grid](np.ones(4, "f4"), np.zeros(4, "f4"))


def test_a_kernel_writes_no_argument_of_a_traced_program():
    with pytest.raises(TraceError, match="writes `o`, which is not made in the function being traced"):
        ts.jit(lambda x, y: ts.kernel(double)[4](x, y))(ts.ones((4,)), ts.ones((4,)))


@ts.kernel
def rows(x, a, b, out, products):
    for block in tile.range_n(x.shape, 2):
        out[0:8] += tile.sum(tile.load(x, block), axis=0)
    products[...] = tile.dot(tile.load(a), tile.load(b), tile.full((2, 2), 1.0, ts.f32))


@TARGETS
def test_blocks_of_whole_rows_and_products_added_to(target, rng):
    x, out, products = rng.random((4, 8), dtype="f4"), np.zeros(8, "f4"), np.zeros((2, 2), "f4")
    a, b = rng.random((2, 8), dtype="f4"), rng.random((8, 2), dtype="f4")
    ts.kernel(target=target)(rows.kernel_function)[1](x, a, b, out, products)
    np.testing.assert_allclose(out, x.sum(0), rtol=1e-6)
    np.testing.assert_allclose(products, a @ b + 1, rtol=1e-6)


TWO = {"twice": lambda a: a * 2.0, "more": lambda a: a + 1.0}
SPLIT = [
    lambda a, b=3.0: a
    * b,
]  # fmt: skip


@pytest.mark.parametrize(("function", "want"), [(TWO["twice"], 2.0), (TWO["more"], 2.0), (SPLIT[0], 3.0)])
def test_lambdas_are_read_where_they_stand(function, want):
    @ts.kernel
    def applied(x):
        x[0] = function(x[0])

    x = np.ones(1, "f4")
    if function is not SPLIT[0] and sys.version_info < (3, 11):  # older Pythons keep no columns
        with pytest.raises(UnsupportedSyntaxError, match="which lambda of this line is meant cannot be told"):
            applied[1](x)
        return
    applied[1](x)
    assert x[0] == want


@ts.kernel
def picked(x, rows, o):
    block = tile.load(x)
    i = tile.program_id(0)
    o[0] = block[1, 2]
    o[1] = block[i + 1, i]
    o[2:4] = block[2, i : i + 2]
    o[4:8] = block[...][0]
    o[8:16] = tile.reshape(block[tile.load(rows)], (8,))
    o[16:20] = tile.sum(block[:, None, :] + block[:, :, None], axis=0)[3]


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_of_blocks(engine, rng):
    x, rows = rng.random((3, 4), dtype="f4"), np.array([2, 0])
    want = np.concatenate([[x[1, 2], x[1, 0]], x[2, :2], x[0], x[rows].ravel(), x.sum(0) + x[:, 3].sum()])
    ((out,),) = results(picked, {"x": x, "rows": rows, "o": np.zeros(20, "f4")}, engines=[engine])
    np.testing.assert_allclose(out, want, rtol=1e-6)


SCALE = np.float32(0.5)


@ts.kernel
def numbers(x, o):
    o[0] = SCALE * x[0] + np.float64(2.0)
    o[1] = 1.0 if any([x[0] > 9.0, x[1] > 1.0]) and all([x[0] > 0.0, 2 > 1]) else 0.0
    for i in reversed(range(2, 5)):
        o[2] = o[2] * 10.0 + tile.cast(i, ts.f32)
    for i in reversed(range(0, tile.cast(x[3], ts.int32))):
        o[3] = o[3] * 10.0 + tile.cast(i, ts.f32)


@pytest.mark.parametrize("engine", ENGINES)
def test_pythons_own_functions_and_numpys_numbers(engine):
    given = {"x": np.arange(1, 5, dtype="f4"), "o": np.zeros(4, "f4")}
    ((out,),) = results(numbers, given, engines=[engine])
    assert out.tolist() == [2.5, 1.0, 432.0, 3210.0]


def test_products_of_bools():
    @ts.kernel
    def product(a, o):
        o[...] = tile.dot(tile.load(a), tile.load(a))

    with pytest.raises(DTypeError, match="a matrix product of bools"):
        product[1](np.ones((2, 2), bool), np.ones((2, 2), bool))

"""Views, gathers and stores: what a subscript of memory means."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ShapeError
from tessera.core.types import f16, f32, int32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.kernel_function import KernelLaunch
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import tile as ops


def ops_of(entry, *args, **constants):
    """The names of the nodes a kernel has."""
    return [n.op for n in KernelLaunch(entry).module(*args, **constants).functions[1].body.walk()]


@kernel
def views(x: Tensor["B", "M", "N"], out: Tensor["M", "N"], *, BM):
    m = tile.program_id(0) * BM
    plane = x[1]
    block = plane[m : m + BM, :]
    out[m : m + BM] = block * 2.0 + x[0, m : BM + m] * x[..., 2][0, 0]
    out[m, 0] += x[0, m, N - 1]


def test_views_of_views(rng):
    x, out = rng.random((2, 6, 4), dtype="f4"), np.zeros((6, 4), "f4")
    views[2](x, out, BM=3)
    want = x[1] * 2 + x[0] * x[0, 0, 2]
    want[[0, 3], 0] += x[0, [0, 3], 3]
    np.testing.assert_allclose(out, want, rtol=1e-6)


@kernel
def contiguous(x: Tensor["N"], out: Tensor["N"], *, B):
    offs = tile.program_id(0) * B + tile.arange(0, B)
    tile.store(out, offs, tile.load(x[offs], mask=offs < N, other=-1.0) + 1.0, mask=offs < N)


def test_contiguous_indices_are_a_block(rng):
    x, out = rng.random(10, dtype="f4"), np.zeros(10, "f4")
    contiguous[3](x, out, B=4)
    np.testing.assert_allclose(out, x + 1)
    found = ops_of(contiguous, x, out, B=4)
    assert ops.load in found and ops.store in found and ops.gather not in found


@kernel
def planes(x: Tensor["M", "N"], out: Tensor["N", "M"], *, BM, BN):
    rows = tile.program_id(0) * BM + tile.arange(0, BM)
    cols = tile.program_id(1) * BN + tile.arange(0, BN)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    block = tile.load(x[rows[:, None], cols[None, :]], mask=inside)
    tile.store(out[cols[:, None], rows[None, :]], block.T, mask=inside.T)


def test_a_two_dimensional_block_of_indices(rng):
    x, out = rng.random((5, 7), dtype="f4"), np.zeros((7, 5), "f4")
    planes[2, 3](x, out, BM=4, BN=3)
    np.testing.assert_array_equal(out, x.T)
    assert ops.gather not in ops_of(planes, x, out, BM=4, BN=3)


@kernel
def indirect(x: Tensor["M", "N"], rows: Tensor["R", int32], out: Tensor["R", "N"]):
    picked = rows[:]
    out[:, :] = x[picked, 0:N]
    out[tile.arange(0, R), picked * 0] = x[picked, picked % N]


def test_gather_and_scatter(rng):
    x, rows, out = rng.random((6, 4), dtype="f4"), np.int32([5, 0, 3]), np.zeros((3, 4), "f4")
    indirect(x, rows, out)
    want = x[rows]
    want[:, 0] = x[rows, rows % 4]
    np.testing.assert_array_equal(out, want)
    assert ops.gather in ops_of(indirect, x, rows, out)


@kernel
def clipped(x: Tensor["M", "N"], out: Tensor["M", "N"], *, B):
    m, n = tile.program_id(0) * B, tile.program_id(1) * B
    block = tile.load(x[m : m + B, n : n + B], other=9.0)
    tile.store(out[m : m + B, n : n + B], block + tile.load(x, shape=(B, B), edge="clip"), edge="clip")


def test_edges(rng):
    x, out = rng.random((5, 6), dtype="f4"), np.zeros((5, 6), "f4")
    clipped[2, 2](x, out, B=4)
    np.testing.assert_allclose(out, 2 * x)


@kernel
def masked(x: Tensor["N"], out: Tensor["M"]):
    offs = tile.arange(0, M)
    out[offs] = tile.load(x, offs, mask=(offs < N) & (offs % 2 == 0), other=tile.cast(offs, f32))


def test_what_is_masked_reads_as_other():
    x, out = np.float32([5, 6, 7]), np.zeros(6, "f4")
    masked(x, out)
    assert out.tolist() == [5, 1, 7, 3, 4, 5]


@kernel
def replaced(x: Tensor["M", 3], out: Tensor["M", 6]):
    i = tile.program_id(0)
    out[i, 0:3] = tile.load(x[i, 0:3], mask=i % 2 == 0, other=tile.cast(10 * i, f32))
    out[i, 3:6] = tile.load(x[i, 1:4], other=tile.cast(i, f32))


@pytest.mark.parametrize("rows", [3, 4])  # a row has as many elements as the grid has programs, or not
def test_what_is_read_instead_may_differ_between_programs(rows, rng):
    x, out, i = rng.random((rows, 3), dtype="f4"), np.zeros((rows, 6), "f4"), np.arange(rows)[:, None]
    with ts.debug.checked():
        replaced[rows](x, out)
    np.testing.assert_array_equal(out, np.hstack([np.where(i % 2 == 0, x, 10 * i), x[:, 1:], i]))


@kernel
def values(x: Tensor["N"], out: Tensor["N"]):
    first, rest = x[0], x[1:N]
    x[0] = 7.0
    x[1] = 8.0
    out[0] = first
    out[1:N] = rest


def test_an_element_is_a_value_and_a_slice_a_view():
    x, out = np.float32([1, 2, 3]), np.zeros(3, "f4")
    values(x, out)
    assert out.tolist() == [1, 8, 3]


@kernel
def widths(a: Tensor["N", int32], b: Tensor["N", f16]):
    i = tile.program_id(0)
    a[i] = i
    b[i] = 2
    a[i] += a[i] > 1


def test_integer_widths_and_numbers_take_the_type_of_the_memory():
    a, b = np.zeros(3, "i4"), np.zeros(3, "f2")
    widths[3](a, b)
    assert a.tolist() == [0, 1, 3] and b.tolist() == [2, 2, 2]


@kernel
def histogram(x: Tensor["N", int32], counts: Tensor["K", int32], top: Tensor[1, int32]):
    i = tile.program_id(0)
    tile.atomic_add(counts[x[i]], 1)
    tile.atomic_max(top[0], x[i])


def test_atomics():
    x, counts, top = np.int32([1, 2, 2, 0, 2]), np.zeros(3, "i4"), np.zeros(1, "i4")
    histogram[5](x, counts, top)
    assert counts.tolist() == [1, 1, 3] and top[0] == 2


@kernel
def vectors(x: Tensor["M", "N"], out: Tensor["M", "N"]):
    for i in tile.range(0, M):
        tile.store_vector(out[i], tile.load_vector(x[i], width=4))


def test_vectors(rng):
    x, out = rng.random((3, 8), dtype="f4"), np.zeros((3, 8), "f4")
    vectors(x, out)
    np.testing.assert_array_equal(out[:, :4], x[:, :4])
    assert not out[:, 4:].any()


@pytest.mark.parametrize("size", [8, 5])
def test_arrays_that_are_not_contiguous_are_written_in_place(size, rng):
    whole = rng.random((size, 2), dtype="f4")
    x, out = whole[:, 0], np.zeros((size, 2), "f4")
    contiguous[2](x, out[:, 1], B=4)
    np.testing.assert_allclose(out[:, 1], x + 1)
    assert not out[:, 0].any()


def turned(x, out):
    i = tile.program_id(0)
    out[i, 0:4] = x[(i * 3) % 5 : (i * 3) % 5 + 4] + x[i % 3 + i // 2 : i // 2 + i % 3 + 4]


def test_the_same_index_written_twice_has_a_known_difference():
    x, out = np.arange(12, dtype="f4"), np.zeros((4, 4), "f4")
    kernel(turned)[4](x, out)
    first = [3 * i % 5 + i % 3 + i // 2 for i in range(4)]
    np.testing.assert_array_equal(out[:, 0], first)


def read_twice(x, n):
    x[0:4] = x[n[0] : n[0] + 4]


def test_what_memory_holds_may_change_between_two_reads():
    with pytest.raises(ShapeError, match="not known while compiling"):
        kernel(read_twice)[1](np.zeros(8, "f4"), np.zeros(1, "i8"))

"""Loops divided where a comparison of their index changes, and unswitched where a tile lies within bounds: no masks."""

import operator
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import tile
from tessera.codegen.artifact import read_artifact
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.codegen.llvm.table.index_sets import MAX_PARTS, strip_mine
from tessera.runtime.driver import lower


@given(st.integers(1, 300), st.sampled_from([2, 8, 16]), st.lists(st.integers(1, 299), max_size=5))
def test_parts_hold_every_index_once_and_decide_every_cut(count, width, cuts):
    cuts = [c for c in cuts if c < count]
    strips = strip_mine(count, width, cuts)
    assert [i for s in strips for i in range(s.start, s.stop)] == list(range(count))
    for strip in strips:
        assert strip.mask is not None or (strip.stop - strip.start) % width == 0
        inside = [c for c in cuts if strip.start < c < strip.stop]
        assert not inside or strip.stop - strip.start <= width or len(strips) <= 2 <= len(set(cuts))
    assert len(strips) <= MAX_PARTS + 1


def run_everywhere(function, *arrays):
    """The result of the machine code, which equals that of the emulator, and the text."""
    backend, module = get_backend("llvm"), lower(ts.jit(function).trace(*arrays).function, "llvm")["tile"]
    artifact = emit_artifact(backend, module, {"vector_bytes": 64})
    (emulated,), (found,) = backend.interpreter(artifact)(arrays), backend.runtime(artifact).run(arrays)
    np.testing.assert_array_equal(found, emulated)
    return found, artifact.text("kernels.ll")


@pytest.mark.parametrize("sizes", [(84, 172), (16, 64), (5, 3), (100, 1, 59), (48, 48, 48)], ids=str)
def test_concatenations(sizes):
    parts = [np.arange(3 * n, dtype=np.float32).reshape(3, n) + i for i, n in enumerate(sizes)]
    found, text = run_everywhere(lambda *p: ts.concatenate(list(p), axis=1), *parts)
    np.testing.assert_array_equal(found, np.concatenate(parts, axis=1))
    if sizes == (48, 48, 48):
        assert "llvm.masked.load" not in re.sub("declare.*", "", text)  # parts of whole vectors are plain copies


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne])
@pytest.mark.parametrize("limit", [0, 1, 31, 32, 33, 99, 100, -5])
def test_selections_by_position(compare, limit):
    x = np.arange(100, dtype=np.float32)
    found, _ = run_everywhere(lambda x: ts.where(compare(ts.arange(100, dtype=ts.int64), limit), x, -x), x)
    np.testing.assert_array_equal(found, np.where(compare(np.arange(100), limit), x, -x))


@pytest.mark.parametrize("size", [7, 40, 130])
def test_padded_rows(size):
    x = np.random.default_rng(0).random((5, size)).astype(np.float32)
    found, _ = run_everywhere(lambda x: ts.pad(x, ((1, 0), (2, 3))), x)
    np.testing.assert_array_equal(found, np.pad(x, ((1, 0), (2, 3))))


@pytest.mark.parametrize("size", [(20011,), (37, 1201), (8192,), (8193,), (5,)], ids=str)
def test_whole_tiles_have_no_masks(size):
    """The last tile of an axis is clipped; the loops of the others store plain vectors, but for a remainder."""
    x = np.random.default_rng(0).random(size).astype(np.float16)
    found, text = run_everywhere(lambda x: x * 2.0 + 1.0, x)
    np.testing.assert_array_equal(found, (x * np.float16(2) + np.float16(1)).astype(np.float16))
    if size == (20011,):
        whole, partial = text.split("\nwhole")[1].split("\npartial")[:2]
        assert "masked.store" not in whole and "masked.store" in partial.split("\ndone")[0]


@pytest.mark.parametrize("shift", [1025, -7, 9000])
def test_long_rows_that_compare_their_index_are_one_tile(shift):
    """The position of a comparison is then a constant of the loop, which is divided there."""
    x = np.random.default_rng(0).random((9, 9600)).astype(np.float32)
    found, text = run_everywhere(lambda x: ts.roll(x, shift, 1), x)
    np.testing.assert_array_equal(found, np.roll(x, shift, 1))
    assert "= load <16 x float>" in text  # no masks, but at the ends of the parts


@pytest.mark.parametrize("axis", [0, 1])
def test_stacks_of_rows_copy_without_selections(axis):
    parts = [np.arange(160, dtype=np.float32).reshape(5, 32) + i for i in range(3)]
    found, text = run_everywhere(lambda *p: ts.stack(p, axis=axis), *parts)
    np.testing.assert_array_equal(found, np.stack(parts, axis=axis))
    if axis == 1:
        assert " select " not in text  # each part of the new axis is a loop of its own


@pytest.mark.parametrize("shape", [(3, 8191 + 700), (2, 20001), (37, 513), (9, 33, 100)], ids=str)
def test_loops_of_the_last_tiles_end_with_the_array(shape):
    x = np.random.default_rng(0).random(shape).astype(np.float32)
    for function, wanted in ((lambda x: ts.flip(x, 0), np.flip(x, 0)), (lambda x: x * 2, x * 2)):
        found, _ = run_everywhere(function, x)
        np.testing.assert_array_equal(found, wanted)


@ts.kernel
def twice_and_once(x, y, z):
    """Rows to two arrays of different lengths; the columns are whole, and so are the rows of `z`."""
    row = tile.program_id(0) * 8
    block = tile.load(x[row : row + 8, 0:64], edge="clip")
    tile.store(y[row : row + 8, 0:64], 2.0 * block, edge="clip")
    tile.store(z[row : row + 8, 0:64], block + 1.0)


def test_the_last_tile_of_several_stores_ends_with_the_longest(tmp_path):
    x, y, z = np.random.default_rng(0).random((21, 64), np.float32), np.zeros((21, 64), "f4"), np.zeros((24, 64), "f4")
    folder = ts.build(twice_and_once[(3,)], x, y, z, out=tmp_path / "built")
    ts.load(folder)(x, y, z)
    np.testing.assert_array_equal(y, 2 * x)
    np.testing.assert_array_equal(z, np.pad(x, ((0, 3), (0, 0))) + 1)
    partial = read_artifact(folder).text("kernels.ll").split("\npartial")[1].split("\ndone")[0]
    assert partial.count("@llvm.smin.i64") == 1  # of the columns there are as many as ever


@pytest.mark.parametrize("sizes", [(21504, 10752), (5000, 1, 9000), (30000,), (4032, 4032, 4033), (3, 40000)], ids=str)
def test_long_concatenations_copy_in_tiles_of_one_part(sizes):
    parts = [np.arange(n, dtype=np.float32) + i for i, n in enumerate(sizes)]
    found, text = run_everywhere(lambda *p: ts.concatenate(list(p), axis=0), *parts)
    np.testing.assert_array_equal(found, np.concatenate(parts))
    if sizes == (21504, 10752):
        assert text.count("\npart") >= 2


@pytest.mark.parametrize("shift", [1, 700, 2533, -3])
@pytest.mark.parametrize("shape", [(3577, 38), (2600, 3), (61000,)], ids=str)
def test_rolls_of_rows_in_tiles(shape, shift):
    x = np.random.default_rng(0).random(shape).astype(np.float32)
    found, _ = run_everywhere(lambda x: ts.roll(x, shift, 0), x)
    np.testing.assert_array_equal(found, np.roll(x, shift, 0))


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne])
@pytest.mark.parametrize("limit", [0, 1, 4095, 4096, 4097, 19999, 20000, -5])
def test_selections_by_position_in_tiles(compare, limit):
    x = np.arange(20000, dtype=np.float32)
    found, _ = run_everywhere(lambda x: ts.where(compare(ts.arange(20000, dtype=ts.int64), limit), x, -x), x)
    np.testing.assert_array_equal(found, np.where(compare(np.arange(20000), limit), x, -x))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_padded_blocks_in_tiles(axis):
    x = np.random.default_rng(0).random((67, 45, 39)).astype(np.float32)
    width = [(2, 3) if a == axis else (0, 0) for a in range(3)]
    found, _ = run_everywhere(lambda x: ts.pad(x * 2.0, width) + 1.0, x)
    np.testing.assert_array_equal(found, np.pad(x * 2, width) + 1)

"""Assertions compiled for a GPU: a program ends at one that fails, and the first failure is told with its values."""

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, emitted

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.errors import ExecutionError
from tessera.runtime.program import prepare


def run(entry, arrays, grid, group=None, arch="sm_80"):
    """What a run of the text leaves in the arrays, and what it raises."""
    artifact = emitted(prepare(entry, arrays, grid=grid, group=group).levels["tile"], arch)
    with pytest.raises(ExecutionError) as error:
        BACKEND.interpreter(artifact)([a for a in arrays if isinstance(a, np.ndarray)])
    return str(error.value), artifact.text(TEXT_FILE)


@ts.kernel
def picked(x, places, out):
    i = tile.program_id(0)
    tile.assert_(tile.load(places[i, :]) < 10, "a place outside", tile.load(places[i, :]), i)
    out[i, :] = x[tile.load(places[i, :])]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_program_that_fails_goes_no_further(arch):
    places = np.arange(40).reshape(4, 10) % 10
    places[1, 7], places[3, 2] = 100, 10**6
    out = np.full((4, 10), -1, "f4")
    said, _ = run(picked, [np.arange(10, dtype="f4"), places, out], (4,), arch=arch)
    assert "a place outside" in said and "program (1,), element (7,) with 100, 1" in said
    np.testing.assert_array_equal(out[[0, 2]], places[[0, 2]])
    assert (out[[1, 3]] == -1).all()


@ts.kernel
def apart(x, out):
    me = tile.local_id()
    tile.assert_(x[me] > 0.0, "positive", x[me])
    out[me] = 1.0


@ts.kernel
def together(x, out):
    me = tile.local_id()
    shared = tile.alloc_shared((8,), ts.f32)
    tile.assert_(x[me] > 0.0, "positive", x[me])
    shared[me] = x[me]
    tile.barrier()
    out[me] = shared[7 - me]


@pytest.mark.parametrize(("entry", "left"), [(apart, 0), (together, 8)])
def test_a_tile_ends_unless_others_wait_for_it(entry, left):
    x, out = np.arange(8, dtype="f4") - 2, np.zeros(8, "f4")
    said, _ = run(entry, [x, out], (1,), 8)
    assert "false at program (0,), tile 0 with -2.0" in said
    np.testing.assert_array_equal(out, x[::-1] if left else [0, 0, 0, 1, 1, 1, 1, 1])


@ts.kernel
def shown(a, b, c, d, e, f):
    x = tile.load(a)
    tile.assert_(x < 3, "all", x, tile.load(b), tile.load(c), tile.load(d), tile.load(e), tile.load(f))


def test_values_of_every_width():
    numbers = [np.array([1, 2, 3, 9]).astype(t) for t in ("i8", "u1", "f2", "f8", ts.bf16.numpy, ts.fp8_e4m3.numpy)]
    said, _ = run(shown, numbers, (1,))
    assert "element (2,) with 3, 3, 3.0, 3.0, 3, 3" in said


@ts.kernel
def product(a, b, out, K: ts.constexpr):
    m, n = tile.program_id(0) * 64, tile.program_id(1) * 64
    acc = tile.zeros((64, 64), ts.f32)
    for k in tile.range(0, K, 64):
        acc += tile.dot(tile.load(a[m : m + 64, k : k + 64]), tile.transpose(tile.load(b[n : n + 64, k : k + 64])))
    tile.print("corner", tile.sum(acc))
    tile.assert_(acc < 1e3, "too large")
    tile.store(out[m : m + 64, n : n + 64], acc)


def test_products_of_warp_groups_say_what_they_find(capsys):
    """Threads of different kinds, which work through several programs: those go on."""
    a, b = np.zeros((192, 128), ts.bf16.numpy), np.ones((128, 128), ts.bf16.numpy)
    a[:64], a[130, 5] = 1, 2000
    out = np.zeros((192, 128), "f4")
    said, text = run(product, [a, b, out, 128], (3, 2), arch="sm_90a")
    assert "wgmma" in text and "too large" in said and "program (2, 0), element (2, 0)" in said
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"program (0, {j}): corner {64.0 * 64 * 128}" for j in (0, 1)] and len(lines) == 6
    np.testing.assert_array_equal(out, a.astype("f4") @ b.astype("f4").T)

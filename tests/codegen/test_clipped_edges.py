"""edge="clip" on every engine: starts and indices that are negative, past the end, or far beyond any memory."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.llvm import BACKEND as LLVM
from tessera.codegen.ptx import BACKEND as PTX
from tessera.runtime.program import prepare

ENGINES = {
    "llvm": lambda module: LLVM.runtime(LLVM.emit(module, {})).run,
    "ptx": lambda module: PTX.interpreter(PTX.emit(module, {})),
}
# Multiplied by the size of a row or an element some of these are small again, modulo 2^32 or 2^64.
STARTS = np.array([0, -1, 5, 4, 3, -2, 2**31, 2**32, 2**40, -(2**40), 2**61, 2**62, -(2**62), 2**63 - 1, -(2**63), 2])


@ts.kernel
def blocks(
    x: ts.Tensor["N", "D", ts.f32],
    at: ts.Tensor["M", ts.int64],
    out: ts.Tensor["M", 16, ts.f32],
    to: ts.Tensor["N", "D", ts.f32],
):
    i = tile.program_id(0)
    j = tile.load(at[i])
    v = tile.load(x[j : j + 2, 0:8], edge="clip", other=7.0)
    tile.store(out[i, 0:16], tile.reshape(v, (16,)))
    tile.store(to[j : j + 1, 2:10], tile.load(x[0:1, 0:8], edge="clip"), edge="clip")


@ts.kernel
def columns(
    x: ts.Tensor["N", "D", ts.f32],
    at: ts.Tensor["M", ts.int64],
    out: ts.Tensor["M", 16, ts.f32],
    to: ts.Tensor["N", "D", ts.f32],
):
    i = tile.program_id(0)
    j = tile.load(at[i])
    v = tile.load(x[0:2, j : j + 8], edge="clip", other=7.0)
    tile.store(out[i, 0:16], tile.reshape(v, (16,)))
    tile.store(to[4:6, j : j + 8], v, edge="clip")


@ts.kernel
def gathers(
    x: ts.Tensor["N", "D", ts.f32],
    at: ts.Tensor["M", ts.int64],
    out: ts.Tensor["M", 16, ts.f32],
    to: ts.Tensor["N", "D", ts.f32],
):
    rows = tile.load(at[0:16])
    tile.store(out[0:16, 0], tile.load(x[rows, 1], edge="clip", other=7.0))
    tile.store(out[0:16, 1], tile.load(x[1, rows], edge="clip", other=7.0))
    tile.store(to[rows, 3], tile.arange(0, 16).to(ts.f32), edge="clip")


def arrays():
    return [
        np.arange(30, dtype=np.float32).reshape(5, 6),
        STARTS,
        np.zeros((16, 16), np.float32),
        np.zeros((5, 6), np.float32),
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "kernel, grid", [(blocks, 16), (columns, 16), (gathers, 1)], ids=lambda v: getattr(v, "name", "")
)
def test_what_lies_outside_reads_other_and_is_not_written(kernel, grid, engine):
    want, found = arrays(), arrays()
    kernel[grid](*want)
    ENGINES[engine](prepare(kernel[grid], arrays(), engine).levels["tile"])(found)
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_array_equal(got, expected)

"""Program grids that exceed the hardware grid: more than three axes, or a long leading one."""

from dataclasses import replace

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, emit_checked, run_both
from tilekernels import Kernel

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.core.errors import ExecutionError, ResourceError, UnsupportedOpError
from tessera.ir.core import Block, Module
from tessera.runtime.program import prepare


@ts.kernel
def places(out, x):
    a, b, c, d = tile.program_id(0), tile.program_id(1), tile.program_id(2), tile.program_id(3)
    out[a, b, c, d] = x[a, b, c, d] + tile.cast(tile.linear_id() * 100 + tile.num_programs(1), ts.f32)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_four_axes(arch):
    shape = (2, 3, 4, 5)
    arrays = [np.zeros(shape, "f4"), np.arange(120, dtype="f4").reshape(shape)]
    module = prepare(places, arrays, grid=shape).levels["tile"]
    (ours, theirs), _ = run_both(module, arrays, arch)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours.reshape(-1), np.arange(120) * 101 + 3)


@ts.kernel
def rows(out):
    i, j = tile.program_id(0), tile.program_id(1)
    tile.assert_(i < 69_999, "the last row")
    out[i, j] = tile.cast(i * 2 + j, ts.int32)


def test_a_long_leading_axis():
    out = np.zeros((70_000, 2), np.int32)
    artifact = emit_checked(prepare(rows, [out], grid=(70_000, 2)).levels["tile"])
    with pytest.raises(ExecutionError, match=r"program \(69999, 0\)"):
        BACKEND.interpreter(artifact)([out])
    np.testing.assert_array_equal(out[:-1].reshape(-1), np.arange(139_998))
    assert not out[-1].any()  # the programs of the last row end there


def test_too_many_programs():
    with pytest.raises(ResourceError, match=r"a grid of 4,294,967,296 programs[\s\S]*at most 2,147,483,647"):
        emit_checked(prepare(rows, [np.zeros((70_000, 2), np.int32)], grid=(1 << 31, 2)).levels["tile"])


def test_several_grids_are_refused():
    k = Kernel(np.zeros(4, "f4"))
    k.store(k.params[0], k.load(k.params[0]))
    first, other = (k.module(grid).main.body for grid in ((2, 1, 1, 2), (3,)))
    module = k.module()
    launch = replace(other.nodes[0], args=first.params)
    main = replace(module.main, body=Block(first.params, (*first.nodes, launch), ()))
    with pytest.raises(UnsupportedOpError, match=r"several grids, one of which is \(2, 1, 1, 2\)"):
        BACKEND.emit(Module("tile", (main, module.functions[1])), {})

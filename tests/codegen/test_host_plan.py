"""Host plans: slices of buffers, their overlap, and the parameters that a kernel touches."""

import numpy as np

import tessera as ts
from tessera import tile
from tessera.codegen.host_plan import HostBufferSlice, find_touched_parameters
from tessera.runtime.program import prepare


def test_a_slice_overlaps_all_that_its_loop_reaches():
    part, behind = HostBufferSlice(-1, 0, 64).slice(0, 16), HostBufferSlice(-1, 32, 16)
    assert part.overlaps(behind) and behind.overlaps(part)
    assert not part.overlaps(HostBufferSlice(-1, 64, 16))


def test_a_slice_moves_with_every_loop_around_it():
    part = HostBufferSlice(-1, 128, 64).slice(0, 16).slice(1, 4)
    assert part.describe() == {"offset": 128, "bytes": 4, "moves": [[0, 16], [1, 4]]}


@ts.kernel
def copied(x, out):
    here = tile.alloc_shared((32, 32), ts.f32)
    tile.cp_async(here, x[0:32, 0:32], edge="clip")
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.store(out[0:32, 0:32], tile.load(here[0:32, 0:32]))


def test_an_asynchronous_copy_reads_its_source():
    given = {"x": np.zeros((32, 32), "f4"), "out": np.zeros((32, 32), "f4")}
    function = prepare(copied, given, "llvm", (1,)).levels["tile"].functions[1]
    assert find_touched_parameters(function, "read") == {0} and find_touched_parameters(function, "write") == {1}

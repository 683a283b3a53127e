"""Resources of kernels are counted, and refused before emission if they exceed the target's limits."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.contract import Capabilities, check_resources, measure_resources
from tessera.core.errors import ResourceError

X = np.zeros((64, 64), "f4")


@ts.kernel
def staged(x, out, *, BM: int = 32, STAGES: int = 2):
    buffers = [tile.alloc_shared((BM, BM), ts.f32) for _ in range(STAGES)]
    for stage in tile.static_range(0, STAGES):
        tile.store(buffers[stage], tile.load(x[0:BM, 0:BM]))
    tile.barrier()
    out[0:BM, 0:BM] = tile.load(buffers[0]) + tile.load(buffers[STAGES - 1])


@ts.kernel
def looped(x, out, *, BM: int = 16):
    acc = tile.zeros((BM, BM))
    for k in tile.range(0, 64, BM):
        acc += tile.load(x[0:BM, k : k + BM])
    out[0:BM, 0:BM] = acc


def module(kernel, group=1, **constants):
    return kernel[(1,), group].module(X, X.copy(), **constants)


def need(kernel, group=1, **constants):
    return measure_resources(module(kernel, group, **constants).functions[1])


def test_counts():
    assert need(staged, 8).group == 8 and need(staged).shared_bytes == 2 * 32 * 32 * 4
    assert need(staged.with_schedule(ts.Schedule(block=16, stages=3))).shared_bytes == 3 * 16 * 16 * 4
    # Two loaded blocks and their sum; in the loop: what is carried, what is loaded, the new sum.
    assert 3 * 32 * 32 * 4 <= need(staged).block_bytes < 3 * 32 * 32 * 4 + 200
    assert 3 * 16 * 16 * 4 <= need(looped).block_bytes < 3 * 16 * 16 * 4 + 200


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (
            {"shared_bytes": 8000},
            ("staged needs 8,192 bytes of shared memory", "at most 8,000 on tiny", "fewer stages"),
        ),
        ({"block_bytes": 9000}, ("bytes of blocks in registers", "at most 9,000 on tiny", "test_legality.py")),
        ({"max_group": 4}, ("staged needs 8 tiles in a group", "at most 4 on tiny")),
    ],
)
def test_refusals(limits, says):
    tiny = Capabilities(16, (ts.f32,), **limits)
    with pytest.raises(ResourceError) as caught:
        check_resources(module(staged, 8), "tiny", tiny)
    assert all(s in str(caught.value) for s in says)


def test_what_fits_passes():
    check_resources(module(staged, 8), "tiny", Capabilities(16, (ts.f32,), 3, 8, 8192, 3 * 4096 + 200))


def test_a_generator_refuses_before_it_emits():
    big = ts.kernel(looped.kernel_function, target="llvm")
    with pytest.raises(ResourceError, match="on llvm"):
        big[(1,), 2048](X, X.copy())

"""Values are dropped at their last use, and not before: in inner regions, in loops, and where branches part tiles."""

import tracemalloc

import numpy as np

import tessera as ts
from tessera import tile
from tessera.interp.tile.block_compiler import find_last_uses


@ts.kernel
def chained(x, out, N: ts.constexpr):
    value = tile.load(x[0:N])
    first = value * 2.0
    for _ in tile.static_range(60):
        value = tile.sqrt(value * value + 1.0)
    total = tile.zeros((N,))
    for k in tile.range(0, 3):
        if out[0] > 0.0:
            total = total + first * tile.cast(k, ts.f32)
        else:
            total = total - value
    out[0:N] = total + first


def test_a_long_chain_holds_few_values_at_once():
    n = 1 << 17
    x, out = np.ones(n, "f4"), np.zeros(n, "f4")
    chained[1](x, out, N=n)
    held = out.copy()
    tracemalloc.start()
    try:
        out[:] = 0
        chained[1](x, out, N=n)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(out, held)
    assert peak < 12 * x.nbytes  # of more than a hundred blocks


def test_each_value_is_dropped_once_and_after_its_uses():
    function = chained[1].module(np.ones(8, "f4"), np.ones(8, "f4"), N=8).functions[1]
    blocks = [function.body, *(r for node in function.body.walk() for r in node.regions)]
    for block in blocks:
        last, gone = find_last_uses(block), set()
        for node in block.nodes:
            used = {*node.args, *(v for r in node.regions for v in r.free)}
            assert not used & gone
            assert not gone & set(last[node])
            gone |= set(last[node])
        made = {v for node in block.nodes for v in node.results}
        assert gone == made - set(block.results)

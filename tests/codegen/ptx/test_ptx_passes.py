"""The passes of the ptx target as functions: sums fused, loops of products found, loads begun early."""

import functools

import numpy as np
from ptxcheck import emit_checked
from tilekernels import Kernel

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.ops import convert_layout, gemm_mainloop, matmul_accumulate
from tessera.codegen.ptx.passes.instruction_selection import fuse_accumulation
from tessera.codegen.ptx.passes.layout_inference import lay_out_function
from tessera.codegen.ptx.passes.loop_transformations import hoist_scalars
from tessera.codegen.ptx.passes.mainloop import form_mainloop
from tessera.codegen.ptx.passes.shared_memory import hoist_loads
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.types import bf16, f32
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, contractions, reduce
from tessera.ops.tensor import elementwise as e
from tessera.runtime.program import prepare


def looped(block=(64, 64, 64), masked=False):
    """A loop that sums products of blocks."""
    m, n, depth = block
    a, b = np.zeros((256, 256), bf16.numpy), np.zeros((256, 256), bf16.numpy)
    k = Kernel(a, b, np.zeros((256, 256), np.float32))
    left, right, out = k.params
    row = k(e.mul, k(tile.program_id, axis=0), k.const(m))

    def step(i, acc):
        rest = [k.broadcast(k(e.less, i, k.const(99)), m, depth)] if masked else []
        x = k.load(left, row, i, shape=(m, depth), edge="clip", rest=rest)
        return k.add(acc, k(contractions.dot, x, k.load(right, i, 0, shape=(depth, n), edge="clip"), dtype=f32))

    (total,) = k.loop(0, 256, depth, [k.const(0.0, f32, (m, n))], step)
    k.store(out, total, row, 0, edge="clip")
    return k.module((4,)).functions[1]


def ops(function):
    return [node.op for node in function.body.walk()]


def test_sums_are_fused():
    found = ops(fuse_accumulation(looped()))
    assert matmul_accumulate in found and contractions.dot not in found


def test_a_loop_of_products_becomes_one_op():
    found = ops(form_mainloop(fuse_accumulation(looped())))
    assert found.count(gemm_mainloop) == 1 and tile.load not in found


def test_loops_that_do_not_fit_stay():
    for function in (looped((64, 64, 48)), looped((32, 64, 64)), looped(masked=True)):
        assert gemm_mainloop not in ops(form_mainloop(fuse_accumulation(function)))


def test_what_a_product_loop_means():
    random = np.random.default_rng(0)
    a, b = random.standard_normal((10, 30)), random.standard_normal((30, 7))
    attrs = {"step": 8, "left": (0, -1), "right": (-1, 1), "block": (16, 8, 8), "flipped": False}
    found = gemm_mainloop.ref(np.ones((16, 8)), a, b, 0, 30, -2, 0, **attrs)
    want = np.ones((16, 8))
    want[2:12, :7] += a @ b
    np.testing.assert_allclose(found, want)
    attrs |= {"right": (1, -1), "flipped": True}
    np.testing.assert_allclose(gemm_mainloop.ref(np.ones((16, 8)), a, b.T, 0, 30, -2, 0, **attrs), want)


def test_loads_come_before_reductions():
    k = Kernel(*(np.zeros((4, 64), np.float32) for _ in range(3)))
    x, y, out = k.params
    total = k(reduce.sum, k.load(x), axis=(-1,), keepdims=True)
    k.store(out, k(e.mul, k.load(y), k.broadcast(total, 4, 64)))
    found = ops(hoist_loads(k.module().functions[1]))
    assert found.index(reduce.sum) > max(i for i, op in enumerate(found) if op is tile.load)


def stencil(count):
    """Differences of pairs of blocks, all of which are loaded first; what a result had before is the other result."""
    k = Kernel(*(np.zeros((64, 64), np.float32) for _ in range(count + 2)))
    *sources, first, second = k.params
    before = k.load(first)
    blocks = [k.load(x) for x in sources]
    pairs = [k(e.sub, a, b) for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
    k.store(first, functools.reduce(k.add, [k(e.mul, p, p) for p in pairs]))
    k.store(second, before)
    return k.module(outputs=2).functions[1]


def test_many_loads_come_right_before_their_first_uses():
    function = stencil(16)
    nodes = hoist_loads(function, 0).body.nodes
    assert sorted(map(id, nodes)) == sorted(map(id, function.body.nodes))
    places = {v: i for i, n in enumerate(nodes) for v in n.results}
    assert all(places.get(v, -1) < i for i, n in enumerate(nodes) for v in n.args)
    loads = [i for i, n in enumerate(nodes) if n.op is tile.load and n.args[0] in function.params[:-2]]
    assert [nodes[load].args[0] for load in loads] == [*function.params[:-2]]  # as the sum adds their pairs
    used = [min(i for i, n in enumerate(nodes) if nodes[load].out in n.args) for load in loads]
    assert all(use - load <= 4 for load, use in zip(loads, used, strict=True))  # after another load and its indices


def test_what_is_overwritten_is_loaded_before_that():
    nodes = hoist_loads(stencil(16), 0).body.nodes
    kept = next(n.args[1] for n in reversed(nodes) if n.op is tile.store)
    found = [n.op for n in nodes if n.op is tile.store or kept in n.results]
    assert found == [tile.load, tile.store, tile.store]


def test_few_loads_stay():
    function = stencil(14)
    assert hoist_loads(function, 0).body.nodes == function.body.nodes


def test_layouts_are_fixed_and_handed_over_in_the_open():
    k = Kernel(np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32))
    v = k.load(k.params[0])
    k.store(
        k.params[1], k(e.add, v, k(basic.broadcast_to, k(reduce.sum, v, axis=(-2,), keepdims=False), shape=(64, 64)))
    )
    done = lay_out_function(k.module().functions[1], 128, 4)
    shown = [n.attrs["layout"] for n in done.function.body.walk() if n.op is convert_layout]
    assert all("threads" in text for text in shown)
    assert all(v in done.layouts for n in done.function.body.walk() for v in n.results)


def normalized(columns=384):
    """Rows of a size that is no power of two, scaled by weights of theirs."""
    x, w = np.zeros((8, columns), bf16.numpy), np.zeros(columns, bf16.numpy)
    k = Kernel(x, w, x)
    rows = k(basic.cast, k.load(k.params[0], shape=x.shape), dtype=f32)
    total = k.broadcast(k(reduce.sum, rows, axis=(-1,), keepdims=True), *x.shape)
    weights = k.broadcast(k(basic.cast, k.load(k.params[1], shape=w.shape), dtype=f32), *x.shape)
    k.store(k.params[2], k(basic.cast, k(e.mul, k(e.mul, rows, total), weights), dtype=bf16))
    return k.module()


def test_a_small_block_is_loaded_as_it_is_used():
    function = lay_out_function(normalized().functions[1], 256, 8).function
    assert convert_layout not in ops(function)


def test_neighbours_inside_together_move_together():
    text = emit_checked(normalized()).text(TEXT_FILE)
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text and "global.u16" not in text


def test_many_warps_results_are_combined_by_lanes():
    x = np.random.default_rng(0).integers(-9, 9, (1, 8192)).astype(np.float32)
    k = Kernel(x, np.zeros(1, np.float32))
    k.store(k.params[1], k(reduce.sum, k.load(k.params[0], shape=x.shape), axis=(-1,), keepdims=False))
    out, artifact = np.zeros(1, np.float32), emit_checked(k.module())
    BACKEND.interpreter(artifact)([x, out])
    assert out[0] == x.sum() and artifact.text(TEXT_FILE).count("shfl.sync") >= 8


def test_masks_of_a_uniform_kernel_compare_in_32_bits():
    x, y = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((3, 5), np.float32)
    join = ts.jit(lambda x, y: ts.concatenate([x, y], axis=1) * 2, target="ptx")
    text = BACKEND.emit(prepare(join, [x, y], "ptx").levels["tile"], {}).text(TEXT_FILE)
    assert "setp.gt.s32" in text and "setp.ge.s64" not in text
    np.testing.assert_array_equal(join(x, y).numpy(), np.concatenate([x, y], axis=1) * 2)


def test_scalars_of_every_round_are_computed_before_a_loop_but_quotients_by_what_may_be_zero():
    k = Kernel(np.zeros(64, np.int64), np.zeros((), np.int64))
    out, n = k.params

    def step(i, carried):
        number = k(e.add, k(e.floor_divide, n, k.const(8)), k(e.remainder, k.const(8), n))
        return k.add(carried, number)

    (total,) = k.loop(0, n, 1, [k.const(0)], step)
    k.store(out, k(basic.broadcast_to, total, shape=(64,)))
    hoisted = hoist_scalars(k.module().functions[1])
    (loop,) = [node for node in hoisted.body.nodes if node.regions]
    before, inside = ([n.op for n in nodes] for nodes in (hoisted.body.nodes, loop.regions[0].nodes))
    assert e.floor_divide in before and e.remainder not in before
    assert e.floor_divide not in inside and e.remainder in inside

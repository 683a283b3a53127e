"""The Tile interpreter: memory, masks, divergence, groups."""

import numpy as np
import pytest
from tiles import kernel

from tessera.core.errors import ExecutionError, OutOfBoundsError
from tessera.core.types import bf16, f32, int64
from tessera.interp.sanitizer.report import Checks
from tessera.interp.tile import interpreter
from tessera.interp.tile.affine import AffineScalar
from tessera.interp.tile.memory import BlockAccess, InstanceMemory
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape


def run(module, *arrays):
    interpreter.run(module, arrays)
    return arrays[-1]


def test_blocks_over_a_grid(rng):
    x, out = rng.random((6, 40), np.float32), np.zeros((6, 40), np.float32)
    with kernel(x=((6, 40), f32), out=((6, 40), f32)) as k:
        row, column = k.op(tile.program_id, axis=0) * 2, k.op(tile.program_id, axis=1) * 8
        k.store("out", elementwise.exp(k.load("x", row, column, shape=(2, 8))), row, column)
    assert np.array_equal(run(k.module(3, 5), x, out), np.exp(x))


def test_many_chunks_give_what_one_gives(rng, monkeypatch):
    x = rng.random((64, 16), np.float32)
    with kernel(x=((64, 16), f32), out=((64,), f32)) as k:
        row = k.op(tile.program_id, axis=0)
        total = reduce.sum(k.load("x", row, 0, shape=(1, 16)), axis=1)
        k.store("out", total, row)
    whole = run(k.module(64), x, np.zeros(64, np.float32))
    monkeypatch.setattr(interpreter, "CHUNK_BYTES", 200)
    assert np.array_equal(run(k.module(64), x, np.zeros(64, np.float32)), whole)


LAYOUTS = {
    "rows": lambda x: x, "columns": lambda x: np.asfortranarray(x),
    "reversed": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "part": lambda x: np.pad(x, 3)[3:-3, 3:-3], "steps": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
    "equal rows": lambda x: np.broadcast_to(x[:1], x.shape),
    "windows": lambda x: np.lib.stride_tricks.sliding_window_view(x.ravel(), x.shape[1])[: x.shape[0]],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, bf16.numpy])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_arrays_of_every_layout(layout, dtype):
    """As strided views, which is quick, and element by element."""
    array = LAYOUTS[layout](np.arange(20).reshape(4, 5).astype(dtype))
    memory = InstanceMemory(array, "x")
    for row, column in ((0, 0), (2, 3), (3, 1)):
        starts = [AffineScalar(row, (-1 if row else 1, 0)), AffineScalar(column, (0, 1))]
        if row == 0:
            starts[0] = AffineScalar(0, (2, 0))
        access = BlockAccess(memory, starts, (1, 1), (2, 2))
        wanted = array[tuple(access.indices())]
        for view in (access.window(), memory.view(starts, (1, 1), (2, 2))):
            np.testing.assert_array_equal(np.broadcast_to(view, wanted.shape), wanted)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 31])
def test_clipped_edges(size, rng):
    x, out = rng.random(size, np.float32), np.zeros(size, np.float32)
    with kernel(x=((size,), f32), out=((size,), f32)) as k:
        start = k.op(tile.program_id, axis=0) * 8
        k.store("out", k.load("x", start, shape=(8,), edge="clip") + 1.0, start, edge="clip")
    assert np.array_equal(run(k.module(-(-size // 8)), x, out), x + 1)


@pytest.mark.parametrize("debug", [None, Checks()])
@pytest.mark.parametrize("how", ["block", "scatter", "atomic", "gather"])
def test_one_value_and_one_mask_of_a_program_count_for_its_whole_block(how, debug):
    """There are as many programs as elements in a row."""
    x, out = np.arange(9, dtype=np.int64).reshape(3, 3), np.zeros((3, 3), np.int64)
    with kernel(x=((3, 3), int64), out=((3, 3), int64)) as k:
        i, columns = k.op(tile.program_id, axis=0), k.op(shape.iota, shape=(3,))
        value, mask = i * 10 + 1, i < 2
        if how in ("block", "gather"):
            value = (
                k.load("x", i, 0, shape=(1, 3), rest=[mask, value])
                if how == "block"
                else k.op(tile.gather, k.refs["x"], i, columns, mask, value)
            )
        if how == "block":
            k.store("out", value, i, 0, rest=[i > 0])
        elif how == "atomic":
            k.op(tile.atomic, k.refs["out"], value, i, columns, mask, kind="add")
        else:
            k.op(tile.scatter, k.refs["out"], value, i, columns, *([mask] if how == "scatter" else []))
    interpreter.run(k.module(3), [x, out], debug=debug)
    kept = np.arange(3)[:, None]
    loaded = np.where(kept < 2, x, 21)
    wanted = {"block": np.where(kept > 0, loaded, 0), "gather": loaded}
    np.testing.assert_array_equal(out, wanted.get(how, np.where(kept < 2, 10 * kept + 1, x * 0)))


def test_masked_lanes_may_lie_outside(rng):
    x, out = rng.random(10, np.float32), np.full(16, -1, np.float32)
    with kernel(x=((10,), f32), out=((16,), f32)) as k:
        start = k.op(tile.program_id, axis=0) * 8
        offsets = start + shape.iota(shape=(8,), dtype=int64)
        other = basic.full(shape=(8,), value=9.0, dtype=f32)
        k.store("out", k.load("x", start, shape=(8,), rest=(offsets < 10, other)), start)
    assert np.array_equal(run(k.module(2), x, out), [*x, *[9.0] * 6])


def test_outside_is_an_error_that_names_the_place():
    with kernel(x=((10,), f32), out=((16,), f32)) as k:
        start = k.op(tile.program_id, axis=0) * 8
        k.store("out", k.load("x", start, shape=(8,)), start)
    with pytest.raises(OutOfBoundsError, match="index 10 is outside axis 0 of x, whose size is 10") as caught:
        run(k.module(2), np.zeros(10, np.float32), np.zeros(16, np.float32))
    assert "test_tile.py:" in str(caught.value) or "tiles.py:" in str(caught.value)


def test_gather_and_scatter(rng):
    x, out = rng.random(32, np.float32), np.zeros(32, np.float32)
    with kernel(x=((32,), f32), out=((32,), f32)) as k:
        offsets = k.op(tile.program_id, axis=0) * 8 + shape.iota(shape=(8,), dtype=int64)
        k.op(tile.scatter, k.refs["out"], k.op(tile.gather, k.refs["x"], 31 - offsets), offsets)
    assert np.array_equal(run(k.module(4), x, out), x[::-1])


def test_matrix_blocks_in_a_loop(rng):
    a, b, c = rng.random((16, 24), np.float32), rng.random((24, 32), np.float32), np.zeros((16, 32), np.float32)
    with kernel(a=((16, 24), f32), b=((24, 32), f32), c=((16, 32), f32)) as k:
        m, n = k.op(tile.program_id, axis=0) * 8, k.op(tile.program_id, axis=1) * 8

        def body(i, acc):
            return [acc + contractions.dot(k.load("a", m, i * 8, shape=(8, 8)), k.load("b", i * 8, n, shape=(8, 8)))]

        (acc,) = k.repeat(k.index(0), k.index(3), [basic.full(shape=(8, 8), value=0.0, dtype=f32)], body)
        k.store("c", acc, m, n)
    assert np.allclose(run(k.module(2, 4), a, b, c), a @ b, rtol=1e-5)


def test_trip_counts_may_differ_between_programs():
    out = np.zeros(5, np.int64)
    with kernel(out=((5,), int64)) as k:
        me = k.op(tile.program_id, axis=0)
        (total,) = k.repeat(k.index(0), me, [k.index(0)], lambda i, t: [t + i])
        k.store("out", shape.reshape(total, shape=(1,)), me)
    assert np.array_equal(run(k.module(5), out), [0, 0, 1, 3, 6])


def test_branches_differ_and_only_one_stores():
    out = np.zeros(6, np.int64)
    with kernel(out=((6,), int64)) as k:
        me = k.op(tile.program_id, axis=0)

        def store_ten():
            k.store("out", shape.reshape(me * 10, shape=(1,)), me)
            return [me + 100]

        (value,) = k.choose(me < 3, store_ten, lambda: [me])
        k.op(tile.scatter, k.refs["out"], value, me, (me >= 2))
    assert np.array_equal(run(k.module(6), out), [0, 10, 102, 3, 4, 5])


def group_sum(diverge):
    with kernel(group=4, x=((8,), f32), out=((8,), f32)) as k:
        block, me = k.op(tile.program_id, axis=0), k.op(tile.local_id)
        shared = k.op(tile.alloc, shape=(4,), dtype=f32, space="shared")
        place = block * 4 + me
        k.op(tile.scatter, shared, k.op(tile.gather, k.refs["x"], place), me)

        def barrier():
            k.op(tile.barrier)
            return []

        if diverge:
            k.choose(me < 2, barrier, lambda: [])
        else:
            barrier()
        k.op(tile.scatter, k.refs["out"], k.op(tile.gather, shared, 3 - me), place)
    return k.module(2)


def test_groups_share_memory(rng):
    x, out = rng.random(8, np.float32), np.zeros(8, np.float32)
    assert np.array_equal(run(group_sum(False), x, out), [*x[3::-1], *x[:3:-1]])


def test_a_divergent_barrier_is_reported():
    with pytest.raises(ExecutionError, match="reached by some tiles of a group and not by others"):
        run(group_sum(True), np.zeros(8, np.float32), np.zeros(8, np.float32))


def test_atomics_lose_nothing():
    out = np.zeros(1, np.int64)
    with kernel(out=((1,), int64)) as k:
        k.op(tile.atomic, k.refs["out"], k.op(tile.program_id, axis=0), k.index(0), kind="add")
    assert run(k.module(10), out)[0] == 45


def test_fresh_memory_is_poisoned():
    out = np.zeros(4, np.float32)
    with kernel(out=((4,), f32)) as k:
        scratch = k.op(tile.alloc, shape=(4,), dtype=f32, space="register")
        k.store("out", k.load(scratch, 0, shape=(4,)), 0)
    assert np.isnan(run(k.module(1), out)).all()


def test_bounds_follow_the_values(rng):
    x = rng.random((4, 64), np.float32)
    with kernel(x=((4, 64), f32), out=((4,), f32)) as k:
        row = k.op(tile.program_id, axis=0)
        k.store("out", reduce.sum(elementwise.exp(k.load("x", row, 0, shape=(1, 64))), axis=1), row)
    module = k.module(4)
    out = run(module, x, np.zeros(4, np.float32))
    (bounded,) = interpreter.run_with_bounds(module, [x, np.zeros(4, np.float32)], (1,))
    error = np.abs(out - bounded.value)
    assert (error <= bounded.radius).all() and (bounded.radius < 1e-3).all() and (bounded.radius > 0).all()


def test_the_ends_of_an_affine_scalar_are_those_of_its_values():
    scalar = AffineScalar(5, (3, 0, -2))
    values = scalar.array((4, 7, 6))
    assert scalar.ends((4, 7, 6)) == (values.min(), values.max()) == (-5, 14)

"""vmap of kernel launches: one more extent of the grid, and the same as a launch for each example."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import tile
from tessera.core.types import RefType, f32, int64
from tessera.interp.tile import interpreter
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Function, Value
from tessera.ops.dialects import control_flow, host
from tessera.ops.dialects import tile as tile_ops
from tessera.ops.tensor import basic, elementwise
from tessera.transforms.flow import launch_batching

TARGETS = ("interp", "llvm", "ptx")


@ts.kernel
def rows_times(x, w, out, *, BM: int = 4):
    """Blocks with a mask, a gather and a second axis of the grid."""
    r, c = tile.program_id(0) * BM + tile.arange(0, BM), tile.program_id(1)
    inside = r < x.shape[0]
    out[r, c] = tile.load(x[r, c], mask=inside) * w[c]


@ts.kernel
def blocks(x, w, out, *, BM: int = 4):
    """Clipped blocks of rows, times a shared row."""
    r = tile.program_id(0) * BM
    tile.store(out[r : r + BM, :], tile.load(x[r : r + BM, :], edge="clip") * w[:][None, :], edge="clip")


@ts.kernel
def histogram(x, counts):
    """Atomic updates at indices that the memory holds."""
    i = tile.program_id(0)
    tile.atomic_add(counts[x[i]], 1)


@ts.kernel
def staged(x, out, *, N: int):
    """A group that exchanges values through shared memory."""
    shared, i = tile.alloc_shared((N,), ts.f32), tile.local_id()
    shared[i] = x[tile.program_id(0) * N + i]
    tile.barrier()
    out[tile.program_id(0) * N + i] = shared[N - 1 - i]


def launch_blocks(x, w):
    return ts.launch(blocks, (-(-x.shape[0] // 4),), x, w, ts.like(x))


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.booleans(), st.integers(0, 2))
def test_a_batch_is_a_launch_for_each_example(batch, rows, columns, shared, axis):
    generator = np.random.default_rng(rows)
    x = generator.standard_normal((batch, rows, columns)).astype("f4")
    w = generator.standard_normal((columns,) if shared else (batch, columns)).astype("f4")
    expected = x * (w if shared else w[:, None, :])
    moved = np.moveaxis(x, 0, axis)
    found = ts.vmap(launch_blocks, in_dims=(axis, None if shared else 0))(moved, w)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_batches_of_batches(target):
    x = np.arange(60, dtype="f4").reshape(2, 2, 5, 3)
    w = np.float32([1, 2, 3])
    twice = lambda x: ts.vmap(ts.vmap(lambda v: launch_blocks(v, w)))(x)  # noqa: E731
    np.testing.assert_allclose(ts.jit(twice, target=target)(x), x * w, rtol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_atomics_and_groups_and_grids_of_two_axes(target):
    x = np.array([[0, 2, 2, 1], [3, 3, 3, 0]])
    count = lambda v: ts.launch(histogram, (4,), v, ts.zeros(4, dtype="int32"))  # noqa: E731
    found = ts.jit(lambda v: ts.vmap(count)(v), target=target)(x)
    np.testing.assert_array_equal(found, [[1, 1, 2, 0], [1, 0, 0, 3]])
    y = np.arange(48, dtype="f4").reshape(2, 24)
    turned = ts.jit(lambda v: ts.vmap(lambda a: ts.launch(staged, ((3,), 8), a, ts.like(a), N=8))(v), target=target)(y)
    np.testing.assert_array_equal(turned, y.reshape(2, 3, 8)[:, :, ::-1].reshape(2, 24))
    z, w = np.arange(32, dtype="f4").reshape(2, 8, 2), np.float32([1, 10])
    grid = ts.jit(lambda v: ts.vmap(lambda a: ts.launch(rows_times, (2, 2), a, w, ts.like(a)))(v), target=target)(z)
    np.testing.assert_array_equal(grid, z * w)


def test_a_shared_operand_is_not_repeated():
    function = ts.jit(lambda x, w: ts.vmap(launch_blocks, in_dims=(0, None))(x, w)).trace(
        ts.ones((3, 5, 2)), ts.ones(2)
    )
    (launch,) = [n for n in function.function.body.nodes if n.op.name == "ts.launch"]
    assert [str(v.type) for v in launch.args] == ["3x5x2xf32", "2xf32"]
    assert launch.attrs["grid"] == (6,)


@ts.kernel
def strided(x, out):
    """A few programs do the work of many."""
    for i in tile.range(tile.program_id(0), x.shape[0], tile.num_programs(0)):
        out[i] = x[i] * 2


@ts.kernel
def claimed(x, slots):
    """The first program that asks gets a slot; all programs ask for different ones."""
    tile.atomic_cas(slots[x[tile.program_id(0)]], 0, tile.program_id(0) + 1)


@ts.kernel
def masked(x, out, *, BM: int = 4):
    """Blocks of rows under masks, one of a single row for all columns."""
    i = tile.program_id(0) * BM
    inside = i + tile.arange(0, BM) < x.shape[0]
    v = tile.load(x[i : i + BM, :], mask=inside[:, None], other=0, edge="clip")
    tile.store(out[i : i + BM, :], v + 1, mask=inside[:, None], edge="clip")


@ts.kernel
def copied(x, out, *, N: int):
    """Memory that is copied into memory of the group on the way, and aligned blocks."""
    held = tile.alloc_shared((N,), ts.int64)
    tile.async_copy(x[0:N], held)
    tile.wait_async()
    tile.barrier()
    tile.store(out[0:N], held[0:N] * 3)


EXAMPLES = {
    "strided": (lambda v: ts.launch(strided, (3,), v, ts.like(v)), lambda x: x * 2, (2, 7)),
    "claimed": (
        lambda v: ts.launch(claimed, (4,), v, ts.zeros(4, dtype="int64")),
        lambda x: np.argsort(x, axis=-1) + 1,
        (3, 4),
    ),
    "masked": (lambda v: ts.launch(masked, (2,), v, ts.like(v)), lambda x: x + 1, (2, 6, 2)),
    "copied": (lambda v: ts.launch(copied, (1,), v, ts.like(v), N=4), lambda x: x * 3, (3, 4)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_accesses_of_every_kind(name, target):
    program, reference, shape = EXAMPLES[name]
    x = np.argsort(np.random.default_rng(0).random(shape), axis=-1)
    found = ts.jit(lambda x: ts.vmap(program)(x), target=target)(x)
    np.testing.assert_array_equal(found, reference(x))


def test_the_block_of_a_copy_has_an_axis_for_the_example():
    """Its rank is that of the side of higher rank, as the op says."""
    program = EXAMPLES["copied"][0]
    function = ts.jit(lambda x: ts.vmap(program)(x)).trace(np.zeros((3, 4), np.int64)).function
    (launch,) = [n for n in function.body.nodes if n.op.name == "ts.launch"]
    (copy,) = [n for n in launch.regions[0].walk() if n.op.name == "tile.async_copy"]
    assert copy.attrs["shape"] == (1, 4)


@pytest.mark.parametrize("place", (0, 1))
def test_a_launch_for_one_example_after_the_other(place, monkeypatch):
    """For kernels with an access that takes no leading index; operands that differ and shared ones in any order."""
    monkeypatch.setattr(launch_batching, "can_batch", lambda node: False)
    x, w = np.arange(30, dtype="f4").reshape(3, 5, 2), np.float32([[1, 10], [2, 20], [3, 30]])
    given, dims = ((x[0], w), (None, 0)) if place else ((x, w[0]), (0, None))
    found = ts.jit(lambda x, w: ts.vmap(launch_blocks, in_dims=dims)(x, w))(*given)
    np.testing.assert_array_equal(found, x[0] * w[:, None] if place else x * w[0])


def test_masks_of_one_bool_stay_as_they_are():
    """The kernel language broadcasts them; Tile IR may have them."""
    builder, refs = Builder(), [Value(RefType((4, 3), f32), name) for name in ("x", "out")]
    row = builder.add(tile_ops.program_id, []).out
    first, half = (builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out for n in (0, 2))
    mask = builder.add(elementwise.less, [row, half]).out
    block = builder.add(tile_ops.load, [refs[0], row, first, mask], {"shape": (1, 3), "edge": "error", "vector": 1}).out
    builder.add(tile_ops.store, [refs[1], block, row, first, mask], {"edge": "error", "vector": 1})
    attrs = {"kernel": "k", "grid": (4,), "attrs": Attrs({}), "written": (1,)}
    launch = Builder().add(control_flow.launch, refs, attrs, types=(), regions=(builder.block(refs, ()),))
    body, grid = launch_batching.batch_body(launch, [True, True], 2)
    x, out = np.arange(24, dtype="f4").reshape(2, 4, 3), np.full((2, 4, 3), 9, "f4")
    function = Function("k", body, Attrs({"group": 1, "grid": grid}))
    interpreter.run(host.make_launch_module(function, 0), [x, out])
    np.testing.assert_array_equal(out, np.where(np.arange(4)[:, None] < 2, x, 9))

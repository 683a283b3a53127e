"""Launch fusion: pointwise neighbours of a kernel move into it where that is legal and pays, and values stay."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.interp import graph
from tessera.ir.core import Module
from tessera.ir.verify import verify
from tessera.lower.passes.launch_fusion import fuse_launches
from tessera.lower.schedule_to_tile.lowering import summarise_kernels
from tessera.ops.tensor import elementwise
from tessera.runtime import driver

B = 4


@ts.kernel
def scale(x, out):
    i = tile.program_id(0) * B
    tile.store(out[i : i + B], tile.load(x[i : i + B], edge="clip") * 3.0, edge="clip")


@ts.kernel
def filled(x, out):
    """What lies outside, or under the mask, is 5, whatever is fused into the load."""
    i = tile.program_id(0) * B
    block = tile.load(x[i + 2 : i + 2 + B], edge="clip", mask=tile.arange(0, B) != 1, other=5.0)
    tile.store(out[i : i + B], block, edge="clip")


@ts.kernel
def summed(x, out):
    """Sums of what a load gives past the end: zeros, whatever is fused into it."""
    i = tile.program_id(0) * B
    out[tile.program_id(0)] = tile.sum(tile.load(x[i : i + B], edge="clip"), axis=0)


@ts.kernel
def looped(x, out):
    i = tile.program_id(0) * B
    total = tile.zeros((B,))
    for k in tile.range(0, 3):
        total += tile.load(x[k : k + B])
    tile.store(out[i : i + B], total, edge="clip")


@ts.kernel
def strided(x, out):
    """Each program reads its part of the array in rounds, whose number follows from the bounds."""
    first = tile.program_id(0) * 2 * B
    total = tile.zeros((B,))
    for k in tile.range(first, tile.minimum(first + 2 * B, x.shape[0]), B):
        total += tile.load(x[k : k + B], edge="clip")
    i = tile.program_id(0) * B
    tile.store(out[i : i + B], total, edge="clip")


@ts.kernel
def rows(x, out):
    i = tile.program_id(0)
    out[i, :] = tile.load(x[i, :]) * 2.0


@ts.kernel
def masked(x, out):
    i = tile.program_id(0) * B
    inside = tile.reshape(tile.arange(0, B) + i < 10, (1, B))
    block = tile.load(x[0:2, i : i + B], edge="clip")
    tile.store(out[0:2, i : i + B], block * 2.0, mask=tile.broadcast(inside, (2, B)), edge="clip")


@ts.kernel
def in_place(x):
    i = tile.program_id(0) * B
    tile.store(x[i : i + B], tile.load(x[i : i + B], edge="clip") + 1.0, edge="clip")


@ts.kernel
def half(x, out):
    i = tile.program_id(0) * B
    tile.store(out[i : i + B], tile.load(x[i : i + B]))


def r(*shape, dtype="f4"):
    return np.random.default_rng(sum(shape)).random(shape).astype(dtype)


def on(kernel, x, *shape):
    return ts.launch(kernel, (3,), x, ts.like(x, shape=shape or None))


CASES = {
    "a producer": (lambda x: on(scale, ts.exp(x) * 2.0 + x), r(10), ["scale_with_add_mul_exp"]),
    "a producer of a clipped load": (lambda x: on(summed, ts.exp(x), 3), r(10), ["summed_with_exp"]),
    "other of a masked load": (lambda x: on(filled, ts.exp(x)), r(10), ["filled_with_exp"]),
    "a consumer": (lambda x: ts.tanh(on(scale, x)) * 2.0 + x, r(10), ["scale_with_tanh_mul_add"]),
    "a consumer of another shape": (lambda x: on(scale, x).reshape(2, 5) * 2.0, r(10), ["scale_with_mul"]),
    "consumers that share operands": (lambda x: (lambda y: y * ts.sigmoid(y))(on(scale, x)), r(10),
                                      ["scale_with_neg_exp_add_div_mul"]),
    "a choice": (lambda x: (lambda y: ts.where(y > 1.5, y, x - y))(on(scale, x)), r(10),
                 ["scale_with_greater_sub_where"]),
    "a broadcast operand": (lambda x: ts.relu(on(rows, x) + x[:, 1]), r(3, 3), ["k0_copy", "rows_with_add_maximum"]),
    "a masked store": (lambda x: on(masked, x) + x[:, 3:4], r(2, 10), ["masked", "k0_add"]),
    "a masked store of whole operands": (lambda x: on(masked, x) + x, r(2, 10), ["masked_with_add"]),
    "reshapes on the way": (lambda x: (on(rows, x).reshape(3, 2, 3) * x[0, :2, None]).reshape(9, 2) - 1.0, r(3, 6),
                            None),
    "a broadcast of a part of an axis": (lambda x: on(rows, x).reshape(3, 2, 3) + x[0, :3], r(3, 6), None),
    "an operand from the launch": (lambda x: (lambda y: y + y.sum())(on(scale, x)), r(10), None),
    "a part that others use": (lambda x: (lambda y: ts.concatenate([y * 2.0, y * 2.0 + x]))(on(scale, x)), r(10), None),
    "its result twice": (lambda x: (lambda y: y * y)(on(scale, x)), r(10), ["scale_with_mul"]),
    "casts": (lambda x: on(scale, x.to(ts.f32)).to(ts.f16), r(10, dtype="f2"), ["scale_with_cast_cast"]),
    "a cast after a slice": (lambda x: on(scale, x.to(ts.f32)).reshape(2, 5)[:, 1:].to(ts.f16), r(10, dtype="f2"),
                             ["scale_with_cast_cast", "k0_copy"]),
    "a cast after a slice of little": (lambda x: on(scale, x.to(ts.f32))[:3].to(ts.f16), r(10, dtype="f2"),
                                       ["scale_with_cast", "k0_cast"]),
    "a slice that others use": (lambda x: (lambda y: y[1:].to(ts.f16) + y.sum().to(ts.f16))(on(scale, x.to(ts.f32))),
                                r(10, dtype="f2"), None),
    "a slice that others use, too": (
        lambda x: (lambda y: y.to(ts.f16) + (y * 3.0).sum().to(ts.f16))(on(scale, x.to(ts.f32))[1:]), r(10, dtype="f2"),
        None,
    ),
    "a widening cast after a slice": (lambda x: on(scale, x)[1:].to(ts.f32), r(10, dtype="f2"), ["scale", "k0_cast"]),
    "inside a scan": (lambda x: ts.scan(lambda c, _: (on(scale, c * 0.1), c[0]), x, None, length=3)[0], r(10),
                      ["k0_copy", "scale_with_mul", "k2_slice", "k3_copy"]),
    "a tensor that others use": (lambda x: (lambda y: on(scale, y) + y.sum())(ts.exp(x)), r(10), None),
    "a load in each round": (lambda x: on(strided, ts.exp(x)), r(12), ["strided_with_exp"]),
    "a producer behind a reshape": (lambda x: on(scale, ts.exp(x).reshape(10)), r(2, 5), ["scale_with_exp"]),
    "a load in a loop": (lambda x: on(looped, ts.exp(x)), r(10), ["k0_exp", "looped"]),
    "a memory in place": (lambda x: ts.launch(in_place, (3,), x * 2.0), r(10), ["k0_mul", "in_place"]),
    "partly written memory": (lambda x: ts.launch(half, (2,), x, ts.zeros(10)) + 1.0, r(10), None),
}  # fmt: skip


def lowered(f, x):
    passes = dict(driver.iterate_passes(ts.jit(f).trace(x).function, driver.find_plan("llvm")))
    return [name for name, *_ in summarise_kernels(passes["tile"])]


@pytest.mark.parametrize("name", CASES)
def test_values_stay_and_the_report_names_what_is_fused(name):
    f, x, kernels = CASES[name]
    wanted = ts.jit(f)(x).numpy()
    fused = fuse_launches(ts.jit(f).trace(x).function)
    verify(Module("graph", (fused,)))
    np.testing.assert_allclose(np.asarray(graph.run(fused, [x])[0]), wanted, rtol=2e-6)
    for target in ("llvm", "ptx"):
        np.testing.assert_allclose(ts.jit(f, target=target)(x).numpy(), wanted, rtol=2e-6)
    if kernels is not None and not name.startswith("inside"):
        assert lowered(f, x) == kernels
    elif kernels is not None:
        assert "scale_with_mul" in lowered(f, x)


# Stores of one result by a program, in turn: of all columns, or under a mask.
@ts.kernel
def stored(x, out, *, FIRST: int = 0, SECOND: int = 0):
    i = tile.program_id(0) * 2
    block = tile.load(x[i : i + 2, 0:4], edge="clip")
    odd = tile.broadcast(tile.reshape(tile.arange(0, 4), (1, 4)) % 2 == 1, (2, 4))
    for masked, held in ((FIRST, block), (SECOND, block * 3.0)):
        if masked:
            tile.store(out[i : i + 2, 0:4], held, mask=odd, edge="clip")
        else:
            tile.store(out[i : i + 2, 0:4], held, edge="clip")


OPERANDS = {
    "whole": lambda x: x, "a column": lambda x: x[:, 2:3], "a row": lambda x: x[1], "an element": lambda x: x[2, 1],
}  # fmt: skip


@pytest.mark.parametrize("masks", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_every_store_of_a_result_gets_what_is_fused_into_it(masks):
    x, fused = r(5, 4), {}
    for name, pick in OPERANDS.items():
        f = ts.jit(lambda x, p=pick: ts.launch(stored, (3,), x, ts.like(x), FIRST=masks[0], SECOND=masks[1]) * p(x))
        found = fuse_launches(f.trace(x).function)
        verify(Module("graph", (found,)))
        np.testing.assert_array_equal(graph.run(found, [x])[0], f(x).numpy())
        fused[name] = all(n.op is not elementwise.mul for n in found.body.nodes)
    assert list(fused.values()) == [True, *[not any(masks)] * 3]  # a mask has the shape of what is stored


@pytest.mark.parametrize("f", [lambda x: on(scale, ts.exp(x)).sum(), lambda x: (ts.tanh(on(scale, x)) * x).sum()])
def test_gradients_of_fused_programs(f):
    x = ts.Tensor(r(10))
    whole = ts.jit(ts.grad(f), target="llvm")(x).numpy()
    np.testing.assert_allclose(whole, ts.grad(f)(x).numpy(), rtol=2e-5)


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_a_mask_in_memory_is_read_by_the_kernel(target):
    x, mask = r(10), np.arange(10) % 3 == 1
    f = ts.jit(lambda x, mask: on(scale, x * mask), target=target)
    np.testing.assert_array_equal(f(x, mask).numpy(), x * mask * np.float32(3))
    passes = dict(driver.iterate_passes(f.trace(x, mask).function, driver.find_plan("llvm")))
    assert [name for name, *_ in summarise_kernels(passes["tile"])] == ["scale_with_mul_cast"]

"""Placed annotations and prefetching (programming model, chapter 4.2), on every engine and under debug mode."""

import numpy as np
import pytest
from engines import ENGINES, results

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, TesseraError, UnknownNameError, UnsupportedSyntaxError

TILE = ENGINES[:1]


@ts.memory
class MemoryHierarchy:
    """Explicit control over memory placement."""

    registers: ts.Tensor[8, ts.f32] @ ts.memory("register")
    shared: ts.Tensor["4", 8, ts.bf16] @ ts.memory("shared")


@ts.kernel
def placed(x: ts.Tensor["N", ts.f32] @ ts.memory("global"), out):
    m, me = MemoryHierarchy(), tile.local_id()
    m.registers[...] = x[0:8] * tile.cast(me, ts.f32)
    m.shared[me, 0:8] = tile.cast(m.registers + 1.0, ts.bf16)
    tile.barrier()
    out[me, 0:8] = tile.load(m.shared[3 - me, 0:8])


def test_buffers_of_a_class(rng):
    x = rng.random(8, dtype="f4")
    want = (x * np.arange(4, dtype="f4")[:, None] + 1).astype(ts.bf16.numpy)[::-1]
    for (out,) in results(placed, {"x": x, "out": np.zeros((4, 8), ts.bf16.numpy)}, group=4):
        np.testing.assert_array_equal(out, want)


def expensive(block):
    return tile.exp(block) + 1.0


@ts.kernel
def efficient_compute(x, out):
    """The copy has the name of what it copies, and a name of its own."""
    for r in tile.range(0, 2):
        row = x[r]
        with ts.memory.prefetch(row, to="shared"), ts.memory.prefetch(x[1 - r, 0:4], to="register") as other:
            row[tile.local_id()] = 0.0
            tile.barrier()
            if tile.local_id() == 0:
                out[r, 0:8] = expensive(tile.load(row))
            total = tile.sum(tile.load(other))
        out[r, 8 + tile.local_id()] = total + row[tile.local_id()]


def test_prefetch(rng):
    x = rng.random((2, 8), dtype="f4")
    want = np.zeros((2, 12), "f4")
    for r in range(2):
        want[r, :8] = np.exp(np.where(np.arange(8) < 4, 0, x[r])) + 1
        want[r, 8:] = x[1 - r, :4].sum() + x[r, :4]
    given = {"x": x, "out": np.zeros((2, 12), "f4")}
    for (out,) in results(efficient_compute, given, group=4):
        np.testing.assert_allclose(out, want, rtol=1e-6)
    with ts.debug.checked():
        results(efficient_compute, given, group=4, engines=TILE)


@ts.kernel
def shared_parameter(x: ts.Tensor["N", ts.f32]):
    with ts.memory.prefetch(x[0:4]):
        pass


@ts.kernel
def into_disk(x):
    with ts.memory.prefetch(x, to="disk"):
        pass


@ts.kernel
def left_early(x):
    for _ in tile.static_range(2):
        with ts.memory.prefetch(x):
            break


@ts.kernel
def no_field(x):
    MemoryHierarchy().caches[0] = x[0]


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (shared_parameter, UnsupportedSyntaxError, "the copy has no name"),
        (into_disk, ArgumentError, "not a memory to prefetch into"),
        (left_early, UnsupportedSyntaxError, "left before its end"),
        (no_field, UnknownNameError, "has no field `caches`"),
    ],
)
def test_refusals(entry, error, message):
    with pytest.raises(error, match=message):
        results(entry, {"x": np.ones(8, "f4")}, engines=TILE)


def test_spaces_are_known_where_they_are_said():
    with pytest.raises(ArgumentError, match="'cache' is not a memory space"):
        ts.memory("cache")
    with pytest.raises(ArgumentError, match="neither shape nor memory"):
        ts.memory(type("Bare", (), {"__annotations__": {"x": int}}))

    def wrong(x: ts.Tensor["N", ts.f32] @ ts.memory("shared")):
        x[0] = 1.0

    with pytest.raises(TesseraError, match="cannot lie in shared memory"):
        ts.kernel(wrong)

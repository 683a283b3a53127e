"""Loops of sums carry blocks of partial sums: threads exchange after a loop, and results are within bounds."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.runtime import driver
from tessera.runtime.program import prepare


def find_barriers_of_loops(text):
    """The barriers between the label of a loop and the branch back to it."""
    lines, found = text.splitlines(), 0
    for i, line in enumerate(lines):
        if line.startswith("$loop") and line.endswith(":"):
            end = next(j for j in range(i, len(lines)) if f"bra.uni {line[:-1]};" in lines[j])
            found += sum("bar.sync" in each for each in lines[i:end])
    return found


@pytest.mark.parametrize(("shape", "dtype"), [((700, 160), "f2"), ((400, 1500), "f2"), ((900, 33), "f4")])
@pytest.mark.parametrize("function", [ts.sum, ts.var])
def test_sums_of_columns(function, shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    levels = driver.lower(ts.jit(lambda x: function(x, axis=0)).trace(x).function, "ptx")
    text = next(iter(BACKEND.emit(levels["tile"], {}).files.values()))
    assert function is ts.var or not find_barriers_of_loops(text)  # the means are spread over threads in loops
    wanted = function(ts.Tensor(x.astype("f8")), axis=0).numpy()
    (ours,) = driver.run_level(levels, "target", [x], "ptx")
    np.testing.assert_allclose(ours, wanted, rtol=2e-3 if dtype == "f2" else 1e-5, atol=0.05 if dtype == "f2" else 1e-4)


@pytest.mark.parametrize("dtype", ["f2", "f4", "i2", "?"])
@pytest.mark.parametrize("function", [ts.max, ts.min])
def test_extremes_of_columns(function, dtype):
    x = np.random.default_rng(0).standard_normal((1100, 170))
    x = (x > 3) if dtype == "?" else (x * 1000).astype(dtype)
    x[:, 3], x[700, 5] = x.max(), np.nan if dtype in ("f2", "f4") else x.min()
    levels = driver.lower(ts.jit(lambda x: function(x, axis=0)).trace(x).function, "ptx")
    assert not find_barriers_of_loops(next(iter(BACKEND.emit(levels["tile"], {}).files.values())))
    (ours,) = driver.run_level(levels, "target", [x], "ptx")
    np.testing.assert_array_equal(ours, getattr(x, function.__name__)(axis=0))


@ts.kernel
def sums(x, out, twice):
    total, other = tile.zeros((4,), "f32"), tile.zeros((4,), "f32")
    for i in tile.range(0, 64, 16):
        block = x[0:4, i : i + 16]
        total = total + tile.sum(block, axis=1)
        other = other * 0.5 + tile.sum(block, axis=1)  # what is carried is not added alone: it stays
    out[0:4] = total
    twice[0:4] = other


def test_other_uses_of_sums_stay():
    x = np.random.default_rng(1).integers(-8, 8, (4, 64)).astype("f4")
    program = prepare(sums, [x, np.zeros(4, "f4"), np.zeros(4, "f4")], grid=(1,))
    blocks = x.reshape(4, 4, 16).sum(-1)
    other = ((blocks[:, 0] * 0.5 + blocks[:, 1]) * 0.5 + blocks[:, 2]) * 0.5 + blocks[:, 3]
    for level in ("tile", "target"):
        ours = program.run(level, "ptx")
        np.testing.assert_array_equal(ours[-2], x.sum(1))
        np.testing.assert_array_equal(ours[-1], other)


@ts.kernel
def mixed(x, narrow, out):
    largest, total, rounded = tile.zeros((4,), "f32"), tile.zeros((4,), "f32"), tile.zeros((4,), "f16")
    for i in tile.range(0, 64, 16):
        block = x[0:4, i : i + 16]
        largest = tile.maximum(largest, tile.sum(block, axis=1))
        total = total + tile.max(block, axis=1)
        rounded = rounded + tile.sum(narrow[0:4, i : i + 16], axis=1)
    out[0, 0:4], out[1, 0:4], out[2, 0:4] = largest, total, tile.cast(rounded, "f32")


def test_other_reductions_and_narrow_sums_stay():
    """A sum that enters a maximum, and one of f16, whose parts would overflow."""
    x = np.random.default_rng(2).integers(-8, 8, (4, 64)).astype("f4")
    narrow = np.where(np.arange(64) % 2, -40000, 40000).astype("f2")[None].repeat(4, 0)
    program = prepare(mixed, [x, narrow, np.zeros((3, 4), "f4")], grid=(1,))
    blocks = x.reshape(4, 4, 16)
    wanted = [np.maximum(blocks.sum(-1).max(-1), 0), blocks.max(-1).sum(-1), np.zeros(4)]
    for level in ("tile", "target"):
        np.testing.assert_array_equal(program.run(level, "ptx")[-1], wanted)


@ts.kernel
def widened(x, out):
    total = tile.zeros((4,), "int64")
    for i in tile.range(0, 64, 16):
        total = total + tile.sum(x[0:4, i : i + 16], axis=1)
    out[0:4] = total


@pytest.mark.parametrize("dtype", ["i4", "i2", "?"])
def test_sums_of_another_type_than_their_elements_stay(dtype):
    x = np.full((4, 64), {"i4": 2**30, "i2": 2**14, "?": 1}[dtype], dtype)
    program = prepare(widened, [x, np.zeros(4, "i8")], grid=(1,))
    for level in ("tile", "target"):
        np.testing.assert_array_equal(program.run(level, "ptx")[-1], x.sum(1, dtype="i8"))

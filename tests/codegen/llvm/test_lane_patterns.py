"""Lanes that repeat numbers, count in cycles, or lie a few elements apart: loads and shuffles in place of gathers."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.codegen.llvm.text import memory
from tessera.runtime.driver import lower


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(dtype)


def compile_text(function, *arrays):
    module = lower(ts.jit(function).trace(*arrays).function, "llvm")["tile"]
    return emit_artifact(get_backend("llvm"), module, {"vector_bytes": 64}).text("kernels.ll")


def run_everywhere(function, *arrays):
    """The result of the machine code, which equals that of the emulator."""
    backend, module = get_backend("llvm"), lower(ts.jit(function).trace(*arrays).function, "llvm")["tile"]
    artifact = emit_artifact(backend, module, {"vector_bytes": 64})
    (emulated,), (found,) = backend.interpreter(artifact)(arrays), backend.runtime(artifact).run(arrays)
    np.testing.assert_array_equal(found, emulated)
    return found


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("columns", [5, 16, 64, 96])
def test_interleaved(columns, count):
    parts = [draw(9, columns, seed=i) for i in range(count)]
    got = run_everywhere(lambda *p: ts.reshape(ts.stack(list(p), axis=-1), (9, columns * count)), *parts)
    np.testing.assert_array_equal(got, np.stack(parts, -1).reshape(9, -1))


def test_interleaved_rows_of_several_tiles():
    """Tiles after the first one start within the rows."""
    parts = [draw(2, 12000, seed=i) for i in range(2)]
    got = run_everywhere(lambda *p: ts.reshape(ts.stack(list(p), axis=-1), (2, 24000)), *parts)
    np.testing.assert_array_equal(got, np.stack(parts, -1).reshape(2, -1))


@pytest.mark.parametrize("count", [2, 4, 16, 32])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.float64], ids=lambda d: d.__name__)
def test_repeated(count, dtype):
    x = draw(6, 32, dtype=dtype)

    def repeat(x):
        return ts.reshape(ts.broadcast_to(ts.reshape(x, (6, 32, 1)), (6, 32, count)), (6, 32 * count)) + ts.zeros(
            (6, 32 * count), dtype=x.dtype
        )

    np.testing.assert_array_equal(run_everywhere(repeat, x), np.repeat(x, count, axis=1))


@pytest.mark.parametrize("block", [2, 3, 4])
def test_pixel_shuffle(block):
    x = draw(1, 3 * block * block, 8, 32)
    got = run_everywhere(lambda x: ts.pixel_shuffle(x, block) * 2, x)
    grid = x.reshape(3, block, block, 8, 32).transpose(0, 3, 1, 4, 2).reshape(1, 3, 8 * block, 32 * block)
    np.testing.assert_array_equal(got, grid * 2)


@pytest.mark.parametrize("step", [2, 3, 5, 8, 9])
@pytest.mark.parametrize("columns", [16, 33, 130])
@pytest.mark.parametrize("dtype", [np.float32, np.int8], ids=lambda d: d.__name__)
def test_strided(step, columns, dtype):
    x = draw(7, columns * step, dtype=dtype)
    np.testing.assert_array_equal(
        run_everywhere(lambda x: x[:, ::step] + x[:, 1::step], x), x[:, ::step] + x[:, 1::step]
    )


def test_strided_loads_end_at_the_last_element():
    """The last lane is the last element of the memory: a load that goes on behind it would leave the page."""
    x = draw(1, 3 * 15 + 1)
    np.testing.assert_array_equal(run_everywhere(lambda x: x[:, ::3] + x[:, ::3], x), 2 * x[:, ::3])


def interleave(x):
    return ts.reshape(ts.stack([x, x + 1], axis=-1), (64, 192))


@pytest.mark.parametrize("function", [lambda x: x[:, ::3] + 1, interleave], ids=["strided", "interleaved"])
def test_no_gather_is_emitted(function):
    assert "masked.gather" not in compile_text(function, draw(64, 96))


@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("stride", range(2, 9))
def test_loads_of_strided_lanes_have_all_lanes_and_nothing_past_the_last(stride, width):
    starts = memory._find_starts(stride, width)
    read = {start + i for start in starts for i in range(width)}
    assert read >= {lane * stride for lane in range(width)} and max(read) == (width - 1) * stride
    found = list(range(starts[0], width))
    for number in range(1, len(starts)):
        pool = [*found, *range(starts[number], starts[number] + width)]
        found = [pool[memory._pick_lane(lane, stride, width, number, starts)] for lane in range(width)]
    assert found == [lane * stride for lane in range(width)]

"""Lanes that repeat numbers, count in cycles, or lie a few elements apart: loads and shuffles in place of gathers."""

from operator import attrgetter

import numpy as np
import pytest
from ml_dtypes import bfloat16

import tessera as ts
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.codegen.llvm.text import memory
from tessera.runtime.driver import lower

get_name = attrgetter("__name__")


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


@pytest.mark.in_turn("dtype")
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


def count_gathers(text):
    return text.count("call <16 x float> @llvm.masked.gather")


@pytest.mark.parametrize("sizes", [(2, 3, 19, 23, 5, 3), (1, 5, 21, 36, 13, 3), (2, 2, 33, 18, 20, 7)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_strided_convolutions(sizes, biased):
    """The windows of each output row are loaded and shuffled, also at the ends of the rows and below the last one."""
    torch = pytest.importorskip("torch")
    b, c, h, w, k, kernel = sizes
    x, weight, bias = draw(b, c, h, w), draw(k, c, kernel, kernel, seed=1), draw(k, seed=2)
    given = (x, weight, bias) if biased else (x, weight)

    def convolve(*args):
        return ts.conv2d(*args, stride=2, padding=kernel // 2)

    found = run_everywhere(convolve, *given)
    wanted = torch.nn.functional.conv2d(*map(torch.from_numpy, given), stride=2, padding=kernel // 2)
    np.testing.assert_array_equal(found, wanted.numpy())  # sums of integers that f32 represents


def test_windows_beside_a_bias_are_not_gathered():
    x, weight, bias = draw(1, 5, 21, 36), draw(13, 5, 3, 3, seed=1), draw(13, seed=2)
    text = compile_text(lambda x, w, b: ts.conv2d(x, w, b, stride=2, padding=1), x, weight, bias)
    assert count_gathers(text) == 0
    # Of a larger image a program computes several rows: its columns are two axes, which are kept apart.
    several = compile_text(lambda x, w, b: ts.conv2d(x, w, b, stride=2, padding=1), draw(7, 5, 93, 36), weight, bias)
    assert several.count("urem <16 x i32>") <= 4  # in the loops of whole tiles, and in those of the others


@pytest.mark.parametrize(("rows", "columns"), [(7, 18), (5, 11), (3, 40)])
def test_lanes_of_merged_axes_have_right_quotients(rows, columns):
    """Quotients and remainders of lanes are computed in 32 bits."""
    x = draw(6, rows, columns)
    found = run_everywhere(lambda x: ts.reshape(ts.permute(x, (1, 0, 2)), (rows, 6 * columns)) * 2.0, x)
    np.testing.assert_array_equal(found, x.transpose(1, 0, 2).reshape(rows, -1) * 2)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("by", [-3, 1, 40, 61])
def test_rolled_rows(by, axis):
    """Rows that lie outside of the array on one side of a choice are not loaded from there."""
    x = draw(70, 37)
    found = run_everywhere(lambda x: ts.roll(x, by, axis), x)
    np.testing.assert_array_equal(found, np.roll(x, by, axis))


def test_rows_outside_of_the_array_are_not_loaded():
    x = draw(70, 37)
    text = compile_text(lambda x: ts.roll(x, 30, 0), x)
    assert "select i1" in text
    # The ends of rows: of both sides in tiles with a choice, and of one in the others.
    assert text.count("call <16 x float> @llvm.masked.load") <= 2 + text.count("\npart")


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (3, 20)])
def test_small_arrays_are_not_read_past_their_ends(sizes):
    x, y = draw(*sizes), draw(5, sizes[1], seed=1)
    found = run_everywhere(lambda x, y: ts.concatenate([x, y], axis=0), x, y)
    np.testing.assert_array_equal(found, np.concatenate([x, y]))


@pytest.mark.parametrize("sizes", [(16, 16), (64, 64), (70, 61), (200, 33), (130, 257)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.float64, np.int16, np.float16, bfloat16], ids=get_name)
def test_transposed_operands_of_pointwise_ops(sizes, dtype):
    x, y = draw(*sizes, dtype=dtype), draw(*sizes[::-1], dtype=dtype, seed=1)
    np.testing.assert_array_equal(run_everywhere(lambda x, y: x.T + y, x, y), x.T + y)


@pytest.mark.parametrize("axes", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_permuted_axes(axes):
    x = draw(19, 32, 47)
    np.testing.assert_array_equal(run_everywhere(lambda x: ts.permute(x, axes) * 2.0, x), x.transpose(axes) * 2)


def test_transposes_are_not_gathers():
    x, y = draw(61, 70), draw(70, 61, seed=1)
    text = compile_text(lambda x, y: x.T + y, x, y)
    assert count_gathers(text) == 0
    assert "ts.transpose" in text


def test_a_transposed_array_is_read_before_it_is_overwritten():
    """Elements of a donated array are loaded before results take their place."""
    x = draw(64, 64)
    f = ts.jit(lambda x: x.T + x, target="llvm", donate=("x",))
    np.testing.assert_array_equal(f(ts.Tensor(x.copy())).numpy(), x.T + x)

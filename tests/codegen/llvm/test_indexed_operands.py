"""Products with gathered operands: matrices that tables of offsets address, and those that they cannot."""

import numpy as np
import pytest

from tessera import tile
from tessera.frontend.kernel import kernel
from tessera.runtime.program import prepare

RNG = np.random.default_rng(5)
IMAGE, WEIGHTS = RNG.standard_normal(500).astype(np.float32), RNG.standard_normal((16, 32)).astype(np.float32)
STEPS = (np.arange(16) * 7).astype(np.int64)


@kernel
def multiply(image, weights, steps, out, *, step: int, kept: int, crossed: bool):
    """out [24, 32] = the windows of image, of which only the first elements are kept, times weights."""
    places = tile.arange(0, 24)[:, None] * step + tile.load(steps[0:16])[None, :]
    if crossed:
        places = places + tile.arange(0, 24)[:, None] * tile.arange(0, 16)[None, :]
    if kept < 16:
        mask = tile.broadcast((tile.arange(0, 16) < kept)[None, :], (24, 16))
        tile.store(out[0:24, 0:32], tile.dot(tile.load(image[places], mask=mask, other=2.0), weights[0:16, 0:32]))
    else:
        tile.store(out[0:24, 0:32], tile.dot(tile.load(image[places]), weights[0:16, 0:32]))


@kernel
def multiply_lines(image, weights, steps, out, *, step: int, columns: bool):
    """out [32, 32] = the transposed weights times lines of image, whose elements are `step` apart.

    With `columns` the image has two axes, and lines are columns of it.
    """
    places, elements = tile.load(steps[0:16])[:, None], tile.arange(0, 32)[None, :] * step
    seen = tile.load(image[elements, places]) if columns else tile.load(image[places + elements])
    tile.store(out[0:32, 0:32], tile.dot(tile.transpose(weights[0:16, 0:32]), seen))


def run(function, shape, **constants):
    out = np.zeros(shape, np.float32)
    arguments = {"image": IMAGE, "weights": WEIGHTS, "steps": STEPS, "out": out, **constants}
    return prepare(function, arguments, "llvm", (1,)).run("device", "llvm")


@pytest.mark.parametrize(("step", "kept", "crossed"), [(1, 16, False), (3, 16, False), (1, 9, False), (1, 16, True)])
def test_gathered_left_operands(step, kept, crossed):
    rows, columns = np.arange(24)[:, None], np.arange(16)[None, :]
    seen = IMAGE[rows * step + STEPS[None, :] + (rows * columns if crossed else 0)]
    seen = np.where(columns < kept, seen, 2.0)
    got = run(multiply, (24, 32), step=step, kept=kept, crossed=crossed)
    np.testing.assert_allclose(got[-1], seen.astype("f8") @ WEIGHTS, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", [1, 2, 0])
def test_gathered_lines(step):
    seen = IMAGE[STEPS[:, None] + np.arange(32)[None, :] * step]
    got = run(multiply_lines, (32, 32), step=step, columns=False)
    np.testing.assert_allclose(got[-1], WEIGHTS.T.astype("f8") @ seen, rtol=1e-5, atol=1e-5)


def test_lines_that_are_columns_of_an_image():
    image, steps = IMAGE[:480].reshape(32, 15), STEPS % 15
    got = run(multiply_lines, (32, 32), step=1, columns=True, image=image, steps=steps)
    np.testing.assert_allclose(got[-1], WEIGHTS.T.astype("f8") @ image[:, steps].T, rtol=1e-5, atol=1e-5)


@kernel
def multiply_flipped(x, y, out, *, m: int, k: int, left: bool):
    """out [m, 32] = x [m, k] times y [k, 32], of which one is read in the opposite order from the program's memory."""
    a, b = tile.load(x[0:m, 0:k]), tile.load(y[0:k, 0:32])
    tile.store(out[0:m, 0:32], tile.dot(tile.flip(a, axis=1), b) if left else tile.dot(a, tile.flip(b, axis=0)))


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(("m", "k"), [(8, 9), (8, 16), (9, 16), (16, 2), (16, 9), (32, 4), (32, 9), (40, 33)])
def test_memory_of_the_program_is_kept_until_all_tiles_have_read_it(m, k, left):
    """The result had the place of the operand, which later tiles still read."""
    x, y = RNG.standard_normal((m, k)).astype("f4"), RNG.standard_normal((k, 32)).astype("f4")
    arguments = {"x": x, "y": y, "out": np.zeros((m, 32), "f4"), "m": m, "k": k, "left": left}
    got = prepare(multiply_flipped, arguments, "llvm", (1,)).run("device", "llvm")[-1]
    wanted = x[:, ::-1].astype("f8") @ y if left else x.astype("f8") @ y[::-1]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)

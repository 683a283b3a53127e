"""Which indices pick elements of a tensor's rows: those that stay in them, and have a place along each axis."""

import numpy as np
import pytest

import tessera as ts
from tessera.ops.tensor import shape
from tessera.runtime import driver
from tests.lower.passes.test_gather_sinking import draw, is_sunk, lower

int64 = ts.int64


def along(axis, *sizes):
    return shape.iota(shape=sizes, axis=axis, dtype=int64)


def checked(t, size):
    return shape.check_index(t, size=size, along=1, what="index", wrap=False)


# The flat indices into 13 rows of 40 elements, made of numbers below 13, and whether they are a pick.
INDICES = {
    "an element of each row": (lambda t: along(0, 13, 1) * 40 + checked(t[:, None], 40), True),
    "of any row and column": (lambda t: checked(t[:, None], 13) * 40 + checked(t[::-1, None] + 1, 40), True),
    "of the first rows": (lambda t: along(0, 5, 1) * 40 + checked(t[:5, None], 40), False),
    "of the first row alone": (lambda t: checked(t[:, None], 40), False),
    "of fewer axes": (lambda t: along(0, 13) * 40 + checked(t, 40), False),
    "of the next row": (lambda t: along(0, 13, 1) * 40 + checked(ts.minimum(t[:, None], 1) + 39, 80), False),
    "with a number": (
        lambda t: along(0, 13, 1) * 40 + checked(t[:, None], 40) + ts.full((13, 1), 2, dtype=int64),
        False,
    ),
}


@pytest.mark.parametrize("case", INDICES)
def test_what_is_a_pick(case):
    index, sunk = INDICES[case]
    x, t = draw(13, 40), np.random.default_rng(1).integers(0, 13, 13)
    t[-1] = 0

    def function(x, t):
        return shape.gather(ts.reshape(ts.log_softmax(x, axis=1), (520,)), index(t), axis=0)

    assert is_sunk(function, x, t) == sunk
    (found,) = driver.run_level(lower(function, (x, t))[0], "tile", [x, t], "ptx")
    np.testing.assert_allclose(found, function(ts.Tensor(x), ts.Tensor(t)).numpy(), rtol=1e-5)


def test_sizes_that_are_not_known_yet():
    f = ts.jit(lambda x, t: ts.take_along_axis(ts.exp(x), t[:, None], axis=1), target="ptx", dynamic=True)
    for rows in (3, 5, 13):
        x, t = draw(rows, 40), np.arange(rows)
        np.testing.assert_allclose(f(x, t).numpy(), np.take_along_axis(np.exp(x), t[:, None], 1), rtol=1e-5)


def test_elements_of_a_broadcast_are_picked_from_what_is_repeated():
    """As of an expanded tensor of PyTorch: the repeated elements are never in memory."""
    x = np.random.default_rng(0).standard_normal((3, 50)).astype("f4")
    at = np.array([[[4], [49], [0]], [[1], [2], [3]]])

    def pick(x, at):
        return ts.take_along_axis(ts.broadcast_to(x, (2, 3, 50)), at, axis=2)

    module = driver.lower(ts.jit(pick).trace(x, at).function, "ptx")["tile"]
    assert len(module.functions) == 2 and all("2x3x50" not in str(p.type) for f in module.functions for p in f.params)
    wanted = np.take_along_axis(np.broadcast_to(x, (2, 3, 50)), at, 2)
    for target in ("interp", "llvm"):
        np.testing.assert_array_equal(ts.jit(pick, target=target)(x, at), wanted)


def test_picks_of_as_many_elements_as_a_call_has():
    """Whether these are few is not known when the program is compiled."""

    def pick(x: ts.Tensor[40, 8], t: ts.Tensor["N", 8, ts.int64]):
        return ts.take_along_axis(ts.exp(x), t, axis=0)

    f, x = ts.jit(pick, target="llvm", dynamic=True), draw(40, 8)
    for rows in (3, 1, 50):
        t = np.random.default_rng(rows).integers(0, 40, (rows, 8))
        np.testing.assert_allclose(f(x, t).numpy(), np.take_along_axis(np.exp(x), t, 0), rtol=1e-5)

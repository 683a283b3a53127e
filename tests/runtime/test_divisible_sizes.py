"""Programs of symbolic sizes that divide: by a constraint, by a comparison of the code, or by what an op needs."""

import logging

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.errors import ShapeError


def rows(size):
    return np.random.default_rng(size).standard_normal((size, 4), dtype=np.float32)


def halves(x):
    half = x.shape[0] // 2
    return x[:half] * x[half:] + ts.arange(half).sum()


def scan(x):
    return ts.scan(lambda c, r: (c + r.sum(0), c), ts.zeros((4,)), x.reshape(-1, 4, 4))[1]


# Each with the constraint that it needs.
PROGRAMS = {
    "inferred": (lambda x: x.reshape(-1, 4, 4).sum(1) + x.reshape(4, -1, 4)[0] + x[::4], "B % 4 == 0"),
    "quotient": (lambda x: ts.softmax(x.reshape(x.shape[0] // 4, 16), axis=-1).sum(0), "B % 4 == 0"),
    "split": (lambda x: sum(n * p for n, p in enumerate(ts.split(x, 4))), "B % 4 == 0"),
    "halves": (halves, "B % 2 == 0"),
    "merged": (lambda x: ts.permute(x.reshape(-1, 2, 4), (1, 0, 2)).reshape(-1, 4) + x, "B % 2 == 0"),
    "gradient": (lambda x: ts.grad(lambda v: (v.reshape(-1, 4, 4).sum(1) ** 2).sum())(x), "B % 4 == 0"),
    "scan": (scan, "B % 4 == 0"),
}


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_constraint_lets_sizes_divide(tmp_path, name, target):
    function, text = PROGRAMS[name]

    def f(x: ts.Tensor["B", 4]):
        return function(x)

    ts.build(ts.jit(ts.require(text)(f)), rows(8), out=tmp_path / "a", target=target, dynamic=True)
    program = ts.load(tmp_path / "a")
    for size in (4, 8, 20):
        want = function(ts.Tensor(rows(size))).numpy()
        np.testing.assert_allclose(program(rows(size)).numpy(), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match=f"{text} does not hold"):
        program(rows(7))


def test_a_comparison_is_a_constraint_too():
    @ts.jit(target="llvm", dynamic=True)
    def pooled(x: ts.Tensor["B", 4]):
        if x.shape[0] % 4:
            return x
        return x.reshape(x.shape[0] // 4, 4, 4).sum(1)

    for size, want in ((8, 2), (12, 3), (9, 9)):
        assert pooled(rows(size)).shape == (want, 4)


@pytest.mark.parametrize("f", [lambda x: x.reshape(-1, 4, 4) + 1, lambda x: ts.split(x, 4)[1] + 1])
def test_an_op_that_divides_makes_a_guard(tmp_path, f, caplog):
    """One program serves the sizes that divide as the example's does; others have the error of their own sizes."""
    caplog.set_level(logging.INFO, logger="tessera.compile")
    jitted = ts.jit(f, target="llvm")
    for size in (8, 12, 20):
        np.testing.assert_array_equal(jitted(rows(size)).numpy(), f(ts.Tensor(rows(size))).numpy())
    assert sum(r.getMessage().startswith("compiled") for r in caplog.records) == 2  # for 8, then for all multiples of 4
    with pytest.raises(ShapeError, match="9"):
        jitted(rows(9))
    ts.build(ts.jit(f), rows(8), out=tmp_path / "a", dynamic={"x": {0: "B"}})
    assert ts.load(tmp_path / "a")(rows(16)).shape == f(ts.Tensor(rows(16))).shape
    with pytest.raises(ShapeError, match="B % 4 == 0 does not hold"):
        ts.load(tmp_path / "a")(rows(6))


def test_the_error_says_what_to_state():
    f = ts.jit(lambda x: x.reshape(x.shape[0] // 4, 16), target="llvm", dynamic=True)
    with pytest.raises(ShapeError, match="cannot reshape") as error:
        f(rows(8))
    assert 'ts.require("s0 % 4 == 0")' in str(error.value)


def test_a_padded_program_computes_exact_quotients(tmp_path):
    def f(x: ts.Tensor["B", 4]):
        return x.mean(0) * (x.shape[0] // 4) + ts.arange(x.shape[0] // 4).sum()

    ts.build(
        ts.jit(ts.require("B % 4 == 0 and B <= 12")(f)), rows(8), out=tmp_path / "a", target="csl:2x2", dynamic=True
    )
    for size in (4, 12):
        want = f(ts.Tensor(rows(size))).numpy()
        np.testing.assert_allclose(ts.load(tmp_path / "a")(rows(size)).numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x[: x.shape[0] // 2] + x[-(x.shape[0] // 2) :],
        lambda x: x[: -(x.shape[0] // 3)] * 2,
        lambda x: x[x.shape[0] - 4 :] * 2,
    ],
)
def test_slices_by_parts_of_a_size(f, dynamic):
    """A bound may be negative for all sizes, or for some: then the example's decides, and it is a guard."""
    jitted = ts.jit(f, target="llvm", dynamic=dynamic)
    for size in (8, 12, 5, 3, 2, 1, 7):
        np.testing.assert_array_equal(jitted(rows(size)).numpy(), f(rows(size)))


@pytest.mark.parametrize("size", ["B//4", "B/4"])
@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_annotations_divide_too(tmp_path, size, target):
    @ts.jit
    @ts.require("B % 4 == 0")
    def f(x: ts.Tensor["B", 4], y: ts.Tensor[size, 4]):
        return x.reshape(-1, 4, 4).sum(1) + y

    ts.build(f, rows(8), rows(2), out=tmp_path / "a", target=target, dynamic=True)
    program, dynamic = ts.load(tmp_path / "a"), ts.jit(f.function, target=target, dynamic=True)
    for count in (1, 5):
        want = f(rows(4 * count), rows(count)).numpy()
        for call in (program, dynamic):
            np.testing.assert_allclose(call(rows(4 * count), rows(count)).numpy(), want, rtol=1e-5, atol=1e-6)
    for count, text in ((6, "B % 4 == 0 does not hold"), (8, "expected B/4 = 2, received 1")):
        with pytest.raises(ShapeError, match=text):
            program(rows(count), rows(1))


@ts.kernel
@ts.require("B % 4 == 0")
def pool(x: ts.Tensor["B", "D"], out: ts.Tensor["B//4", "D"]):
    row, share = tile.program_id(0), 1.0 / (x.shape[0] // 4) + 0.5 * x.shape[1]
    for c in tile.range(0, x.shape[1], 16):
        block = tile.load(x[row * 4 : row * 4 + 4, c : c + 16], edge="clip")
        tile.store(out[row, c : c + 16], tile.sum(block, axis=0) * share, edge="clip")


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_kernels_divide_sizes(tmp_path, target):
    """Also into what is no size: `1.0 / n` and `0.5 * n` are values at run time."""
    start = np.ones((8, 20), np.float32), np.zeros((2, 20), np.float32)
    ts.build(pool[lambda c: (c["B"] // 4,)], *start, out=tmp_path / "a", target=target, dynamic=True)
    for count, columns in ((1, 33), (5, 7)):
        x = np.random.default_rng(count).standard_normal((4 * count, columns), dtype=np.float32)
        out = np.zeros((count, columns), np.float32)
        ts.load(tmp_path / "a")(x, out)
        np.testing.assert_allclose(out, x.reshape(-1, 4, columns).sum(1) * (1 / count + columns / 2), rtol=1e-4)

"""uint16, uint32 and uint64: arithmetic, comparisons, sums and conversions, exactly as NumPy's at every level."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import DTypeError
from tessera.interp.bound import compare_with_bound
from tessera.runtime.program import prepare

NAMES = ("uint16", "uint32", "uint64")
RUNS = [*((level, "llvm") for level in ("graph", "schedule", "tile", "target", "device")), ("target", "ptx")]
PAIRS = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "//": np.floor_divide, "%": np.remainder, "&": np.bitwise_and,
    "|": np.bitwise_or, "^": np.bitwise_xor, "<": np.less, ">=": np.greater_equal, "==": np.equal,
}  # fmt: skip
SINGLE = {"~": np.invert, "-": np.negative, "abs": np.abs, "ts.sign": np.sign, "ts.square": np.square}


def numbers(name, least=0):
    """The ends of the type, its middle, and numbers at random."""
    top = np.iinfo(name).max
    drawn = np.random.default_rng(least).integers(least, top, 24, dtype=name, endpoint=True)
    return np.concatenate([np.array([least, 1, 2, top, top - 1, top // 2, top // 2 + 1], name), drawn])


def exactly(function, arrays, want):
    """Check that each level gives these elements of this type, and that the bound says so."""
    program = prepare(ts.jit(function), arrays, "llvm")
    bounds = program.bounds()
    for level, target in RUNS:
        (got,) = program.run(level, target)
        assert got.dtype == want.dtype and np.array_equal(got, want) and compare_with_bound(got, bounds[0]).ok, (
            level,
            target,
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("word", PAIRS)
def test_pairs(name, word):
    x, y = numbers(name), numbers(name, 1)[::-1].copy()
    exactly(eval(f"lambda x, y: x {word} y"), (x, y), PAIRS[word](x, y))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("word", SINGLE)
def test_single(name, word):
    x = numbers(name)
    exactly(eval(f"lambda x: {word}(x)", {"ts": ts}), (x,), SINGLE[word](x))


def test_powers_do_not_pass_through_floats():
    x, by = np.array([3, 2**40 + 1, 2**63 + 1, 2**64 - 1], np.uint64), np.array([40, 1, 1, 3], np.uint64)
    assert ((ts.Tensor(x) ** ts.Tensor(by)).numpy() == x**by).all()
    exactly(lambda x, y: x**y, (x, by), x**by)


@pytest.mark.parametrize("name", NAMES)
def test_shifts_extremes_constants(name):
    x, by = numbers(name), (numbers(name) % np.array(np.iinfo(name).bits, name)).astype(name)
    top = int(np.iinfo(name).max)
    exactly(lambda x, y: (x << y) ^ (x >> y), (x, by), np.left_shift(x, by) ^ np.right_shift(x, by))
    exactly(lambda x: ts.maximum(ts.minimum(x, top - 1), 1), (x,), np.clip(x, 1, np.array(top - 1, name)))


@pytest.mark.parametrize("name", NAMES)
def test_along_an_axis(name):
    """Sums of narrower types are int64, as everywhere."""
    x = numbers(name)
    total = np.uint64 if name == "uint64" else np.int64
    exactly(lambda x: ts.sum(x, axis=0, keepdims=True), (x,), x.sum(keepdims=True, dtype=total))
    exactly(lambda x: ts.cumsum(x), (x,), x.cumsum(dtype=total))
    exactly(lambda x: ts.max(x, axis=0, keepdims=True), (x,), x.max(keepdims=True))
    exactly(lambda x: ts.sort(x), (x,), np.sort(x))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("other", ["int8", "int16", "int64", "uint8", *NAMES, "bool"])
def test_to_and_from_integers(name, other):
    x = numbers(name)
    y = x.astype(other) if other == "bool" else np.array([np.iinfo(other).min, 0, 1, np.iinfo(other).max], other)
    exactly(lambda x: x.to(other), (x,), x.astype(other))
    exactly(lambda y: y.to(name), (y,), y.astype(name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("other", [ts.f64, ts.f32, ts.f16, ts.bf16], ids=str)
def test_from_floats(name, other):
    """Toward zero, saturating; NaN gives 0. Python's integers are the reference."""
    y = np.array([0, 1.5, -3, 255.7, 65535, 65536, 4e9, 5e9, 1.8e19, 2e19, np.inf, -np.inf, np.nan])
    with np.errstate(over="ignore"):
        y = y.astype(other.numpy)
    top = np.iinfo(name).max
    want = [0 if not v > 0 else top if v >= float(top) else int(v) for v in y.astype(np.float64)]
    exactly(lambda y: y.to(name), (y,), np.array(want, name))


def test_beside_other_types():
    assert (ts.Tensor([1], ts.uint16) + ts.Tensor([1], ts.int8)).dtype == ts.int32
    assert (ts.Tensor([1], ts.uint32) + ts.Tensor([1], ts.uint8)).dtype == ts.uint32
    with pytest.raises(DTypeError, match="no integer type holds the values of both"):
        ts.Tensor([1], ts.uint64) + ts.Tensor([1], ts.int8)
    with pytest.raises(DTypeError, match="-1 does not fit uint32"):
        ts.Tensor([1], ts.uint32) + -1

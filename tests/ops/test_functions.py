"""The wider math library against NumPy, at every level and in kernels, and each composite against its lowering."""

import math

import numpy as np
import pytest
from scipy import special

import tessera as ts
from tessera import tile
from tessera.interp import graph
from tessera.ir.rewrite import expand_composites
from tessera.ir.rules import Op, lower
from tessera.ops.tensor import scalar_functions
from tessera.runtime.program import prepare

OPS = [
    o for o in vars(scalar_functions).values() if isinstance(o, Op) and o.ref.__module__ == scalar_functions.__name__
]
COMPOSITES = [o for o in OPS if o in lower]
NUMPY = {"acos": "arccos", "asin": "arcsin", "atan": "arctan", "atan2": "arctan2"}
EDGES = np.array([0, -0.0, 1, -1, 0.5, -0.3, 3, -7, 40, -90, np.inf, -np.inf, np.nan], "f8")


def name(op):
    return op.__name__


def operands(op, values):
    return [np.roll(values, 4 * i) for i in range(len(op.operands))]


@pytest.mark.parametrize("op", COMPOSITES, ids=name)
def test_a_composite_is_what_its_lowering_says(op):
    args = operands(op, EDGES)
    if op is scalar_functions.tan:  # its pole
        args = [np.clip(args[0], -90, 90)]
    calls = {1: lambda x: op(x), 2: lambda x, y: op(x, y), 3: lambda x, y, z: op(x, y, z)}
    traced = ts.Jit(calls[len(args)]).trace(*args).function
    (whole,), (parts,) = graph.run(traced, args), graph.run(expand_composites(traced), args)
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("op", [o for o in OPS if o not in (scalar_functions.fma, scalar_functions.clip)], ids=name)
def test_numpy_agrees(op):
    theirs = special.expit if op is ts.sigmoid else getattr(np, NUMPY.get(name(op), name(op)))
    args = operands(op, np.linspace(-0.95, 0.95, 37, dtype="f4"))
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(op(*args).numpy(), theirs(*args), rtol=1e-6)


def test_small_arguments_keep_their_digits():
    assert ts.expm1(1e-7).item() == pytest.approx(1.00000005e-7, rel=1e-6)
    assert ts.log1p(1e-7).item() == pytest.approx(9.9999995e-8, rel=1e-6)


def test_the_largest_arguments_do_not_overflow():
    x = np.array([89.0], "f4")
    np.testing.assert_allclose(ts.jit(lambda v: ts.sinh(v) / ts.cosh(v))(x).numpy(), 1.0, rtol=1e-6)


@ts.kernel
def angles(x, y, out, B: ts.constexpr):
    a, b = tile.load(x[0:B]), tile.load(y[0:B])
    turned = tile.atan2(a, b) + tile.clip(tile.expm1(a), -0.5, 0.5) + math.tan(b)
    out[0:B] = tile.where(tile.isfinite(turned), turned, 0.0) + tile.sign(a) * tile.trunc(b * 3.0)


@pytest.mark.parametrize("engine", [("tile", "interp"), ("target", "llvm"), ("device", "llvm")], ids=str)
def test_in_a_kernel(engine, rng):
    x, y = (rng.uniform(-1, 1, 19).astype("f4") for _ in range(2))
    program = prepare(angles, {"x": x, "y": y, "out": np.zeros(19, "f4"), "B": 19}, grid=(1,))
    want = np.arctan2(x, y) + np.clip(np.expm1(x), -0.5, 0.5) + np.tan(y) + np.sign(x) * np.trunc(y * 3)
    np.testing.assert_allclose(program.run(*engine)[-1], want, rtol=2e-5, atol=1e-6)


SLOPES = {
    "expm1": np.exp, "log1p": lambda x: 1 / (1 + x), "atan": lambda x: 1 / (1 + x * x),
    "tan": lambda x: 1 / np.cos(x) ** 2, "sinh": np.cosh, "cosh": np.sinh, "asin": lambda x: 1 / np.sqrt(1 - x * x),
    "log10": lambda x: 1 / x / np.log(10),
}  # fmt: skip


@pytest.mark.parametrize("which", SLOPES)
def test_slopes(which):
    x = np.array([0.2, 0.5, 0.9])
    found = ts.grad(lambda v: ts.sum(getattr(ts, which)(v)))(x).numpy()
    np.testing.assert_allclose(found, SLOPES[which](x), rtol=1e-12)


def test_signs_of_zeros():
    """As C and the array API standard have them, at every level."""
    ends = np.array([0.0, -0.0, 1.0, -1.0], np.float32)
    y, x = (a.ravel() for a in np.meshgrid(ends, ends))
    program = prepare(ts.jit(lambda y, x: (ts.atan2(y, x), ts.sign(y))), (y, x), "llvm")
    for level in ("graph", "schedule", "device"):
        angle, sign = program.run(level, "llvm")
        np.testing.assert_allclose(angle, np.arctan2(y, x), rtol=1e-6)
        assert (np.signbit(angle) == np.signbit(np.arctan2(y, x))).all() and not np.signbit(sign[sign == 0]).any()
    assert math.isnan(ts.sign(math.nan).item())

"""Scalar functions and activations beside the basic ones: against NumPy, their lowerings and the compiled target."""

import numpy as np
import pytest

import tessera as ts
from tessera.interp import graph
from tessera.ir.rewrite import expand_composites
from tessera.ir.rules import lower
from tessera.ops.tensor import nn, scalar_functions

# Those of the family that have no tests of their own elsewhere (tests/ops/test_functions.py).
OPS = [
    *(
        getattr(scalar_functions, n)
        for n in "square reciprocal signbit copysign hypot logaddexp asinh acosh atanh".split()
    ),
    nn.elu,
    nn.leaky_relu,
    nn.mish,
    nn.softplus,
]
NUMPY = {"asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh"}
EDGES = np.array([0, -0.0, 1, -1, 0.5, -0.3, 3, -7, 1e-9, -1e-9, 1e9, np.inf, -np.inf, np.nan], "f8")
ALIKE = ("square", "reciprocal", "hypot", "logaddexp", "asinh", "acosh", "atanh")


def name(op):
    return op.__name__


def called(op):
    calls = {1: lambda x: op(x), 2: lambda x, y: op(x, y)}
    return calls[len(op.operands)]


def operands(op, values):
    return [np.roll(values, 5 * i) for i in range(len(op.operands))]


@pytest.mark.parametrize("op", OPS, ids=name)
def test_a_composite_is_what_its_lowering_says(op):
    assert op in lower
    args = operands(op, EDGES)
    traced = ts.Jit(called(op)).trace(*args).function
    (whole,), (parts,) = graph.run(traced, args), graph.run(expand_composites(traced), args)
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("op", OPS, ids=name)
def test_compiled(op):
    args = operands(op, EDGES.astype(np.float32))
    eager = op(*args).numpy()
    compiled = ts.jit(called(op), target="llvm")(*args).numpy()
    np.testing.assert_allclose(compiled, eager, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("name", ALIKE)
def test_numpy_agrees(name):
    op = getattr(ts, name)
    args = operands(op, EDGES)
    with np.errstate(all="ignore"):
        want = getattr(np, NUMPY.get(name, name))(*args)
    np.testing.assert_allclose(op(*args).numpy(), want, rtol=1e-12)


def test_signs():
    assert ts.signbit([-0.0, 0.0, -1.0, float("nan")]).tolist() == [True, False, True, False]
    assert np.signbit(ts.copysign([0.0, 1.0], -1.0).numpy()).all()
    assert (+ts.Tensor([1.0])).tolist() == [1.0] and [x.tolist() for x in divmod(ts.Tensor([7]), 2)] == [[3], [1]]


def test_what_replaces_nan():
    x = np.array([np.nan, np.inf, -np.inf, 2.0], np.float32)
    np.testing.assert_array_equal(ts.nan_to_num(x).numpy(), np.nan_to_num(x))
    assert ts.nan_to_num([1, 2]).tolist() == [1, 2]
    assert ts.nan_to_num(ts.Tensor([np.inf], "fp8_e5m2")).item() == 57344.0


@pytest.mark.parametrize("op", [o for o in OPS if o.__name__ not in ("signbit", "copysign")], ids=name)
def test_derivatives(op):
    """Against central differences, also where a branch that is not taken would overflow."""
    points = np.array([1.7, 2.3, 0.6, 1e30], "f8") if name(op) != "atanh" else np.array([0.3, -0.6, 0.9], "f8")
    points = points + (1.0 if name(op) == "acosh" else 0.0)
    args = operands(op, points)[: len(op.operands)]
    found = ts.grad(lambda x, *rest: ts.sum(op(x, *rest)))(*map(ts.Tensor, args)).numpy()
    step = 1e-6 * np.maximum(np.abs(points), 1)
    with np.errstate(all="ignore"):
        high, low = (op.ref(points + s, *args[1:], **op.complete({})) for s in (step, -step))
    np.testing.assert_allclose(found, (high - low) / (2 * step), rtol=1e-5, atol=1e-9)

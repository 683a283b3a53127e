"""scatter of many updates by "set", "min", "max" and "multiply": the interpreter's bits, linear work, derivatives."""

import ml_dtypes
import numpy as np
import pytest
import torch

import tessera as ts
from tessera.runtime import driver

CASES = {
    "numbers": ((40,), 0, (90,)),
    "rows": ((30, 20), 0, (25,)),
    "two axes of indices": ((3, 50, 4), 1, (6, 7)),
    "columns": ((5, 64), -1, (33,)),
    "few updates": ((300, 3), 0, (5,)),
}
TYPES = ["f4", "f8", "f2", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "i4", "i8", "i1", "u1", "u4", "u8", "?"]
# Each shape with one type; each type with one shape, as a maximum and as a product.
DRAWS = [(name, "f4", mode) for name in CASES for mode in ("set", "max", "min", "multiply")]
DRAWS += [("two axes of indices", dtype, mode) for dtype in TYPES[1:] for mode in ("max", "multiply")]


def draw(shape, dtype, mode, rng):
    """Elements with many ties; of floats NaN, infinities and both zeros, but for products powers of two."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        return rng.integers(0 if dtype.kind == "u" else -4, 9, shape).astype(dtype)
    few = [1.0, -1.0, 2.0, 0.5] if mode == "multiply" else [-2.0, -0.0, 0.0, 1.0, 3.0, 3.0, np.nan, 448.0, np.inf]
    return rng.choice(few[: len(few) - (dtype == ml_dtypes.float8_e4m3fn)], shape).astype(dtype)


@pytest.mark.parametrize(("name", "dtype", "mode"), DRAWS)
@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_targets_give_the_bits_of_the_interpreter(name, dtype, mode, target, rng):
    (shape, axis, places), at = CASES[name], CASES[name][1] % len(CASES[name][0])
    x = draw(shape, dtype, mode, rng)
    updates = draw((*shape[:at], *places, *shape[at + 1 :]), dtype, mode, rng)
    indices = rng.integers(-shape[at], shape[at], places)
    function = ts.jit(lambda x, i, u: ts.scatter(x, i, u, axis=axis, mode=mode)).trace(x, indices, updates).function
    want = np.asarray(ts.scatter(x, indices, updates, axis=axis, mode=mode))
    levels = driver.lower(function, target)
    assert any(n.op.name == "host.launch" and n.attrs["kernel"] for n in levels["schedule"].main.body.nodes)
    for level in ("tile", "target"):
        (found,) = driver.run_level(levels, level, [x, indices, updates], target)
        same = (found == want) | ((found != found) & (want != want))
        assert (
            same.all() and (np.signbit(found) == np.signbit(want))[want == want].all()
            if x.dtype != bool
            else same.all()
        )


@pytest.mark.parametrize("target", ["interp", "llvm"])
@pytest.mark.parametrize("mode", ["set", "max", "min", "multiply"])
def test_gradients_are_those_of_torch(mode, target, rng):
    x, weights = rng.integers(0, 4, 60).astype("f4"), rng.normal(size=60).astype("f4")
    updates = rng.integers(0, 4, 200).astype("f4")  # many ties
    indices = rng.permutation(200)[:200] % 60 if mode != "set" else rng.permutation(60)
    updates = updates[: len(indices)]

    def loss(x, u):
        return ts.sum(ts.scatter(x, indices, u, mode=mode) * weights)

    found = ts.jit(lambda x, u: ts.grad(loss, argnums=(0, 1))(x, u), target=target)(x, updates)
    a, b = (torch.tensor(v, requires_grad=True) for v in (x, updates))
    way = {"max": "amax", "min": "amin", "multiply": "prod"}.get(mode)
    where = torch.tensor(indices)
    out = a.scatter_reduce(0, where, b, way) if way else a.index_copy(0, where, b)
    (out * torch.tensor(weights)).sum().backward()
    for ours, theirs in zip(found, (a.grad, b.grad), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_an_index_outside_is_an_error(target):
    program = ts.jit(lambda x, i, u: ts.scatter(x, i, u, mode="max"), target=target)
    with pytest.raises(ts.errors.OutOfBoundsError, match="40"):
        program(np.zeros((40, 3), "f4"), np.full(50, 40), np.ones((50, 3), "f4")).numpy()

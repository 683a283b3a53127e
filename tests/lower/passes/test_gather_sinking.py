"""Few elements that are picked of a computed tensor are computed from those elements of what it is made of."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx.generator import PLAN
from tessera.errors import OutOfBoundsError
from tessera.ir.core import Module
from tessera.lower.pipeline import lower as make_modules
from tessera.runtime import driver

TOLERANCE = {"f8": 1e-12, "f4": 1e-5, "f2": 4e-3, ml_dtypes.bfloat16: 3e-2}


def pick(y, places, axis=1):
    return ts.take_along_axis(y, ts.expand_dims(places, axis), axis=axis)


def lower(function, arrays, target="ptx"):
    """The lowered program, and the largest number of elements of a memory that a launch writes."""
    lowered = driver.lower(ts.jit(function).trace(*arrays).function, target)
    launches = [n for n in lowered["tile"].main.body.nodes if n.op.name == "host.launch"]
    return lowered, max(int(np.prod(n.args[-1].type.shape)) for n in launches)


def is_sunk(function, *arrays):
    """Whether the pass changes a function of these arrays."""
    passes = make_modules(Module("graph", (ts.jit(function).trace(*arrays).function,)), PLAN)
    before = next(module for name, module in passes if name == "dead code")
    return next(module for name, module in passes if name == "sink gathers") != before


def draw(*shape, dtype="f4"):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


SUNK = {
    "log_softmax": (lambda x, t: pick(ts.log_softmax(x, axis=1), t), (13, 40)),
    "softmax": (lambda x, t: pick(ts.softmax(x, axis=1), t), (13, 40)),
    "one op": (lambda x, t: pick(ts.exp(x), t), (13, 40)),
    "a number of each column": (lambda x, t: pick(x * ts.mean(x, axis=0), t), (13, 40)),
    "a number of all": (lambda x, t: pick(x - ts.max(x), t), (13, 40)),
    "a comparison": (lambda x, t: pick(ts.where(x > 0, x * 2, ts.zeros_like(x)), t), (13, 40)),
    "pictures": (lambda x, t: pick(ts.log_softmax(x, axis=1), t), (2, 33, 3, 5)),
    "the first axis": (lambda x, t: pick(ts.log_softmax(x, axis=0), t, 0), (40, 7)),
    "axes of one element": (lambda x, t: pick(ts.log_softmax(x, axis=1), t), (1, 40, 1)),
}


def draw_case(case, dtype="f4"):
    function, shape = SUNK[case]
    rest = shape[1:] if case == "the first axis" else (shape[0], *shape[2:])
    size = max(shape)
    return function, draw(*shape, dtype=dtype), np.random.default_rng(1).integers(-size, size, rest)


@pytest.mark.in_turn("level")
@pytest.mark.parametrize("level", ["tile", "target"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", SUNK)
def test_nothing_writes_the_whole_source(case, dtype, level):
    function, x, places = draw_case(case, dtype)
    want = np.asarray(function(ts.Tensor(x), ts.Tensor(places)).numpy()).astype("f8")
    lowered, written = lower(function, (x, places))
    assert written < x.size and is_sunk(function, x, places)
    (ours,) = driver.run_level(lowered, level, [x, places], "ptx")
    np.testing.assert_allclose(ours.astype("f8"), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", SUNK)
def test_on_a_processor(case):
    function, x, places = draw_case(case)
    np.testing.assert_allclose(ts.jit(function, target="llvm")(x, places), function(x, places).numpy(), 1e-5, 1e-6)


KEPT = {
    "a result too": lambda x, t: (lambda y: (pick(y, t), y))(ts.exp(x)),
    "picked twice": lambda x, t: (lambda y: pick(y, t) + pick(y, t + 1))(ts.exp(x)),
    "many picks": lambda x, t: ts.take_along_axis(ts.exp(x), ts.stack([t] * 9, axis=1), axis=1),
    "nothing is computed": pick,
    "whole rows": lambda x, t: ts.gather(ts.exp(x), t, axis=0),
    "a policy": lambda x, t: pick(ts.exp(ts.cast(x, ts.f16 @ ts.toward_zero)), t),
    "a sorted source": lambda x, t: pick(ts.cumsum(x, axis=1), t),
    "five tensors": lambda x, t: pick(sum((ts.max(x * n, axis=1, keepdims=True) for n in range(4)), start=x), t),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_stays_as_it_is(case):
    x, places = draw(13, 40), np.random.default_rng(1).integers(0, 13, 13)
    function = KEPT[case]
    assert not is_sunk(function, x, places)
    lowered, _ = lower(function, (x, places))
    want = function(ts.Tensor(x), ts.Tensor(places))
    for ours, each in zip(
        driver.run_level(lowered, "tile", [x, places], "ptx"), want if isinstance(want, tuple) else [want], strict=True
    ):
        np.testing.assert_allclose(ours, each.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", [ts.gelu, ts.relu, lambda y: y])
def test_a_product_keeps_what_its_kernel_does_to_its_result(activation):
    def loss(x, w, t):
        return pick(ts.log_softmax(activation(x @ w), axis=1), t)

    x, w, places = draw(16, 32), draw(32, 64), np.arange(16)
    lowered, written = lower(loss, (x, w, places))
    assert len(lowered["tile"].functions) == 3 and written == 16 * 64
    (ours,) = driver.run_level(lowered, "tile", [x, w, places], "ptx")
    np.testing.assert_allclose(ours, loss(*(ts.Tensor(v) for v in (x, w, places))).numpy(), rtol=1e-3, atol=1e-3)


def test_the_bounds_of_indices_stay():
    function, x, places = draw_case("log_softmax")
    lowered, _ = lower(function, (x, places))
    places[3] = 40
    for level in ("tile", "target"):
        with pytest.raises(OutOfBoundsError, match="40 is outside axis 1 of size 40"):
            driver.run_level(lowered, level, [x, places], "ptx")


def test_special_values():
    """A NaN or an infinity stays in its row, and the element that is picked says whether it is one."""
    x, places = draw(6, 40), np.array([0, 1, 2, 3, 4, 5])
    x[0, 7], x[1, 1], x[2, 30], x[3, 3], x[4] = np.nan, -np.inf, np.inf, np.inf, -np.inf
    function = SUNK["log_softmax"][0]
    with np.errstate(all="ignore"):
        want = function(ts.Tensor(x), ts.Tensor(places)).numpy()
    lowered, _ = lower(function, (x, places))
    for level in ("tile", "target"):
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(driver.run_level(lowered, level, [x, places], "ptx")[0], want, rtol=1e-5)

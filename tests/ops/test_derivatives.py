"""First and second derivatives against mpmath: at ordinary points, ties, zeros, edges of the domain and extremes."""

import ml_dtypes
import numpy as np
import pytest
from derivatives import KINKS, SMOOTH, UNCHECKED, differentiate, find_call, find_point
from mpmath import mp, mpf

import tessera as ts
from tessera.core.errors import DeviceUnavailable
from tessera.ir.rules import REGISTRY, jvp, lower
from tessera.ops.tensor import activations, elementwise, losses, metric_losses, nn, reduce, scalar_functions

MODULES = {m.__name__ for m in (activations, elementwise, losses, metric_losses, nn, reduce, scalar_functions)}
# The error of a derivative, in units of eps: some ten roundings, and those of the functions in its rule. Of 16 bits:
# the rounding of the result that it is computed from, and its own.
ULPS = {64: 32, 32: 32, 16: 3}
DTYPES = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def list_functions():
    """Every op with a derivative, and every public function in the modules of such ops."""
    ops = {o.__name__ for o in REGISTRY.values() if o.name.startswith("ts.") and (o in jvp or o in lower)}
    return ops | {n for n in dir(ts) if find_module(n) in MODULES}


def find_module(name):
    """The module of a public function; None of a bridge whose library is not installed."""
    try:
        return getattr(getattr(ts, name), "__module__", None)
    except DeviceUnavailable:
        return None


def test_every_function_is_checked():
    """A new function has a case in derivatives.py, or a reason."""
    checked = set(SMOOTH) | set(KINKS)
    assert list_functions() - checked - set(UNCHECKED) == set(), "give these a case in derivatives.py"
    assert not checked & set(UNCHECKED) and set(UNCHECKED) <= list_functions()


def test_a_function_without_a_case_is_reported(monkeypatch):
    monkeypatch.delitem(SMOOTH, "sinh")
    with pytest.raises(AssertionError, match="sinh"):
        test_every_function_is_checked()


def partials_of(name):
    """A function that returns every first and second partial derivative, one after the other."""
    call = find_call(name)

    def everything(*xs):
        places = tuple(range(len(xs)))
        gradient = ts.grad(lambda *xs: ts.sum(call(*xs)), argnums=places)
        found = [*gradient(*xs)]
        for i in places:
            found += ts.grad(lambda *xs, i=i: ts.sum(gradient(*xs)[i]), argnums=places)(*xs)
        return tuple(found)

    return everything


def places_of(count):
    return [(i,) for i in range(count)] + [(i, j) for i in range(count) for j in range(count)]


def close(found, exact, dtype, lost):
    """Whether a number is right: to ULPS units, or overflowed or flushed as the exact one would be."""
    limits = ml_dtypes.finfo(dtype)
    room = ULPS[limits.bits] * float(limits.eps) * (abs(exact) + lost) + 4 * float(limits.smallest_normal)
    if not np.isfinite(found):
        return not np.isnan(found) and abs(exact) + room >= float(limits.max) and mp.sign(exact) == np.sign(found)
    return abs(mpf(found) - exact) <= room


def check(name, dtype, run):
    case = SMOOTH[name]
    points = [p for p in (find_point(at, np.dtype(dtype)) for at in case.at) if p is not None]
    found = run(partials_of(name), [np.array(column, dtype) for column in zip(*points, strict=True)])
    wrong = []
    for where, column in zip(places_of(len(points[0])), found, strict=True):
        for point, value in zip(points, np.asarray(column).astype(np.float64), strict=True):
            exact = differentiate(name, point, where)
            if not close(value, exact, np.dtype(dtype), case.find_loss(point)):
                wrong.append(f"d{where} at {point}: {value}, expected {float(exact)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMOOTH)
def test_eager(name, dtype):
    check(name, DTYPES[dtype], lambda f, arrays: f(*map(ts.Tensor, arrays)))


@pytest.mark.parametrize("name", SMOOTH)
def test_compiled(name):
    check(name, np.float32, lambda f, arrays: ts.jit(f, target="llvm")(*arrays))


@pytest.mark.parametrize("name", SMOOTH)
def test_batched(name):
    check(name, np.float64, lambda f, arrays: ts.vmap(f)(*arrays))


@pytest.mark.parametrize("target", ("interp", "llvm"))
@pytest.mark.parametrize("name", KINKS)
def test_conventions_and_limits(name, target):
    call = find_call(name)
    points, wanted = zip(*KINKS[name], strict=True)
    columns = [np.array(column, np.float32) for column in zip(*points, strict=True)]
    slope = ts.grad(lambda *xs: ts.sum(call(*xs)), argnums=tuple(range(len(columns))))
    found = ts.jit(slope, target=target)(*columns)
    np.testing.assert_allclose(np.stack(found, axis=-1), np.array(wanted, np.float32), rtol=1e-6)


@pytest.mark.parametrize(("p", "wanted"), ((1.0, 1.0), (2.0, 0.0), (3.0, 0.0)))
def test_pools_of_zeros(p, wanted):
    slope = ts.grad(lambda x: ts.sum(ts.lp_pool1d(x, p, 2)))
    assert (slope(np.zeros((1, 1, 4), np.float32)).numpy() == wanted).all()


def test_the_places_of_a_sort_are_computed_as_they_are():
    """Integers have no tangent: the lowering of a sort, which compares all pairs, is no part of its derivative."""
    x = np.random.default_rng(0).normal(size=300).astype("f4")
    weights = np.arange(300, dtype="f4")
    function = ts.jit(lambda x: ts.grad(lambda x: ts.sum(ts.sort(x) * weights))(x))
    values = [v for n in function.trace(x).function.body.walk() for v in n.results]
    assert max(np.prod(v.type.shape) for v in values) == 300
    assert np.array_equal(function(x).numpy(), weights[np.argsort(np.argsort(x))])


def test_frames_of_a_sequence_loss_are_a_loop():
    sizes = []
    for frames in (5, 50):
        logs = np.log(np.full((frames, 2, 4), 0.25, "f4"))
        loss = ts.jit(lambda x: ts.grad(lambda x: ts.ctc_loss(x, [[1, 2], [3, 3]], [len(x)] * 2, [2, 2]))(x))
        sizes.append(sum(1 for _ in loss.trace(logs).function.body.walk()))
    assert sizes[0] == sizes[1]

"""Choosing elements, logic, arrangement, facts of element types, losses and draws: against NumPy and by example."""

import math

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, OutOfBoundsError, ShapeError, TraceError

G = np.random.default_rng(0)
A, I = G.normal(size=(3, 4)).astype(np.float32), G.integers(-2, 3, (3, 4))
CASES = {
    "take": (lambda x: ts.take(x, [2, -1, 0], 1), lambda x: np.take(x, [2, -1, 0], 1), A),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), lambda x: np.where(x > 0, np.float32(0), x), A),
    "index_add": (lambda x: x.index_add(1, ts.Tensor([1, 1]), x[:, :2], 2.0),
                  lambda x: x + np.stack([x[:, 0] * 0, 2 * (x[:, 0] + x[:, 1]), x[:, 0] * 0, x[:, 0] * 0], 1), A),
    "searchsorted": (lambda x: ts.searchsorted(ts.sort(x[0]), x), lambda x: np.searchsorted(np.sort(x[0]), x), I),
    "right": (lambda x: ts.searchsorted(ts.sort(x[0]), x, "right"),
              lambda x: np.searchsorted(np.sort(x[0]), x, "right"), I),
    "logical_and": (lambda x: ts.logical_and(x, x > 0), lambda x: np.logical_and(x, x > 0), I),
    "logical_or": (lambda x: ts.logical_or(x, x > 1), lambda x: np.logical_or(x, x > 1), I),
    "logical_xor": (lambda x: ts.logical_xor(x, x > 0), lambda x: np.logical_xor(x, x > 0), I),
    "logical_not": (lambda x: ts.logical_not(x), np.logical_not, I),
    "count_nonzero": (lambda x: x.count_nonzero(dim=1, keepdim=True), lambda x: (x != 0).sum(1, keepdims=True), I),
    "isclose": (lambda x: ts.isclose(x, x + 1e-6), lambda x: np.isclose(x, x + np.float32(1e-6)), A),
    "diff": (lambda x: ts.diff(x, 2, axis=0), lambda x: np.diff(x, 2, axis=0), A),
    "chunk": (lambda x: x.chunk(3, 1)[1], lambda x: x[:, 2:], A),
    "meshgrid": (lambda x: ts.meshgrid(x[0], x[1], x[2])[0], lambda x: np.meshgrid(*x)[0], A),
    "meshgrid ij": (lambda x: ts.meshgrid(x[0], x[1], indexing="ij")[1],
                    lambda x: np.meshgrid(x[0], x[1], indexing="ij")[1], A),
    "swapaxes": (lambda x: x.swapaxes(0, 1), np.transpose, A),
}  # fmt: skip


@pytest.mark.parametrize("target", [None, "interp", "llvm"])
@pytest.mark.parametrize("ours,numpy,x", CASES.values(), ids=CASES)
def test_numpy_agrees(ours, numpy, x, target):
    found = ours(ts.Tensor(x)) if target is None else ts.jit(ours, target=target)(x)
    np.testing.assert_allclose(found.numpy(), numpy(x), rtol=1e-6, atol=1e-6)
    assert found.numpy().dtype == numpy(x).dtype


def test_what_only_values_tell():
    assert [p.tolist() for p in ts.nonzero(I)] == [p.tolist() for p in np.nonzero(I)]
    values, which, counts = ts.unique(I)
    want = np.unique(I, return_inverse=True, return_counts=True)
    assert values.tolist() == want[0].tolist() and counts.tolist() == want[2].tolist()
    assert (values.numpy()[which.numpy()] == I).all()
    assert ts.unique(ts.Tensor([1.0, 1.0], ts.fp8_e4m3))[0].dtype is ts.fp8_e4m3
    for function in (ts.nonzero, ts.unique):
        with pytest.raises(TraceError):
            ts.jit(lambda x, f=function: f(x)[0])(A)


def test_closeness():
    inf, nan = math.inf, math.nan
    assert ts.isclose([inf, inf, -inf, nan], [inf, -inf, 1.0, nan]).tolist() == [True, False, False, False]
    assert bool(ts.allclose([nan], [nan], equal_nan=True)) and not bool(ts.array_equal([1, 2], [1, 2, 3]))


def test_facts_of_element_types():
    for name, info in (("f16", np.finfo(np.float16)), ("f32", np.finfo(np.float32)), ("f64", np.finfo(np.float64))):
        ours = ts.finfo(name)
        assert (ours.eps, ours.max, ours.smallest_normal, ours.smallest_subnormal) == (
            info.eps, info.max, info.smallest_normal, info.smallest_subnormal
        )  # fmt: skip
    assert (ts.iinfo(ts.uint8).max, ts.iinfo("int4").min) == (255, -8)
    assert ts.can_cast("bf16", "f32") and not ts.can_cast("bf16", "f16") and ts.can_cast("uint8", "int16")
    assert not ts.can_cast("int8", "fp8_e5m2") and ts.isdtype("uint8", "unsigned integer")
    assert ts.result_type(ts.Tensor([1]), "bf16") is ts.bf16
    with pytest.raises(DTypeError, match="cannot mix"):
        ts.result_type("f16", "bf16")
    with pytest.raises(DTypeError, match="needs a float"):
        ts.finfo("int8")


def test_losses():
    p, y = np.float32([0.1, 0.8, 1.0]), np.float32([0.0, 1.0, 1.0])
    want = -(y * np.log(p) + (1 - y) * np.maximum(np.log(np.maximum(1 - p, 1e-44)), -100))
    np.testing.assert_allclose(ts.binary_cross_entropy(p, y, reduction="none").numpy(), want, rtol=1e-6)
    logits = ts.binary_cross_entropy_with_logits(np.float32([-800, 0, 800]), y, reduction="none")
    np.testing.assert_allclose(logits.numpy(), [0, math.log(2), 0], rtol=1e-6)
    np.testing.assert_allclose(ts.huber_loss([0.0, 3.0], [0.5, 0.0], "none", delta=2.0).numpy(), [0.125, 4.0])
    assert ts.kl_div([math.log(0.5), 0.0], [0.5, 0.0], "sum").item() == 0.0
    assert ts.mse([1.0, 3.0], [0.0, 0.0]).item() == 5.0


def test_draws():
    flips = ts.bernoulli(0.25, (20000,), ts.Generator(3))
    assert abs(flips.numpy().mean() - 0.25) < 0.02 and flips.dtype is ts.bool
    assert sorted(ts.permutation(100, ts.Generator(1)).tolist()) == list(range(100))
    assert ts.permutation(100, ts.Generator(1)).tolist() != list(range(100))


def test_bad_calls():
    for call, error in (
        (lambda: ts.take(A, [4], 1), OutOfBoundsError),
        (lambda: ts.take(A, [0.5]), DTypeError),
        (lambda: ts.searchsorted(A, A[:1]), ShapeError),
        (lambda: ts.searchsorted(A[0], A, "middle"), ArgumentError),
        (lambda: ts.chunk(A, 0), ArgumentError),
        (lambda: ts.meshgrid(A, A), ShapeError),
        (lambda: ts.broadcast_arrays(A, A[:, :3]), ShapeError),
        (lambda: ts.bernoulli(2.0, (3,)), ArgumentError),
        (lambda: ts.permutation(-1), ArgumentError),
        (lambda: ts.asarray([1.0, 2.0], copy=False), ArgumentError),
        (lambda: ts.nonzero(1.0), ShapeError),
    ):
        with pytest.raises(error):
            call()


def test_bounds_axes_and_widths_may_be_left_out():
    x = ts.Tensor(A)
    assert ts.clip(x, min=0.0).tolist() == np.maximum(A, 0).tolist() == x.clamp(0.0).tolist()
    assert x.clip(max=0.5).tolist() == np.minimum(A, np.float32(0.5)).tolist() and ts.clip(x) is x
    assert ts.argmax(x).item() == A.argmax() and x.argmin().item() == A.argmin()
    assert ts.argmax(x, keepdims=True).shape == (1, 1) and ts.argmax(x, axis=1).tolist() == A.argmax(1).tolist()
    assert ts.squeeze(ts.ones((1, 2, 1))).shape == ts.squeeze(ts.ones((1, 2, 1)), (0, 2)).shape == (2,)
    assert ts.flatten(ts.Tensor(1.0)).shape == (1,)
    for width in (1, (1, 2), ((0, 2), (1, 0))):
        assert ts.pad(x, width, value=3.0).tolist() == np.pad(A, width, constant_values=3.0).tolist()
    for wrong in ((1, 2, 3), "a", ((1, 1),) * 3, -1, 1.5, [[1.0], [2.0, 3.0]]):
        with pytest.raises(ShapeError):
            ts.pad(x, wrong)


def test_sizes_and_classes_that_do_not_fit():
    x = ts.Tensor(A)
    for call in (
        lambda: ts.layer_norm(x, (3,)), lambda: ts.layer_norm(x, 3), lambda: ts.layer_norm(x, (1, 3, 4)),
        lambda: ts.batch_norm(x, ts.zeros(3), ts.ones(4)),
        lambda: ts.batch_norm(x, ts.zeros(4), ts.ones(4), ts.ones(1)),
    ):  # fmt: skip
        with pytest.raises(ShapeError):
            call()
    for call in (lambda: ts.cross_entropy(x, ts.Tensor([0, 1, 4])), lambda: ts.nll_loss(x, ts.Tensor([0, 1, -1]))):
        with pytest.raises(OutOfBoundsError, match="class .* is outside axis 1 of size 4"):
            call()
    assert ts.cross_entropy(x, ts.Tensor([0, -100, 3])).shape == ()

"""Convolutions, pools and losses against loops and formulas written out."""

import itertools
import math

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, ShapeError

G = np.random.default_rng(1)


def correlate(x, w, stride, padding, dilation, groups):
    """One output element at a time."""
    x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, w.shape[2:], strict=True)]
    size = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, stride, strict=True)]
    out = np.zeros((x.shape[0], w.shape[0], *size))
    per, each = x.shape[1] // groups, w.shape[0] // groups
    for b, o, i, j in itertools.product(*map(range, out.shape)):
        i0, j0, c0 = i * stride[0], j * stride[1], o // each * per
        cut = x[b, c0 : c0 + per, i0 : i0 + reach[0] : dilation[0], j0 : j0 + reach[1] : dilation[1]]
        out[b, o, i, j] = (cut * w[o]).sum()
    return out


@pytest.mark.parametrize("target", ("interp", "llvm"))
def test_wide_windows_are_gathered(target):
    x, w = G.normal(size=(2, 4, 24, 30)), G.normal(size=(6, 2, 12, 11))
    conv = ts.jit(lambda x, w: ts.conv2d(x, w, stride=(2, 3), padding=(0, 1), dilation=(1, 2), groups=2), target=target)
    np.testing.assert_allclose(conv(x, w), correlate(x, w, (2, 3), (0, 1), (1, 2), 2), rtol=1e-10, atol=1e-10)
    slopes = ts.grad(lambda x: ts.sum(ts.conv2d(x, w[:2, :1]) ** 2))(x[:1, :1])
    step = 1e-4 * G.normal(size=(1, 1, 24, 30))
    loss = lambda x: (correlate(x, w[:2, :1], (1, 1), (0, 0), (1, 1), 1) ** 2).sum()  # noqa: E731
    change = (loss(x[:1, :1] + step) - loss(x[:1, :1] - step)) / 2
    np.testing.assert_allclose((slopes.numpy() * step).sum(), change, rtol=1e-6)


@pytest.mark.parametrize("target", ("interp", "llvm"))
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"),
    (
        ((1, 1), (0, 0), (1, 1), 1),
        ((2, 1), (1, 2), (1, 1), 2),
        ((1, 2), (2, 0), (2, 1), 4),
        ((3, 3), (1, 1), (1, 2), 1),
    ),
)
def test_conv2d(stride, padding, dilation, groups, target):
    x, w = G.normal(size=(2, 4, 7, 6)), G.normal(size=(8, 4 // groups, 3, 2))
    bias = G.normal(size=8)
    run = ts.jit(lambda x, w, b: ts.conv2d(x, w, b, stride, padding, dilation, groups), target=target)
    want = correlate(x, w, stride, padding, dilation, groups) + bias[:, None, None]
    np.testing.assert_allclose(run(x, w, bias).numpy(), want, atol=1e-12)


def test_conv1d_is_conv2d_of_one_row():
    x, w = G.normal(size=(2, 3, 9)), G.normal(size=(4, 3, 3))
    want = correlate(x[:, :, None], w[:, :, None], (1, 2), (0, 1), (1, 1), 1)[:, :, 0]
    np.testing.assert_allclose(ts.conv1d(x, w, stride=2, padding=1).numpy(), want, atol=1e-12)


@pytest.mark.parametrize("target", ("interp", "llvm"))
def test_pools(target):
    x = G.normal(size=(1, 2, 7, 6))
    low = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    want = [[low[0, :, i : i + 3, j : j + 3].max((1, 2)) for j in range(0, 6, 2)] for i in range(0, 7, 2)]
    got = ts.jit(lambda x: ts.max_pool2d(x, 3, 2, 1), target=target)(x).numpy()[0]
    np.testing.assert_array_equal(np.moveaxis(got, 0, -1), want)
    mean = ts.jit(lambda x: ts.avg_pool2d(x, (7, 2)), target=target)(x).numpy()
    np.testing.assert_allclose(mean, x.reshape(1, 2, 7, 3, 2).mean((2, 4))[:, :, None], atol=1e-12)


def test_windows_refused():
    x = ts.zeros((1, 4, 5, 5))
    for call in (
        lambda: ts.conv2d(x, ts.zeros((2, 3, 3, 3))), lambda: ts.conv2d(x, ts.zeros((2, 4, 6, 6))),
        lambda: ts.max_pool2d(x[0], 2), lambda: ts.conv2d(x, ts.zeros((3, 2, 1, 1)), groups=2),
    ):  # fmt: skip
        with pytest.raises(ShapeError):
            call()
    for call in (lambda: ts.conv2d(x, ts.zeros((2, 4, 1, 1)), stride=0), lambda: ts.max_pool2d(x, 2, padding=2)):
        with pytest.raises(ArgumentError):
            call()


@pytest.mark.parametrize("smoothing", (0.0, 0.2))
@pytest.mark.parametrize("weighted", (False, True))
def test_cross_entropy(smoothing, weighted):
    """The definition, one row at a time; class -100 counts for nothing."""
    x, target = G.normal(size=(5, 4)), [0, 3, -100, 1, 1]
    w = np.array([1.0, 2.0, 0.5, 3.0]) if weighted else np.ones(4)
    losses, scale = [], 0.0
    for row, label in zip(x, target, strict=True):
        logs = row - math.log(math.fsum(math.exp(v) for v in row))
        losses.append(
            -(1 - smoothing) * w[label] * logs[label] - smoothing / 4 * (w * logs).sum() if label >= 0 else 0.0
        )
        scale += w[label] if label >= 0 else 0.0
    weight = w if weighted else None
    args = (ts.Tensor(x), ts.Tensor(target), weight)
    got = {r: ts.cross_entropy(*args, reduction=r, label_smoothing=smoothing).numpy() for r in ("none", "sum", "mean")}
    np.testing.assert_allclose(got["none"], losses, rtol=1e-12)
    np.testing.assert_allclose([got["sum"], got["mean"]], [sum(losses), sum(losses) / scale], rtol=1e-12)


def test_batch_norm_and_its_running_values():
    x = G.normal(size=(4, 3, 2, 2)) * 3 + 5
    out = ts.batch_norm(x, ts.zeros(3, ts.f64), ts.ones(3, ts.f64), eps=0.0).numpy()
    np.testing.assert_allclose((out.mean((0, 2, 3)), out.std((0, 2, 3))), ([0] * 3, [1] * 3), atol=1e-12)
    mean, var = ts.running_statistics(x, ts.zeros(3, ts.f64), ts.ones(3, ts.f64))
    np.testing.assert_allclose(mean.numpy(), 0.1 * x.mean((0, 2, 3)))
    np.testing.assert_allclose(var.numpy(), 0.9 + 0.1 * x.var((0, 2, 3), ddof=1))
    fixed = ts.batch_norm(x, mean, var, training=False, eps=0.0).numpy()
    np.testing.assert_allclose(fixed[:, 0], (x[:, 0] - mean.numpy()[0]) / np.sqrt(var.numpy()[0]))


@pytest.mark.parametrize("target", ("interp", "llvm"))
def test_batch_norm_returns_the_running_values(target):
    x, old = G.normal(size=(4, 3, 2)) * 3 + 5, (np.zeros(3), np.ones(3))
    step = ts.jit(lambda x, m, v: ts.batch_norm(x, m, v, momentum=0.3, return_statistics=True), target=target)
    y, mean, var = (t.numpy() for t in step(x, *old))
    np.testing.assert_allclose(y, ts.batch_norm(x).numpy(), rtol=1e-12)
    np.testing.assert_allclose(mean, 0.3 * x.mean((0, 2)))
    np.testing.assert_allclose(var, 0.7 + 0.3 * x.var((0, 2), ddof=1))
    known = ts.batch_norm(x, mean, var, training=False, return_statistics=True)
    assert known[1].tolist() == mean.tolist() and known[2].tolist() == var.tolist()
    for bad in ({"training": False}, {"return_statistics": True}):
        with pytest.raises(ArgumentError, match="running statistics"):
            ts.batch_norm(x, **bad)


def test_layer_norm_names_the_weight():
    with pytest.raises(ArgumentError, match=r"layer_norm\(x, weight=...\)"):
        ts.layer_norm(ts.ones((2, 4)), ts.ones(4))


@pytest.mark.parametrize("dtype", [ts.fp8_e4m3, ts.fp8_e5m2, ts.int8, ts.uint8, ts.int4])
def test_a_maximum_leaves_out_what_is_padded(dtype):
    """Even where a type has no infinity."""
    x = np.full((1, 1, 4), 2 if dtype == ts.uint8 else -3).astype(dtype.numpy)
    pooled = ts.max_pool1d(ts.Tensor(x), 3, stride=1, padding=1).numpy().astype(int)
    np.testing.assert_array_equal(pooled, x.astype(int))
    if dtype.is_float:
        bags = ts.embedding_bag(ts.Tensor(x[0].T), ts.tensor([0, 1, 2]), ts.tensor([0, 1]), mode="max")
        np.testing.assert_array_equal(bags.numpy().astype(int), [[-3], [-3]])


@pytest.mark.parametrize("target", ("interp", "llvm"))
@pytest.mark.parametrize("kernel", (5, 100, (9, 9)))
def test_the_index_of_a_maximum_is_that_of_the_last_nan_or_the_first_tie(kernel, target):
    """As in PyTorch, for windows compared one by one, as a whole, and along one axis after the other."""
    rank, shape = (1, (1, 2, 103)) if isinstance(kernel, int) else (2, (1, 2, 13, 12))
    x = np.round(G.normal(size=shape)).astype(np.float32)
    x[G.random(shape) < 0.02] = np.nan
    pool = getattr(ts, f"max_pool{rank}d")
    _, found = ts.jit(lambda x: pool(x, kernel, 2, return_indices=True), target=target)(x)
    plane, size = np.arange(math.prod(shape[2:])).reshape(shape[2:]), np.broadcast_to(kernel, rank)
    for place in np.ndindex(*found.shape):
        window = tuple(slice(2 * i, 2 * i + k) for i, k in zip(place[2:], size, strict=True))
        values, numbers = x[place[:2]][window].ravel(), plane[window].ravel()
        nans = np.flatnonzero(np.isnan(values))
        assert found.numpy()[place] == numbers[nans[-1] if nans.size else values.argmax()]


@pytest.mark.parametrize("size", [(24, 36), (29, 40)])
@pytest.mark.parametrize("target", ("interp", "llvm"))
def test_wide_windows_side_by_side_are_reshaped(target, size):
    """Patches: no element is gathered, nor its gradient scattered; what is left over at the ends is in none."""
    x, w = G.normal(size=(2, 3, *size)), G.normal(size=(5, 3, 12, 12))
    conv = ts.jit(lambda x, w: ts.conv2d(x, w, stride=12), target=target)
    np.testing.assert_allclose(conv(x, w), correlate(x, w, (12, 12), (0, 0), (1, 1), 1), rtol=1e-10, atol=1e-10)
    slope = ts.jit(lambda x, w: ts.grad(lambda x: ts.sum(ts.conv2d(x, w, stride=12)))(x))
    assert not {n.op.name for n in slope.trace(x, w).function.body.walk()} & {"ts.gather", "ts.scatter_add"}
    want = np.zeros_like(x)
    rows, columns = (n // 12 * 12 for n in size)
    want[:, :, :rows, :columns] = np.tile(w.sum(0), (1, rows // 12, columns // 12))
    np.testing.assert_allclose(slope(x, w), want, rtol=1e-10, atol=1e-10)

"""Every family of functions, compiled for llvm and called eagerly: types alike, values as close as types allow."""

import itertools

import numpy as np
import pytest

import tessera as ts
from tessera.ir.rules import REGISTRY
from tessera.ops.tensor.coercion import coerce_floating, coerce_pointwise, coerce_power, coerce_rounding

I = ts.Tensor([0, 2, 1])
FAMILIES = {
    "activations": lambda d: (ts.elu(d["m"] - 0.5), ts.leaky_relu(d["m"] - 0.5), ts.mish(d["m"]), ts.softplus(d["m"])),
    "arith": lambda d: (
        ts.square(d["m"]),
        ts.reciprocal(d["m"]),
        ts.hypot(d["m"], d["n"]),
        ts.logaddexp(d["m"], d["n"]),
        ts.copysign(d["m"], -d["n"]),
        ts.asinh(d["m"]),
        ts.acosh(d["m"] + 1.0),
        ts.atanh(d["m"]),
        ts.nan_to_num(d["m"]),
        ts.lerp(d["m"], d["n"], 0.3),
    ),
    "tri": lambda d: (
        ts.sin(d["m"]),
        ts.tan(d["m"]),
        ts.asin(d["m"]),
        ts.acos(d["m"]),
        ts.atan(d["m"]),
        ts.sinh(d["m"]),
        ts.cosh(d["m"]),
        ts.atan2(d["m"], d["n"]),
    ),
    "red": lambda d: (
        d["m"].sum(0),
        d["m"].mean(1),
        d["m"].var(),
        d["m"].std(0),
        d["m"].prod(1),
        d["m"].max(0),
        d["m"].min(1),
        ts.logsumexp(d["m"], axis=1),
        ts.norm(d["m"]),
        ts.norm(d["m"], 1),
        ts.compensated_sum(d["m"], axis=0),
        ts.argmax(d["m"], axis=0),
    ),
    "run": lambda d: (ts.cumsum(d["m"]), ts.cumprod(d["m"], axis=0), ts.diff(d["m"])),
    "move": lambda d: (
        ts.flip(d["m"]),
        ts.roll(d["m"], 1),
        ts.repeat(d["m"], 2),
        ts.tiled(d["m"], (2, 1)),
        ts.tril(d["m"]),
        ts.triu(d["m"], 1),
        ts.diag(d["v"]),
        ts.diagonal(d["m"]),
        ts.pad(d["m"], ((1, 0), (0, 2)), value=1.0),
        ts.stack([d["m"], d["n"]]),
        ts.split(d["m"], 2)[1],
        ts.unbind(d["m"])[1],
        *ts.meshgrid(d["v"], d["v"]),
        d["m"][::-1, 1:3],
        d["m"][[0, 2]],
        d["m"][[0, 2], [1, 1]],
    ),
    "pick": lambda d: (
        ts.gather(d["m"], I, axis=0),
        ts.take(d["m"], I, 1),
        ts.take_along_axis(d["m"], ts.argsort(d["m"]), -1),
        ts.index_add(d["m"], 0, I, d["n"][:3]),
        ts.scatter(d["m"], I, d["n"][:3]),
        ts.masked_fill(d["m"], d["m"] > 0.5, 0.0),
        ts.sort(d["m"]),
        *ts.topk(d["m"], 2),
        ts.searchsorted(ts.sort(d["v"]), d["m"]),
        ts.where(d["m"] > d["n"], d["m"], d["n"]),
    ),
    "prod": lambda d: (
        d["m"] @ d["n"],
        ts.gemm(d["m"], d["n"], d["n"], 2.0, 0.5),
        ts.einsum("ij,jk,kl->il", d["m"], d["n"], d["m"]),
        ts.tensordot(d["m"], d["n"], 1),
        ts.outer(d["v"], d["v"]),
        ts.kron(d["m"], d["v"]),
        ts.vecdot(d["m"], d["n"]),
        ts.cross(d["m"][:3], d["n"][:3], axis=0),
        ts.matrix_power(d["m"], 3),
        ts.trace(d["m"]),
        ts.dot(d["v"], d["v"]),
    ),
    "lapack": lambda d: (
        ts.cholesky(d["spd"]),
        ts.svd(d["m"])[1],
        ts.qr(d["m"])[1],
        ts.eigh(d["spd"])[0],
        ts.inv(d["spd"]),
        ts.det(d["spd"]),
        ts.solve(d["spd"], d["v"]),
    ),
    "nn": lambda d: (
        ts.relu(d["m"]),
        ts.gelu(d["m"]),
        ts.gelu(d["m"], approximate="tanh"),
        ts.silu(d["m"]),
        ts.sigmoid(d["m"]),
        ts.softmax(d["m"]),
        ts.log_softmax(d["m"], dim=0),
        ts.layer_norm(d["m"], (4,), d["v"], d["v"]),
        ts.rms_norm(d["m"], d["v"]),
        ts.batch_norm(d["m"], d["v"], d["v"]),
        ts.scaled_dot_product_attention(d["m"], d["n"], d["n"], causal=True),
        ts.conv1d(d["m"][None], d["n"][:, :, None]),
        ts.conv2d(d["m"][None, None], d["n"][None, None, :3, :3], padding=1),
        ts.max_pool2d(d["m"][None, None], 2),
        ts.avg_pool2d(d["m"][None, None], 2),
    ),
    "loss": lambda d: (
        ts.mse_loss(d["m"], d["n"]),
        ts.l1_loss(d["m"], d["n"]),
        ts.huber_loss(d["m"], d["n"]),
        ts.cross_entropy(d["m"], ts.Tensor([0, 1, 2, 3])),
        ts.binary_cross_entropy(d["m"], d["n"]),
        ts.binary_cross_entropy_with_logits(d["m"], d["n"]),
        ts.kl_div(ts.log(d["m"]), d["n"]),
        ts.cross_entropy(d["m"], d["n"]),
    ),
    "logic": lambda d: (
        ts.isclose(d["m"], d["n"]),
        ts.logical_xor(d["m"] > 0.5, d["n"] > 0.5),
        ts.any(d["m"] > 0.5, axis=0),
        ts.all(d["m"] > 0.1),
        ts.count_nonzero(d["m"] > 0.5),
        ts.isnan(d["m"]),
    ),
    "quant": lambda d: (
        ts.fake_quantize(d["m"]),
        *ts.quantize(d["m"]),
        ts.stable.layer_norm(d["m"]),
        ts.stable.softmax(d["m"]),
        ts.stable.scaled_dot_product_attention(d["m"], d["n"], d["n"]),
        ts.one_hot(I, 4),
    ),
}

CLOSE = {ts.f32: 2e-5, ts.bf16: 3e-2}


def operands(dtype):
    g = np.random.default_rng(0)
    m, n, v = (g.uniform(0.2, 0.9, s) for s in ((4, 4), (4, 4), (4,)))
    return {k: ts.Tensor(a, dtype) for k, a in {"m": m, "n": n, "v": v, "spd": m @ m.T + 4 * np.eye(4)}.items()}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_is_eager(family, dtype):
    given, function = operands(dtype), FAMILIES[family]
    compiled = ts.jit(lambda *args: function(dict(zip(given, args, strict=True))), target="llvm")(*given.values())
    for eager, out in zip(function(given), compiled, strict=True):
        assert out.type == eager.type
        a, b = (t.numpy().astype(np.float64) for t in (eager, out))
        np.testing.assert_allclose(b, a, rtol=CLOSE[dtype], atol=CLOSE[dtype])


INTEGER_OPS = "bitwise_and bitwise_or bitwise_xor bitwise_not shift_left shift_right integer_power".split()
# Zeros of both signs, numbers whose squares overflow or vanish, infinities and NaN.
SPECIAL = [0.0, -0.0, 1, -1, 0.5, -3, 1e-30, -1e-30, 100, -5000, 5e3, 1e30, -1e30, 3e38, np.inf, -np.inf, np.nan]
SCALAR = [
    o for o in REGISTRY.values()
    if o.name.startswith("ts.") and o.coerce in (coerce_floating, coerce_pointwise, coerce_power, coerce_rounding)
    and len(o.operands) <= 2 and o.__name__ not in INTEGER_OPS and "decompositions" not in o.ref.__module__
]  # fmt: skip


def check_kinds(out, want, names):
    """The same NaNs, infinities and signs of zeros; elsewhere the same numbers to three digits."""
    for a, b, name in zip(out, want, names, strict=True):
        a, b = (t.numpy().astype(np.float64) for t in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-37, err_msg=name)
        zero = b == 0
        assert (np.signbit(a)[zero] == np.signbit(b)[zero]).all(), f"{name}: {a} {b}"


@pytest.mark.parametrize("count", (1, 2))
@pytest.mark.parametrize("dtype", (np.float32, np.float64))
def test_special_values_of_functions(dtype, count):
    ops = [o for o in SCALAR if len(o.operands) == count]
    with np.errstate(over="ignore"):
        columns = [a.ravel().astype(dtype) for a in np.meshgrid(*[SPECIAL] * count)]

    def all_of_them(*xs):
        return tuple(o(*xs) for o in ops)

    eager = all_of_them(*map(ts.Tensor, columns))
    check_kinds(ts.jit(all_of_them, target="llvm")(*columns), eager, [o.name for o in ops])


ROWS = [np.array(row) for row in itertools.product([0.0, -0.0, 1.0, -1.0], repeat=3)]
REDUCTIONS = "sum mean max min prod cumsum cumprod var std norm softmax logsumexp compensated_sum".split()


@pytest.mark.parametrize("dtype", (np.float32, np.float64, np.float16))
def test_signs_of_zeros_in_rows(dtype):
    rows = np.stack(ROWS).astype(dtype)

    def all_of_them(x):
        return (
            *(getattr(ts, name)(x, axis=-1) for name in REDUCTIONS),
            x - (-0.0),
            ts.clip(x, -0.0, 0.0), ts.layer_norm(x), ts.relu(x), ts.max_pool2d(x[None, None], (2, 1)),
        )  # fmt: skip

    names = [*REDUCTIONS, "sub", "clip", "layer_norm", "relu", "max_pool2d"]
    check_kinds(ts.jit(all_of_them, target="llvm")(rows), all_of_them(ts.Tensor(rows)), names)


@pytest.mark.parametrize("target", ("interp", "llvm"))
@pytest.mark.parametrize("dtype", (np.int8, np.uint8, np.int32, np.int64))
def test_means_of_integers_do_not_wrap(dtype, target):
    rows = np.full((3, 300), np.iinfo(dtype).max, dtype)
    for axis in (None, 0, 1):
        found = ts.jit(lambda x, axis=axis: ts.mean(x, axis=axis), target=target)(rows)
        np.testing.assert_allclose(found, rows.mean(axis), rtol=1e-6)


def test_both_zeros_are_constants():
    assert not np.signbit(ts.full((), 0.0).numpy()) and np.signbit(ts.full((), -0.0).numpy())
    assert not np.signbit(ts.full((), 0.0).numpy())
    x = np.float32([0.0, -0.0])
    for target in ("interp", "llvm"):  # IEEE 754-2019, in either order
        high, low = ts.jit(lambda x, y: (ts.maximum(x, y), ts.minimum(x, y)), target=target)(x, x[::-1].copy())
        assert not np.signbit(high.numpy()).any() and np.signbit(low.numpy()).all()
        assert not np.signbit(ts.jit(lambda x: x.max(), target=target)(x).numpy())
        assert np.signbit(ts.jit(lambda x: x.min(), target=target)(x).numpy())


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize(("shape", "axis"), [((3, 1), 1), ((1, 3), 0), ((1,), 0), ((1, 1), (0, 1))])
def test_the_sum_of_one_negative_zero_is_zero(target, shape, axis):
    """As in NumPy and PyTorch: a sum starts at zero."""
    x = np.full(shape, -0.0, "f4")
    for f in (lambda x: ts.sum(x, axis=axis), lambda x: ts.mean(x, axis=axis)):
        for y in (ts.jit(f, target=target)(x), f(ts.tensor(x))):
            assert not np.signbit(y.numpy()).any()
    assert np.signbit(ts.jit(lambda x: ts.max(x, axis=axis), target=target)(x).numpy()).all()

"""Values and gradients of the ops against PyTorch's on the same inputs (tests/fixtures/torch_ops/make_fixture.py)."""

from pathlib import Path

import numpy as np
import pytest
from everywhere import close

import tessera as ts
from tessera.core.errors import ShapeError

DATA = np.load(Path(__file__).parents[1] / "fixtures" / "torch_ops" / "ops.npz")
NAMES = sorted(k.removesuffix("/out") for k in DATA.files if k.endswith("/out"))
OTHER = {
    "sum -1": lambda x: ts.sum(x, axis=-1),
    "sum all": ts.sum,
    "sum keepdim": lambda x: ts.sum(x, axis=(0, -1), keepdims=True),
    "sum empty": lambda x: ts.sum(x, axis=0),
    "prod empty": lambda x: ts.prod(x, axis=0),
    "all empty": lambda x: ts.all(x > 0, axis=0),
    "any empty": lambda x: ts.any(x > 0, axis=0),
    "mean empty": lambda x: ts.mean(x, axis=0),
    "logsumexp empty": lambda x: ts.logsumexp(x, axis=0),
    "mean": lambda x: ts.mean(x, axis=-2),
    "var": lambda x: ts.var(x, axis=-1),
    "var 1": lambda x: ts.var(x, axis=0, correction=1),
    "std": lambda x: ts.std(x, axis=-1),
    "prod": lambda x: ts.prod(x, axis=-1),
    "amax": lambda x: ts.max(x, axis=-1),
    "amin": lambda x: ts.min(x, axis=0),
    "amax ties": lambda x: ts.max(x, axis=-1),
    "amin ties": lambda x: ts.min(x, axis=-1),
    "amax nan": lambda x: ts.max(x, axis=0),
    "sum nan": lambda x: ts.sum(x, axis=0),
    "argmax": lambda x: ts.argmax(x, axis=-1),
    "argmin": lambda x: ts.argmin(x, axis=0),
    "logsumexp": lambda x: ts.logsumexp(x, axis=-1),
    "cumprod": lambda x: ts.cumprod(x, axis=0),
    "norm": lambda x: ts.norm(x, axis=-1),
    "softmax 0": lambda x: ts.softmax(x, axis=0),
    "leaky_relu": lambda x: ts.leaky_relu(x, slope=0.1),
    "layer_norm": lambda x, w, b: ts.layer_norm(x, (4,), w, b[0].expand((4,))),
    "rms_norm": lambda x, w: ts.rms_norm(x, w, eps=1e-6),
    "attention": ts.scaled_dot_product_attention,
    "attention causal": lambda q, k, v: ts.scaled_dot_product_attention(q, k, v, causal=True),
    "matmul batch": lambda q, s: q[..., :3] @ s,
    "matvec": ts.matmul,
    "einsum": lambda q, k: ts.einsum("bqd,bkd->bqk", q, k),
    "kron": lambda a, b: ts.kron(a, b[None]),
    "conv2d": lambda x, w: ts.conv2d(x, w, stride=(2, 1), padding=1, dilation=(1, 2), groups=2),
    "conv1d": lambda x, w: ts.conv1d(x, w, stride=2, padding=1),
    "max_pool2d": lambda x: ts.max_pool2d(x, 2, stride=1),
    "avg_pool2d": lambda x: ts.avg_pool2d(x, 2),
    "bce_logits": lambda x, p: ts.binary_cross_entropy_with_logits(x, p / 3),
    "clip": lambda x: ts.clip(x, -0.5, 0.8),
    "where": lambda x, y: ts.where(x > y, x * y, y),
    "flip": lambda x: ts.flip(x, -1),
    "roll": lambda x: ts.roll(x, 1, -1),
    "triu": lambda x: ts.triu(x, 1),
    "topk": lambda x: ts.topk(x, 2)[0],
    "index": lambda x, i: x[:, i],
    "index_add": lambda x, i, u: ts.index_add(x, 1, i, u[:3, :4]),
    "repeat": lambda x: ts.repeat(x, 2, axis=1),
    "slogdet": lambda a: ts.slogdet(a)[1],
    "solve": lambda a, b: ts.solve(a[0], b[:3]),
    "qr": lambda a: (lambda q, r: q @ (r * r))(*ts.qr(a)),
    "svd values": lambda a: ts.svd(a)[1],
    "svd": lambda a: (lambda u, s, v: (u * ts.exp(s)) @ v)(*ts.svd(a)),
    "cholesky": lambda a: ts.cholesky((a + a.mT) / 2),
    "eigh": lambda a: (lambda w, v: (v * ts.log(w)[..., None, :]) @ v.mT)(*ts.eigh((a + a.mT) / 2)),
    "matrix_power": lambda a: ts.matrix_power(a, 3),
    "batch_norm": lambda x, w, b: ts.batch_norm(x, ts.zeros(4, ts.f64), ts.ones(4, ts.f64), w, b),
    "batch_norm known": lambda x, m: ts.batch_norm(x, m, m**2 + 0.5, training=False),
    "nll_loss": lambda x, y: ts.nll_loss(ts.log_softmax(x), y),
    "kl_div": lambda x, p: ts.kl_div(ts.log_softmax(x), p),
    "cross_entropy weighted": lambda x, y, w: ts.cross_entropy(x, y, w * w, label_smoothing=0.2, ignore_index=3),
    "cross_entropy shares": lambda x, p: ts.cross_entropy(x, p, reduction="sum"),
    "scatter": lambda x, i, u: ts.scatter(x, i, u.T[:2]),
    "scatter_add": lambda x, i, u: ts.scatter_add(x, i, u.T[:2]),
    "take_along_axis": lambda x, i: ts.take_along_axis(x, i, 1),
    "masked_fill": lambda x, y: ts.masked_fill(x, y > 0, 7.0) * y,
    "nan_to_num special": lambda x: ts.nan_to_num(x, 2.0, 3.0, -4.0),
    "tensordot": lambda a, b: ts.tensordot(a, b, ([0, 2], [0, 2])),
    "moveaxis": lambda x: ts.moveaxis(x, 0, 2),
    "stack": lambda x, y: ts.stack([x, y * y], 1),
    "concatenate": lambda x, y: ts.concatenate([x * x, y], 1),
    "split": lambda x: (lambda a, b: a * b)(*ts.split(x, 2, 1)),
    "pad": lambda x: ts.pad(x, ((0, 1), (1, 2)), 3.0),
    "tiled": lambda x: ts.tiled(x, (2, 3)),
    "swapaxes": lambda x: ts.swapaxes(x, -1, 0),
    "expand_dims": lambda x, s: ts.expand_dims(x, 1) * s[0, :, :4],
    "count_nonzero": lambda x: ts.count_nonzero(x, axis=1),
    "pinv": ts.linalg.pinv,
    "matrix_norm": ts.linalg.matrix_norm,
    "matrix_rank": ts.linalg.matrix_rank,
    "eigvalsh": lambda a: ts.linalg.eigvalsh((a + a.mT) / 2),
    "svdvals": ts.linalg.svdvals,
    "gelu tanh": lambda x: ts.gelu(x, approximate="tanh"),
    "permute": lambda x: ts.permute(x, (2, 0, 1)),
    "kahan": lambda x: ts.compensated_sum(x, axis=-1),
}
# Where the two say different things on purpose.
SIGN_OF_NAN = ("sign special",)  # itself; PyTorch says 0
NEEDS_ELEMENTS = ("mean empty", "logsumexp empty")  # an error; PyTorch gives NaN and -inf
AT_NAN = ("maximum special other", "minimum special other", "atan2 special other")  # no derivative to speak of
ON_THE_HOST = "cholesky inv det slogdet solve qr svd eigh pinv matrix_rank eigvalsh svdvals".split()


def function(name):
    return OTHER.get(name) or getattr(ts, name.split()[0])


def inputs(name):
    return [DATA[f"in/{n}"] for n in str(DATA[f"{name}/inputs"]).split()]


def cotangent(shape):
    return np.cos(np.arange(int(np.prod(shape)), dtype=np.float64)).reshape(shape)


def loss(name):
    return lambda *args: (function(name)(*args) * ts.Tensor(cotangent(DATA[f"{name}/out"].shape))).sum()


def wanted(name):
    found = {int(k[-1]): DATA[k] for k in DATA.files if k.startswith(f"{name}/grad")}
    return [i for i, a in enumerate(inputs(name)) if a.dtype.kind == "f" and i in found], found


@pytest.mark.parametrize("name", [n for n in NAMES if n not in NEEDS_ELEMENTS])
def test_value(name):
    want = DATA[f"{name}/out"]
    got = function(name)(*map(ts.Tensor, inputs(name))).numpy()
    assert got.shape == want.shape and got.dtype == want.dtype
    kept = ~np.isnan(inputs(name)[0]) if name in SIGN_OF_NAN else np.full(got.shape, True)
    np.testing.assert_allclose(got[kept], want[kept], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in NAMES if wanted(n)[0] and n not in NEEDS_ELEMENTS])
def test_gradient(name):
    places, want = wanted(name)
    got = ts.grad(loss(name), argnums=tuple(places))(*inputs(name))
    regular = np.all([np.isfinite(a) & (a != 0) for a in inputs(name)], axis=0) if name in AT_NAN else True
    for place, g in zip(places, got, strict=True):
        kept = (np.isfinite(want[place]) if "special" in name else np.full(g.shape, True)) & regular
        np.testing.assert_allclose(g.numpy()[kept], want[place][kept], rtol=1e-7, atol=1e-9)


def test_reducing_nothing():
    for reduce in (ts.max, ts.min, ts.argmax, ts.argmin, ts.mean, ts.logsumexp):
        with pytest.raises(ShapeError):
            reduce(ts.zeros((0, 3)), axis=0)


def _program(names):
    """All cases' values and gradients as one function of the inputs."""

    def program(given):
        found = {}
        for name in names:
            args = [given[n] for n in str(DATA[f"{name}/inputs"]).split()]
            found[name] = function(name)(*args)
            if wanted(name)[0]:
                found[f"{name}, gradient"] = ts.grad(loss(name), argnums=tuple(wanted(name)[0]))(*args)
        return found

    return program


REGULAR = [n for n in NAMES if "special" not in n and "empty" not in n and n.split()[0] not in ON_THE_HOST]


@pytest.mark.parametrize("part", range(4))
def test_llvm_agrees(part):
    """The same cases, lowered through every level, in one program for a quarter of them."""
    names = REGULAR[part::4]
    given = {k.removeprefix("in/"): DATA[k] for k in DATA.files if k.startswith("in/") and DATA[k].size}
    got, want = (ts.jit(_program(names), target=target)(given) for target in ("llvm", "interp"))
    for name in want:
        close(got[name], want[name], name)

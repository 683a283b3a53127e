"""Properties of every op with a derivative, over drawn shapes (sizes 0 and 1 too), broadcasts and memory layouts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.ir.rules import REGISTRY, jvp, lower
from tessera.ops.tensor import attention
from tessera.ops.tensor.basic import fusion_barrier
from tessera.transforms.autodiff import linearisation

STEP = 1e-6
# Where an op is smooth, if that is not the inner part of its domain. The others are smooth at the values drawn, which
# lie off every whole and half number.
SMOOTH = {
    **dict.fromkeys("reciprocal remainder atan2 hypot".split(), (0.4, 3.0)),
    "atanh": (-0.9, 0.9),
    "acosh": (1.2, 3.0),
}


def smooth_domain(op):
    low, high = op.domain
    inner = (max(low, 0.4), min(high, 3.0)) if low >= 0 else (max(0.9 * low, -2.0), min(0.9 * high, 2.0))
    return SMOOTH.get(op.__name__, inner)


AXIS = {"axis": -1}
# Ops that do not meet each element alone, as functions of one or two tensors of rank 2 with the same shape.
OTHERS = {
    **{n: lambda x, y, n=n: getattr(ts, n)(x, axis=-1) * ts.sum(y) for n in "sum mean std var prod logsumexp".split()},
    **{n: lambda x, y, n=n: getattr(ts, n)(x * y, axis=-1) for n in "max min".split()},
    **{
        n: lambda x, y, n=n: getattr(ts, n)(x, axis=-1) * y
        for n in "softmax log_softmax cumsum cumprod cummax cummin".split()
    },
    "normalize": lambda x, y: ts.layer_norm(x) * ts.rms_norm(y),
    "broadcast": lambda x, y: x[None] * ts.broadcast_to(y, (3, *y.shape)),
    "reshape": lambda x, y: ts.reshape(x, (-1 if x.size else 0,)) * ts.flatten(y),
    "permute": lambda x, y: x.T * y.permute(1, 0),
    "slice": lambda x, y: x[:, ::2] * y[:, ::-1][:, ::2],
    "pad": lambda x, y: ts.pad(x, ((1, 0), (0, 2))) * 2.0,
    "concatenate": lambda x, y: ts.concatenate([x, y * x], axis=1),
    "gather": lambda x, y: ts.gather(x * y, ts.Tensor(np.zeros(3, np.int64)), axis=1),
    "scatter_add": lambda x, y: ts.scatter_add(x, ts.Tensor(np.zeros(y.shape[1], np.int64)), y, axis=1),
    "scatter": lambda x, y: ts.scatter(x, ts.Tensor(np.zeros(1, np.int64)), y[:, :1] * 1.0, axis=1),
    "update_slice": lambda x, y: ts.update_slice(x * y, y[:, 1:] * 2.0, start=(0, 0)),
    "dot": lambda x, y: x @ y.T,
    "mesh_shift": lambda x, y: ts.mesh_shift(x * y, axis=1, shift=-1),
    "fma": lambda x, y: ts.fma(x, y, x),
    "scaled_dot_product_attention": lambda x, y: ts.scaled_dot_product_attention(x, y, x * y),
    "positional_attention": lambda x, y: attention.positional_attention(*(z[None, :, None] for z in (x, y, x * y)))[
        0, :, 0
    ],
    "compensated_sum": lambda x, y: ts.kahan_sum(lambda z: z.sum(axis=-1))(x * y),
    "where": lambda x, y: ts.where(x > y, x * x, y),
    "clip": lambda x, y: ts.clip(x, -0.5, 1.1) * y,
    "kept": lambda x, y: ts.checkpoint_here(x) * y,
    "recompute": lambda x, y: ts.checkpoint(lambda a: ts.sin(a) * y)(x),
    "fusion_barrier": lambda x, y: fusion_barrier(ts.sin(x)) * y,
}
COLLECTIVES = [o.__name__ for o in REGISTRY.values() if "collective" in o.effects]
NEEDS_ELEMENTS = "max min logsumexp softmax log_softmax mean std var normalize gather scatter_add scatter".split()
NEEDS_ELEMENTS += ["scaled_dot_product_attention", "positional_attention"]
# Ops whose derivative is tested elsewhere, or of which there is none to test.
ELSEWHERE = {
    **dict.fromkeys(("scan", "cond", "while_loop"), "tests/transforms/flow"),
    **dict.fromkeys("cholesky svd qr eigh slogdet solve".split(), "decompositions, below"),
    **dict.fromkeys(("eig", "eig_parts"), "refused"),
    "stop_gradient": "tests/transforms/autodiff/test_custom.py: it has none, on purpose",
    "cast": "below",
    "rough_cast": "a cast, which is below",
    **dict.fromkeys(("attention_with_sums", "attention_gradients"), "tests/stdlib/test_attention_gradients.py"),
    **dict.fromkeys("full iota dim_value".split(), "no operand"),
    "bitcast": "of bits",
    "integer_power": "of integers",
    "check_index": "of integers",
    "launch": "tests/transforms/flow/test_launch_derivatives.py",
    **dict.fromkeys((*COLLECTIVES, "local_part", "place_part"), "tests/dist/test_collectives.py"),
    **dict.fromkeys("argmax argmin argsort all any isnan isinf isfinite signbit".split(), "results are no floats"),
    **dict.fromkeys("less less_equal greater greater_equal equal not_equal".split(), "results are no floats"),
    **dict.fromkeys("bitwise_and bitwise_or bitwise_xor bitwise_not shift_left shift_right".split(), "no floats"),
}
DIFFERENTIABLE = {
    o.__name__: o
    for o in REGISTRY.values()
    if o.name.startswith("ts.") and (o in jvp or o in lower or o in linearisation.call_jvp_rules)
}
POINTWISE = sorted(
    n
    for n, o in DIFFERENTIABLE.items()
    if n not in ELSEWHERE and n not in OTHERS and len(o.operands) <= 2 and not o.attrs
)
sizes = st.integers(0, 3)


def test_every_op_is_tested():
    untested = set(DIFFERENTIABLE) - set(ELSEWHERE) - set(OTHERS) - set(POINTWISE) - set(WITH_ATTRIBUTES)
    assert not untested, f"give these a case, or a reason in ELSEWHERE: {sorted(untested)}"
    assert set(ELSEWHERE) <= {o.__name__ for o in REGISTRY.values()}


WITH_ATTRIBUTES = {
    "elu": {},
    "leaky_relu": {"slope": 0.2},
    "softplus": {"beta": 2.0},
    "gelu": {},
    "mish": {},
    "celu": {"alpha": 2.0},
    "hardtanh": {},
    "softshrink": {"lambd": 0.3},
    "hardshrink": {"lambd": 0.3},
}


@st.composite
def values(draw, shape, domain, offset=0.0):
    """An array of this shape whose elements lie in a domain, off whole and half numbers, in a drawn layout."""
    low, high = domain
    grid = draw(st.lists(st.integers(0, 40), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    array = (low + (high - low) * (np.array(grid, float).reshape(shape) + 0.31) / 41.7 + offset).astype(np.float64)
    layout = draw(st.sampled_from(["plain", "transposed", "strided"]))
    if layout == "transposed":
        return np.ascontiguousarray(array.T).T
    return np.repeat(array, 2, axis=-1)[..., ::2] if layout == "strided" and array.ndim else array


@st.composite
def pointwise_operands(draw, count, domain):
    """Operands that broadcast against each other."""
    shape = tuple(draw(st.lists(sizes, max_size=3)))
    found = []
    for place in range(count):
        own = tuple(1 if place and draw(st.booleans()) else n for n in shape)
        own = own[draw(st.integers(0, len(own))) :] if place else own
        found.append(draw(values(own, domain, 0.0137 * place)))
    return found


def check(function, arrays, seed=0):
    """Forward mode against central differences and reverse mode; jit and non-contiguous operands come with them."""
    rng = np.random.default_rng(seed)
    tangents = [rng.normal(size=a.shape) for a in arrays]
    out, moved = ts.jvp(function, tuple(arrays), tuple(tangents))
    ends = [
        function(*(ts.Tensor(a + s * t) for a, t in zip(arrays, tangents, strict=True))).numpy() for s in (STEP, -STEP)
    ]
    np.testing.assert_allclose(moved, (ends[0] - ends[1]) / (2 * STEP), rtol=2e-5, atol=2e-6)
    g = rng.normal(size=moved.shape)
    cotangents = ts.vjp(function, *arrays)[1](g)
    assert [c.shape for c in cotangents] == [a.shape for a in arrays]
    paired = sum((c.numpy() * t).sum() for c, t in zip(cotangents, tangents, strict=True))
    np.testing.assert_allclose((g * moved.numpy()).sum(), paired, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(ts.jit(function)(*arrays), function(*map(ts.Tensor, arrays)))
    return out


def check_vmap(function, arrays):
    """vmap against a loop, over the operands stacked with changed copies of themselves."""
    many = [np.stack([a, a * 0.9 + 0.01, a * 1.1 - 0.01]) for a in arrays]
    rows = [function(*(ts.Tensor(a[i]) for a in many)).numpy() for i in range(3)]
    np.testing.assert_allclose(ts.vmap(function)(*many), np.stack(rows), rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", [*POINTWISE, *WITH_ATTRIBUTES])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_pointwise(name, data):
    op = DIFFERENTIABLE[name]
    arrays = data.draw(pointwise_operands(len(op.operands), smooth_domain(op)))

    def function(*xs):
        return op(*xs, **WITH_ATTRIBUTES.get(name, {}))

    out = check(function, arrays)
    assert out.shape == np.broadcast_shapes(*(a.shape for a in arrays))
    check_vmap(function, arrays)


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_others(name, data):
    least = 1 if name in NEEDS_ELEMENTS else 0
    shape = data.draw(st.tuples(st.integers(least, 3), st.integers(max(least, 2 if name == "std" else 0), 4)))
    arrays = [data.draw(values(shape, (0.4, 2.0), 0.0137 * i)) for i in range(2)]
    if name in ("std", "max", "min", "cummax", "cummin", "normalize"):  # apart from each other, as their kinks ask for
        arrays[0] = arrays[0] * 0.1 + np.arange(arrays[0].size).reshape(shape) % 7
    check(OTHERS[name], arrays)
    check_vmap(OTHERS[name], arrays)


DECOMPOSED = {
    "cholesky": lambda a: ts.cholesky(a @ a.mT + 2.0 * ts.eye(3, dtype=ts.f64)),
    "solve": lambda a: ts.solve(a, a @ a + 1.0),
    "inv": ts.inv,
    "det": ts.det,
    "slogdet": lambda a: ts.slogdet(a)[1],
    "qr": lambda a: ts.qr(a)[0] * ts.qr(a)[1],
    "svd": lambda a: (ts.svd(a)[0] * ts.svd(a)[1][..., None, :]) @ ts.svd(a)[2] + ts.svd(a)[1][..., None],
    "eigh": lambda a: (lambda w, v: (v * ts.exp(w)[..., None, :]) @ v.mT)(*ts.eigh(a + a.mT)),
}


@pytest.mark.parametrize("name", DECOMPOSED)
@pytest.mark.parametrize("batch", [(), (2,), (0,)])
def test_decompositions(name, batch, rng):
    a = rng.normal(size=(*batch, 3, 3)) + np.diag([3.0, 5.0, 8.0])
    check(DECOMPOSED[name], [a])
    check_vmap(DECOMPOSED[name], [a])
    second = ts.jacfwd(lambda x: ts.grad(lambda y: (DECOMPOSED[name](y) ** 2).sum())(x))
    if not batch:
        moved = [
            ts.grad(lambda y: (DECOMPOSED[name](y) ** 2).sum())(a + s * np.ones_like(a)).numpy() for s in (1e-6, -1e-6)
        ]
        want = (moved[0] - moved[1]) / 2e-6
        np.testing.assert_allclose(second(a).numpy().sum((-1, -2)), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_casts():
    x = np.array([0.3, -1.2], np.float32)
    g = ts.grad(lambda x: (x.to(ts.f64) * np.pi).sum().to(ts.f32))(x)
    assert g.dtype == ts.f32 and np.allclose(g, np.pi)
    half = ts.grad(lambda x: (x.to(ts.bf16) * 3.0).sum().to(ts.f32))(x)
    assert half.tolist() == [3.0, 3.0]

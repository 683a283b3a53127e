"""Functions of JAX that cover the operations of StableHLO, each with arguments."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RNG = np.random.default_rng(7)
X, Y = RNG.standard_normal((2, 5, 6)).astype("f4")
SQUARE, POSITIVE = RNG.standard_normal((5, 5)).astype("f4"), np.abs(X) + np.float32(0.1)
IMAGE = RNG.standard_normal((2, 8, 9, 4)).astype("f4")
KERNEL = RNG.standard_normal((3, 3, 4, 6)).astype("f4")
INTS = RNG.integers(-40, 40, (5, 6)).astype("i4")
WORDS = RNG.integers(0, 2**32, (5, 6), dtype="u4")
VECTOR = RNG.standard_normal(11).astype("f4")
NAN = np.float32([3, np.nan, -0.0, 0.0, -np.inf, np.inf, -1])
KEY = np.uint32([0, 42])
RBG = np.uint32([1, 2, 3, 4])
CONV = ("NHWC", "HWIO", "NHWC")


def conv(**options):
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=CONV, **options)


def window(x, join, start, **options):
    return lax.reduce_window(x, start, join, **options)


def newton(x):
    """A loop whose number of steps depends on values."""
    return lax.while_loop(
        lambda s: jnp.abs(s[0] * s[0] - x) > 1e-4, lambda s: ((s[0] + x / s[0]) / 2, s[1] + 1), (x, 0)
    )


def attention(q, k, v):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)


def rnn(x, w):
    def step(h, a):
        h = jnp.tanh(a + h @ w)
        return h, h.sum()

    return lax.scan(step, jnp.zeros(5), x)


def map_rows(x):
    return lax.map(lambda row: lax.cond(row.sum() > 0, jnp.sin, jnp.cos, row), x)


def gather_windows(x, i):
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1))
    return lax.gather(x, i, numbers, (2, 3), mode="clip")


def scatter_windows(x, i, u):
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    return lax.scatter_add(x, i, u, numbers, mode="clip")


def scatter_partly_outside(x, i, u):
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    return lax.scatter_add(x, i, u, numbers, mode="drop")


def batched_gather(x, i):
    return jax.vmap(lambda a, b: a[b])(x, i)


def argument_of_pairs(x, y):
    def join(a, b):
        first = a[0] * a[0] + a[1] * a[1] >= b[0] * b[0] + b[1] * b[1]
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    return lax.reduce((x, y), (np.float32(0), np.float32(0)), join, (1,))


def normalise(x, scale, offset):
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale + offset


def gradient(f):
    return lambda *args: jax.grad(lambda *a: f(*a).sum(), argnums=tuple(range(len(args))))(*args)


PLACES = np.int32([[0, 1], [3, 4], [9, 9], [-2, 0]])
QKV = RNG.standard_normal((3, 2, 2, 4, 8)).astype("f4")
# name: the function, and its arguments
CASES = {
    "arithmetic": (lambda x, y: (x + y) * (x - y) / (jnp.abs(y) + 1) - (-x), X, Y),
    "transcendental": (lambda x: jnp.exp(-x) + jnp.log(x) + jnp.sqrt(x) + lax.rsqrt(x) + jnp.cbrt(x), POSITIVE),
    "trigonometric": (lambda x, y: jnp.sin(x) + jnp.cos(x) * jnp.tan(x) + jnp.arctan2(x, y) + jnp.tanh(y), X, Y),
    "hyperbolic": (lambda x: (jnp.sinh(x), jnp.cosh(x), jnp.arcsinh(x), jnp.arctanh(x / 9), jnp.arccosh(x * x + 2)), X),
    "special": (
        lambda x: (lax.erf(x), lax.erfc(x), lax.lgamma(x + 4), lax.digamma(x + 4), lax.erf_inv(jnp.tanh(x))),
        X,
    ),
    "bessel": (lambda x: (jax.scipy.special.i1e(x * 9), jax.scipy.special.i0e(x * 9)), X),
    "rounding": (
        lambda x: (jnp.floor(x), jnp.ceil(x), jnp.round(x), lax.round(x * 2), jnp.trunc(x), jnp.sign(x)),
        X * 3,
    ),
    "power": (lambda x, y: (x**y, jnp.power(x, 3), lax.integer_pow(y, -2)), POSITIVE, Y),
    "log1p_expm1": (lambda x: (jnp.log1p(x), jnp.expm1(-x), jax.nn.sigmoid(x), jnp.logaddexp(x, 2 * x)), POSITIVE),
    "comparison": (
        lambda x, y: (x < y, x >= y, x == y, jnp.where(x > 0, x, y), jnp.maximum(x, y), jnp.clip(x, -1, 1)),
        X,
        Y,
    ),
    "isfinite": (lambda x: (jnp.isfinite(x), jnp.isnan(x), jnp.nan_to_num(x), jnp.isinf(x), jnp.signbit(x)), NAN),
    "next_after": (lambda x, y: jnp.nextafter(x, y), X, Y),
    "integers": (lambda x: (x // 7, x % 7, lax.div(x, 7), lax.rem(x, 7), x**3, jnp.sign(x), jnp.abs(x)), INTS),
    "bits": (
        lambda x, w: (x & 12, x | 3, x ^ 5, ~x, x << 3, x >> 2, w >> 5, lax.population_count(w), lax.clz(w)),
        INTS,
        WORDS,
    ),
    "shifts_by_values": (lambda x, y: (x << y, x >> y, lax.shift_right_logical(x, y)), INTS, np.abs(INTS)),
    "conversions": (
        lambda x, i: (x.astype("i4"), x.astype("bool"), i.astype("f4"), i.astype("i1"), x.astype("bfloat16")),
        X,
        INTS,
    ),
    "bitcast": (lambda x: (lax.bitcast_convert_type(x, "i4"), lax.bitcast_convert_type(x, "u2")), X),
    "half_bitcast": (lambda x: lax.bitcast_convert_type(x.astype("float16"), "i2"), X),
    "reduce_precision": (lambda x: (lax.reduce_precision(x, 5, 2), lax.reduce_precision(x, 8, 7)), X * 100),
    "shapes": (lambda x: (x.T.reshape(2, 15), x[None, :, :, None], jnp.broadcast_to(x[:1], (4, 6)), x[::-1, 1:5:2]), X),
    "pad": (lambda x: lax.pad(x, np.float32(2), ((1, -1, 2), (-2, 3, 0))), X),
    "pad_traced": (lambda x, v: lax.pad(x, v, ((2, 0, 1), (0, 1, 0))), X, np.float32(np.inf)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y * 2, x[:, :2]], axis=1), X, Y),
    "iota": (lambda x: x + jnp.arange(6) + jnp.linspace(0, 1, 5)[:, None], X),
    "dynamic_slice": (
        lambda x, i: (lax.dynamic_slice(x, (i, i), (2, 3)), lax.dynamic_slice(x, (1, i), (2, 6))),
        X,
        np.int32(4),
    ),
    "dynamic_update": (
        lambda x, u, i: (lax.dynamic_update_slice(x, u[:2, :3], (i, 1)), x.at[i].set(u[0])),
        X,
        Y,
        np.int32(4),
    ),
    "take": (lambda x, i: (jnp.take(x, i, axis=1), x[i], x[i, 2]), X, np.int32([3, 0, -1])),
    "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, axis=1), X, np.int32(np.argsort(X))[:, :3]),
    "gather_windows": (gather_windows, X, PLACES),
    "batched_gather": (batched_gather, X, np.int32([[0, 2], [5, 1], [3, 3], [4, 0], [1, 1]])),
    "embedding_gradient": (gradient(lambda w: jnp.take(w, np.int32([1, 1, 4]), axis=0) ** 2), X),
    "scatter_set": (lambda x, u: x.at[np.int32([4, 1])].set(u[:2]), X, Y),
    "scatter_add_twice": (lambda x: x.at[np.int32([1, 1, 2]), np.int32([0, 0, 5])].add(10.0), X),
    "scatter_multiply": (lambda x: x.at[:, np.int32([0, 2, 2])].multiply(3.0), X),
    "scatter_minmax": (lambda x, u: (x.at[np.int32([0, 3])].min(u[:2]), x.at[np.int32([0, 3])].max(u[:2])), X, Y),
    "scatter_windows": (scatter_windows, X, PLACES, RNG.standard_normal((4, 2, 3)).astype("f4")),
    "scatter_partly_outside": (scatter_partly_outside, X, PLACES, RNG.standard_normal((4, 2, 3)).astype("f4")),
    "scatter_outside": (lambda x, i: x.at[i].add(1.0, mode="drop"), X, np.int32([0, 99, -99, 2])),
    "scatter_apply": (lambda x: x.at[np.int32([0, 3, 3])].apply(jnp.sin), X),
    "sum_prod": (lambda x: (x.sum(0), x.prod(1), x.mean(), x.var(1), x.sum()), X),
    "min_max": (lambda x, i: (x.max(0), x.min(1), i.max(), i.min(0), (x > 1).any(0), (x > -2).all(1)), X, INTS),
    "argmax": (lambda x, n: (x.argmax(0), x.argmin(1), n.argmax(), x.argmax()), X, NAN),
    "reduce_bits": (
        lambda i: (
            lax.reduce(i, np.int32(0), lax.bitwise_xor, (0,)),
            lax.reduce(i, np.int32(-1), lax.bitwise_and, (1,)),
        ),
        INTS,
    ),
    "reduce_pairs": (argument_of_pairs, X, Y),
    "logsumexp": (lambda x: (jax.nn.logsumexp(x, axis=1), jax.nn.log_softmax(x), jax.nn.softmax(x, axis=0)), X),
    "cumulative": (
        lambda x: (jnp.cumsum(x, 1), jnp.cumprod(x, 0), lax.cummax(x, axis=1), lax.cumlogsumexp(x, axis=1)),
        X,
    ),
    "long_cumsum": (lambda x: jnp.cumsum(jnp.tile(x, 9)), VECTOR),
    "max_pool": (
        lambda x: window(
            x, lax.max, -jnp.inf, window_dimensions=(1, 3, 3, 1), window_strides=(1, 2, 2, 1), padding="SAME"
        ),
        IMAGE,
    ),
    "dilated_window": (
        lambda x: window(
            x,
            lax.add,
            0.0,
            window_dimensions=(2, 3),
            window_strides=(1, 1),
            padding="VALID",
            window_dilation=(2, 1),
            base_dilation=(1, 2),
        ),
        X,
    ),
    "max_pool_gradient": (
        gradient(
            lambda x: (
                window(
                    x, lax.max, -jnp.inf, window_dimensions=(1, 2, 2, 1), window_strides=(1, 2, 2, 1), padding="SAME"
                )
                ** 2
            )
        ),
        IMAGE,
    ),
    "sort": (
        lambda x, n: (jnp.sort(x, axis=0), jnp.argsort(x, axis=1), jnp.sort(n), jnp.sort(x, descending=True)),
        X,
        NAN,
    ),
    "sort_pairs": (lambda i, x: lax.sort((i % 3, x, i), dimension=1, num_keys=2), INTS, X),
    "top_k": (lambda x: lax.top_k(x, 3), X),
    "searchsorted": (lambda x, v: jnp.searchsorted(jnp.sort(x), v), VECTOR, X[0]),
    "dot": (lambda x, y: (x @ y.T, jnp.dot(x[0], y[0]), jnp.einsum("ij,ij->i", x, y), jnp.outer(x[0], y[0])), X, Y),
    "dot_types": (
        lambda x, i: (jnp.dot(x.astype("bfloat16"), x.T.astype("bfloat16"), preferred_element_type="float32"), i @ i.T),
        X,
        INTS,
    ),
    "attention": (attention, *QKV),
    "attention_gradient": (gradient(attention), *QKV),
    "convolution": (conv(window_strides=(2, 1), padding="SAME"), IMAGE, KERNEL),
    "convolution_dilated": (
        conv(window_strides=(1, 1), padding=((3, -1), (0, 2)), lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
        IMAGE,
        KERNEL,
    ),
    "convolution_groups": (
        conv(window_strides=(1, 1), padding="VALID", feature_group_count=2),
        IMAGE,
        KERNEL[:, :, :2],
    ),
    "convolution_batch_groups": (conv(window_strides=(1, 1), padding="VALID", batch_group_count=2), IMAGE, KERNEL),
    "convolution_gradient": (gradient(conv(window_strides=(2, 2), padding="SAME")), IMAGE, KERNEL),
    "normalise": (normalise, IMAGE, IMAGE[0, 0, 0], IMAGE[0, 0, 1]),
    "while": (lambda v: newton(jnp.abs(v[0]) + 1), VECTOR),
    "fori": (lambda x, y: lax.fori_loop(0, 4, lambda i, s: jnp.tanh(s @ y) + i, x), SQUARE, SQUARE.T.copy()),
    "scan": (rnn, SQUARE, SQUARE.T.copy()),
    "scan_gradient": (gradient(lambda x, w: rnn(x, w)[1]), SQUARE, SQUARE.T.copy()),
    "associative_scan": (lambda x: lax.associative_scan(jnp.maximum, x, axis=1), X),
    "switch": (lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.exp], x), np.int32(1), X),
    "map_cond": (map_rows, X),
    "uniform": (lambda k: (jax.random.uniform(k, (7,)), jax.random.bits(k, (3, 4)), jax.random.split(k)), KEY),
    "normal": (lambda k: (jax.random.normal(k, (5,)), jax.random.normal(k, (4,), "bfloat16")), KEY),
    "discrete": (
        lambda k: (
            jax.random.randint(k, (9,), -5, 90),
            jax.random.bernoulli(k, 0.3, (9,)),
            jax.random.permutation(k, 8),
        ),
        KEY,
    ),
    "categorical": (lambda k, x: jax.random.categorical(k, x, axis=1), KEY, X),
    "rng_philox": (lambda k: lax.rng_bit_generator(k, (3, 5)), RBG),
    "rng_threefry": (lambda k: lax.rng_bit_generator(k, (3, 4), algorithm=lax.RandomAlgorithm.RNG_THREE_FRY), RBG),
    "checkpoint": (gradient(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))), X),
    "mlp_gradient": (gradient(lambda w, v, x: jax.nn.gelu(x @ w) @ v), SQUARE, SQUARE.T.copy(), SQUARE),
}

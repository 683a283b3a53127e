"""The functions whose derivatives are checked, as mpmath has them, with the points at which they are."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import mpmath
import numpy as np
from mpmath import mp, mpf

import tessera as ts
from tessera.ops.tensor.scalar_functions import clipped

MAX, MIN, TINY = "the largest number of the type", "the least number", "the smallest normal number"
LINE = (0.0, 0.25, -0.75, 1.0, -1.0, 3.0, -9.0, TINY)
SATURATING = (*LINE, 20.0, -20.0, -95.0, 200.0, -800.0, MAX, MIN)  # -95: exp(95) overflows in f32; 800: in f64
POSITIVE = (0.25, 1.0, 3.0, 100.0, TINY, MAX)
PLANE = ((1.0, 1.0), (3.0, 3.0), (-2.0, 2.0), (0.5, -3.0), (0.0, 2.0), (2.0, 0.0), (-0.5, -0.5), (100.0, 0.25))
ROWS = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (3.0, 3.0, -2.0), (0.5, -0.25, 2.0), (1.0, 0.0, 0.0))
APART = ((0.5, -0.25, 2.0), (1.0, 3.0, -9.0), (-1.0, -2.0, -3.0))
STEP = mpf(10) ** -60


@dataclass(frozen=True)
class Smooth:
    """A function as mpmath has it, its points, and its call in Tessera.

    `lost` is the absolute error, in units of the type's eps, of derivatives that are computed from a result that
    saturates, or as a difference; it may depend on the point.
    """

    exact: Callable
    at: Sequence = LINE
    call: Callable | None = None
    lost: float | Callable[..., float] = 0.0

    def find_loss(self, point):
        """The absolute error at a point."""
        return self.lost(*point) if callable(self.lost) else self.lost


def softplus(x):
    return mpmath.log1p(mp.exp(x)) if x < 0 else x + mpmath.log1p(mp.exp(-x))


def logistic(x):
    return 1 / (1 + mp.exp(-x))


def normal_distribution(x):
    return mpf(x > 0) if abs(x) > 1e6 else mp.erfc(-x / mp.sqrt(2)) / 2


def per_square(y, x):
    return 1 / np.hypot(y, x) ** 2 if max(abs(x), abs(y)) < 1e100 else 0.0


def across(function, *weights):
    """A function of numbers that applies a function of rows to them, and sums its results with these weights."""

    def call(*xs):
        out = function(ts.stack(xs, axis=-1), axis=-1)
        return ts.sum(out * ts.Tensor(np.array(weights), out.dtype), axis=-1) if weights else out

    return call


def variance(*xs):
    return sum((x - sum(xs) / len(xs)) ** 2 for x in xs) / len(xs)


def weigh_softmax(*xs):
    return sum(k * mp.exp(x - max(xs)) for k, x in enumerate(xs, 1)) / sum(mp.exp(x - max(xs)) for x in xs)


def log_sum(*xs):
    return max(xs) + mp.log(sum(mp.exp(x - max(xs)) for x in xs))


def gelu_by_tanh(x):
    return x / 2 * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (x + mpf("0.044715") * x**3)))


SMOOTH = {
    "add": Smooth(lambda x, y: x + y, PLANE),
    "sub": Smooth(lambda x, y: x - y, PLANE),
    "mul": Smooth(lambda x, y: x * y, PLANE),
    "div": Smooth(lambda x, y: x / y, [p for p in PLANE if p[1]]),
    "fma": Smooth(lambda x, y, z: x * y + z, [(*p, 2.0) for p in PLANE]),
    "pow": Smooth(lambda x, y: x**y, [(2.0, 3.0), (0.5, -1.5), (3.0, 0.0), (1.0, 1.0), (0.25, 0.5)]),
    "neg": Smooth(lambda x: -x),
    "abs": Smooth(abs, [x for x in LINE if x]),
    "exp": Smooth(mp.exp, (*LINE, 11.0, -80.0)),
    "exp2": Smooth(lambda x: mpf(2) ** x, (*LINE, 15.0, -100.0)),
    "expm1": Smooth(mpmath.expm1, (*LINE, 11.0), lost=1),
    "log": Smooth(mp.log, POSITIVE),
    "log2": Smooth(lambda x: mp.log(x, 2), POSITIVE),
    "log10": Smooth(mp.log10, POSITIVE),
    "log1p": Smooth(mpmath.log1p, (*LINE[:4], 3.0, -0.875, TINY, MAX)),
    "sqrt": Smooth(mp.sqrt, POSITIVE),
    "rsqrt": Smooth(lambda x: 1 / mp.sqrt(x), POSITIVE),
    "square": Smooth(lambda x: x * x),
    "reciprocal": Smooth(lambda x: 1 / x, (*POSITIVE, -3.0)),
    "sin": Smooth(mp.sin, (*LINE, 20.0)),
    "cos": Smooth(mp.cos, (*LINE, 20.0)),
    "tan": Smooth(mp.tan, (*LINE[:-2], 1.5, TINY)),
    "asin": Smooth(mp.asin, (0.0, TINY, 0.25, -0.75, 0.9375)),
    "acos": Smooth(mp.acos, (0.0, TINY, 0.25, -0.75, 0.9375)),
    "atan": Smooth(mp.atan, (*LINE, 300.0)),
    "atan2": Smooth(mp.atan2, (*PLANE[:-2], (100.0, 0.25), (1e-3, 1e-3), (MAX, 1.0)), lost=per_square),
    "sinh": Smooth(mp.sinh, (*LINE, 11.0)),
    "cosh": Smooth(mp.cosh, (*LINE, 11.0)),
    "tanh": Smooth(mp.tanh, SATURATING, lost=1),
    "asinh": Smooth(mp.asinh, (*LINE, 200.0, MAX)),
    "acosh": Smooth(mp.acosh, (1.125, 2.0, 9.0, 200.0, MAX)),
    "atanh": Smooth(mp.atanh, (0.0, TINY, 0.25, -0.75, 0.9375)),
    "erf": Smooth(mp.erf, SATURATING),
    "erfc": Smooth(lambda x: mpf(0) if x > 1e6 else mp.erfc(x), SATURATING),
    "hypot": Smooth(lambda x, y: mp.sqrt(x * x + y * y), (*PLANE, (1e-3, 1e-3)), lost=lambda x, y: 1 / np.hypot(x, y)),
    "logaddexp": Smooth(
        lambda x, y: x + softplus(y - x), (*PLANE, (0.0, 0.0), (200.0, -800.0), (-800.0, -800.0), (MAX, 0.0)), lost=1
    ),
    "sigmoid": Smooth(logistic, SATURATING, lost=1),
    "softplus": Smooth(softplus, SATURATING, lost=1),
    "silu": Smooth(lambda x: x * logistic(x), SATURATING, lost=4),
    "mish": Smooth(lambda x: x * mp.tanh(softplus(x)), SATURATING, lost=8),
    "gelu": Smooth(lambda x: x * normal_distribution(x), SATURATING, lost=4),
    "gelu by tanh": Smooth(gelu_by_tanh, SATURATING, lambda x: ts.gelu(x, approximate="tanh"), lost=16),
    "elu": Smooth(lambda x: x if x > 0 else mpmath.expm1(x), [x for x in SATURATING if x]),
    "leaky_relu": Smooth(lambda x: x if x > 0 else x / 4, LINE[1:], lambda x: ts.leaky_relu(x, 0.25)),
    "relu": Smooth(lambda x: max(x, mpf(0)), LINE[1:]),
    "logsigmoid": Smooth(lambda x: -softplus(-x), SATURATING, lost=1),
    "hardsigmoid": Smooth(lambda x: min(max(x + 3, 0), 6) / 6, [x for x in LINE if x != 3.0]),
    "hardswish": Smooth(lambda x: x * min(max(x + 3, 0), 6) / 6, [x for x in SATURATING if x != 3.0]),
    "hardtanh": Smooth(lambda x: min(max(x, -2), 2), SATURATING, lambda x: ts.hardtanh(x, -2.0, 2.0)),
    "celu": Smooth(
        lambda x: x if x > 0 else 4 * mpmath.expm1(x / 4), [x for x in SATURATING if x], lambda x: ts.celu(x, alpha=4.0)
    ),
    "selu": Smooth(
        lambda x: mpf("1.0507009873554805") * (x if x > 0 else mpf("1.6732632423543772") * mpmath.expm1(x)),
        [x for x in SATURATING if x],
    ),
    "softsign": Smooth(lambda x: x / (1 + abs(x)), [x for x in SATURATING if x]),
    "tanhshrink": Smooth(lambda x: x - mp.tanh(x), SATURATING, lost=1),
    "softshrink": Smooth(lambda x: mp.sign(x) * max(abs(x) - 0.5, 0), SATURATING),
    "hardshrink": Smooth(lambda x: x if abs(x) > 0.5 else 0 * x, SATURATING),
    "maximum": Smooth(max, [p for p in PLANE if p[0] != p[1]]),
    "minimum": Smooth(min, [p for p in PLANE if p[0] != p[1]]),
    "remainder": Smooth(lambda x, y: x - y * mp.floor(x / y), [(7.25, 2.0), (-7.25, 2.0), (0.5, -3.0)]),
    "fmod": Smooth(
        lambda x, y: x - y * mp.sign(x / y) * mp.floor(abs(x / y)), [(7.25, 2.0), (-7.25, 2.0), (0.5, -3.0)]
    ),
    "copysign": Smooth(lambda x, y: abs(x) * mp.sign(y), [(3.0, -2.0), (-3.0, -2.0), (0.5, 1.0)]),
    "where": Smooth(lambda x, y: x if x > y else y * y, PLANE[2:-2], lambda x, y: ts.where(x > y, x, y * y)),
    "clip": Smooth(
        lambda x, a, b: min(max(x, a), b), [(0.5, -1.0, 1.0), (-3.0, -1.0, 1.0), (9.0, -1.0, 1.0)], clipped
    ),
    "lerp": Smooth(lambda x, y, w: x + (y - x) * w, [(*p, 0.25) for p in PLANE]),
    "nan_to_num": Smooth(lambda x: x),
    "positive": Smooth(lambda x: x),
    **{name: Smooth(mp.floor, (0.25, -0.75, 3.5)) for name in ("floor", "trunc", "ceil", "round", "sign")},
    "floor_divide": Smooth(lambda x, y: mp.floor(x / y), [(7.25, 2.0), (-7.25, 2.0), (0.5, -3.0)]),
    "mse_loss": Smooth(lambda x, y: (x - y) ** 2, PLANE, lambda x, y: ts.mse_loss(x, y, "none")),
    "l1_loss": Smooth(
        lambda x, y: abs(x - y), [p for p in PLANE if p[0] != p[1]], lambda x, y: ts.l1_loss(x, y, "none")
    ),
    "huber_loss": Smooth(
        lambda x, y: (x - y) ** 2 / 2 if abs(x - y) < 1 else abs(x - y) - mpf(1) / 2,
        (*PLANE, (0.0, 0.0), (0.5, 0.25), (MAX, 0.0)),
        lambda x, y: ts.huber_loss(x, y, "none"),
    ),
    "smooth_l1_loss": Smooth(
        lambda x, y: (x - y) ** 2 if abs(x - y) < 0.5 else abs(x - y) - mpf(1) / 4,
        (*PLANE, (0.0, 0.0), (0.5, 0.25), (MAX, 0.0)),
        lambda x, y: ts.smooth_l1_loss(x, y, "none", beta=0.5),
    ),
    "binary_cross_entropy": Smooth(
        lambda x, y: -y * mp.log(x) - (1 - y) * mp.log(1 - x),
        [(0.5, 0.5), (0.25, 0.0), (0.75, 1.0), (0.125, 0.25)],
        lambda x, y: ts.binary_cross_entropy(x, y, reduction="none"),
    ),
    "binary_cross_entropy_with_logits": Smooth(
        lambda x, y: softplus(x) - x * y,
        [(0.0, 0.5), (0.0, 0.0), (3.0, 1.0), (-9.0, 1.0), (200.0, 1.0), (-800.0, 0.0)],
        lambda x, y: ts.binary_cross_entropy_with_logits(x, y, reduction="none"),
        lost=2,
    ),
    "sum": Smooth(lambda *xs: sum(xs), ROWS, across(ts.sum)),
    "compensated_sum": Smooth(lambda *xs: sum(xs), ROWS, across(ts.compensated_sum)),
    "mean": Smooth(lambda *xs: sum(xs) / 3, ROWS, across(ts.mean)),
    "max": Smooth(max, APART, across(ts.max)),
    "min": Smooth(min, APART, across(ts.min)),
    "prod": Smooth(lambda x, y, z: x * y * z, ROWS, across(ts.prod)),
    "cumsum": Smooth(lambda x, y, z: x + 2 * (x + y) + 3 * (x + y + z), ROWS, across(ts.cumsum, 1, 2, 3)),
    "cumprod": Smooth(lambda x, y, z: x + 2 * x * y + 3 * x * y * z, ROWS, across(ts.cumprod, 1, 2, 3)),
    "cummax": Smooth(lambda x, y, z: x + 2 * max(x, y) + 3 * max(x, y, z), APART, across(ts.cummax, 1, 2, 3)),
    "cummin": Smooth(lambda x, y, z: x + 2 * min(x, y) + 3 * min(x, y, z), APART, across(ts.cummin, 1, 2, 3)),
    "var": Smooth(variance, ROWS, across(ts.var)),
    "std": Smooth(lambda *xs: mp.sqrt(variance(*xs)), APART, across(ts.std), lost=1),
    "norm": Smooth(lambda *xs: mp.norm(xs), (*ROWS[1:], (1.0, 0.0, 0.0)), across(ts.norm), lost=1),
    "normalize": Smooth(
        lambda x, y, z: (x - y) / mp.sqrt(variance(x, y, z) + mpf(1) / 4), ROWS,
        across(lambda row, axis: ts.layer_norm(row, eps=0.25), 1, -1, 0), lost=8,
    ),
    "rms_norm": Smooth(
        lambda x, y, z: x / mp.sqrt((x * x + y * y + z * z) / 3 + mpf(1) / 4), ROWS,
        across(lambda row, axis: ts.rms_norm(row, eps=0.25), 1, 0, 0), lost=8,
    ),
    "softmax": Smooth(weigh_softmax, ROWS, across(ts.softmax, 1, 2, 3), lost=4),
    "log_softmax": Smooth(
        lambda x, y, z: 3 * x + z - 4 * log_sum(x, y, z), ROWS, across(ts.log_softmax, 3, 0, 1), lost=8
    ),
    "logsumexp": Smooth(log_sum, ROWS, across(ts.logsumexp), lost=1),
    "softmin": Smooth(lambda *xs: weigh_softmax(*(-x for x in xs)), ROWS, across(ts.softmin, 1, 2, 3), lost=4),
    "glu": Smooth(lambda x, y: x * logistic(y), (*PLANE, (3.0, -800.0), (-3.0, 200.0)), across(ts.glu, 1), lost=4),
    "prelu": Smooth(
        lambda x, w: x if x > 0 else x * w, [(0.5, 0.25), (-3.0, 0.25)],
        lambda x, w: ts.reshape(ts.prelu(ts.reshape(x, (1, -1)), ts.reshape(w, (-1,))), x.shape),
    ),
    "soft_margin_loss": Smooth(
        lambda x, y: softplus(-x * y), [(0.0, 1.0), (0.0, -1.0), (3.0, 1.0), (-800.0, -1.0), (200.0, -1.0)],
        lambda x, y: ts.soft_margin_loss(x, y, "none"), lost=2,
    ),
    "poisson_nll_loss": Smooth(
        lambda x, y: mp.exp(x) - x * y, PLANE[:-1], lambda x, y: ts.poisson_nll_loss(x, y, reduction="none")
    ),
    "gaussian_nll_loss": Smooth(
        lambda x, y, v: (mp.log(v) + (x - y) ** 2 / v) / 2, [(*p, v) for p in PLANE[:4] for v in (0.25, 2.0)],
        lambda x, y, v: ts.gaussian_nll_loss(x, y, v, reduction="none"), lost=1,
    ),
    "kl_div": Smooth(
        lambda x, y: y * (mp.log(y) - x), [(-1.0, 0.5), (-3.0, 1.0), (0.0, 0.25)], lambda x, y: ts.kl_div(x, y, "none")
    ),
}  # fmt: skip


INF = float("inf")
# Points with a convention (docs/autodiff.md), an infinite derivative or a limit: the first derivatives.
KINKS = {
    "abs": [((0.0,), (0.0,))],
    "maximum": [((1.0, 1.0), (0.5, 0.5))],
    "minimum": [((-0.0, 0.0), (0.5, 0.5))],
    "max": [((2.0, 2.0, 1.0), (0.5, 0.5, 0.0))],
    "min": [((2.0, 2.0, 2.0), (1 / 3, 1 / 3, 1 / 3))],
    "relu": [((0.0,), (0.0,)), ((-0.0,), (0.0,)), ((INF,), (1.0,)), ((-INF,), (0.0,))],
    "hardsigmoid": [((3.0,), (0.0,)), ((-3.0,), (0.0,))],
    "hardswish": [((3.0,), (1.0,)), ((-3.0,), (0.0,)), ((-INF,), (0.0,))],
    "hardtanh": [((2.0,), (0.0,)), ((-2.0,), (0.0,))],
    "softshrink": [((0.5,), (0.0,)), ((INF,), (1.0,))],
    "hardshrink": [((-0.5,), (0.0,)), ((INF,), (1.0,))],
    "celu": [((0.0,), (1.0,)), ((-INF,), (0.0,)), ((INF,), (1.0,))],
    "selu": [((0.0,), (1.7580993408473766,)), ((-INF,), (0.0,))],
    "softsign": [((0.0,), (1.0,)), ((INF,), (0.0,))],
    "tanhshrink": [((0.0,), (0.0,)), ((INF,), (1.0,))],
    "logsigmoid": [((INF,), (0.0,)), ((-INF,), (1.0,))],
    "erfc": [((INF,), (0.0,)), ((-INF,), (0.0,))],
    "elu": [((0.0,), (1.0,)), ((-INF,), (0.0,)), ((INF,), (1.0,))],
    "leaky_relu": [((0.0,), (0.25,))],
    "sign": [((0.0,), (0.0,))],
    "clip": [((1.0, -1.0, 1.0), (0.5, 0.0, 0.5))],
    "sqrt": [((0.0,), (INF,)), ((INF,), (0.0,))],
    "rsqrt": [((0.0,), (-INF,)), ((INF,), (0.0,))],
    "log": [((0.0,), (INF,)), ((INF,), (0.0,))],
    "log1p": [((-1.0,), (INF,)), ((INF,), (0.0,))],
    "exp": [((-INF,), (0.0,)), ((INF,), (INF,))],
    "expm1": [((-INF,), (0.0,)), ((INF,), (INF,))],
    "asin": [((1.0,), (INF,)), ((-1.0,), (INF,))],
    "acos": [((1.0,), (-INF,)), ((-1.0,), (-INF,))],
    "atan": [((INF,), (0.0,)), ((-INF,), (0.0,))],
    "asinh": [((INF,), (0.0,)), ((-INF,), (0.0,))],
    "acosh": [((1.0,), (INF,)), ((INF,), (0.0,))],
    "atanh": [((1.0,), (INF,)), ((-1.0,), (INF,))],
    "tanh": [((INF,), (0.0,)), ((-INF,), (0.0,))],
    "erf": [((INF,), (0.0,)), ((-INF,), (0.0,))],
    "sigmoid": [((INF,), (0.0,)), ((-INF,), (0.0,))],
    "softplus": [((INF,), (1.0,)), ((-INF,), (0.0,))],
    "gelu": [((INF,), (1.0,)), ((-INF,), (0.0,))],
    "mish": [((INF,), (1.0,)), ((-INF,), (0.0,))],
    "logaddexp": [((-INF, -INF), (0.5, 0.5)), ((-INF, 1.0), (0.0, 1.0)), ((INF, 1.0), (1.0, 0.0))],
    "logsumexp": [((-INF, -INF, -INF), (0.0, 0.0, 0.0)), ((-INF, 1.0, -INF), (0.0, 1.0, 0.0))],
    "hypot": [((0.0, 0.0), (0.0, 0.0)), ((0.0, -3.0), (0.0, -1.0))],
    "norm": [((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))],
    "std": [((2.0, 2.0, 2.0), (0.0, 0.0, 0.0))],
    "pow": [((0.0, 1.0), (1.0, 0.0)), ((0.0, 2.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, 0.0)), ((0.0, 0.5), (INF, 0.0))],
    "l1_loss": [((1.0, 1.0), (0.0, 0.0))],
    "huber_loss": [((1.0, 0.0), (1.0, -1.0)), ((INF, 0.0), (1.0, -1.0))],
    "binary_cross_entropy": [((0.0, 0.0), (1.0, 100.0)), ((1.0, 1.0), (-1.0, -100.0))],
    "binary_cross_entropy_with_logits": [((INF, 1.0), (0.0, -INF))],
    "kl_div": [((-1.0, 0.0), (0.0, 0.0))],
    "relu6": [((3.0,), (1.0,)), ((0.0,), (0.0,)), ((6.0,), (0.0,)), ((INF,), (0.0,))],
    "nextafter": [((1.0, 2.0), (1.0, 0.0)), ((0.0, -1.0), (1.0, 0.0))],
    "nan_to_num": [((INF,), (0.0,)), ((float("nan"),), (0.0,))],
}


PAIRED = "hinge_embedding margin_ranking cosine_embedding triplet_margin multi_margin multilabel_margin".split()
PAIRED += ["multilabel_soft_margin", "triplet_margin_with_distance"]
# The reason why a function has no case here.
UNCHECKED = {
    **dict.fromkeys(
        "reshape permute slice pad concatenate gather broadcast mesh_shift update_slice".split(), "moves elements"
    ),
    **dict.fromkeys("scatter scatter_add argsort full dim_value iota check_index bitcast".split(), "moves elements"),
    **dict.fromkeys(
        "all_reduce reduce_scatter reduce_to broadcast_from all_gather scatter_from gather_to all_to_all "
        "collective_permute local_part place_part send receive".split(),
        "tests/dist/test_collectives.py",
    ),
    **dict.fromkeys("cast rough_cast kept recompute fusion_barrier".split(), "the identity"),
    **dict.fromkeys("less less_equal greater greater_equal equal not_equal".split(), "results are no floats"),
    **dict.fromkeys("argmax argmin all any isnan isinf isfinite signbit".split(), "results are no floats"),
    **dict.fromkeys("bitwise_and bitwise_or bitwise_xor bitwise_not".split(), "operands are no floats"),
    **dict.fromkeys("shift_left shift_right integer_power".split(), "operands are no floats"),
    **dict.fromkeys(
        "dot solve slogdet cholesky svd qr eigh eig eig_parts".split(), "tests/transforms/autodiff/test_properties.py"
    ),
    **dict.fromkeys("scaled_dot_product_attention positional_attention".split(), "softmax between products"),
    **dict.fromkeys("attention_with_sums attention_gradients".split(), "softmax between products"),
    **dict.fromkeys("layer_norm batch_norm running_statistics".split(), "normalize, mean and var with affine ops"),
    **dict.fromkeys("cross_entropy nll_loss".split(), "log_softmax and where; tests/ops/test_against_torch.py"),
    **dict.fromkeys("cosine_similarity pairwise_distance pdist lp_normalize".split(), "quotients of norms"),
    **dict.fromkeys("rrelu threshold gumbel_softmax".split(), "where, softmax and random numbers"),
    **{f"{name}_loss": "sums of hinges, distances and logsigmoid: tests/ops/test_against_torch.py" for name in PAIRED},
    "linear_cross_entropy": "logsumexp and log_softmax",
    "mse": "an alias",
    "dropout": "a product with a random mask",
    "stop_gradient": "its derivative is 0 on purpose: tests/transforms/autodiff/test_custom.py",
}


def find_call(name):
    """The function of a case."""
    case = SMOOTH.get(name)
    return (case and case.call) or getattr(ts, name)


def find_point(at, dtype):
    """A point as numbers of the element type, or None where one of them overflows."""
    limits = ml_dtypes.finfo(dtype)
    special = {MAX: limits.max, MIN: limits.min, TINY: limits.smallest_normal}
    numbers = tuple(float(dtype.type(special.get(x, x))) for x in (at if isinstance(at, tuple) else (at,)))
    return numbers if all(abs(x) <= float(limits.max) for x in numbers) else None


@functools.cache
def differentiate(name, point, wanted):
    """A partial derivative of a case at a point; `wanted` are the places of the operands."""
    digits = 500 + 2 * max(int(abs(mp.log10(abs(x)))) if x else 0 for x in point)
    with mp.workdps(digits):
        return +find_central_difference(SMOOTH[name].exact, [mpf(x) for x in point], wanted)


def find_central_difference(function, point, wanted):
    if not wanted:
        return function(*point)
    place, *rest = wanted
    size = STEP * (abs(point[place]) or 1)
    ends = [
        find_central_difference(function, [x + s * size * (i == place) for i, x in enumerate(point)], rest)
        for s in (1, -1)
    ]
    return (ends[0] - ends[1]) / (2 * size)

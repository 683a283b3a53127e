"""Every Graph op gives equal results at the Graph, Schedule and Tile levels."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.types import as_dtype
from tessera.ir.rules import REGISTRY, Op, lower
from tessera.lower.indexing_maps import IndexDigit
from tessera.lower.schedule_to_tile.tile_emitter import find_digit_span
from tessera.ops.tensor import basic, contractions, nn, reduce, shape
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f
from tessera.ops.tensor.attention import positional_attention, rough_cast, scaled_dot_product_attention
from tests.lower.levels import agree

FLOATS = [e.add, e.sub, e.mul, e.div, e.maximum, e.minimum, e.pow, f.atan2]
UNARY = [
    e.neg, e.abs, e.exp, e.exp2, e.log, e.log2, e.sqrt, e.rsqrt, e.tanh, e.erf, e.erfc, e.sin, e.cos, e.floor, e.ceil,
    e.round, nn.relu, nn.sigmoid, nn.silu, nn.gelu, f.expm1, f.log1p, f.atan, f.log10, f.tan, f.sinh, f.cosh, f.asin,
    f.acos, f.sign, f.trunc, f.isnan, f.isinf, f.isfinite, basic.stop_gradient,
]  # fmt: skip
COMPARISONS = [e.less, e.less_equal, e.greater, e.greater_equal, e.equal, e.not_equal]
INTEGERS = [e.add, e.mul, e.bitwise_and, e.bitwise_or, e.bitwise_xor]


def floats(*shape, seed=0, dtype=np.float32):
    """Positive and well away from 0, so that every function is defined."""
    return (np.random.default_rng(seed).random(shape) + 0.5).astype(dtype)


def normals(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def whole(*shape, seed=0, dtype=np.int32, high=7):
    return np.random.default_rng(seed).integers(1, high, shape).astype(dtype)


@pytest.mark.parametrize("op", FLOATS, ids=lambda o: o.name)
def test_binary(op):
    agree(op, floats(4, 6), floats(4, 6, seed=1))


@pytest.mark.parametrize("op", UNARY, ids=lambda o: o.name)
def test_unary(op):
    agree(op, floats(3, 7))


@pytest.mark.parametrize("op", COMPARISONS, ids=lambda o: o.name)
def test_comparison(op):
    agree(op, whole(4, 5), whole(4, 5, seed=1))


@pytest.mark.parametrize(
    "op", [*INTEGERS, e.floor_divide, e.remainder, e.shift_left, e.shift_right], ids=lambda o: o.name
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_integer(op, dtype):
    agree(op, whole(4, 5, dtype=dtype), whole(4, 5, seed=1, dtype=dtype))


CASES = {
    "fma": (lambda x, y: f.fma(x, y, x), normals(3, 5), normals(3, 5, seed=1)),
    "clip": (lambda x: f.clip(x, -0.5, 0.5), normals(3, 5)),
    "not": (lambda x: ~x, whole(4)),
    "where": (lambda x, y: e.where(x > y, x, y * 2), normals(3, 5), normals(3, 5, seed=1)),
    "cast": (lambda x: x.to("int32"), normals(3, 5) * 9),
    "cast to bf16": (lambda x: x.to("bf16") * 2, normals(3, 5)),
    "full": (lambda x: basic.full(shape=(2, 3), value=4) + x, floats(3)),
    "constant": (lambda: basic.full(shape=(2, 3), value=4),),
    "scalar": (lambda x: x * 2 + 1, floats()),
    "broadcast": (lambda x, y: x + y, floats(4, 1, 3), floats(5, 1)),
    "reshape": (lambda x: x.reshape(6, 4), floats(2, 3, 4)),
    "reshape unevenly": (lambda x: (x * 2).reshape(5, 6), floats(6, 5)),
    "permute": (lambda x: x.permute(2, 0, 1) + 1, floats(2, 3, 4)),
    "transpose twice": (lambda x: x.transpose() + x, floats(5, 5)),
    "heads": (lambda x: x.reshape(2, 6, 3, 4).permute(0, 2, 1, 3) * 2, floats(2, 6, 12)),
    "merge heads": (lambda x: x.permute(0, 2, 1, 3).reshape(2, 6, 12) * 2, floats(2, 3, 6, 4)),
    "repeat": (lambda x: basic.broadcast_to(x.reshape(3, 1, 4), shape=(3, 2, 4)).reshape(6, 4) * 2, floats(3, 4)),
    "again and again": (lambda x: basic.broadcast_to(x, shape=(3, 4)).reshape(12) * 2, floats(4)),
    "repeat and sum": (
        lambda x: basic.broadcast_to(x.reshape(12, 1), shape=(12, 3)).reshape(4, 9).sum(axis=1), floats(3, 4),
    ),
    "slice": (lambda x: x[1:5:2, 2:] * 2, floats(6, 7)),
    "subscript": (lambda x: x[1, ..., None, -1], floats(3, 4, 5)),
    "pad": (lambda x: shape.pad(x, low=(1, 0), high=(2, 3), value=7), floats(3, 4)),
    "pad a sum": (lambda x: shape.pad(x + x.exp(), low=(1, 2), high=(2, 0)), floats(3, 4)),
    "concatenate": (lambda x, y: shape.concatenate([x, y * 2, x], axis=1), floats(3, 4), floats(3, 2)),
    "stack": (lambda x, y: shape.stack([x, y]), floats(3), floats(3, seed=1)),
    "gather": (lambda x, i: shape.gather(x, i, axis=1), floats(3, 8), whole(2, 5)),
    "embedding": (lambda w, i: shape.embedding(w, i) * 2, floats(7, 6), whole(2, 5, dtype=np.int64)),
    "gather of a sum": (lambda x, i: shape.gather(x + 1, i, axis=0), floats(8, 3), whole(5)),
    "gather by a sum": (lambda x, i: shape.gather(x, i + 1, axis=0), floats(8, 3), whole(5)),
    "iota": (lambda x: shape.iota(shape=(4, 5), axis=0) + x, whole(5, dtype=np.int64)),
    "iota of floats": (lambda x: shape.iota(shape=(4, 5), dtype="f32") * x, floats(5)),
    "arange": (lambda: shape.arange(3, 20, 4),),
    "sum": (lambda x: x.sum(axis=1), floats(3, 7)),
    "sum of columns": (lambda x: x.sum(axis=0), floats(7, 5)),
    "sum in the middle": (lambda x: x.sum(axis=1), floats(3, 7, 5)),
    "sum of all": (lambda x: x.sum(), floats(3, 4, 5)),
    "sum of ends": (lambda x: x.sum(axis=(0, 2)), floats(3, 4, 5)),
    "sum of ends kept": (lambda x: x.sum(axis=(0, 2), keepdims=True), floats(3, 4, 5)),
    "sum of integers": (lambda x: x.sum(axis=0), whole(7, 5, dtype=np.int8)),
    "sum of bools": (lambda x: (x > 3).sum(axis=1), whole(4, 9)),
    "sum of one": (lambda x: x.sum(axis=1), floats(3, 1)),
    "sum of nothing": (lambda x: x.sum(axis=1), floats(3, 0)),
    "sum of a constant": (lambda x: x + basic.full(shape=(2, 9), value=1.5).sum(axis=1), floats(2)),
    "sum of half": (lambda x: x.to("f16").sum(axis=1), floats(3, 9)),
    "sum of a product": (lambda x, y: (x * y).sum(axis=1), floats(4, 7), floats(4, 7, seed=1)),
    "max": (lambda x: x.max(axis=-1), normals(4, 7)),
    "min": (lambda x: x.min(axis=0), normals(4, 7)),
    "max of integers": (lambda x: x.max(axis=1), whole(4, 7)),
    "max of bools": (lambda x: reduce.max(x > 5, axis=1), whole(4, 7)),
    "argmax": (lambda x: x.argmax(axis=-1), whole(4, 9).astype(np.float32)),
    "argmin": (lambda x: x.argmin(axis=0), whole(9, 4)),
    "argmax of one": (lambda x: x.argmax(axis=1), floats(4, 1)),
    "mean": (lambda x: x.mean(axis=-1), normals(4, 7)),
    "mean of integers": (lambda x: x.mean(), whole(4, 7)),
    "var": (lambda x: x.var(axis=-1, correction=1), normals(4, 7)),
    "var of columns": (lambda x: x.var(axis=0), normals(7, 4)),
    "nested": (lambda x: x.max(axis=1).sum(axis=0), normals(4, 7)),
    "nested square": (lambda x: x.max(axis=1).sum(axis=0), normals(6, 6)),
    "nested normalised": (lambda x: nn.softmax(x.max(axis=1) + x.sum(axis=0)), normals(6, 6)),
    "two axes apart": (lambda x: x - x.sum(axis=0) + x.sum(axis=1, keepdims=True), normals(6, 6)),
    "softmax": (nn.softmax, normals(3, 4, 9)),
    "softmax inside": (lambda x: nn.softmax(x, axis=1), normals(3, 9, 4)),
    "softmax twice": (lambda x: nn.softmax(nn.softmax(x) * 3), normals(3, 9)),
    "softmax both ways": (lambda x: nn.softmax(x, axis=0) + nn.softmax(x, axis=1), normals(6, 6)),
    "softmax of f16": (lambda x: nn.softmax(x.to("f16")), normals(3, 9)),
    "softmax of a policy": (lambda x: nn.softmax(x.to(ts.f32 @ ts.toward_zero)), normals(3, 9)),
    "maximum of a policy": (lambda x: x.to(ts.f32 @ ts.toward_zero).max(axis=1), normals(3, 9)),
    "argmax of a policy": (lambda x: reduce.argmax(x.to(ts.f32 @ ts.toward_zero), axis=1), normals(3, 9)),
    "log_softmax": (nn.log_softmax, normals(3, 9)),
    "layer_norm": (nn.layer_norm, normals(2, 3, 8), 8, normals(8), normals(8)),
    "layer_norm of two axes": (lambda x: nn.layer_norm(x, (3, 8)), normals(2, 3, 8)),
    "rms_norm": (nn.rms_norm, normals(5, 8), normals(8)),
    "matmul": (contractions.matmul, normals(6, 9), normals(9, 10)),
    "matmul of one": (contractions.matmul, normals(1, 9), normals(9, 1)),
    "outer product": (contractions.matmul, normals(6, 1), normals(1, 5)),
    "matmul of nothing": (contractions.matmul, normals(6, 0), normals(0, 5)),
    "vector": (contractions.matmul, normals(9), normals(9, 4)),
    "dot product": (contractions.matmul, normals(9), normals(9)),
    "batch": (contractions.matmul, normals(2, 3, 6, 9), normals(2, 3, 9, 5)),
    "batch of one": (contractions.matmul, normals(2, 3, 6, 9), normals(3, 9, 5)),
    "rows": (contractions.matmul, normals(2, 6, 9), normals(9, 5)),
    "transposed": (lambda x, y: x @ y.T, normals(6, 9), normals(5, 9)),
    "strided view": (
        lambda x: shape.strided_view(x, shape=(3, 2, 4), start=(5, 1), strides=((-2, 0, 0), (0, 3, 1))) * 2,
        normals(6, 12),
    ),
    "windows": (
        lambda x: shape.stack([x[:, a : a + 4] for a in (0, 2, 4)], 1) @ x[:, :4, None],
        normals(5, 9),
    ),
    "sum of windows": (lambda x: shape.stack([x[:, a : a + 7 : 2] for a in range(3)], 0).sum(axis=0), normals(5, 9)),
    "sliced": (lambda x, y: x[:, 2:9] @ y[1:8], normals(6, 12), normals(9, 5)),
    "sliced and long": (lambda x, y: x[:, 1:12] @ y[1:12], normals(6, 15), normals(15, 5)),
    "gram": (lambda x: x @ x.T, normals(6, 9)),
    "linear": (lambda x, w, b: contractions.linear(x, w, b), normals(2, 6, 9), normals(9, 5), normals(5)),
    "linear gelu": (lambda x, w, b: nn.gelu(contractions.linear(x, w, b)), normals(6, 9), normals(9, 5), normals(5)),
    "two products": (lambda x, a, b: x @ a + x @ b, normals(6, 9), normals(9, 5), normals(9, 5, seed=1)),
    "chain": (lambda x, a, b: x @ a @ b, normals(6, 9), normals(9, 5), normals(5, 7)),
    "product of a sum": (lambda x, y: (x + 1) @ y.exp(), normals(6, 9), normals(9, 5)),
    "product and its transpose": (lambda x, y: (x @ y) + (x @ y).transpose(), normals(5, 9), normals(9, 5)),
    "part of a product": (lambda x, y: (x @ y)[1:, 2:], normals(5, 9), normals(9, 6)),
    "softmax of a product": (lambda x, y: nn.softmax(x @ y * 0.5), normals(5, 9), normals(9, 6)),
    "product of int8": (contractions.matmul, whole(6, 9, dtype=np.int8), whole(9, 5, dtype=np.int8)),
    "product of f16": (lambda x, y: x.to("f16") @ y.to("f16"), normals(6, 9), normals(9, 5)),
    "product of f64": (contractions.matmul, normals(6, 9, dtype=np.float64), normals(9, 5, dtype=np.float64)),
    "wider": (lambda x, y: contractions.matmul(x.to("bf16"), y.to("bf16"), dtype="f32"), normals(6, 9), normals(9, 5)),
    "head split": (
        lambda x, w, b: contractions.linear(x, w, b).reshape(2, 6, 3, 4).permute(0, 2, 1, 3),
        normals(2, 6, 10), normals(10, 12), normals(12),
    ),
    "head merge": (lambda x, w: x.permute(0, 2, 1, 3).reshape(2, 6, 12) @ w, normals(2, 3, 6, 4), normals(12, 5)),
    "attention": (scaled_dot_product_attention, normals(2, 3, 6, 4), normals(2, 3, 5, 4), normals(2, 3, 5, 4)),
    "causal": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, causal=True),
        *(normals(2, 7, 4, seed=i) for i in range(3)),
    ),
    "square attention": (scaled_dot_product_attention, *(normals(6, 6, seed=i) for i in range(3))),
    "attention of f16": (
        lambda q, k, v: scaled_dot_product_attention(q.to("f16"), k.to("f16"), v.to("f16")),
        *(normals(2, 7, 4, seed=i) for i in range(3)),
    ),
    "rough cast": (lambda x: rough_cast(x, dtype=as_dtype("bf16")) * 2, normals(4, 5)),
    "masked": (scaled_dot_product_attention, *(normals(2, 3, 6, 4, seed=i) for i in range(3)), normals(2, 1, 1, 6)),
    "heads after positions": (positional_attention, *(normals(2, 6, 3, 4, seed=i) for i in range(3))),
    "masked, heads after positions": (
        lambda q, k, v, m: positional_attention(q, k, v, m, causal=True),
        *(normals(2, 6, 3, 4, seed=i) for i in range(3)),
        normals(2, 1, 1, 6),
    ),
    "masked all over": (scaled_dot_product_attention, *(normals(3, 6, 4, seed=i) for i in range(3)), normals(6, 6)),
    "several": (lambda x: (x + 1, (x + 1).sum(axis=0), x.exp(), x), normals(4, 5)),
    "same twice": (lambda x: (x * 2, x * 2), normals(4, 5)),
    "view of a result": (lambda x: (lambda y: (y, y.reshape(20)))(x * 2), normals(4, 5)),
    "empty twice": (lambda x: (x, x, x + 1, x + 1), normals(0, 5)),
    "empty": (lambda x: x + 1, normals(0, 5)),
    "many axes": (lambda x: x.permute(5, 4, 3, 2, 1, 0) + 1, normals(2, 3, 2, 3, 2, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    function, *arrays = CASES[name]
    fixed = {i: a for i, a in enumerate(arrays) if not isinstance(a, np.ndarray)}
    given = [a for i, a in enumerate(arrays) if i not in fixed]

    def program(*tensors):
        each = iter(tensors)
        return function(*(fixed.get(i, None) or next(each) for i in range(len(arrays))))

    agree(program, *given)


def test_every_op_has_a_case():
    """The families that `to_schedule` lowers, by name: a primitive added to one must be added here."""
    listed = {o.name for o in (*FLOATS, *UNARY, *COMPARISONS, *INTEGERS)} | {
        f"ts.{n}"
        for n in (
            "floor_divide remainder shift_left shift_right bitwise_not where cast full dim_value broadcast reshape "
            "permute slice pad concatenate gather iota sum max min argmax argmin mean var dot softmax "
            "log_softmax normalize scaled_dot_product_attention positional_attention rough_cast fma clip recompute "
            "fusion_barrier check_index strided_view"
        ).split()
    }
    families = (basic, e, reduce, shape, contractions, nn)
    defined = {o.name for family in families for o in vars(family).values() if isinstance(o, Op) and o not in lower}
    assert defined <= listed and listed <= set(REGISTRY)


def test_a_digit_that_wraps_within_a_tile_is_irregular():
    assert find_digit_span(IndexDigit(0, 20, 1, 5), (4,)) == 0  # 4, 0, 1, 2


def test_the_index_of_nan_is_found_in_a_loop():
    x = np.zeros((4, 33), np.float32)
    x[1, 20:] = np.nan
    agree(lambda x: (reduce.argmax(x, axis=-1), reduce.argmin(x, axis=-1)), x)

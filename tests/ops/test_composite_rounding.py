"""Functions of several ops round once: results and gradients in 16 bits against those in float64, rounded."""

import types

import ml_dtypes
import numpy as np
import pytest
import test_functional
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.interp import graph
from tessera.ir.numerics.conversion import convert
from tessera.lower.passes.gather_sinking import sink_widening
from tessera.ops.tensor import basic, coercion, contractions
from tessera.runtime import driver

CLASSES = ts.Tensor(np.arange(16) % 8)
# Each function with the shapes of its operands; "+" marks numbers between 0 and 1.
CASES = {
    "linear": (ts.linear, (32, 8), (8, 32), (32,)),
    "gemm": (lambda a, b, c: ts.gemm(a, b, c, 1.5, 0.75), (16, 8), (8, 16), (16, 16)),
    "einsum": (lambda a, b, c: ts.einsum("ij,jk,kl->il", a, b, c), (16, 8), (8, 4), (4, 8)),
    "tensordot": (lambda a, b: ts.tensordot(a, b, 1), (16, 24), (24, 8)),
    "vecdot": (ts.vecdot, (64, 8), (64, 8)),
    "outer": (ts.outer, (16,), (16,)),
    "kron": (ts.kron, (4, 4), (4, 4)),
    "cross": (ts.cross, (64, 3), (64, 3)),
    "matrix_power": (lambda x: ts.matrix_power(x, 3), (16, 3, 3)),
    "diff": (lambda x: ts.diff(x, 2), (16, 16)),
    "lerp": (lambda x, y: ts.lerp(x, y, 0.3125), (256,), (256,)),
    "norm": (lambda x: ts.norm(x, axis=-1), (64, 8)),
    "norm 3": (lambda x: ts.norm(x, 3, axis=-1), (64, 8)),
    "matrix_norm": (ts.linalg.matrix_norm, (64, 3, 4)),
    "vector_norm": (lambda x: ts.linalg.vector_norm(x, axis=-1), (64, 8)),
    "det": (ts.linalg.det, (64, 2, 2)),
    "pinv": (lambda x: ts.linalg.pinv(x, 1e-4), (32, 3, 2)),
    "layer_norm": (lambda x, w, b: ts.layer_norm(x, 32, w, b), (16, 32), (32,), (32,)),
    "rms_norm": (ts.rms_norm, (16, 32), (32,)),
    "stable layer_norm": (ts.stable.layer_norm, (16, 32), (32,), (32,)),
    "stable rms_norm": (ts.stable.rms_norm, (16, 32), (32,)),
    "batch_norm": (ts.batch_norm, (16, 8), (8,), ("+", 8), (8,), (8,)),
    "batch_norm known": (lambda *a: ts.batch_norm(*a, training=False), (16, 8), (8,), ("+", 8), (8,), (8,)),
    "running_statistics": (lambda *a: ts.running_statistics(*a)[1], (16, 64), (64,), ("+", 64)),
    "dropout": (lambda x: ts.dropout(x, 0.3, generator=ts.Generator(1)), (256,)),
    "conv1d": (ts.conv1d, (2, 3, 16), (4, 3, 3), (4,)),
    "conv2d": (lambda *a: ts.conv2d(*a, padding=1), (2, 2, 6, 6), (4, 2, 3, 3), (4,)),
    "mse_loss": (lambda x, y: ts.mse_loss(x, y, "none"), (256,), (256,)),
    "mse": (lambda x, y: ts.mse(x, y), (256,), (256,)),
    "l1_loss": (lambda x, y: ts.l1_loss(x, y, "none"), (256,), (256,)),
    "huber_loss": (lambda x, y: ts.huber_loss(x, y, "none", 0.7), (256,), (256,)),
    "binary_cross_entropy": (lambda x, y: ts.binary_cross_entropy(x, y, reduction="none"), ("+", 256), ("+", 256)),
    "binary_cross_entropy_with_logits": (
        lambda x, y: ts.binary_cross_entropy_with_logits(x, y, reduction="none"), (256,), ("+", 256),
    ),
    "kl_div": (lambda x, y: ts.kl_div(x, y, "none"), (256,), ("+", 256)),
    "cross_entropy": (lambda x, w: ts.cross_entropy(x, CLASSES, w, "none", label_smoothing=0.1), (16, 8), ("+", 8)),
    "cross_entropy shares": (lambda x, y: ts.cross_entropy(x, y, reduction="none"), (16, 8), ("+", 16, 8)),
    "nll_loss": (lambda x: ts.nll_loss(x, CLASSES, reduction="mean"), (16, 8)),
    "softmax": (ts.softmax, (16, 16)),
    "normalize": (ts.layer_norm, (16, 16)),
    "logsumexp": (lambda x: ts.logsumexp(x, axis=-1), (16, 16)),
    "std": (lambda x: ts.std(x, axis=-1), (16, 16)),
}  # fmt: skip
SIGNS = ts.Tensor(np.where(np.arange(64) % 2, 1, -1))
# Checked as called, not compiled.
FURTHER = {
    "conv3d": (ts.conv3d, (1, 2, 4, 4, 4), (2, 2, 2, 2, 2), (2,)),
    "conv_transpose1d": (ts.conv_transpose1d, (1, 3, 8), (3, 2, 3), (2,)),
    "conv_transpose2d": (ts.conv_transpose2d, (1, 2, 5, 5), (2, 3, 3, 3), (3,)),
    "conv_transpose3d": (ts.conv_transpose3d, (1, 2, 3, 3, 3), (2, 2, 2, 2, 2), (2,)),
    "avg_pool1d": (lambda x: ts.avg_pool1d(x, 3), (2, 3, 18)),
    "avg_pool2d": (lambda x: ts.avg_pool2d(x, 2), (2, 3, 8, 8)),
    "avg_pool3d": (lambda x: ts.avg_pool3d(x, 2), (1, 2, 4, 4, 4)),
    "adaptive_avg_pool1d": (lambda x: ts.adaptive_avg_pool1d(x, 3), (2, 3, 11)),
    "adaptive_avg_pool2d": (lambda x: ts.adaptive_avg_pool2d(x, 3), (1, 2, 7, 7)),
    "adaptive_avg_pool3d": (lambda x: ts.adaptive_avg_pool3d(x, 2), (1, 2, 5, 5, 5)),
    "lp_pool1d": (lambda x: ts.lp_pool1d(x, 2.0, 3), ("+", 2, 3, 18)),
    "lp_pool2d": (lambda x: ts.lp_pool2d(x, 3.0, 2), ("+", 2, 3, 8, 8)),
    "lp_pool3d": (lambda x: ts.lp_pool3d(x, 2.0, 2), ("+", 1, 2, 4, 4, 4)),
    "bilinear": (ts.bilinear, (8, 3), (8, 4), (5, 3, 4), (5,)),
    "glu": (ts.glu, (16, 16)),
    "prelu": (ts.prelu, (16, 4), (4,)),
    "group_norm": (lambda x, w, b: ts.group_norm(x, 2, w, b), (4, 4, 8), (4,), (4,)),
    "instance_norm": (lambda x: ts.instance_norm(x), (4, 4, 8)),
    "local_response_norm": (lambda x: ts.local_response_norm(x, 3), (2, 6, 8)),
    "lp_normalize": (lambda x: ts.lp_normalize(x, 2.0), (16, 16)),
    "cosine_similarity": (ts.cosine_similarity, (16, 16), (16, 16)),
    "pairwise_distance": (ts.pairwise_distance, (16, 16), (16, 16)),
    "pdist": (ts.pdist, (8, 6)),
    "interpolate": (lambda x: ts.interpolate(x, scale_factor=2, mode="bilinear"), (1, 2, 4, 4)),
    "smooth_l1_loss": (lambda x, y: ts.smooth_l1_loss(x, y, "none", 0.75), (64,), (64,)),
    "soft_margin_loss": (lambda x: ts.soft_margin_loss(x, SIGNS.to(x.dtype), "none"), (64,)),
    "hinge_embedding_loss": (lambda x: ts.hinge_embedding_loss(x, SIGNS.to(x.dtype), reduction="none"), (64,)),
    "margin_ranking_loss": (lambda x, y: ts.margin_ranking_loss(x, y, SIGNS.to(x.dtype), 0.5, "none"), (64,), (64,)),
    "poisson_nll_loss": (lambda x, y: ts.poisson_nll_loss(x, y, reduction="none"), (64,), ("+", 64)),
    "gaussian_nll_loss": (lambda x, y, v: ts.gaussian_nll_loss(x, y, v, reduction="none"), (64,), (64,), ("+", 64)),
    "triplet_margin_loss": (lambda *a: ts.triplet_margin_loss(*a, reduction="none"), (16, 8), (16, 8), (16, 8)),
    "cosine_embedding_loss": (
        lambda x, y: ts.cosine_embedding_loss(x, y, SIGNS[:16], reduction="none"), (16, 8), (16, 8),
    ),
    "grid_sample": (lambda x, g: ts.grid_sample(x, g, align_corners=False), (1, 2, 4, 4), ("+", 1, 3, 3, 2)),
    "affine_grid": (lambda t: ts.affine_grid(t, (1, 1, 4, 4), align_corners=False), (1, 2, 3)),
    "multi_margin_loss": (lambda x: ts.multi_margin_loss(x, CLASSES, reduction="none"), (16, 8)),
    "linear_cross_entropy": (lambda x, w: ts.linear_cross_entropy(x, w, CLASSES), (16, 8), (8, 8)),
    "cbrt": (ts.cbrt, (256,)),
    "lgamma": (ts.lgamma, ("+", 256)),
    "digamma": (ts.digamma, ("+", 256)),
    "erfinv": (ts.erfinv, ("+", 256)),
    "bessel_i0e": (ts.bessel_i0e, (256,)),
    "bessel_i1e": (ts.bessel_i1e, (256,)),
    "col2im": (lambda x: ts.col2im(x, (4, 4), 2), (1, 8, 9)),
}  # fmt: skip
ALL = {**CASES, **FURTHER}
SEEDS = st.integers(0, 2**32 - 1)
HALVES = st.sampled_from([ts.f16, ts.bf16])


def draw(seed, dtype, shapes):
    """Operands of an element type, and the same numbers in float64."""
    g = np.random.default_rng(seed)
    arrays = [g.uniform(0.05, 0.95, s[1:]) if s[0] == "+" else g.normal(size=s) for s in shapes]
    narrow = [ts.Tensor(convert(a, dtype), dtype) for a in arrays]
    return narrow, [ts.Tensor(x.numpy().astype(np.float64)) for x in narrow]


def check_rounded_once(out, exact, dtype):
    """Each element is the float64 number rounded, up to the errors of arithmetic in f32."""
    assert out.dtype is dtype
    value = exact.numpy()
    slack = 2.0**-19 * (np.abs(value) + np.abs(value).max(initial=0))
    low, high = (convert(value + side, dtype).astype(np.float64) for side in (-slack, slack))
    found = out.numpy().astype(np.float64)
    assert np.all((low <= found) & (found <= high))
    return np.mean(found == convert(value, dtype).astype(np.float64))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, dtype=HALVES)
def test_results_round_once(name, seed, dtype):
    function, *shapes = ALL[name]
    narrow, wide = draw(seed, dtype, shapes)
    check_rounded_once(function(*narrow), function(*wide), dtype)


@pytest.mark.parametrize("target", ["interp", "llvm"])
@pytest.mark.parametrize("name", CASES)
def test_compiled_results_round_once(name, target):
    function, *shapes = CASES[name]
    for dtype in (ts.f16, ts.bf16):
        narrow, wide = draw(1, dtype, shapes)
        check_rounded_once(ts.jit(function, target=target)(*narrow), function(*wide), dtype)


READ_A_RESULT = (
    "softmax",
    "det",
    "pinv",
    "cross_entropy",
    "cross_entropy shares",
)  # rules that read a rounded result


@pytest.mark.parametrize("name", [n for n in CASES if n not in READ_A_RESULT])
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS, dtype=HALVES)
def test_gradients_round_once(name, seed, dtype):
    function, *shapes = ALL[name]
    narrow, wide = draw(seed, dtype, shapes)
    out, pull = ts.vjp(function, *narrow)
    g = ts.Tensor(convert(np.random.default_rng(seed + 1).normal(size=out.shape), dtype), dtype)
    exact = ts.vjp(function, *wide)[1](ts.Tensor(g.numpy().astype(np.float64)))
    for found, want in zip(pull(g), exact, strict=True):
        check_rounded_once(found, want, dtype)


def test_all_but_one_element_of_a_thousand_is_exact():
    right = {}
    for name in ("linear", "layer_norm", "rms_norm", "batch_norm", "norm", "conv2d", "huber_loss", "lerp"):
        function, *shapes = CASES[name]
        for dtype in (ts.f16, ts.bf16):
            pairs = [draw(seed, dtype, shapes) for seed in range(40)]
            right[name, dtype] = np.mean([check_rounded_once(function(*a), function(*b), dtype) for a, b in pairs])
    assert all(share >= 0.999 for share in right.values()), right


def test_intermediate_results_do_not_overflow():
    largest = ts.Tensor([65504.0], ts.f16)
    assert ts.lerp(largest, -largest, 0.25).tolist() == [32752.0]
    assert ts.huber_loss(largest * 0.5, -largest * 0.25, delta=0.5).item() == 24560.0
    assert ts.norm(ts.Tensor([3e-4, 4e-4], ts.f16)).item() == pytest.approx(5e-4, rel=1e-3)


@pytest.mark.parametrize("name", ["linear", "layer_norm", "huber_loss", "norm", "conv2d"])
def test_as_torch(name):
    """Where PyTorch rounds the numbers of float64, so does every element here."""
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    peers = {
        "linear": lambda x, w, b: f.linear(x, w.T, b),
        "layer_norm": lambda x, w, b: f.layer_norm(x, (32,), w, b),
        "huber_loss": lambda x, y: f.huber_loss(x, y, reduction="none", delta=0.7),
        "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
        "conv2d": lambda *a: f.conv2d(*a, padding=1),
    }
    function, *shapes = CASES[name]
    narrow, wide = draw(2, ts.f16, shapes)
    want = convert(function(*wide).numpy(), ts.f16)
    peer = peers[name](*(torch.tensor(x.numpy()) for x in narrow)).numpy()
    assert np.mean((function(*narrow).numpy() == want)[peer == want]) >= 0.999


# What a public function that is no op and no composite may do: move or choose elements, compare them, or apply one op.
AT_MOST_ONE_OP = """
    zeros ones empty full zeros_like ones_like empty_like full_like arange linspace eye asarray tensor from_dlpack finfo
    iinfo result_type can_cast isdtype take index_add masked_fill searchsorted nonzero unique sort topk narrow pad flip
    roll repeat tiled split chunk broadcast_arrays meshgrid unbind tril triu one_hot take_along_axis clip positive
    nan_to_num logical_and logical_or logical_xor logical_not allclose array_equal count_nonzero transpose expand_dims
    squeeze flatten stack embedding matmul inv eigvalsh svdvals matrix_rank matrix_transpose moveaxis swapaxes diagonal
    diag trace manual_seed rand randn randint bernoulli permutation isclose threshold relu6 softmin im2col pixel_shuffle
    pixel_unshuffle channel_shuffle max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d fractional_max_pool2d
    fractional_max_pool3d max_unpool1d max_unpool2d max_unpool3d dropout1d dropout2d dropout3d complex_eig
    bitcast population_count count_leading_zeros reduce_precision scaled_dot_product_attention
""".split()
RANDOM = "gumbel_softmax alpha_dropout feature_alpha_dropout".split()  # composites whose samples are no function of x


def test_every_function_of_several_ops_is_a_case():
    """A new public function is a `composite` and a case above or of test_functional.py, or applies one op at most."""
    functions = [(n, getattr(ts, n)) for n in ts.__all__ if isinstance(getattr(ts, n), types.FunctionType)]
    defined = {n: f for n, f in functions if f.__module__.startswith("tessera.ops.tensor.")}
    assert len(defined) > 100
    checked = {n.partition(" ")[0] for n in (*ALL, *test_functional.NAMES)}
    assert not defined.keys() - set(AT_MOST_ONE_OP) - set(RANDOM) - checked
    several = {n for n in defined.keys() - set(AT_MOST_ONE_OP) if not hasattr(defined[n], "counts_as_one_op")}
    assert several == {"gemm"}  # one product, or a composite of its own


def test_operands_of_products_stay_narrow():
    """Matrix units multiply 16-bit operands, the epilogue is fused, and the bias is widened after the product."""
    narrow, _ = draw(0, ts.bf16, ((16, 16), (16, 16), (16,)))
    found = driver.lower(ts.jit(lambda *a: ts.linear(*a)).trace(*narrow).function, "llvm")
    kernels = found["tile"].functions[1:]
    assert len(kernels) == 1
    ops = [n.op for n in kernels[0].body.nodes]
    (dot,) = (n for n in kernels[0].body.nodes if n.op is contractions.dot)
    assert [v.type.dtype for v in dot.args] == [ts.bf16, ts.bf16] and dot.out.type.dtype is ts.f32
    assert ops.index(basic.cast) > ops.index(contractions.dot)


def test_casts_sink_to_their_first_use():
    narrow, _ = draw(0, ts.bf16, ((4,), (4,)))
    function = ts.jit(lambda x, y: (ts.exp(x) + ts.lerp(x, y, 0.5), x.to(ts.f32))).trace(*narrow).function
    sunk = sink_widening(function)
    assert {n.op for n in sunk.body.nodes} == {n.op for n in function.body.nodes}
    defined = set(sunk.params)
    for node in sunk.body.nodes:
        assert defined.issuperset(node.args)
        defined.update(node.results)


def test_a_cast_that_a_loop_reads_stays_before_the_loop():
    """Its body takes the value from outside: it is no operand of the loop."""

    def program(x):
        wide = ts.cast(x, dtype="f32")
        return ts.fori_loop(0, 3, lambda i, total: total + wide, ts.zeros((4,)))

    x = np.arange(4).astype(ml_dtypes.bfloat16)
    sunk = sink_widening(ts.jit(program).trace(x).function)
    assert [n.op.name for n in sunk.body.nodes][-2:] == ["ts.cast", "ts.scan"]
    np.testing.assert_array_equal(graph.run(sunk, [x])[0], [0.0, 3.0, 6.0, 9.0])


def test_mixed_types_are_refused():
    x, w = ts.Tensor(np.ones((2, 2)), ts.bf16), ts.Tensor(np.ones((2, 2)), ts.f16)
    for call in (lambda: ts.linear(x, w), lambda: ts.lerp(x, [0.5, 1.0], 0.5), lambda: ts.norm(x) + ts.norm(w)):
        with pytest.raises(ts.errors.DTypeError):
            call()


def test_a_policy_of_any_operand_is_that_of_the_function():
    """Its accumulation and its compensation of sums hold inside, its rounding for the result."""
    policy = ts.Policy("bf16", accumulate="f64", compensated=True, rounding="toward_zero")
    x, plain = ts.Tensor([1.0, 2.0], policy), ts.Tensor([1.0, 2.0], ts.bf16)
    assert ts.lerp(plain, x, 0.5).type == ts.lerp(x, plain, 0.5).type == x.type
    assert coercion.widen_operand(x).type.policy == ts.Policy("f32", accumulate="f64", compensated=True)
    with ts.precision(compute=ts.f16):  # the types of a numeric context are those of the ops inside
        assert ts.lerp(plain, plain * 2.0, 0.5).type.policy.compute == ts.f16


def test_a_policy_rounds_the_result():
    x = ts.Tensor([1.0, 2.0], ts.bf16 @ ts.accum(ts.f32) @ ts.toward_zero)
    assert ts.lerp(x, x * 1.5, 0.3).type == x.type
    total = ts.norm(ts.Tensor([1.0, 1.0], ts.bf16 @ ts.toward_zero))
    assert total.item() == 1.4140625  # the square root of 2 is 1.41421, its neighbours 1.4140625 and 1.421875

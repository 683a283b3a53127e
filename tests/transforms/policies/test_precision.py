"""Precision contexts and policies: what they change in types, values and every level of a program."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.generator import TEXT_FILE
from tessera.core.errors import ArgumentError, DTypeError
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.runtime.program import prepare

G = np.random.default_rng(0)
X, W = G.normal(size=(8, 16)).astype(np.float32), G.normal(size=(16, 8)).astype(np.float32)


def net(x, w):
    return ts.softmax(ts.matmul(x, w) + 1.0, axis=-1).sum(axis=0)


CONTEXTS = {
    "mixed": lambda: ts.precision("mixed"),
    "bf16": lambda: ts.precision(compute=ts.bf16, accumulate=ts.f32, store=ts.bf16),
    "f16 sat": lambda: ts.numerics(saturate=True, store=ts.f16),
    "fp8": lambda: ts.precision(store=ts.fp8_e5m2, accumulate=ts.f32),
    "toward zero": lambda: ts.numerics(round="toward_zero", store=ts.bf16),
    "stochastic": lambda: ts.numerics(round="stochastic", store=ts.f16),
    "flush": lambda: ts.numerics(denorm_mode="flush"),
    "compensated": lambda: ts.numerics(compensated=True),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_every_level_sees_it(context):
    """The clauses are in the text of each level, and values agree within their bound."""

    def inside(x, w):
        with context():
            return net(x, w)

    eager = inside(ts.Tensor(X), ts.Tensor(W))
    program = prepare(ts.jit(inside), [X, W])
    (bound,) = program.bounds()
    wanted = [f"{k} = " for k in (eager.type.policy.clauses() if eager.type.policy else {}) if k != "seed"]
    for level in ("graph", "schedule", "tile"):
        text = print_module(program.levels[level])
        assert all(clause in text for clause in wanted), level
        assert print_module(parse_module(text)) == text
        (out,) = program.run(level)
        assert out.dtype == eager.dtype.numpy
        apart = np.abs(out.astype(np.float64) - bound.value)
        assert (apart <= bound.radius).all() or not np.isfinite(bound.radius).all()


def test_what_computes_in_f16_rounds_to_it():
    with ts.precision("mixed"):
        assert (ts.Tensor([2048.0]) + 1.0).item() == 2048.0
        assert ts.sum(ts.full(shape=(4096,), value=1.0)).item() == 4096.0  # accumulated in f32
    with ts.precision(compute=ts.bf16, store=ts.fp8_e4m3):
        y = ts.Tensor([1.0]) * 1.3
    assert y.dtype is ts.fp8_e4m3 and y.item() == 1.25


def test_contexts_nest_and_close():
    with ts.precision(accumulate=ts.f64), ts.precision(store=ts.bf16):
        assert repr((ts.Tensor([1.0]) + 1.0).type.policy) == "ts.bf16 @ accumulate=f64"
    assert (ts.Tensor([1.0]) + 1.0).type.policy is None
    with pytest.raises(ZeroDivisionError), ts.precision("mixed"):
        _ = 1 / 0
    assert (ts.Tensor([1.0]) + 1.0).type.policy is None


def test_a_jit_function_is_traced_for_each_context():
    double = ts.jit(lambda x: x + x)
    plain = double(X)
    with ts.precision(store=ts.bf16):
        narrow = double(X)
    assert (plain.dtype, narrow.dtype, double(X).dtype) == (ts.f32, ts.bf16, ts.f32)


def test_named_policies_and_classes():
    @ts.numerics.policy("training")
    class Training(ts.NumericalPolicy):
        storage = ts.bf16
        compute = ts.bf16
        accumulate = ts.f32
        rounding = "nearest"

    with ts.numerics(Training):
        one = ts.Tensor([1.0]) + 1.0
    with ts.numerics("training"):
        other = ts.Tensor([1.0]) + 1.0
    assert one.type == other.type == ts.Tensor[1, ts.bf16 @ ts.compute(ts.bf16) @ ts.accum(ts.f32)]
    assert ts.Tensor["D", Training].policy == Training.__policy__


def test_a_policy_that_quantizes():
    @ts.precision_policy
    class Quantized:
        storage = ts.int8
        scale = ts.f32
        compute = ts.f32
        accumulate = ts.f32

        def quantize(self, x):
            scale = ts.max(ts.abs(x)) / 127.0
            return ts.round(x / scale).astype(ts.int8), scale

        def dequantize(self, x, scale):
            return x.astype(ts.f32) * scale

    weights = ts.Tensor["D", "D", Quantized]
    assert weights.dtype is ts.int8 and weights.policy.accumulate is ts.f32
    policy = Quantized()
    assert ts.allclose(policy.dequantize(*policy.quantize(ts.Tensor(W))), W, atol=np.abs(W).max() / 254)

    @ts.jit
    def product(x: ts.Tensor["N", "D", ts.f32], w: weights, scale: ts.Tensor[ts.f32]):
        return x @ policy.dequantize(w, scale)

    square = G.normal(size=(8, 8)).astype(np.float32)
    q, scale = policy.quantize(ts.Tensor(square))
    np.testing.assert_allclose(product(X[:, :8], q, scale).numpy(), X[:, :8] @ square, atol=0.2)


def test_types_keep_policies_through_gradients():
    x = ts.Tensor(X, ts.bf16 @ ts.accum(ts.f32))
    g = ts.grad(lambda x: (x * x).sum())(x)
    assert g.dtype is ts.bf16
    with ts.precision("mixed"):
        assert ts.grad(lambda x: (x * x).sum())(ts.Tensor([3.0])).item() == 6.0


def test_adaptive():
    class Adaptive(ts.PrecisionPolicy):
        def select_precision(self, tensor, grad_scale):
            return ts.f32 if grad_scale > 1e3 else ts.bf16 if grad_scale > 1 else ts.fp8_e4m3

    step = ts.adaptive_precision(Adaptive())(ts.jit(lambda x: x * 2.0))
    seen = []
    for gradient in (0.5, 2.0, 5e3):
        step.observe({"w": ts.Tensor([-gradient])})
        seen.append(step(ts.Tensor([1.0])).dtype)
    assert seen == [ts.fp8_e4m3, ts.bf16, ts.f32]


def test_bad_policies():
    for call, error, match in (
        (lambda: ts.precision("medium"), ArgumentError, "no policy 'medium'"),
        (lambda: ts.precision(store=ts.int8), DTypeError, "stores floats"),
        (lambda: ts.numerics(rounds="up"), ArgumentError, "no clause rounds"),
        (lambda: ts.numerics(round="up"), DTypeError, "no rounding 'up'"),
        (lambda: ts.numerics(3), ArgumentError, "3 is not a policy"),
        (lambda: ts.precision_policy(type("P", (), {})), ArgumentError, "no storage"),
        (lambda: ts.Policy(ts.f16, denormals="drop"), DTypeError, "no denormals"),
        (lambda: ts.precision(compute="f17"), DTypeError, "not an element type"),
    ):
        with pytest.raises(error, match=match):
            call()


def test_contexts_leave_lowerings_and_kernels_alone(tmp_path):
    """What a composite is made of, and what a kernel says, are not cast again."""

    @ts.kernel
    def twice(x: ts.Tensor["N", ts.f32], y: ts.Tensor["N", ts.f32]):
        i = ts.tile.program_id(0)
        y[i] = x[i] * 2.0

    out = np.zeros(4, np.float32)
    with ts.precision(store=ts.bf16):
        twice[4](np.float32([1, 2, 3, 4.1]), out)
        normal = ts.layer_norm(ts.Tensor(X))
        gradient = ts.grad(lambda x: ts.softmax(x).max())(ts.Tensor(X[0]))
        folder = ts.build(ts.jit(lambda x: ts.softmax(x)), X, out=tmp_path / "a")
    assert out[3] == np.float32(4.1) * 2 and normal.dtype is ts.bf16 and gradient.dtype is ts.f32
    assert ts.load(folder)(X).dtype is ts.bf16


def round_to_f16(x):
    return x.astype(np.float16).astype(np.float32)


def test_products_multiply_in_the_compute_type():
    """Operands are rounded, sums and results are not: as of NumPy with operands rounded to f16."""
    with ts.precision("mixed"):
        y = ts.Tensor(X) @ ts.Tensor(W)
        z = ts.einsum("ij,kj->ik", ts.Tensor(X), ts.Tensor(W.T))
    want = round_to_f16(X) @ round_to_f16(W)
    assert y.dtype is ts.f32 and y.type.policy.compute is ts.f16
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(z.numpy(), want, rtol=1e-6, atol=1e-6)
    assert np.abs(want - X @ W).max() > 1e-4


def test_a_wider_compute_type_and_integers_change_no_product():
    with ts.precision(compute=ts.f32):
        assert (ts.Tensor(X.astype(np.float64)) @ ts.Tensor(W.astype(np.float64))).numpy().dtype == np.float64
    with ts.precision(compute=ts.f32):
        y = ts.Tensor(X, ts.f16) @ ts.Tensor(W, ts.f16)
    np.testing.assert_array_equal(y.numpy(), (ts.Tensor(X, ts.f16) @ ts.Tensor(W, ts.f16)).numpy())
    with ts.precision("mixed"):
        assert (ts.ones((2, 300), ts.int32) @ ts.ones((300, 2), ts.int32)).tolist() == [[300, 300], [300, 300]]


def test_gradients_multiply_in_the_compute_type_and_stay_wide():
    torch = pytest.importorskip("torch")

    def loss(x, w):
        with ts.precision(compute=ts.bf16):
            return (x @ w).sum()

    gx, gw = ts.jit(ts.grad(loss, argnums=(0, 1)))(ts.Tensor(X), ts.Tensor(W))
    x, w = (torch.tensor(a, requires_grad=True) for a in (X, W))
    with torch.autocast("cpu", torch.bfloat16):
        (x @ w).sum().backward()
    assert gx.dtype is gw.dtype is ts.f32
    np.testing.assert_allclose(gx.numpy(), x.grad.numpy(), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(gw.numpy(), w.grad.numpy(), rtol=1e-2, atol=1e-2)


def test_attention_in_a_context_is_that_of_rounded_operands():
    q, k, v = (G.normal(size=(2, 4, 8)).astype(np.float32) for _ in range(3))
    with ts.precision("mixed"):
        y = ts.scaled_dot_product_attention(ts.Tensor(q), ts.Tensor(k), ts.Tensor(v), is_causal=True)
    want = ts.scaled_dot_product_attention(*(ts.Tensor(a, ts.f16) for a in (q, k, v)), is_causal=True)
    assert y.dtype is ts.f32
    np.testing.assert_array_equal(y.numpy(), want.numpy().astype(np.float32))


def test_tensor_cores_multiply_in_mixed_precision():
    def layer(x, w):
        with ts.precision("mixed"):
            return ts.relu(x @ w)

    x = ts.ones((256, 256))
    artifact = BACKEND.emit(
        prepare(ts.jit(layer), [x, x], target="ptx").levels["tile"], {"arch": "sm_90a", "debug": False}
    )
    assert ".f32.f16.f16" in artifact.text(TEXT_FILE)


def test_layers_with_wide_parameters_take_narrow_results():
    """Of a context that stores results in a narrower type: operands of a product are cast as those of other ops."""
    hidden = ts.Tensor(G.normal(size=(W.shape[1], 3)).astype(np.float32))
    with ts.precision(compute=ts.bf16, accumulate=ts.f32, store=ts.bf16):
        y = ts.relu(ts.Tensor(X) @ ts.Tensor(W)) @ hidden
    assert y.dtype is ts.bf16
    np.testing.assert_allclose(y.numpy().astype("f4"), np.maximum(X @ W, 0) @ hidden.numpy(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("loss", [
    lambda z: ts.cross_entropy(z, np.arange(8)), lambda z: (z / (z * z + 1.0)).sum(),
    lambda z: (z / ts.Tensor(np.full(8, 3.0, "f4"))).sum(),
], ids=["cross entropy", "quotient", "quotient of two policies"])  # fmt: skip
@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_a_loss_after_the_context_has_a_derivative(loss, target):
    """Operands of the context's policy and of none: derivatives compute in the type of the result."""

    def run(name, x, w):
        with ts.precision(name):
            z = x @ w
        return loss(z)

    narrow, wide = (
        ts.jit(ts.grad(lambda x, w, name=name: run(name, x, w), argnums=(0, 1)), target=target)(X, W)
        for name in ("mixed", "full")
    )
    for g, h in zip(narrow, wide, strict=True):
        assert g.dtype is ts.f32
        np.testing.assert_allclose(g.numpy(), h.numpy(), rtol=0.1, atol=0.02 * np.abs(h.numpy()).max())

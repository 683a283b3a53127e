"""Quantization, loss scaling, compensated sums, stochastic rounding, stable forms, determinism."""

import itertools
import math

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, EffectError, ExecutionError, UnsupportedOpError

G = np.random.default_rng(0)


def ill_conditioned(n, rng):
    """Numbers of which pairs cancel, and what is left of them: the sum of the small ones."""
    large = rng.normal(size=n) * 10.0 ** rng.uniform(0, 6, size=n)
    x = np.concatenate([large, -large, rng.normal(size=n)]).astype(np.float32)
    rng.shuffle(x)
    return x


@pytest.mark.parametrize("target", [None, "interp", "llvm"])
def test_compensated_sums_are_better(target):
    worse = []
    for seed in range(5):
        x = ill_conditioned(3000, np.random.default_rng(seed))
        exact = math.fsum(map(float, x))
        plain, careful = (lambda x: x.sum()), ts.kahan_sum(lambda x: x.sum())
        if target is not None:
            plain, careful = ts.jit(plain, target=target), ts.jit(careful, target=target)
        errors = [abs(f(ts.Tensor(x)).item() - exact) for f in (plain, careful)]
        assert errors[1] <= 4e-7 * max(abs(exact), 1.0) + 1e-12 * np.abs(x).sum()
        worse.append(errors[0] / max(errors[1], 1e-9))
    assert np.median(worse) > 100


def test_compensated_sums_elsewhere():
    """Shapes, infinities, integers and means; and as a clause of a type."""
    x = G.normal(size=(3, 5, 7)).astype(np.float32)
    for axis, keep in itertools.product((None, 1, (0, 2)), (False, True)):
        want = x.astype(np.float64).sum(axis=axis, keepdims=keep)
        np.testing.assert_allclose(ts.compensated_sum(x, axis=axis, keepdims=keep).numpy(), want, rtol=1e-6, atol=1e-6)
    assert ts.compensated_sum([1.0, math.inf]).item() == math.inf and math.isnan(ts.compensated_sum([math.nan]).item())
    assert ts.compensated_sum([1, 2]).item() == 3 and ts.compensated_sum(ts.zeros((0,))).item() == 0.0
    row = ts.Tensor([1e8, 1.0, -1e8, 1.0], ts.f32 @ ts.compensated)
    assert row.sum().item() == 2.0 and row.mean().item() == 0.5
    assert ts.summation.kahan(ts.grad(lambda x: x.sum()))(ts.Tensor([1.0, 2.0])).tolist() == [1.0, 1.0]


def test_stochastic_rounding_is_unbiased_and_repeats():
    @ts.rounding.stochastic
    def stored(x):
        return ts.cast(x, dtype=ts.f32) + 0.0

    with ts.numerics(round="stochastic", store=ts.bf16):
        y = ts.full(shape=(40000,), value=1.0 + 2.0**-9) * 1.0
        again = ts.full(shape=(40000,), value=1.0 + 2.0**-9) * 1.0
    mean = y.numpy().astype(np.float64).mean()
    assert abs(mean - (1 + 2.0**-9)) < 4 * 2.0**-8 / math.sqrt(40000)  # four standard deviations
    assert (y.numpy() != again.numpy()).any()  # each op draws anew
    with ts.numerics(round="stochastic", store=ts.bf16):
        repeated = ts.full(shape=(40000,), value=1.0 + 2.0**-9) * 1.0
    assert (y.numpy() == repeated.numpy()).all() and stored([1.0]).item() == 1.0


def test_many_small_steps_are_not_lost():
    """With nearest-even each step of 2^-10 is lost beside 1 in bf16; stochastic rounding keeps them on average."""
    with ts.numerics(round="stochastic", store=ts.bf16):
        x = ts.ones((200,))
        for _ in range(256):
            x = x + 2.0**-10
    assert abs(x.numpy().astype(np.float64).mean() - 1.25) < 0.02


def test_fake_quantization_passes_gradients_through():
    x = ts.Tensor(G.normal(size=(4, 6)).astype(np.float32))
    y = ts.fake_quantize(x, bits=4)
    assert len(np.unique(np.round(y.numpy() / np.abs(x.numpy()).max() * 7))) <= 15
    step = np.abs(x.numpy()).max() / 7
    assert np.abs(y.numpy() - x.numpy()).max() <= step / 2 + 1e-6
    g = ts.grad(lambda x: (ts.fake_quantize(x, bits=4) * 3.0).sum())(x)
    np.testing.assert_array_equal(g.numpy(), np.full((4, 6), 3.0, np.float32))
    rows = ts.fake_quantize(x, axis=0)
    np.testing.assert_allclose(rows.numpy()[1], ts.fake_quantize(x[1]).numpy(), rtol=1e-6)


def test_quantization_aware():
    x, w = (ts.Tensor(G.normal(size=s).astype(np.float32)) for s in ((5, 8), (8, 3)))

    @ts.quantization_aware(weights=ts.int8, activations=ts.int8, accumulate=ts.int32)
    def layer(x, w):
        return ts.relu(ts.matmul(x, w))

    simulated, real, plain = layer(x, w), layer.eval()(x, w), ts.relu(x @ w)
    np.testing.assert_allclose(simulated.numpy(), real.numpy(), atol=1e-5)
    assert 0 < np.abs(simulated.numpy() - plain.numpy()).max() < 0.2
    np.testing.assert_allclose(ts.grad(lambda w: layer(x, w).sum())(w).numpy(), _gradient(x, w), atol=0.1)
    graph = ts.jit(layer.eval()).trace(x, w).function
    assert "int8" in {str(v.type.dtype) for n in graph.body.nodes if n.op.name == "ts.dot" for v in n.args}


def _gradient(x, w):
    return ts.grad(lambda w: ts.relu(x @ w).sum())(w).numpy()


def test_loss_scaling():
    @ts.mixed_precision(compute=ts.f16, accumulate=ts.f32, grad_scale=1024)
    def step(w, x):
        def scaled(w):
            with ts.autocast():
                return (x * w).sum() * ts.grad_scale()

        return ts.unscale_grads({"w": ts.grad(scaled)(w)})

    assert step(ts.Tensor([2.0]), ts.Tensor([3.0]))["w"].tolist() == [3.0] and ts.grad_scale() == 1.0
    scaler = ts.LossScaler(scale=2.0**16, interval=2)
    gradients, good = scaler.unscale([ts.Tensor([math.inf])])
    assert not good and scaler.update(good) == 2.0**15
    assert [scaler.update(True) for _ in range(4)] == [2.0**15, 2.0**16, 2.0**16, 2.0**17]
    small = ts.Tensor([2.0**-20], ts.f16) * 0.25
    assert small.item() == 2.0**-22 and scaler.unscale(scaler.scale(small))[0].item() == 2.0**-22


def test_numerically_stable():
    x = ts.Tensor((1e4 + G.normal(size=4096)).astype(np.float32))
    want = np.var(x.numpy().astype(np.float64))

    @ts.numerically_stable
    def stable(x):
        return x.var(), ts.softmax(ts.Tensor([-math.inf, -math.inf])), ts.layer_norm(x)

    spread, weights, normal = stable(x)
    np.testing.assert_allclose(spread.item(), want, rtol=1e-4)
    assert weights.tolist() == [0.0, 0.0] and abs(normal.numpy().std() - 1.0) < 1e-3


def test_all_reduce_is_of_one_process_or_refused(monkeypatch):
    x = ts.Tensor([1.0, 2.0])
    assert ts.deterministic.all_reduce(x).tolist() == ts.jit(ts.deterministic.all_reduce)(x).tolist() == [1.0, 2.0]
    assert ts.effects.inferred(ts.deterministic.all_reduce, x) == {"collective"}
    with pytest.raises(EffectError):
        ts.pure(lambda x: ts.deterministic.all_reduce(x))(x)
    with pytest.raises(ArgumentError, match="median"):
        ts.deterministic.all_reduce(x, "median")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UnsupportedOpError, match="over 4 processes"):
        ts.deterministic.all_reduce(x)


def test_deterministic():
    @ts.deterministic(seed=42)
    def train(steps):
        out = []
        for _ in range(steps):
            with ts.deterministic.scope():
                out.append(ts.deterministic.dropout(ts.ones((64,)), p=0.5).tolist())
                out.append(ts.rand((2,)).tolist())
        return out

    ts.manual_seed(7)
    before = ts.rand((2,)).tolist()
    assert train(2) == train(2)
    ts.manual_seed(7)
    assert ts.rand((2,)).tolist() == before
    assert ts.verify_determinism(lambda x: ts.dropout(x) + ts.randn((64,)), ts.ones((64,)), num_runs=3) == 3


def test_what_differs_is_named():
    counter = itertools.count()

    def leaky(x):
        y = x * 2.0
        return ts.exp(y + float(next(counter)))

    with pytest.raises(ExecutionError, match="run 2 differs from run 1"):
        ts.verify_determinism(leaky, ts.ones((3,)))
    with pytest.raises(ExecutionError, match=r"ts.add gives other bits in a second run") as found:
        ts.debug.deterministic(leaky)(ts.ones((3,)))
    assert found.value.location.file == __file__
    assert ts.debug.deterministic(lambda x: x + ts.rand((3,)))(ts.ones((3,))).shape == (3,)


def test_bad_calls():
    for call, error in (
        (lambda: ts.fake_quantize([1.0], bits=1), ArgumentError),
        (lambda: ts.fake_quantize([1]), DTypeError),
        (lambda: ts.quantize([1.0], ts.uint8), DTypeError),
        (lambda: ts.quantization_aware(weights=ts.f16), DTypeError),
        (lambda: ts.mixed_precision(grad_scale=0.0), ArgumentError),
        (lambda: ts.deterministic(seed="x"), ArgumentError),
        (lambda: ts.quantization.aware(calibrate=False), ArgumentError),
    ):
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_a_number_is_rounded_by_the_policy_of_its_tensor(run):
    """Once: a number beyond the range saturates, and one between two values goes toward zero."""

    def saturated(x):
        with ts.numerics(saturate=True, store=ts.fp8_e5m2):
            return x * 2.0**18

    def cut(x):
        with ts.numerics(rounding="toward_zero", store=ts.bf16):
            return x * (1.0 + 2.0**-8 + 2.0**-9)

    x = ts.Tensor([0.5, 0.0, -0.25, 4.0])
    assert run(saturated)(x).tolist() == [28672.0, 0.0, -14336.0, 57344.0]
    assert run(cut)(x).tolist() == [0.5, 0.0, -0.25, 4.0]
    held = ts.cast(x, dtype=ts.f16 @ ts.saturate)
    assert run(lambda x: ts.pad(x, [(0, 1)], value=1e6))(held).tolist()[-1] == 65504.0

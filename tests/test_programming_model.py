"""The programming model, chapter by chapter: each way to write a program that it shows, whole and running."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest

import tessera
import tessera as ts
from tessera import Policy, Tensor, accum, bf16, f32, fp8_e4m3, int8, int32, tf32
from tessera.errors import DTypeError, EffectError, ShapeError

X = np.arange(12, dtype="f4").reshape(3, 4) / 10


def close(found, want, rtol=1e-5):
    np.testing.assert_allclose(np.asarray(found, "f8"), want, rtol=rtol, atol=1e-6)


# Chapter 1


def test_1_1_a_function_with_contracts():
    weights = {(4, 6): ts.ones((4, 6)), (6, 2): ts.ones((6, 2))}

    def linear(x, size):
        return x @ weights[x.shape[-1], size]

    @tessera.function
    def model(x: Tensor["B", "D_in"]) -> Tensor["B", "D_out"]:
        return linear(ts.relu(linear(x, 6)), 2)

    assert model(X).shape == (3, 2)

    @tessera.function
    def wrong(x: Tensor["B", "D"]) -> Tensor["B", "D"]:
        return ts.sum(x, axis=-1)

    with pytest.raises(ShapeError, match="does not return what it says"):
        wrong(X)


def test_1_2_numbers_and_places_are_explicit():
    x: Tensor["B", "D", bf16 @ accum(f32)] = ts.ones((2, 3)).to(bf16)
    weights = ts.ones((3, 4)).to(bf16)
    with tessera.device("cpu"), tessera.prefetch(weights, "L2_cache"):
        y = ts.matmul(x, weights)
    assert y.dtype == bf16 and (y.numpy() == 3).all()


@tessera.kernel
def doubled_rows(x, out, *, TILE_M: int = 2, WARPS: int = 4):
    i = tessera.tile.program_id(0) * TILE_M
    out[i : i + TILE_M, :] = x[i : i + TILE_M, :] * 2.0


def test_1_3_everything_just_works_and_control_of_what_matters():
    sizes = {"vocabulary": 50, "context": 8, "width": 8, "layers": 1, "heads": 2}  # not those of the published model
    input = np.arange(12).reshape(2, 6)
    assert tessera.models.GPT2(**sizes)(input).shape == (2, 6, 50)
    model = tessera.models.GPT2(precision="mixed", attention="flash2", compile_mode="optimize", **sizes)
    assert model(input).shape == (2, 6, 50)


def test_1_3_control_of_everything():
    seen = []
    doubled_rows.before(lambda launch: seen.append((launch.constants, launch.group)))

    def custom_kernel(x):
        out = ts.zeros(x.shape)
        doubled_rows[lambda c: (-(-4 // c["TILE_M"]),)](x, out)
        return out @ x

    @tessera.custom
    def expert_model(x):
        with tessera.schedule(tile_size=4, warps=8):
            with tessera.numerics(accumulate=tf32, round="stochastic"):
                return custom_kernel(x)

    close(expert_model(np.ones((4, 4), "f4")), np.full((4, 4), 8))
    assert seen[0][0] == {"TILE_M": 4, "WARPS": 8}


# Chapter 2


def test_2_1_sizes_are_followed():
    @ts.jit
    def attention(q: Tensor["B", "H", "S", "D"], k: Tensor["B", "H", "S", "D"]) -> Tensor["B", "H", "S", "S"]:
        return ts.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]))

    q = ts.rand((2, 3, 4, 5), generator=ts.Generator(0))
    close(attention(q, q).sum(-1), np.ones((2, 3, 4)))
    with pytest.raises(ShapeError):
        attention(q, q[:, :, :, :3])


def test_2_1_broadcasting():
    @ts.jit
    def add(x: Tensor["B", "S", "D"], y: Tensor["D"], z: Tensor["1", "S", "1"]) -> Tensor["B", "S", "D"]:
        return x + y + z

    assert add(ts.ones((2, 3, 4)), ts.ones((4,)), ts.ones((1, 3, 1))).shape == (2, 3, 4)

    @ts.jit
    def invalid(x: Tensor["B", "S", "D"], y: Tensor["B", "K", "D"]) -> Tensor["B", "S", "D"]:
        return x + y

    report = str(ts.check(invalid))
    assert "Cannot broadcast S with K in dimension 1" in report and "Possible fixes:" in report
    with pytest.raises(ShapeError, match="cannot broadcast S = 3 with K = 5"):
        invalid(ts.ones((2, 3, 4)), ts.ones((2, 5, 4)))


def test_2_1_static_and_dynamic_sizes():
    weight = ts.ones((768, 10))

    @ts.jit
    def static_model(x: Tensor["?", 768]) -> Tensor["?", 10]:
        return x @ weight

    @ts.jit
    @ts.require("D % 8 == 0")
    def dynamic_model(x: Tensor["?", "D"]) -> Tensor["?", "D"]:
        return x * 2.0

    @ts.jit
    def checked_when_run(x: Tensor) -> Tensor:
        assert x.shape[-1] == 4, "the last size is 4"
        return x * 2.0

    assert static_model(ts.ones((3, 768))).shape == (3, 10)
    assert dynamic_model(ts.ones((2, 16))).shape == (2, 16)
    assert checked_when_run(X).shape == (3, 4)
    for refused in (lambda: static_model(ts.ones((3, 5))), lambda: dynamic_model(ts.ones((2, 15)))):
        with pytest.raises(ShapeError):
            refused()


def test_2_2_policies():
    storage = Policy(storage=fp8_e4m3, compute=bf16, accumulate=f32, rounding="stochastic", saturate=True)
    assert Tensor["B", "D", storage].policy == storage

    @tessera.numerics.policy("training")
    class Training(tessera.NumericalPolicy):
        storage = bf16
        compute = bf16
        accumulate = f32
        rounding = "nearest"

    @tessera.numerics.policy("inference")
    class Inference(tessera.NumericalPolicy):
        storage = fp8_e4m3
        accumulate = bf16
        rounding = "stochastic"
        saturate = True

    found = []
    for policy in (Training, Inference):
        with tessera.numerics(policy):
            found.append((ts.ones((3, 3)) @ ts.ones((3, 3))).dtype)
    assert found == [bf16, fp8_e4m3]


def test_2_3_effects():
    @tessera.pure
    def add(x, y):
        return x + y

    @tessera.effects(["random", "io"])
    def dropout(x, p=0.5):
        return x * tessera.random.bernoulli(p, x.shape)

    def composed(x):
        return dropout(add(x, x))

    @tessera.effects(["all"])
    def step(batch):
        with tessera.effects.suspend("io"):
            loss = add(batch, batch).sum()
        return loss

    @tessera.effects(["memory"])
    def prefetch_weights(weights):
        tessera.memory.prefetch_to_l2(weights)

    assert tessera.effects.of(composed) == {"random", "io"}
    assert step(ts.ones((3,))).item() == 6 and prefetch_weights(ts.ones((3,))) is None
    with pytest.raises(EffectError):
        tessera.function(composed)(ts.ones((3,)))


# Chapter 3


def test_3_1_definitions():
    @tessera.function
    def layer_norm(x: Tensor["...", "D"]) -> Tensor["...", "D"]:
        mean, std = x.mean(dim=-1, keepdim=True), x.std(dim=-1, keepdim=True)
        return (x - mean) / (std + 1e-5)

    @tessera.compile
    @tessera.checkpoint
    @tessera.function
    def layer(x):
        return ts.tanh(x) + x

    @tessera.function
    @tessera.specialize_for("A100", "H100")
    def specialised(x: Tensor) -> Tensor:
        return x * (1.0 if tessera.current_device() == "A100" else 2.0)

    assert abs(layer_norm(X).numpy().mean()) < 1e-6
    close(layer(X), np.tanh(X) + X)
    close(specialised(X), X)


def test_3_2_composition():
    from tessera.functional import compose, curry, pipe

    def scale(factor):
        return lambda x: x * factor

    close(compose(scale(2.0), lambda x: x - x.mean())(ts.tensor([1.0, 3.0])), [-2, 2])
    assert pipe(int, str, len)(12.5) == 2
    assert curry(lambda q, k, dim, heads: (q, k, dim, heads), dim=128, heads=8)(1, 2) == (1, 2, 128, 8)

    @tessera.maybe
    def divide(x: Tensor, y: Tensor) -> tessera.Maybe[Tensor]:
        return tessera.Nothing() if (y == 0).any() else tessera.Just(x / y)

    found = [divide(ts.ones((2,)), y).map(lambda z: z + 1).unwrap_or(None) for y in (ts.ones((2,)), ts.zeros((2,)))]
    close(found[0], [2, 2])
    assert found[1] is None


def test_3_3_higher_order():
    w_h, w_x, w_o = ts.eye(4), ts.ones((5, 4)) / 10, ts.ones((4, 5))

    @tessera.scan
    def cell(carry: Tensor["H"], x: Tensor["D"]) -> tuple[Tensor["H"], Tensor["D"]]:
        new = ts.tanh(carry @ w_h + x @ w_x)
        return new, new @ w_o

    @tessera.fold
    def tree_sum(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @tessera.vmap(in_dims=0, out_dims=0)
    def twice(x: Tensor["D"]) -> Tensor["D"]:
        return x * 2.0

    carry, outputs = cell(ts.zeros((4,)), ts.ones((7, 5)))
    assert carry.shape == (4,) and outputs.shape == (7, 5)
    close(tree_sum(ts.ones((7, 3))), [7, 7, 7])
    close(twice(X), X * 2)


def test_3_3_control_flow():
    @tessera.while_loop
    def refine(x: Tensor, condition: Callable, max_iters: int = 100) -> Tensor:
        @tessera.jit
        def body(x, i):
            return x * 0.5, i + 1

        return tessera.while_loop(cond=lambda x, i: condition(x) and i < max_iters, body=body, init=(x, 0))[0]

    close(refine(ts.ones((3,)), lambda x: x.sum() > 1.0), [0.25] * 3)


def test_3_4_transformations():
    def loss(params, x):
        return ts.mse(x @ params, ts.zeros((3, 2)))

    value, gradient = tessera.value_and_grad(loss)(ts.ones((4, 2)), X)
    close(gradient, tessera.grad(loss, argnums=0)(ts.ones((4, 2)), X).numpy())
    close(value, (X.sum(1) ** 2).mean())
    close(tessera.grad(tessera.grad(lambda x: x**3))(ts.tensor(2.0)), 12)

    @tessera.jit(static_argnums=(1,))
    def flexible(x: Tensor["?", "?"], size: int):
        return x @ ts.ones((x.shape[-1], size))

    assert flexible(X, 5).shape == (3, 5)

    @tessera.checkpoint(policy="selective")
    def deep(x):
        for layer in (ts.tanh, ts.exp):
            x = tessera.checkpoint_here(layer(x))
        return x

    close(tessera.grad(lambda x: deep(x).sum())(ts.tensor([0.0])), [1])


# Chapters 6 and 7


def test_6_1_precision():
    def model(x):
        return x @ x.T

    with tessera.precision("mixed"):  # computes in f16, where 1 + 1/4096 is 1
        mixed = model(ts.ones((3, 3)) * (1 + 1 / 4096))
    with tessera.precision(compute=bf16, accumulate=f32, store=fp8_e4m3):
        stored = model(ts.ones((3, 3)))
    assert (mixed.numpy() == 3).all() and stored.dtype == fp8_e4m3

    class Adaptive(tessera.PrecisionPolicy):
        def select_precision(self, tensor, grad_scale):
            return f32 if grad_scale > 1e3 else bf16

    close(tessera.adaptive_precision(Adaptive())(model)(ts.ones((3, 3))), np.full((3, 3), 3))
    quantised = tessera.quantization_aware(weights=int8, activations=int8, accumulate=int32)(model)
    close(quantised(ts.ones((3, 3))), np.full((3, 3), 3), rtol=0.02)


def test_6_2_stability():
    scope = {}
    exec("from tessera.stable import *", scope)
    assert {"softmax", "logsumexp", "variance", "mean"} & set(scope)

    @tessera.numerically_stable
    def layer_norm(x: Tensor, eps: float = 1e-5) -> Tensor:
        mean = tessera.stable.mean(x)
        return (x - mean) / ts.sqrt(tessera.stable.variance(x, mean) + eps)

    @tessera.kahan_sum
    def precise(x: Tensor) -> Tensor:
        return ts.sum(x)

    @tessera.stable.attention
    def attention(q, k, v, temperature=1.0):
        return tessera.stable.scaled_dot_product_attention(q, k, v, temperature=temperature, use_log_space=True)

    assert abs(float(layer_norm(X).numpy().mean())) < 1e-6
    close(precise(ts.tensor([1e8, 1.0, -1e8])), 1)
    assert attention(*(ts.ones((2, 3, 4)) for _ in range(3))).shape == (2, 3, 4)


def test_6_3_determinism():
    @tessera.deterministic(seed=42)
    def train(batches):
        with tessera.deterministic.scope():
            losses = [tessera.deterministic.all_reduce(b.sum() * ts.rand((1,))) for b in batches]
        return losses, tessera.deterministic.dropout(ts.ones((50,)), p=0.1)

    first, second = train([ts.ones((3,))] * 2), train([ts.ones((3,))] * 2)
    assert tessera.allclose(first[1], second[1], rtol=0, atol=0)
    assert all(tessera.allclose(a, b, rtol=0, atol=0) for a, b in zip(first[0], second[0], strict=True))


def test_7_custom_rules_and_estimators():
    @tessera.custom_vjp
    def relu(x):
        return tessera.maximum(x, 0)

    relu.defvjp(lambda x: (tessera.maximum(x, 0), x > 0), lambda mask, g: g * mask)

    @tessera.custom_jvp
    def divide(x, y):
        return x / y

    @divide.defjvp
    def _(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        return x / y, (dx * y - x * dy) / (y * y)

    @tessera.straight_through
    def quantise(x):
        return tessera.round(x)

    @tessera.checkpoint.policy("selective")
    def checked(x):
        return ts.tanh(tessera.checkpoint_here(ts.exp(x)))

    x = ts.tensor([-1.0, 2.0])
    close(tessera.grad(lambda x: relu(x).sum())(x), [0, 1])
    close(tessera.grad(lambda x: divide(x, x + 3.0).sum())(x), [0.75, 0.12])
    close(tessera.grad(lambda x: quantise(x).sum())(x), [1, 1])
    close(tessera.grad(lambda x: (tessera.stop_gradient(x) * x).sum())(x), [-1, 2])
    assert tessera.grad(lambda x: checked(x).sum())(x).shape == (2,)


def test_7_implicit_differentiation():
    @tessera.implicit_diff
    def fixed_point(f, x, max_iters=100):
        for _ in range(max_iters):
            new = f(x)
            if tessera.allclose(x, new):
                break
            x = new
        return x

    @tessera.diff_through_opt
    def argmin(x, objective):
        return tessera.optimize(lambda y: objective(x, y), init=tessera.zeros_like(x))

    close(fixed_point(ts.cos, ts.tensor(1.0)), 0.739085, rtol=1e-4)
    close(tessera.grad(lambda x: argmin(x, lambda x, y: ((y - x * x) ** 2).sum()).sum())(ts.ones((2,))), [2, 2], 1e-3)

    def penalty(discriminator, real, fake):
        alpha = tessera.random.uniform((real.shape[0], 1))
        gradient = tessera.grad(discriminator)(alpha * real + (1 - alpha) * fake)
        return ((tessera.norm(gradient, dim=[1]) - 1) ** 2).mean()

    close(penalty(lambda x: x.sum(), ts.ones((2, 4)), ts.zeros((2, 4))), 1)


# Chapter 9: schedules, tuning and models


def test_9_1_schedules():
    whole = tessera.Schedule(
        tile_m=16, tile_n=16, tile_k=8, block_m=32, block_n=16, warps=8, stages=3, vector_width=8, unroll_factor=4,
        prefetch_distance=2, swizzle_pattern="xor",
    )  # fmt: skip
    assert (whole.vector, whole.unroll, whole.prefetch, whole.swizzle) == (8, 4, 2, "xor")

    @tessera.kernel.with_schedule(whole)
    def product(A, B, C):
        return ts.tile.matmul(A, B, C)

    close(product(X, X.T.copy(), np.ones((3, 3), "f4")), X @ X.T + 1)
    base = tessera.Schedule(tile_m=64, tile_n=64)
    assert base.derive(tile_k=16, warps=4) == tessera.Schedule(tile_m=64, tile_n=64, tile_k=16, warps=4)
    assert tessera.Schedule(tile_m=128) | tessera.Schedule(tile_n=128) == tessera.Schedule(tile_m=128, tile_n=128)
    assert base.with_block(64, 32).with_warps(4) == base.derive(block=(64, 32), warps=4)


@pytest.mark.parametrize("metric", ["latency", "latency_ms"])
def test_9_2_tuning_by_a_list(metric, tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "tuned"))

    @tessera.autotune(configs=[{"tile_m": 64, "warps": 4}, {"tile_m": 128, "warps": 8}], metric=metric)
    def product(A, B):
        return ts.tile.matmul(A, B)

    close(product(X, X.T.copy()), X @ X.T)


def test_9_2_tuning_by_a_space(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "tuned"))

    @tessera.autotune.search_space(
        tile_m=[64, 128, 256], tile_n=[64, 256], warps=[2, 8],
        constraints=[lambda c: c.tile_m * c.tile_n <= 16384, lambda c: c.warps * 32 <= c.tile_m],
    )  # fmt: skip
    def double(x, y):
        y[...] = x * 2.0

    trials = double[1,].tune(X, np.zeros_like(X)).trials
    found = [dict(t.config) for t in trials]
    assert 0 < len(found) < 12
    assert all(c["tile_m"] * c["tile_n"] <= 16384 and c["warps"] * 32 <= c["tile_m"] for c in found)


def test_9_3_models_of_performance(tmp_path, monkeypatch):
    class Roofline(tessera.PerformanceModel):
        def predict(self, kernel):
            flops, moved = kernel.count_flops(), kernel.count_memory_bytes()
            return max(flops / 1e12, moved / 1e12)

    class Measured(tessera.PerformanceModel):
        def __init__(self):
            self.seen = defaultdict(list)

        def predict(self, kernel):
            times = []
            for _ in range(3):
                start = tessera.time()
                kernel.run()
                times.append(tessera.time() - start)
            return statistics.median(times)

    for number, model in enumerate((Roofline(), Measured())):
        monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / f"tuned{number}"))

        @tessera.autotune(configs=[{"B": 2}, {"B": 4}], search=ts.Guided(model, keep=1))
        def double(x, y, *, B: int = 2):
            i = ts.tile.program_id(0) * B
            y[i : i + B] = x[i : i + B] * 2.0

        x, y = np.ones(8, "f4"), np.zeros(8, "f4")
        double[lambda c: (8 // c["B"],)](x, y)
        assert (y == 2).all()


# Chapter 12 and 13


def test_12_1_messages():
    def attention(x: Tensor["B", "S", 768]) -> Tensor["B", "S", 768]:
        return x * 2.0

    def block(x: Tensor["B", "S", 512]) -> Tensor["B", "S", 512]:
        out = attention(x)
        return x + out

    def fp8_only(x: Tensor["N", fp8_e4m3]):
        return x

    def mixed(x: Tensor["N", bf16]):
        return fp8_only(x)

    shape, dtype = str(ts.check(block)), str(ts.check(mixed))
    for part in ("Shape mismatch in function 'block'", 'Expected: Tensor["B", "S", 768]', "^^^", "Possible fixes:",
                 'Received: Tensor["B", "S", 512]', "Stack trace:", "in attention",
                 "2. Project it first: x @ w, where w is Tensor[512, 768]"):  # fmt: skip
        assert part in shape
    assert "Numerical type mismatch in function 'mixed'" in dtype and "x.to(ts.fp8_e4m3)" in dtype
    with pytest.raises(DTypeError):
        ts.jit(fp8_only)(ts.ones((2,)))


def test_13_memory_and_rounding():
    @tessera.memory.reuse
    def reuse(x):
        with tessera.memory.buffer(size="1MB") as buffer:
            first = buffer.allocate(x.shape)
            second = buffer.reuse(first)
        return x * 2.0 + second * 0.0

    @tessera.quantization.aware(weights=int8, activations=int8, calibrate=True)
    def quantised(x):
        return tessera.fake_quantize(x, bits=8) @ ts.eye(4)

    @tessera.rounding.stochastic
    def rounded(x):
        return x + 1.0

    @tessera.summation.kahan
    def precise(x: Tensor) -> Tensor:
        return x.sum()

    assert reuse(ts.ones((3,))).shape == (3,)
    close(quantised(X), X, rtol=0.05)
    close(rounded(X), X + 1)
    close(precise(ts.tensor([1e8, 1.0, -1e8])), 1)


def test_4_3_memory_of_results(tmp_path):
    calls = []

    @tessera.memoize(maxsize=1000, typed=True)
    def expensive(x):
        calls.append("memoised")
        return x * 2.0

    @tessera.persistent_cache(str(tmp_path / "cache.db"))
    def forward(x: Tensor, version: str) -> Tensor:
        calls.append(version)
        return x * 3.0

    for _ in range(2):
        close(expensive(ts.ones((2,))), [2, 2])
        close(forward(ts.ones((2,)), "1"), [3, 3])
    assert calls == ["memoised", "1"]


def test_5_1_gradient_accumulation():
    @tessera.gradient_accumulation(steps=4)
    def train(batch):
        return (batch * 2.0).sum()

    assert np.isfinite(train(ts.ones((8, 3))).numpy())

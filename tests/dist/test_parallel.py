"""Parallel layers, data parallelism, ZeRO and pipelines against the same on one device (PyTorch, NumPy)."""

import numpy as np
import pytest

import tessera as ts
from tessera.dist import P, bubble_share, count_held, list_actions
from tessera.errors import ArgumentError, ShapeError

rng = np.random.default_rng(3)
mesh = ts.Mesh((4,), "x")


def draw(*shape, dtype="f4"):
    return ts.Tensor(rng.standard_normal(shape).astype(dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ring_attention_is_attention(ranks, causal):
    torch = pytest.importorskip("torch")
    q, k, v = (draw(2, 3, 8, 5) for _ in range(3))
    ring = ts.spmd(
        lambda q, k, v: ts.dist.ring_attention(q, k, v, causal=causal),
        mesh=ts.Mesh(ranks, "s"), in_specs=P(None, None, "s"), out_specs=P(None, None, "s"),
    )  # fmt: skip
    inputs = [torch.tensor(x.numpy(), requires_grad=True) for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
    np.testing.assert_allclose(ring(q, k, v), wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
    (wanted**2).mean().backward()
    loss = ts.spmd(
        lambda q, k, v: ts.all_reduce((ts.dist.ring_attention(q, k, v, causal=causal) ** 2.0).mean(), "mean"),
        mesh=ts.Mesh(ranks, "s"), in_specs=P(None, None, "s"),
    )  # fmt: skip
    for g, x in zip(ts.grad(loss, argnums=(0, 1, 2))(q, k, v), inputs, strict=True):
        np.testing.assert_allclose(g, x.grad.numpy(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f64", "bf16"])
def test_ring_attention_in_other_types(dtype):
    q, k, v = (draw(2, 12, 5, dtype="f8").to(getattr(ts, dtype)) for _ in range(3))
    ring = ts.spmd(
        ts.dist.ring_attention, mesh=ts.Mesh(3, "s"), in_specs=P(None, "s"), out_specs=P(None, "s"), target="llvm"
    )
    found = ring(q, k, v)
    q, k, v = (x.numpy().astype("f8") for x in (q, k, v))
    weights = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(5))
    wanted = weights / weights.sum(-1, keepdims=True) @ v
    assert found.dtype == getattr(ts, dtype)
    np.testing.assert_allclose(found.numpy().astype("f8"), wanted, atol=1e-13 if dtype == "f64" else 2**-7)


@pytest.mark.parametrize("capacity", [2, 5, 20])
def test_expert_parallel_drops_what_is_beyond_capacity(capacity):
    x, gate, w = draw(20, 6), draw(6, 8), draw(8, 6, 6)

    def layer(x, gate, w):
        gates = ts.softmax(x @ gate, axis=-1)
        return ts.dist.expert_parallel(x, gates, lambda tokens: tokens @ w, capacity)

    specs = (P("x"), None, P("x"))
    found = ts.spmd(layer, mesh=mesh, in_specs=specs, out_specs=P("x"))(x, gate, w)
    gates = np.exp(x.numpy() @ gate.numpy())
    gates /= gates.sum(1, keepdims=True)
    wanted = np.zeros((20, 6), "f4")
    for rank in range(4):
        taken = np.zeros(8, int)
        for t in range(5 * rank, 5 * rank + 5):
            best = gates[t].argmax()
            taken[best] += 1
            if taken[best] <= capacity:
                wanted[t] = gates[t, best] * (x.numpy()[t] @ w.numpy()[best])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert capacity != 2 or (wanted == 0).all(1).any()


def test_data_parallel_compiles_once_and_names_the_function():
    w, x, y = draw(3, 1), draw(8, 3), draw(8, 1)
    traced = []

    def error(w, x, y):
        traced.append(1)
        return ts.mse_loss(x @ w, y)

    whole, parts = ts.mse_loss(x @ w, y), ts.data_parallel(error, devices=4, batch_argnums=(1, 2), target="llvm")
    np.testing.assert_allclose(parts(w, x, y), whole, rtol=1e-6)
    count = len(traced)
    np.testing.assert_allclose(parts(w * 2.0, x, y), ts.mse_loss(x @ w * 2.0, y), rtol=1e-6)
    assert len(traced) == count
    for call in (parts, ts.value_and_grad(parts)):
        with pytest.raises(ShapeError, match="argument 1 of error of size 7"):
            call(w, draw(7, 3), draw(7, 1))


def test_data_parallel_cuts_batches_however_they_are_passed():
    def model(w, scale=2.0, x=None):
        return (x @ w) * scale

    w, x = draw(3), draw(8, 3)
    want = x.numpy() @ w.numpy() * 2
    np.testing.assert_allclose(ts.data_parallel(model, devices=4, batch_argnums=2)(w, x=x), want, atol=1e-6)
    np.testing.assert_allclose(ts.data_parallel(model, devices=4, batch_argnums=-1)(w, 2.0, x), want, atol=1e-6)
    loss = ts.data_parallel(lambda w, x: (x @ w).sum(), devices=4, batch_argnums=1)
    np.testing.assert_allclose(ts.grad(loss)(w, x=x), x.numpy().sum(0) / 4, rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match="argument 3"):
        ts.data_parallel(model, devices=4, batch_argnums=3)(w, 2.0, x)


def test_data_parallel_averages():
    w, x, y = draw(3), draw(8, 3), draw(8)

    def loss(w, x, y):
        return ((x @ w - y) ** 2.0).mean()

    ranks = ts.data_parallel(loss, devices=["gpu:0", "gpu:1", "gpu:2", "gpu:3"], batch_argnums=(1, 2))
    np.testing.assert_allclose(ranks(w, x, y), loss(w, x, y), rtol=1e-6)
    for i in (0, 1):
        np.testing.assert_allclose(ts.grad(ranks, argnums=i)(w, x, y), ts.grad(loss, argnums=i)(w, x, y), rtol=1e-5)
    np.testing.assert_array_equal(ts.data_parallel(lambda x: x * 2.0, devices=4)(x), x.numpy() * 2)
    with pytest.raises(ShapeError, match="no 4 equal parts"):
        ranks(w, draw(6, 3), draw(6))
    with pytest.raises(ArgumentError, match="needs devices"):
        ts.data_parallel(loss)


OPTIMIZERS = {"sgd": lambda: ts.optim.SGD(0.1, momentum=0.9), "adamw": lambda: ts.optim.AdamW(0.01)}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_steps_are_those_of_the_whole_optimizer(stage, name):
    params = {"w": draw(5, 3), "b": draw(3), "one": draw(1)}  # sizes that four ranks do not divide
    xs = draw(3, 8, 5)

    def loss(p, x):
        return (ts.tanh(x @ p["w"] + p["b"]) * p["one"]).sum() / 2.0

    def program():
        zero = ts.dist.ZeroOptimizer(OPTIMIZERS[name](), stage)
        held = zero.shard(params) if stage == 3 else params
        state = zero.init(held)
        assert stage == 1 or all(v.size <= 4 for k, s in state.items() if isinstance(s, dict) for v in s.values())
        for x in xs:
            local = (lambda p, x: loss(zero.gather(p), x)) if stage == 3 else loss
            held, state = zero.update(held, ts.grad(local)(held, ts.shard(x, mesh)), state)
        return zero.gather(held) if stage == 3 else held

    found = ts.spmd(program, mesh=mesh)()
    optimizer, held = OPTIMIZERS[name](), params
    state = optimizer.init(held)
    for x in xs:
        held, state = optimizer.update(held, ts.grad(lambda p, x: loss(p, x) / 4.0)(held, x), state)
    for key in params:
        np.testing.assert_allclose(found[key], held[key], rtol=2e-5, atol=1e-6)


def test_zero_as_a_decorator():
    @ts.zero(stage=3, mesh=mesh, optimizer=ts.optim.SGD(1.0))
    def step(params, gradients):
        params = ts.zero.gather_params(params)
        grads = ts.zero.reduce_scatter_grads(gradients)
        return ts.zero.all_gather(ts.zero.update_local(params, grads))

    found = step({"w": ts.ones((2, 3))}, {"w": ts.full((2, 3), 0.25)})
    np.testing.assert_array_equal(found["w"], np.full((2, 3), 0.75))
    with pytest.raises(ArgumentError, match="no stage 4"):
        ts.zero(stage=4)
    with pytest.raises(ArgumentError, match="Adafactor needs whole ones"):
        ts.dist.ZeroOptimizer(ts.optim.Adafactor())
    with pytest.raises(ArgumentError, match="decorates"):
        ts.zero.all_gather({})


CASES = [("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 2, 1), ("interleaved", 4, 8, 2), ("interleaved", 2, 6, 3)]


@pytest.mark.parametrize(("schedule", "ranks", "micros", "chunks"), CASES)
def test_schedules_run_every_pass_once_and_never_wait_for_ever(schedule, ranks, micros, chunks):
    plans = [list_actions(schedule, r, ranks, micros, chunks) for r in range(ranks)]
    for plan in plans:
        assert sorted(plan) == sorted({(f, c, m) for f in (False, True) for c in range(chunks) for m in range(micros)})
    done, places, last = set(), [0] * ranks, ranks * chunks - 1
    while any(p < len(plan) for p, plan in zip(places, plans, strict=True)):
        before = sum(places)
        for rank, plan in enumerate(plans):
            while places[rank] < len(plan):
                forward, chunk, micro = plan[places[rank]]
                stage = chunk * ranks + rank
                needs = (True, stage - 1, micro) if forward else (False, stage + 1, micro)
                if (
                    (stage if forward else last - stage)
                    and needs not in done
                    or (not forward and (True, stage, micro) not in done)
                ):
                    break
                done.add((forward, stage, micro))
                places[rank] += 1
        assert sum(places) > before, "no rank can go on"


def test_1f1b_holds_few_activations():
    assert [count_held("1f1b", r, 4, 8) for r in range(4)] == [4, 3, 2, 1]
    assert [count_held("gpipe", r, 4, 8) for r in range(4)] == [8] * 4
    assert bubble_share(4, 8, 2) < bubble_share(4, 8)


def test_pipelines_that_do_not_fit():
    ok = [lambda p, x: x] * 4
    mean = ts.dist.Pipeline(ok, lambda y, t: y.mean(), microbatches=3)
    with pytest.raises(ShapeError, match="no 3 equal micro-batches"):
        ts.spmd(lambda: mean.value_and_grad([{}], ts.ones((4, 2)), ts.ones((4,))), mesh=mesh)()
    with pytest.raises(ArgumentError, match="2 parameters for 1 stages"):
        ts.spmd(lambda: mean.value_and_grad([{}, {}], ts.ones((3, 2)), ts.ones((3,))), mesh=mesh)()
    with pytest.raises(ArgumentError, match="no pipeline schedule"):
        ts.dist.Pipeline(ok, len, schedule="zigzag")
    with pytest.raises(ArgumentError, match="multiple of 4"):
        list_actions("interleaved", 0, 4, 6, 2)


def test_layers_that_do_not_fit():
    with pytest.raises(ShapeError, match="ring_attention"):
        ts.spmd(lambda: ts.dist.ring_attention(ts.ones((2, 3)), ts.ones((2, 4)), ts.ones((2, 4))), mesh=mesh)()
    with pytest.raises(ShapeError, match="multiple of 4"):
        ts.spmd(lambda: ts.dist.expert_parallel(ts.ones((2, 3)), ts.ones((2, 6)), abs, 1), mesh=mesh)()

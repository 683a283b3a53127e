"""Gradients of attention by launches that compute the weights again, against the gradients in f64."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.core.types import TensorType
from tessera.ops.tensor.attention_gradients import attention_with_sums
from tessera.runtime import driver
from tessera.stdlib import attention_launches

BACKEND = get_backend("ptx")


def make_program(causal, window, scale=None):
    """The result of attention and the gradients of its product with `g`."""

    def loss(q, k, v, g):
        attention = ts.scaled_dot_product_attention(q, k, v, is_causal=causal, window=window, scale=scale)
        return (attention * g).to(ts.f32).sum()

    return ts.jit(lambda q, k, v, g: ts.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v, g)[1])


def draw(heads, groups, queries, keys, features, values, dtype, batch=2):
    rng = np.random.default_rng(queries + keys)
    shapes = (batch, heads, queries, features), (batch, groups, keys, features), (batch, groups, keys, values)
    return [ts.tensor(rng.standard_normal(s).astype(np.float32)).to(dtype) for s in (*shapes, (*shapes[0][:3], values))]


def compute_exactly(operands, causal, window, scale=None, mask=0.0):
    """The gradients in f64, by the definition."""
    q, k, v, g = (x.to(ts.f64).numpy() for x in operands)
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]
    keys, values = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
    distance = np.arange(q.shape[2])[:, None] - np.arange(k.shape[2])[None, :]
    seen = (distance >= 0 if causal else True) & (distance < window if window else True)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    s = np.where(seen, q @ keys.swapaxes(2, 3) * scale + mask, -np.inf)
    p = np.nan_to_num(np.exp(s - np.where(seen, s, -1e30).max(axis=-1, keepdims=True)))
    p = p / np.maximum(p.sum(axis=-1, keepdims=True), 1e-30)
    ds = p * (g @ values.swapaxes(2, 3) - (g * (p @ values)).sum(axis=-1, keepdims=True)) * scale
    dk, dv = ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g
    return [ds @ keys, *(x.reshape(-1, groups, shared, *x.shape[2:]).sum(axis=2) for x in (dk, dv))]


def draw_case(heads, *sizes):
    """Several heads of two examples, or one head of one example: sizes of each kind, odd ones too, have both."""
    return draw(heads, *sizes, batch=min(heads, 2))


LIMITS = {ts.bf16: 5e-3, ts.f16: 6e-4, ts.f32: 1e-6}
CASES = {
    "causal": ((2, 2, 128, 128, 64, 64, ts.bf16), True, None),
    "grouped": ((2, 1, 192, 192, 64, 64, ts.bf16), True, None),
    "odd": ((1, 1, 100, 150, 64, 64, ts.bf16), False, None),
    "window": ((1, 1, 150, 100, 64, 64, ts.bf16), True, 70),
    "narrow heads": ((1, 1, 100, 100, 32, 48, ts.f16), True, None),
    "wide heads": ((1, 1, 100, 130, 128, 128, ts.bf16), True, None),
    "padded heads": ((2, 1, 100, 130, 72, 80, ts.f16), True, None),  # to 128 features
}


WIDE_CASES = {
    "f32": ((1, 1, 97, 97, 40, 24, ts.f32), True, None),
    "f32 window": ((2, 1, 70, 100, 32, 32, ts.f32), False, 70),
}


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", CASES | WIDE_CASES)
def test_gradients_agree_with_the_definition(name, arch, monkeypatch):
    monkeypatch.setattr(attention_launches, "LEAST_WIDE_SCORES", ((128, 0),))
    sizes, causal, window = (CASES | WIDE_CASES)[name]
    operands = draw_case(*sizes)
    levels = driver.lower(make_program(causal, window).trace(*operands).function, "ptx")
    launched = {n.attrs["kernel"] for n in levels["tile"].main.body.walk() if n.op.name == "host.launch"}
    assert {"attend", "differentiate_keys", "differentiate_queries"} <= launched
    artifact = BACKEND.emit(levels["tile"], {"arch": arch})
    found = BACKEND.interpreter(artifact)([x.numpy() for x in operands])
    limit = LIMITS[sizes[-1]]
    for ours, exact in zip(found, compute_exactly(operands, causal, window), strict=True):
        assert np.linalg.norm(ours.astype(np.float64) - exact) < limit * np.linalg.norm(exact)


def draw_mask(kind, batch, heads, queries, keys):
    """Numbers, some of them minus infinity, that are added to the scores: of each score, or of each key alone."""
    rng = np.random.default_rng(keys)
    shape = {"each": (batch, heads, queries, keys), "shared": (1, 1, queries, keys), "keys": (batch, 1, 1, keys)}[kind]
    mask = np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape))
    return (mask + 100).astype(np.float32)  # where there is no query, no sum makes up for that


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kind", ["each", "shared", "keys"])
def test_masked_gradients_agree_with_the_definition(kind, arch):
    operands = draw(2, 1, 100, 150, 64, 64, ts.bf16)
    mask = ts.tensor(draw_mask(kind, 2, 2, 100, 150)).to(ts.bf16)

    def loss(q, k, v, g, mask):
        wide = ts.broadcast_to(mask, (2, 2, 100, 150))  # as PyTorch gives it to its kernels
        return (ts.scaled_dot_product_attention(q, k, v, wide) * g).to(ts.f32).sum()

    program = ts.jit(lambda *args: ts.value_and_grad(loss, argnums=(0, 1, 2))(*args)[1])
    module = driver.lower(program.trace(*operands, mask).function, "ptx")["tile"]
    launches = {n.attrs["kernel"]: n for n in module.main.body.walk() if n.op.name == "host.launch"}
    assert {"attend", "differentiate_keys", "differentiate_queries"} <= launches.keys()
    assert mask.shape in [v.type.shape for v in launches["differentiate_keys"].args]  # it is not repeated in memory
    found = BACKEND.interpreter(BACKEND.emit(module, {"arch": arch}))([x.numpy() for x in (*operands, mask)])
    exact = compute_exactly(operands, False, None, mask=mask.to(ts.f64).numpy())
    for ours, wanted in zip(found, exact, strict=True):
        assert np.linalg.norm(ours.astype(np.float64) - wanted) < 5e-3 * np.linalg.norm(wanted)


def test_the_gradient_by_a_mask():
    """It needs the weights, which are stored then."""
    operands = draw(2, 2, 70, 70, 16, 16, ts.f32)
    mask = ts.tensor(np.random.default_rng(5).standard_normal((1, 2, 70, 70)).astype(np.float32))

    def loss(q, k, v, g, mask):
        return (ts.scaled_dot_product_attention(q, k, v, mask) * g).sum()

    *found, by_mask = ts.jit(ts.grad(loss, argnums=(0, 1, 2, 4)))(*operands, mask)
    for ours, exact in zip(found, compute_exactly(operands, False, None, mask=mask.numpy()), strict=True):
        np.testing.assert_allclose(ours.numpy(), exact, rtol=1e-3, atol=1e-4)
    step = np.zeros(mask.shape, np.float32)
    step[0, 1, 3, 4] = 1e-2
    change = loss(*operands, mask + ts.tensor(step)) - loss(*operands, mask - ts.tensor(step))
    np.testing.assert_allclose(by_mask[0, 1, 3, 4].item(), change.item() / 2e-2, rtol=2e-2)


@pytest.mark.parametrize(("queries", "kernels"), [(1, {"attend_part", "combine_parts"}), (128, {"attend"})])
def test_sums_that_nothing_needs(queries, kernels):
    """It is attention then, with all its launches: of few queries in parts of the keys."""
    q, k = ts.zeros((2, 4, queries, 64), ts.bf16), ts.zeros((2, 4, 2048, 64), ts.bf16)

    def attend(q, k, v):
        out, sums = attention_with_sums(q, k, v, causal=False, scale=0.125, weights=ts.bf16, window=0)
        return out, (sums * 2.0)[:0]

    module = driver.lower(ts.jit(lambda *args: attend(*args)[0]).trace(q, k, k).function, "ptx")["tile"]
    assert {f.name for f in module.functions[1:]} == kernels


PROCESSOR_CASES = {
    **CASES,
    "f32": ((2, 1, 97, 97, 40, 24, ts.f32), True, None),
    "deep": ((1, 1, 131, 70, 160, 160, ts.f32), False, None),
}


def find_kernels(program, operands):
    """The tile functions of a program for the processor, and the module."""
    module = driver.lower(program.trace(*operands).function, "llvm")["tile"]
    return {f.name for f in module.functions[1:]}, module


@pytest.mark.parametrize("name", PROCESSOR_CASES)
def test_gradients_on_a_processor(name, monkeypatch):
    monkeypatch.setattr(attention_launches, "_streams_scores", lambda *_: True)
    sizes, causal, window = PROCESSOR_CASES[name]
    operands = draw_case(*sizes)
    launched, module = find_kernels(make_program(causal, window), operands)
    assert {"attend", "differentiate_keys", "differentiate_queries"} <= launched
    found = driver.compile_tile(module, "llvm")([x.numpy() for x in operands])
    limit = LIMITS[sizes[-1]]
    for ours, exact in zip(found, compute_exactly(operands, causal, window), strict=True):
        assert np.linalg.norm(ours.astype(np.float64) - exact) < limit * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("length", "dtype", "streams"), [(200, ts.f32, False), (600, ts.f32, True), (600, ts.bf16, True)]
)
def test_a_processor_keeps_scores_that_its_cache_holds(length, dtype, streams):
    operands = [ts.zeros((1, 4, length, 32), dtype) for _ in range(4)]
    launched, _ = find_kernels(make_program(True, None), operands)
    assert ("differentiate_keys" in launched) == streams


@pytest.mark.parametrize(("features", "values"), [(64, 256), (256, 64)])
def test_a_gpu_stores_the_weights_of_wide_heads(features, values):
    """Whether the queries or the values are wide: blocks of both would not fit."""
    operands = draw(1, 1, 128, 128, features, values, ts.bf16)
    module = driver.lower(make_program(True, None).trace(*operands).function, "ptx")["tile"]
    assert "differentiate_keys" not in {f.name for f in module.functions}


@pytest.mark.parametrize(
    ("length", "features", "stored"), [(400, 32, True), (1100, 32, False), (1100, 64, True), (12000, 64, False)]
)
def test_a_gpu_stores_the_weights_of_few_scores_in_f32(length, features, stored):
    operands = [TensorType((1, 2, length, features), ts.f32)] * 4
    module = driver.lower(make_program(True, None).trace(*operands).function, "ptx")["tile"]
    assert ("differentiate_keys" not in {f.name for f in module.functions}) == stored


@pytest.mark.parametrize(
    ("heads", "length", "features", "dtype", "stored"),
    [
        (8, 512, 256, ts.f32, True),
        (8, 512, 128, ts.f32, False),  # blocks of fewer features are as fast
        (64, 128, 256, ts.f32, False),  # many programs, few keys
        (8, 71, 256, ts.f32, True),  # few programs
        (8, 20000, 256, ts.f32, False),  # 13 GB of scores
        (8, 512, 256, ts.bf16, False),
    ],
)
def test_a_gpu_stores_the_scores_of_wide_heads_of_f32(heads, length, features, dtype, stored):
    operands = [TensorType((1, heads, length, features), dtype)] * 3
    program = ts.jit(lambda q, k, v: ts.scaled_dot_product_attention(q, k, v, is_causal=True))
    module = driver.lower(program.trace(*operands).function, "ptx")["tile"]
    assert ("attend" not in {f.name for f in module.functions}) == stored


def test_keys_past_the_end_have_no_weight():
    """Scores far below 0 have sums of which the weights of keys that do not exist would be infinities."""
    rng = np.random.default_rng(0)
    q = np.abs(rng.standard_normal((1, 2, 100, 64))) + 2
    k, v, g = -2 * q[:, :, :70], rng.standard_normal((1, 2, 70, 64)), rng.standard_normal((1, 2, 100, 64))
    operands = [ts.tensor(x.astype(np.float32)).to(ts.bf16) for x in (np.tile(x, (2, 1, 1, 1)) for x in (q, k, v, g))]
    levels = driver.lower(make_program(False, None).trace(*operands).function, "ptx")
    found = BACKEND.interpreter(BACKEND.emit(levels["tile"], {"arch": "sm_80"}))([x.numpy() for x in operands])
    for ours, exact in zip(found, compute_exactly(operands, False, None), strict=True):
        assert np.linalg.norm(ours.astype(np.float64) - exact) < 0.1 * np.linalg.norm(exact)


def test_the_loops_use_warp_groups():
    operands = draw(1, 1, 128, 128, 64, 64, ts.bf16)
    levels = driver.lower(make_program(True, None).trace(*operands).function, "ptx")
    text = next(iter(BACKEND.emit(levels["tile"], {"arch": "sm_90a"}).files.values()))
    bodies = {part.split("(")[0]: part for part in text.split(".visible .entry ")[1:]}
    for name in ("attend", "differentiate_keys", "differentiate_queries"):
        assert "wgmma.mma_async" in bodies[name]
        assert "cp.async.bulk.tensor" in bodies[name]


@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_other_targets_store_the_weights(target):
    operands = [x.to(ts.f32) for x in draw(4, 2, 9, 9, 16, 8, ts.f32)]
    program = make_program(True, 3)
    found = ts.jit(program, target=target)(*operands)
    for ours, exact in zip(found, compute_exactly(operands, True, 3), strict=True):
        np.testing.assert_allclose(ours.numpy(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [-0.25, 0.0])
def test_scales_that_are_not_positive(scale, monkeypatch):
    """The greatest score is not that of the greatest product: their weights are stored."""
    monkeypatch.setattr(attention_launches, "_streams_scores", lambda *_: True)
    operands = draw(1, 1, 70, 70, 16, 16, ts.f32)
    program = make_program(True, None, scale)
    launched, module = find_kernels(program, operands)
    assert "differentiate_keys" not in launched
    found = driver.compile_tile(module, "llvm")([x.numpy() for x in operands])
    for ours, exact in zip(found, compute_exactly(operands, True, None, scale), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-5)


def test_batches_of_a_size_that_a_call_gives(monkeypatch):
    monkeypatch.setattr(attention_launches, "_streams_scores", lambda *_: True)
    given = ts.Tensor["B", 1, 70, 16]

    @ts.jit(target="llvm", dynamic=True)
    def program(q: given, k: given, v: given, g: given):
        return make_program(True, None).function(q, k, v, g)

    operands = draw(1, 1, 70, 70, 16, 16, ts.f32)
    exact = compute_exactly(operands, True, None)
    for batch in (1, 2):
        for ours, each in zip(program(*(x[:batch] for x in operands)), exact, strict=True):
            np.testing.assert_allclose(ours.numpy(), each[:batch], rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients():
    q, k, v, g = (x.to(ts.f64)[0, 0] for x in draw(1, 1, 5, 5, 4, 4, ts.f32))

    def first(q):
        return ts.grad(lambda q: (ts.scaled_dot_product_attention(q, k, v, is_causal=True) * g).sum())(q)

    step = 1e-5
    direction = ts.tensor(np.random.default_rng(0).standard_normal(q.shape))
    moved = ts.grad(lambda q: (first(q) * direction).sum())(q).numpy()
    numeric = np.zeros(q.shape)
    for at in np.ndindex(*q.shape):
        shift = np.zeros(q.shape)
        shift[at] = step
        ahead, behind = (first(q + ts.tensor(sign * shift)).numpy() for sign in (1, -1))
        numeric[at] = ((ahead - behind) * direction.numpy()).sum() / (2 * step)
    np.testing.assert_allclose(moved, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("part", [np.s_[..., ::3], np.s_[..., 32:160], np.s_[:, 1:, 128:256], np.s_[..., 127::-1]])
def test_heads_of_a_part_of_an_array(part):
    """Features that are not heads side by side are copied before they are read."""
    rng = np.random.default_rng(3)
    whole = ts.tensor(rng.standard_normal((2, 129, 384)).astype(np.float32)).to(ts.bf16)
    length = whole.numpy()[part].shape[1]
    g = ts.tensor(rng.standard_normal((2, 2, length, 64)).astype(np.float32)).to(ts.bf16)

    def program(whole, g):
        def loss(whole):
            heads = whole[part].reshape((2, length, 2, 64)).permute(0, 2, 1, 3)
            return (ts.scaled_dot_product_attention(heads, heads, heads, is_causal=True) * g).to(ts.f32).sum()

        return ts.grad(loss)(whole)

    levels = driver.lower(ts.jit(program).trace(whole, g).function, "ptx")
    (found,) = driver.run_level(levels, "tile", [whole.numpy(), g.numpy()], "ptx")
    exact = program(whole.to(ts.f64), g.to(ts.f64)).numpy()
    assert np.linalg.norm(found.astype(np.float64) - exact) < 6e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_heads_side_by_side_stay_in_place(arch):
    """Queries, keys and values of one projection are read where it wrote them, and gradients are not turned."""
    batch, length, heads, features = 2, 128, 2, 64
    width = heads * features
    rng = np.random.default_rng(3)
    whole, g = (ts.tensor(rng.standard_normal((batch, length, n)).astype(np.float32)) for n in (3 * width, width))

    def attend(whole):
        parts = [whole[..., i * width : (i + 1) * width] for i in range(3)]
        turned = [p.reshape((batch, length, heads, features)).permute(0, 2, 1, 3) for p in parts]
        found = ts.scaled_dot_product_attention(*turned, is_causal=True)
        return found.permute(0, 2, 1, 3).reshape((batch, length, width))

    program = lambda whole, g: ts.grad(lambda whole: (attend(whole) * g).to(ts.f32).sum())(whole)  # noqa: E731
    narrow = [x.to(ts.bf16) for x in (whole, g)]
    levels = driver.lower(ts.jit(program).trace(*narrow).function, "ptx")
    launches = [n for n in levels["tile"].main.body.walk() if n.op.name == "host.launch"]
    (forward,) = (n for n in launches if n.attrs["kernel"] == "attend")
    assert forward.args[0] is forward.args[1] is forward.args[2]
    assert not any("copy" in n.attrs["kernel"] for n in launches)
    artifact = BACKEND.emit(levels["tile"], {"arch": arch})
    (found,) = BACKEND.interpreter(artifact)([x.numpy() for x in narrow])
    exact = program(*(x.to(ts.f64) for x in narrow)).numpy()
    assert np.linalg.norm(found.astype(np.float64) - exact) < 5e-3 * np.linalg.norm(exact)


def test_long_rows_of_f64_keep_their_weights():
    """The kernels that compute weights again hold them in f32."""
    x = np.random.default_rng(2).standard_normal((1, 4, 520, 8))
    loss = lambda q: (ts.scaled_dot_product_attention(q, q, q, causal=True) ** 2.0).sum()  # noqa: E731
    found, want = (ts.jit(ts.grad(loss), target=t)(x) for t in ("llvm", "interp"))
    assert found.dtype == ts.f64
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12)

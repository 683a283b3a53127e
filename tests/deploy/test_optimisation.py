"""ts.optimize: passes against PyTorch's and NumPy's formulas, what they report, and limits."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera import deploy
from tessera.core.errors import (
    ArgumentError,
    ConstraintError,
    DeviceUnavailable,
    ShapeError,
    UnknownNameError,
    UnsupportedOpError,
)
from tessera.deploy.passes import prune_groups, prune_smallest, quantise_groups, quantise_rows
from tessera.stdlib.quantised import dequantise

RNG = np.random.default_rng(0)
W = RNG.standard_normal((64, 24)).astype(np.float32)  # [in, out]
B = RNG.standard_normal(24).astype(np.float32)
X = RNG.standard_normal((5, 64)).astype(np.float32)


def layer(x):
    return x @ W + B


def optimised(*names, x=X, f=layer, **named):
    return ts.optimize(f, target="server", optimizations=names, calibration=[(x,)], **named)


def norm(a):
    return float(np.sqrt(np.square(np.asarray(a, np.float64)).sum()))


# Weights.


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_int8_codes_are_pytorchs():
    torch = pytest.importorskip("torch")
    codes, scale = quantise_rows(W.T)
    found = torch.quantize_per_channel(torch.tensor(W.T.copy()), torch.tensor(scale), torch.zeros(24), 0, torch.qint8)
    np.testing.assert_array_equal(codes, found.int_repr().numpy())
    np.testing.assert_array_equal(scale, np.abs(W).max(axis=0) / np.float32(127))


def test_int4_groups_are_numpys():
    matrix = quantise_groups(W.T)
    groups = W.T.reshape(24, 2, 32).astype(np.float64)
    low, top = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    step = (top - low) / 15
    want = np.rint((groups - low) / step) * step + low
    assert matrix.packed and matrix.scale.dtype == np.float16 and matrix.shape == (24, 64)
    # f16 scales and low values move an element by 2^-11 of them; a code may round the other way at a tie
    assert np.abs(dequantise(matrix).numpy().reshape(want.shape) - groups).max() <= (step / 2 * 1.01).max() + 4e-3
    assert norm(dequantise(matrix).numpy().reshape(want.shape) - want) <= 0.02 * norm(want)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_scales_of_every_size(size):
    """f16 scales would be 0 or infinite where the weights are tiny or huge."""
    matrix = dequantise(quantise_groups((W.T * size).astype(np.float32))).numpy()
    assert norm(matrix / size - W.T) <= 0.1 * norm(W)
    codes, scale = quantise_rows((W.T * size).astype(np.float32))
    assert norm(codes * scale[:, None].astype(np.float64) / size - W.T) <= 0.01 * norm(W)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_constant_weights(value):
    f = optimised("weight_int4", f=lambda x: x @ np.full((64, 8), value, np.float32))
    np.testing.assert_allclose(f(X).numpy(), X @ np.full((64, 8), value), rtol=1e-3, atol=1e-4)


def int8_weights():
    codes, scale = quantise_rows(W.T)
    return (codes * scale[:, None].astype(np.float64)).T


def fp8_weights():
    scale = np.abs(W).max(axis=0) / np.float32(448)
    return (W / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


@pytest.mark.parametrize(
    ("name", "weights", "bytes_"),
    [
        ("weight_int8", int8_weights, 64 * 24 + 24 * 4),
        ("weight_fp8", fp8_weights, 64 * 24 + 24 * 4),
        ("weight_int4", lambda: dequantise(quantise_groups(W.T)).numpy().T, 64 * 24 // 2 + 24 * 2 * 2 * 2),
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
def test_products_with_quantised_weights(name, weights, bytes_, rows):
    x = RNG.standard_normal((rows, 64)).astype(np.float32)
    f = optimised(name, x=x)
    np.testing.assert_allclose(f(x).numpy(), x.astype(np.float64) @ weights() + B, rtol=1e-4, atol=1e-4)
    assert not rows or f.report.figures["weight_bytes"] == bytes_ + B.nbytes
    assert f.report.figures["weight_bytes_before"] == W.nbytes + B.nbytes


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_static_int8_is_pytorchs_formula():
    torch = pytest.importorskip("torch")
    f = ts.optimize(layer, target="server", optimizations=["static_int8"], calibration=[(X,), (X * 0.5,)])
    step = float(np.float32(np.abs(X).max()) / np.float32(127))
    for x in (X, X * 3):  # beyond the range, activations saturate
        q = torch.quantize_per_tensor(torch.tensor(x), step, 0, torch.qint8).int_repr().numpy().astype(np.int64)
        codes, scale = quantise_rows(W.T)
        want = (np.maximum(q, -127) @ codes.T.astype(np.int64)) * (scale.astype(np.float64) * step) + B
        np.testing.assert_allclose(f(x).numpy(), want, rtol=1e-5, atol=1e-5)
    assert f.report.passes[0].figures["products"] == 1


def test_the_loss_is_the_distance_of_results():
    f = optimised("weight_int8")
    want = layer(X)
    assert f.report.figures["accuracy_loss"] == pytest.approx(norm(f(X).numpy() - want) / norm(want), rel=1e-3)
    assert optimised("constant_folding").report.figures["accuracy_loss"] < 1e-6


def test_a_measure_of_the_user():
    calls = []

    def evaluate(model):
        calls.append(model(X).numpy())
        return 1.0 if len(calls) == 1 else 0.75

    f = optimised("weight_int8", evaluate=evaluate)
    assert f.report.figures["accuracy_loss"] == 0.25 and f.report.figures["accuracy_before"] == 1.0
    np.testing.assert_allclose(calls[0], layer(X), rtol=1e-5, atol=1e-5)
    assert np.abs(calls[1] - calls[0]).max() > 1e-4


# Pruning.


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 1.0])
def test_magnitude_pruning_is_pytorchs(sparsity):
    prune = pytest.importorskip("torch.nn.utils.prune")
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(64, 24)
    linear.weight.data = torch.tensor(W.T.copy())
    prune.l1_unstructured(linear, "weight", amount=sparsity)
    np.testing.assert_array_equal(prune_smallest(W.T, sparsity), linear.weight.detach().numpy())
    f = optimised(deploy.MagnitudePruning(sparsity))
    np.testing.assert_allclose(f(X).numpy(), X @ linear.weight.detach().numpy().T + B, rtol=1e-4, atol=1e-4)
    assert f.report.passes[0].figures["sparsity"] == pytest.approx(sparsity, abs=1e-3)


def test_two_of_four():
    pruned = prune_groups(W.T)
    for old, new in zip(W.T.reshape(-1, 4), pruned.reshape(-1, 4), strict=True):
        kept = sorted(np.abs(old))[2:]
        assert sorted(np.abs(new)) == [0, 0, *kept] and all(n in (0, o) for o, n in zip(old, new, strict=True))
    f = optimised("pruning_2_4", "weight_int8")
    np.testing.assert_allclose(f(X).numpy(), X @ pruned.T + B, rtol=0, atol=0.2)
    odd = optimised("pruning_2_4", x=X[:, :7], f=lambda x: x @ W[:7])
    assert odd.report.passes[0].figures["left"] == 1 and np.array_equal(odd(X[:, :7]).numpy(), layer_of(X[:, :7]))


def layer_of(x):
    return ts.optimize(lambda x: x @ W[:7], target="server", optimizations=[], example=(x,))(x).numpy()


# Whole models.


def make_classifier():
    ts.manual_seed(0)
    nn = ts.nn
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(body, nn.Linear(8 * 36, 10), nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("constant_folding", 1e-6), ("weight_int8", 0.02), ("weight_fp8", 0.1), ("weight_int4", 0.2),
        ("static_int8", 0.03),
    ],
)  # fmt: skip
def test_a_classifier(name, loss):
    model = make_classifier()
    images = RNG.standard_normal((4, 3, 6, 6)).astype(np.float32)
    f = ts.optimize(model, target="server", optimizations=[name], calibration=[images])
    assert model.training  # as it was
    model.eval()
    assert f.report.figures["accuracy_loss"] <= loss
    assert norm(f(images).numpy() - model(images).numpy()) <= loss * norm(model(images).numpy())
    assert f(images).shape == (4, 10) and len(f(images[:1])) == 1


def test_folding_leaves_fewer_ops_and_the_same_results():
    def f(x):
        return x @ (ts.Tensor(W) * 2.0 - 1.0).T.T + (B + 1.0) + (B + 1.0)

    found = optimised("constant_folding", f=f).report.passes[0].figures
    assert found["ops_before"] > found["ops"] == 5


def test_constants_inside_loops_are_kept():
    def f(x):
        return ts.fori_loop(0, 3, lambda i, y: ts.tanh(y @ W[:, :1] * 0.1 + y), x)

    found = optimised("weight_int8", "constant_folding", f=f)
    want = X
    for _ in range(3):
        want = np.tanh(want @ W[:, :1] * 0.1 + want)
    np.testing.assert_allclose(found(X).numpy(), want, rtol=1e-5, atol=1e-5)


def test_tied_weights_are_stored_once():
    w = W[:24].copy()
    f = optimised("weight_int8", x=X[:, :24], f=lambda x: (x @ w) @ w)
    assert f.report.figures["weight_bytes"] == 24 * 24 + 24 * 4


def test_a_matrix_on_both_sides():
    w = ts.Tensor(W[:24].copy())
    x = X[:, :24]
    f = optimised("weight_int8", x=x, f=lambda x: (x @ w) @ w + ts.matmul(w, x.T).T)
    want = x @ w.numpy() @ w.numpy() + (w.numpy() @ x.T).T
    assert norm(f(x).numpy() - want) < 0.02 * norm(want)
    assert f.report.figures["weight_bytes"] <= 2 * (24 * 24 + 24 * 4)  # once for each side


def test_what_is_broadcast_stays_small():
    b = ts.Tensor(W[:, 0].copy())
    f = optimised(
        "constant_folding", f=lambda x: x * ts.broadcast_to(b, shape=(5, 64)) + ts.broadcast_to(b, shape=(5, 64)).T.T
    )
    np.testing.assert_allclose(f(X).numpy(), X * W[:, 0] + W[:, 0], rtol=1e-6, atol=1e-6)
    assert f.report.figures["weight_bytes"] <= 2 * 64 * 4


def test_each_product_has_a_range_of_its_own():
    f = optimised("static_int8", f=lambda x: x @ W * 100.0 + (x * 100.0) @ W)
    assert f.report.figures["accuracy_loss"] < 0.03


def test_batches_of_matrices_are_left_and_named():
    w = np.stack([W, W])
    x = np.stack([X, X])
    f = ts.optimize(lambda x: x @ w, target="server", optimizations=["weight_int8"], example=(x,))
    assert f.report.passes[0].figures["left"] == {"its weights are a batch of matrices": 1}


def test_arguments_as_weights_and_results_in_containers():
    @ts.jit
    def f(p, x):
        return {"y": x @ p["w"], "n": (x, p["b"])}

    made = ts.optimize(f, target="edge", example=({"w": W, "b": B}, X), weights=("p",))
    found = made({"w": W, "b": B}, X)
    np.testing.assert_allclose(found["y"].numpy(), X @ int8_weights(), rtol=1e-4, atol=1e-4)
    assert np.array_equal(found["n"][1].numpy(), B) and np.array_equal(found["n"][0].numpy(), X)


def test_batch_sizes_and_bundles(tmp_path):
    f = optimised("weight_int8", "kernel_fusion", "memory_planning")
    f.compile(batch_size=1).compile(batch_size=9)
    loaded = ts.load(ts.save(f, tmp_path / "m.bundle", metadata={"version": "1"}))
    for n in (1, 5, 9):
        x = np.resize(X, (n, 64)).astype(np.float32)
        np.testing.assert_array_equal(loaded(x).numpy(), f(x).numpy())
    with pytest.raises(ShapeError):
        loaded(np.resize(X, (2, 64)).astype(np.float32))


@pytest.mark.parametrize("dtype", [ts.bf16, ts.f16, ts.f64])
def test_other_types_are_left_and_named(dtype):
    w, x = ts.Tensor(W).to(dtype), ts.Tensor(X).to(dtype)
    f = ts.optimize(lambda x: x @ w, target="server", optimizations=["weight_int8"], example=(x,))
    assert f.report.passes[0].figures["left"] == {"its operands are not f32": 1}
    assert f.report.figures["accuracy_loss"] == 0


def test_weights_that_are_not_finite_are_left():
    w = W.copy()
    w[0, 0] = np.nan
    f = optimised("weight_int8", f=lambda x: x @ w)
    assert f.report.passes[0].figures["left"] == {"its weights are not all finite": 1}
    assert np.isnan(f(X).numpy()[:, 0]).all()


# The report and limits.


def test_the_report():
    f = optimised("weight_int8", "constant_folding", "layer_fusion", "memory_minimization", "pruning")
    data = f.report.data()
    names = ["constant_folding", "magnitude_pruning", "weight_int8", "kernel_fusion", "memory_planning"]
    assert [p["name"] for p in data["passes"]] == names and all(p["summary"] for p in data["passes"])
    assert data["passes"][3]["launches"] >= 1
    assert "kernel_fusion" in str(f.report) and "weight bytes" in str(f.report)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"size": "1K"}, r"the limit of size[\s\S]*at most 1,024 bytes[\s\S]*1,728 bytes"),
        ({"memory": 10}, "the limit of memory"),
        ({"latency": "1us"}, "the limit of latency"),
        ({"accuracy_loss": 1e-9}, "the limit of accuracy_loss"),
    ],
)
def test_a_limit_that_is_not_met(limits, says):
    with pytest.raises(ConstraintError, match=says):
        optimised("weight_int8", constraints=limits)


def test_limits_that_are_met():
    limits = {"size": "1MB", "memory": "1GB", "latency": "10s", "accuracy_loss": 0.1}
    found = optimised("weight_int8", constraints=limits).report.figures
    assert found["latency_ms"] > 0 and found["measured"]["llvm"]["calls"] >= 3


@pytest.mark.parametrize(
    ("named", "error", "says"),
    [
        ({"optimizations": ["weight_int9"]}, UnknownNameError, "did you mean weight_int"),
        ({"optimizations": "pruning"}, ArgumentError, "is a list"),
        ({"optimizations": [3]}, ArgumentError, "is no pass"),
        ({"optimizations": ["weight_int8", "weight_int4"]}, ArgumentError, "2 passes quantise the same weights"),
        ({"optimizations": ["static_int8"], "calibration": None}, ArgumentError, "are measured on a call"),
        ({"constraints": {"power": "5W"}}, ArgumentError, "power cannot be measured"),
        ({"constraints": ["size"]}, ArgumentError, "constraints is no mapping"),
        ({"constraints": {"speed": 1}}, UnknownNameError, "no constraint speed"),
        ({"constraints": {"latency": "fast"}}, ArgumentError, "is no duration"),
        ({"constraints": {"size": "big"}}, ArgumentError, "no size of memory"),
        ({"target": "toaster"}, UnknownNameError, "no target that is installed"),
        ({"target": "ptx", "constraints": {"latency": "1s"}}, DeviceUnavailable, "cannot be measured"),
        ({"calibration": X}, ArgumentError, "no list of calls"),
        ({"weights": ("w",)}, UnknownNameError, "no argument w"),
    ],
)
def test_wrong_requests(named, error, says):
    with pytest.raises(error, match=says):
        ts.optimize(layer, **{"target": "server", "calibration": [(X,)], **named})


def test_models_that_are_none():
    with pytest.raises(ArgumentError, match="is no model"):
        ts.optimize(3, target="server")
    with pytest.raises(UnsupportedOpError, match="draws random numbers"):
        ts.optimize(lambda x: x + ts.randn(3), target="server", example=(np.ones(3, np.float32),))
    f = ts.optimize(layer, target="server")
    for named in ({"target": 3}, {"generator": 3}, {"weights": 3}, {"evaluate": "f"}):
        with pytest.raises(ArgumentError, match="no text|no list of names|no function"):
            ts.optimize(layer, **{"target": "edge", "example": (X,), **named})
    with pytest.raises(ArgumentError, match="nothing has been compiled"):
        f.report  # noqa: B018
    with pytest.raises(ArgumentError, match="has no example"):
        f.compile(batch_size=1)
    assert f(X).shape == (5, 24) and f.compile(batch_size=2)(X[:2]).shape == (2, 24)


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, True, "half", float("nan")])
def test_wrong_sparsities(sparsity):
    with pytest.raises(ArgumentError, match="sparsity is a share"):
        deploy.MagnitudePruning(sparsity)


def test_without_a_target_it_finds_a_minimum():
    assert ts.optimize(lambda y: (y - 3.0) ** 2, init=ts.Tensor(0.0)).item() == 3.0

"""Lazy layers against PyTorch's: shapes of the first input, results with its weights, and refusals before it."""

import numpy as np
import pytest

import tessera as ts
from tessera import nn, optim

torch = pytest.importorskip("torch")
CASES = [
    ("Linear", (3,), {"bias": False}, (2, 4, 5)),
    *((f"Conv{d}d", (4, 2), {"groups": 2, "padding": 1}, (2, 6, 5, 4, 3)[: d + 2]) for d in (1, 2, 3)),
    *((f"ConvTranspose{d}d", (4, 2), {"stride": 2}, (2, 6, 3, 4, 3)[: d + 2]) for d in (1, 2, 3)),
    *((f"BatchNorm{d}d", (), {"eps": 0.1, "momentum": 0.3}, (2, 6, 5, 4, 3)[: d + 2]) for d in (1, 2, 3)),
    ("BatchNorm1d", (), {}, (7, 3)),
    *((f"InstanceNorm{d}d", (), {}, (2, 6, 5, 4, 3)[: d + 2]) for d in (1, 2, 3)),
    ("Conv2d", (4, 3), {}, (6, 5, 4)),  # without an axis of examples
]


@pytest.mark.parametrize(("name", "args", "options", "shape"), CASES, ids=lambda x: str(x))
def test_lazy_layers_are_those_of_torch(name, args, options, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    ours, theirs = getattr(nn, f"Lazy{name}")(*args, **options), getattr(torch.nn, f"Lazy{name}")(*args, **options)
    theirs(torch.tensor(x))  # shapes
    ours(x)
    assert type(ours) is getattr(nn, name) and {n: t.shape for n, t in ours.state_dict().items()} == {
        n: tuple(t.shape) for n, t in theirs.state_dict().items()
    }
    fresh = getattr(nn, f"Lazy{name}")(*args, **options)
    fresh(x)
    fresh.load_state_dict(theirs.state_dict())
    want = theirs(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(fresh(x).numpy(), want, rtol=1e-4, atol=1e-5)


def make_model():
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))


def test_a_model_of_lazy_layers_trains_after_its_first_call():
    model = make_model().eval()
    assert "LazyConv2d(4, 3)" in repr(model) and "after the first call" in repr(model)
    assert model(ts.zeros((2, 3, 6, 6))).shape == (2, 2)
    assert not any(m.training for m in model.modules()) and model[4].in_features == 64
    state = model.state_dict()
    np.testing.assert_array_equal(state["1.running_mean"].numpy(), 0.0)  # in evaluation mode nothing is counted
    loop = ts.train.Loop(model.train(), optim.SGD(lr=0.1), lambda m, x: (m(x) ** 2.0).mean(), progress=False)
    rows = loop.run([ts.randn((4, 3, 6, 6))] * 3)
    assert rows[-1]["loss"] < rows[0]["loss"]
    again = make_model()
    again(ts.zeros((1, 3, 6, 6)))
    again.load_state_dict(state)


@pytest.mark.parametrize("use", [
    lambda m: m.parameters(), lambda m: m.state_dict(), lambda m: m.load_state_dict({}), lambda m: m.to(ts.bf16),
    lambda m: optim.Adam().init(m), lambda m: ts.jit(lambda m, x: m(x))(m, ts.zeros((1, 3, 6, 6))),
    lambda m: ts.jit(lambda x: m(x))(ts.zeros((1, 3, 6, 6))), lambda m: ts.grad(lambda m: m(ts.ones(2)).sum())(m),
])  # fmt: skip
def test_nothing_uses_a_model_without_shapes(use):
    model = make_model()
    with pytest.raises(ts.errors.ArgumentError, match="LazyConv2d has no parameters before its first call"):
        use(model)
    assert model(ts.zeros((1, 3, 6, 6))).shape == (1, 2)


def test_wrong_arguments_and_inputs_of_lazy_layers():
    with pytest.raises(ts.errors.ArgumentError, match="Linear has no argument 'units'"):
        nn.LazyLinear(units=3)
    with pytest.raises(ts.errors.ArgumentError, match="LazyConv2d"):
        nn.LazyConv2d(4)
    with pytest.raises(ts.errors.ShapeError, match="no axis of features"):
        nn.LazyConv2d(4, 3)(ts.zeros((3, 3)))
    layer = nn.LazyConv2d(4, 3, groups=2)
    with pytest.raises(ts.errors.TesseraError):
        layer(ts.zeros((1, 3, 6, 6)))  # 3 channels in 2 groups
    assert layer(ts.zeros((1, 4, 6, 6))).shape == (1, 4, 4, 4)

"""`@ts.pipeline`: the loss and the gradients of a model as stages are those of the model on one device."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.pytree import flatten
from tessera.errors import ArgumentError

nn = ts.nn


def error(y, t):
    return ((y - t) * (y - t)).mean()


def make(schedule="1f1b", devices=("a", "b"), places=("a", "b"), microbatches=2, forward=None):
    class Model(nn.Module):
        def __init__(self):
            for i, place in enumerate(places):
                part = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
                setattr(self, f"part{i}", part if place is None else part.on(place))

        @ts.pipeline.schedule(schedule)
        def forward(self, x):
            for i in range(len(places)):
                x = getattr(self, f"part{i}")(x)
            return x

    if forward is not None:
        Model.forward = forward
    return ts.pipeline(stages=len(devices), devices=list(devices), microbatches=microbatches)(Model)


@pytest.mark.parametrize(
    ("schedule", "places"),
    [("gpipe", "ab"), ("1f1b", "aab"), ("interleaved", "abab"), ("1f1b", (None,) * 4)],
)
def test_value_and_gradients(schedule, places):
    model = make(schedule, places=places)()
    x, t = (ts.Tensor(np.random.default_rng(i).standard_normal((4, 3)).astype("f4")) for i in (0, 1))
    value, grads = model.value_and_grad(x, t, error)
    wanted, expected = ts.value_and_grad(lambda m: error(m(x), t))(model)
    np.testing.assert_allclose(value.numpy(), wanted.numpy(), rtol=1e-6)
    assert type(grads) is type(model)
    for (path, a), (_, b) in zip(flatten(grads)[0], flatten(expected)[0], strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-5, atol=1e-7, err_msg=path)
    optimizer = ts.optim.SGD(0.1)
    stepped, _ = optimizer.update(model, grads, optimizer.init(model))
    assert error(stepped(x), t).item() < value.item()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"places": "ba"}, "stage 0 of Model begins with part0, on 'b'"),
        ({"places": "aba"}, "3 stages"),
        ({"places": (None,) * 3}, "3 parts have no 2 equal stages"),
        ({"forward": lambda self, x: self.part1(self.part0(x) * 2.0)}, "no pipeline: unsupported operand"),
        ({"forward": lambda self, x: self.part1(x)}, "part0.0.weight is in no stage"),
        ({"forward": lambda self, x: (self.part0(x), self.part1(x))[1]}, "part1 does not take the activation"),
        ({"forward": lambda self, x: (self.part1(self.part0(x)), x)}, "does not return"),
    ],
)
def test_refused_models(options, text):
    with pytest.raises(ArgumentError, match=text):
        make(**options)().value_and_grad(ts.ones((4, 3)), ts.ones((4, 3)), error)


def test_refused_decorations():
    with pytest.raises(ArgumentError, match="a device for each stage"):
        ts.pipeline(stages=3, devices=["a"])
    with pytest.raises(ArgumentError, match="decorates a module"):
        ts.pipeline(stages=1)(dict)
    with pytest.raises(ArgumentError, match="no pipeline schedule 'zigzag'"):
        ts.pipeline.schedule("zigzag")
    model = make()()
    with pytest.raises(ArgumentError, match="is one already"):
        ts.spmd(lambda: model.value_and_grad(ts.ones((4, 3)), ts.ones((4, 3)), error), mesh=ts.Mesh(2))()

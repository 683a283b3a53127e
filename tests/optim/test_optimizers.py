"""Optimizers against PyTorch's: the same gradients give the same parameters, eager and compiled, for all options."""

import numpy as np
import pytest

import tessera as ts
from tessera import optim

torch = pytest.importorskip("torch")
CASES = [
    ("SGD", {"lr": 0.1}, {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {}),
    ("Adam", {}, {}),
    ("Adam", {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}, {}),
    ("Adam", {"lr": 0.1, "amsgrad": True}, {}),
    ("Adam", {"lr": 0.1, "betas": (0.0, 0.9)}, {}),
    ("AdamW", {}, {}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.3, "amsgrad": True}, {}),
    ("RMSprop", {}, {}),
    ("RMSprop", {"lr": 0.1, "momentum": 0.9, "centered": True, "weight_decay": 0.1}, {}),
    ("Adafactor", {}, {}),
    ("Adafactor", {"lr": 0.1, "beta2_decay": -0.5, "eps": (1e-3, 0.1), "d": 1.5, "weight_decay": 0.1}, {}),
    ("Adagrad", {}, {}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}, {}),
]
SHAPES = {"a": (3, 5), "b": (7,), "c": ()}


def make_arrays(rng):
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def run_torch(name, options, start, gradients, dtype=None):
    held = {n: torch.tensor(x).requires_grad_() for n, x in start.items()}
    optimizer = getattr(torch.optim, name)(held.values(), **options)
    for step in gradients:
        for n, p in held.items():
            p.grad = torch.tensor(step[n])
        optimizer.step()
    return {n: p.detach().numpy() for n, p in held.items()}


@pytest.mark.parametrize("target", ["interp", "cpu"])
@pytest.mark.parametrize(("name", "options", "_"), CASES, ids=lambda x: str(x))
def test_steps_equal_those_of_torch(name, options, _, target):
    rng = np.random.default_rng(0)
    start, gradients = make_arrays(rng), [make_arrays(rng) for _ in range(12)]
    optimizer = getattr(optim, name)(**options)
    params = {n: ts.Tensor(x) for n, x in start.items()}
    state, update = optimizer.init(params), ts.jit(optimizer.update, target=target)
    for step in gradients:
        params, state = update(params, {n: ts.Tensor(x) for n, x in step.items()}, state)
    expected = run_torch(name, options, start, gradients)
    for n, p in params.items():
        np.testing.assert_allclose(p.numpy(), expected[n], rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("make", [lambda m: m, lambda m: m.parameters(), lambda m: list(m.parameters())])
def test_parameters_as_first_argument_are_refused(make):
    model = ts.nn.Linear(2, 1)
    for options in ({}, {"lr": 0.1}):
        with pytest.raises(ts.errors.ArgumentError, match="without parameters") as found:
            optim.AdamW(make(model), **options)
        assert "optim.AdamW(lr=...); state = optimizer.init(model)" in str(found.value)

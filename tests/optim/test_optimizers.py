"""Optimizers against PyTorch's: the same gradients give the same parameters, eager and compiled, for all options."""

import inspect

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
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}, {}),
    ("Adam", {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.3, "maximize": True}, {}),
    ("Adadelta", {}, {}),
    ("Adadelta", {"lr": 0.5, "rho": 0.7, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}, {}),
    ("Adamax", {}, {}),
    ("Adamax", {"lr": 0.1, "betas": (0.7, 0.9), "eps": 0.1, "weight_decay": 0.1}, {}),
    ("NAdam", {}, {}),
    ("NAdam", {"lr": 0.1, "betas": (0.7, 0.9), "eps": 0.1, "weight_decay": 0.1, "momentum_decay": 0.3}, {}),
    ("NAdam", {"lr": 0.1, "momentum_decay": 0.0, "weight_decay": 0.1, "decoupled_weight_decay": True}, {}),
    ("RAdam", {}, {}),
    ("RAdam", {"lr": 0.1, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.1}, {}),
    ("RAdam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}, {}),
    ("Rprop", {}, {}),
    ("Rprop", {"lr": 0.1, "etas": (0.3, 1.5), "step_sizes": (0.05, 0.2), "maximize": True}, {}),
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
            p.grad = torch.tensor(step[n]) if n in step else None
        optimizer.step()
    return {n: p.detach().numpy() for n, p in held.items()}


@pytest.mark.parametrize("target", ["interp", "cpu"])
@pytest.mark.parametrize(("name", "options", "_"), CASES, ids=lambda x: str(x))
def test_steps_equal_those_of_torch(name, options, _, target):
    rng = np.random.default_rng(0)
    start, gradients = make_arrays(rng), [make_arrays(rng) for _ in range(20)]
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


STEPS = [("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}), ("Adam", {"lr": 0.1}), ("AdamW", {"lr": 0.1}),
         ("Adagrad", {"lr": 0.1, "lr_decay": 0.5}), ("Adafactor", {"lr": 0.1}), ("NAdam", {"lr": 0.1}),
         ("RAdam", {"lr": 0.1}), ("Adamax", {"lr": 0.1})]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "target"), [
    *((*case, target) for case in STEPS for target in ("interp", "cpu")),
    ("NAdam", {"lr": 0.1}, "ptx"), ("RAdam", {"lr": 0.1}, "ptx"), ("AdamW", {"lr": 0.1}, "ptx"),
], ids=lambda x: str(x))  # fmt: skip
def test_a_parameter_counts_its_own_steps(name, options, target):
    rng = np.random.default_rng(0)
    start, gradients = make_arrays(rng), [make_arrays(rng) for _ in range(24 if target != "ptx" else 6)]
    left = {n: [i % 5 != 1 for i in range(24)] if n == "a" else [i > 3 for i in range(24)] for n in ("a", "c")}
    gradients = [{n: g for n, g in step.items() if n == "b" or left[n][i]} for i, step in enumerate(gradients)]
    optimizer = getattr(optim, name)(**options)
    params = {n: ts.Tensor(x) for n, x in start.items()}
    state, update = optimizer.init(params), ts.jit(optimizer.update, target=target)
    for step in gradients:
        params, state = update(params, {n: ts.Tensor(x) for n, x in step.items()}, state)
    expected = run_torch(name, options, start, gradients)
    for n, p in params.items():
        np.testing.assert_allclose(p.numpy(), expected[n], rtol=3e-5, atol=3e-6, err_msg=n)
    assert state["step"].item() == len(gradients)
    assert state["steps"].numpy().tolist() == [sum(n in g for g in gradients) for n in sorted(start)]


def test_steps_that_are_left_out_do_not_count():
    optimizer, params = optim.Adam(), {"a": ts.ones((2,))}
    state = optimizer.init(params)
    for good, count in ((True, 1), (False, 1), (True, 2)):
        params, state = optimizer.update(params, params, state, good=ts.Tensor(good))
        assert state["steps"].numpy().tolist() == [count] == [state["step"].item()]


def test_many_steps_of_nadam_keep_its_product():
    for count in (1, 400, 4000):
        optimizer = optim.NAdam(lr=0.1)
        mu = np.float64(0.9) * (1 - 0.5 * 0.96 ** (np.arange(1, count + 2) * 0.004))
        found = optimizer.scalars(ts.Tensor([count]))
        np.testing.assert_allclose(found["g"].numpy(), (1 - mu[-2]) / (1 - mu[:-1].prod()), rtol=1e-12)
        np.testing.assert_allclose(found["m"].numpy(), mu[-1] / (1 - mu.prod()), rtol=1e-12)


@pytest.mark.parametrize(("make", "what"), [
    (lambda: optim.Adam(fused=True), "one launch"), (lambda: optim.SGD(foreach=True), "leave it out"),
    (lambda: optim.AdamW(capturable=True), "part of the state"), (lambda: optim.Adam(params=[]), "init"),
    (lambda: optim.RMSprop(foo=1), "foo"), (lambda: optim.Rprop(optim.StepLR(0.1, 2)), "schedule"),
    (lambda: optim.Rprop(etas=(1.5, 2.0)), "etas"),
    (lambda: optim.Rprop(step_sizes=3), "two numbers"),
    (lambda: optim.SequentialLR(3, [1]), "a list"), (lambda: optim.Adadelta(rho=1.5), "rho"),
    (lambda: optim.NAdam(lr=float("nan")), "lr"),
])  # fmt: skip
def test_options_that_do_not_exist_are_refused(make, what):
    with pytest.raises(ts.errors.ArgumentError, match="(?s)" + what):
        make()


def test_every_optimizer_of_torch_has_its_options_here_or_refuses_them():
    kinds = {n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type)} & set(optim.__all__) - {
        "Optimizer"
    }
    given = {"lr": 0.1, "betas": (0.5, 0.6), "eps": (1e-3, 1e-3), "etas": (0.1, 2.0), "step_sizes": (0.0, 1.0),
             "beta2_decay": -0.5, "d": 1.0, "nesterov": False}  # fmt: skip
    refused = set()
    for name in kinds:
        for option in list(inspect.signature(getattr(torch.optim, name)).parameters)[1:]:
            try:
                getattr(optim, name)(
                    **{option: given.get(option, 1e-3) if name == "Adafactor" or option != "eps" else 0.1}
                )
            except ts.errors.ArgumentError:
                refused.add(option)
    assert refused == {"foreach", "fused", "capturable", "differentiable"}

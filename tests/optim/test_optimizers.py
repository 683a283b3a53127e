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
    ("ASGD", {}, {}),
    ("ASGD", {"lr": 0.3, "lambd": 0.1, "alpha": 0.6, "t0": 4, "weight_decay": 0.1, "maximize": True}, {}),
    ("LBFGS", {"lr": 0.1}, {}),
    ("LBFGS", {"lr": 0.05, "history_size": 3}, {}),
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


def make_arrays(rng, dtype=np.float32):
    return {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


def run_torch(name, options, start, gradients, dtype=None):
    held = {n: torch.tensor(x).requires_grad_() for n, x in start.items()}
    options = {"max_iter": 1, **options} if name == "LBFGS" else options
    optimizer = getattr(torch.optim, name)(held.values(), **options)
    for step in gradients:
        for n, p in held.items():
            p.grad = torch.tensor(step[n]) if n in step else None
        optimizer.step(*[lambda: 0.0] * (name == "LBFGS"))
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


@pytest.mark.parametrize(("name", "options", "target"), [
    *((name, options, "cpu") for name, options, _ in CASES if name != "LBFGS"), ("AdamW", {}, "interp"),
], ids=lambda x: str(x))  # fmt: skip
def test_a_hundred_steps_in_f64_are_those_of_torch(name, options, target):
    """Bias corrections and schedules are of f64 too."""
    rng = np.random.default_rng(0)
    start, gradients = make_arrays(rng, np.float64), [make_arrays(rng, np.float64) for _ in range(100)]
    optimizer = getattr(optim, name)(**options)
    params = {n: ts.Tensor(x) for n, x in start.items()}
    state, update = optimizer.init(params), ts.jit(optimizer.update, target=target)
    for step in gradients:
        params, state = update(params, {n: ts.Tensor(x) for n, x in step.items()}, state)
    torch.set_default_dtype(torch.float64)  # some of PyTorch's optimizers compute their scalars in this type
    try:
        expected = run_torch(name, options, start, gradients)
    finally:
        torch.set_default_dtype(torch.float32)
    for n, p in params.items():
        np.testing.assert_allclose(p.numpy(), expected[n], rtol=1e-11, atol=1e-12, err_msg=n)


def test_a_schedule_has_the_type_of_the_widest_parameter():
    """In f64 the rates are those of Python's floats; an f32 parameter beside it takes them rounded once."""
    schedule = optim.CosineAnnealingLR(0.3, 7)
    optimizer, params = optim.SGD(schedule), {"a": ts.Tensor([0.0], ts.f64), "b": ts.Tensor([0.0], ts.f32)}
    ones = {n: ts.ones_like(p) for n, p in params.items()}
    state, update = optimizer.init(params), ts.jit(optimizer.update, target="cpu")
    for i in range(5):
        before = {n: p.numpy() for n, p in params.items()}
        params, state = update(params, ones, state)
        assert abs(params["a"].item() - (before["a"][0] - schedule(i))) < 1e-15
        assert params["b"].item() == before["b"][0] - np.float32(schedule(i))


@pytest.mark.parametrize("rate", [lambda: ts.Tensor(float("nan")), lambda: ts.Tensor(-1.0), lambda: float("nan")])
def test_a_learning_rate_that_is_known_is_checked(rate):
    params = [ts.Tensor([1.0])]
    for optimizer in (optim.AdamW(), optim.LBFGS()):
        with pytest.raises(ts.errors.ArgumentError, match="lr is (nan|-1.0)") as found:
            optimizer.update(params, params, optimizer.init(params), lr=rate())
        assert "test_optimizers.py" in str(found.value)
    nan_schedule = optim.SGD(lambda step: step * float("nan"))
    with pytest.raises(ts.errors.ArgumentError, match="lr is nan"):
        nan_schedule.update(params, params, nan_schedule.init(params))


def test_the_step_of_a_learning_rate_that_is_nan_can_be_left_out():
    params, optimizer = [ts.Tensor([1.0])], optim.Adam()
    step = ts.jit(lambda p, s, lr: optimizer.update(p, p, s, lr=lr, good=ts.isfinite(lr)), target="cpu")
    new, state = step(params, optimizer.init(params), ts.Tensor(float("nan")))
    assert new[0].numpy().tolist() == [1.0] and state["step"].item() == 0


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
    (lambda: optim.NAdam(lr=float("nan")), "lr"), (lambda: optim.SparseAdam(), "dense"),
    (lambda: optim.LBFGS(line_search_fn="strong_wolfe"), "each update is a step"), (lambda: optim.ASGD(t0=-1), "t0"),
    (lambda: optim.LBFGS(max_iter=20), "once for each iteration"),
    (lambda: optim.LBFGS(history_size=0), "history_size"),
])  # fmt: skip
def test_options_that_do_not_exist_are_refused(make, what):
    with pytest.raises(ts.errors.ArgumentError, match="(?s)" + what):
        make()


def test_every_optimizer_of_torch_has_its_options_here_or_refuses_them():
    kinds = {n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type)} & set(optim.__all__) - {
        "Optimizer",
        "SparseAdam",
    }
    given = {"lr": 0.1, "betas": (0.5, 0.6), "eps": (1e-3, 1e-3), "etas": (0.1, 2.0), "step_sizes": (0.0, 1.0),
             "beta2_decay": -0.5, "d": 1.0, "nesterov": False,
             "history_size": 3}  # fmt: skip
    refused = set()
    for name in kinds:
        for option in list(inspect.signature(getattr(torch.optim, name)).parameters)[1:]:
            try:
                getattr(optim, name)(
                    **{option: given.get(option, 1e-3) if name == "Adafactor" or option != "eps" else 0.1}
                )
            except ts.errors.ArgumentError:
                refused.add(option)
    assert refused == {
        "foreach", "fused", "capturable", "differentiable", "max_iter", "max_eval", "line_search_fn"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["ASGD", "LBFGS"])
def test_a_hundred_steps_on_a_loss_are_those_of_torch(name):
    """A quadratic of two parameters in f64, compiled, from gradients at each side's own parameters."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((12, 6)), rng.standard_normal(12)
    options = {"ASGD": {"lr": 0.01, "lambd": 0.01, "t0": 50}, "LBFGS": {"lr": 0.2, "history_size": 5}}[name]
    start = {"w": rng.standard_normal(5), "c": np.asarray(rng.standard_normal())}

    def compute(p, lib):
        return ((lib.asarray(a[:, :5]) @ p["w"] + p["c"] * lib.asarray(a[:, 5]) - lib.asarray(b)) ** 2).sum()

    optimizer, params = getattr(optim, name)(**options), {n: ts.Tensor(x) for n, x in start.items()}
    state = optimizer.init(params)
    step = ts.jit(
        lambda p, s: optimizer.update(p, ts.grad(lambda p: compute(p, ts))(p), s), target="cpu", donate=("p", "s")
    )
    for _ in range(100):
        params, state = step(params, state)
    held = {n: torch.tensor(x).requires_grad_() for n, x in start.items()}
    peer = getattr(torch.optim, name)([held["c"], held["w"]], **options, **({"max_iter": 1} if name == "LBFGS" else {}))

    def closure():
        peer.zero_grad()
        loss = compute(held, torch)
        loss.backward()
        return loss

    for _ in range(100):
        peer.step(closure)
    for n, p in params.items():
        np.testing.assert_allclose(p.numpy(), held[n].detach().numpy(), rtol=1e-7, atol=1e-9)
    if name == "ASGD":
        means = [peer.state[held[n]]["ax"].numpy() for n in params]
        for mean, n in zip(means, params, strict=True):
            np.testing.assert_allclose(state["average"][n].numpy(), mean, rtol=1e-7)


def test_lbfgs_leaves_out_a_step():
    """Neither a step that is not good nor a gradient of zeros changes anything."""
    optimizer, params = optim.LBFGS(), {"a": ts.ones((2,))}
    state = optimizer.init(params)
    for g, good in ((1.0, False), (0.0, True)):
        new, made = optimizer.update(params, {"a": ts.full((2,), g)}, state, good=ts.Tensor(good))
        np.testing.assert_array_equal(new["a"].numpy(), 1.0)
        assert all(np.array_equal(made[n].numpy(), state[n].numpy()) for n in state if n != "step")
        assert made["step"].item() == int(good)
    with pytest.raises(ts.errors.ArgumentError, match="no state of LBFGS"):
        optimizer.update(params, params, optim.Adam().init(params))
    with pytest.raises(ts.errors.ShapeError, match="other parameters"):
        optimizer.update({"a": ts.ones((3,))}, {"a": ts.ones((3,))}, state)

"""Learning-rate schedules against PyTorch's, as Python numbers and inside a compiled program."""

import numpy as np
import pytest

import tessera as ts
from tessera import optim

torch = pytest.importorskip("torch")
CASES = [
    ("StepLR", {"step_size": 3, "gamma": 0.5}),
    ("MultiStepLR", {"milestones": [2, 5, 5], "gamma": 0.3}),
    ("ExponentialLR", {"gamma": 0.9}),
    ("ConstantLR", {}),
    ("CosineAnnealingLR", {"T_max": 7, "eta_min": 0.01}),
    ("LinearLR", {}),
    ("LinearLR", {"start_factor": 0.1, "end_factor": 0.7, "total_iters": 4}),
    ("PolynomialLR", {"total_iters": 8, "power": 2.0}),
    ("OneCycleLR", {"max_lr": 0.4, "total_steps": 12}),
    ("OneCycleLR", {"max_lr": 0.4, "total_steps": 12, "pct_start": 0.5, "anneal_strategy": "linear"}),
    ("OneCycleLR", {"max_lr": 0.4, "epochs": 3, "steps_per_epoch": 4, "three_phase": True, "div_factor": 5.0}),
    ("CosineAnnealingWarmRestarts", {"T_0": 3, "eta_min": 0.01}),
    ("CosineAnnealingWarmRestarts", {"T_0": 1, "T_mult": 2}),
    ("CosineAnnealingWarmRestarts", {"T_0": 2, "T_mult": 3}),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.4, "step_size_up": 2, "step_size_down": 3}),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.4, "step_size_up": 3, "mode": "triangular2"}),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.4, "step_size_up": 2, "mode": "exp_range", "gamma": 0.9}),
    ("LambdaLR", {"lr_lambda": lambda t: 1.0 / (t + 1.0)}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda x: x if isinstance(x, str) else ",".join(x))
def test_rates_equal_those_of_torch(name, options):
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.2, momentum=0.0)
    own = name in ("OneCycleLR", "CyclicLR")
    extra = {"cycle_momentum": False} if own else {}
    theirs = getattr(torch.optim.lr_scheduler, name)(optimizer, **options, **extra)
    expected = []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(expected) < 12:
            theirs.step()
    ours = getattr(optim, name)(**({} if own else {"lr": 0.2}), **options)
    np.testing.assert_allclose([ours(t) for t in range(12)], expected, rtol=1e-9, atol=1e-12)
    traced = ts.jit(lambda t: ours(t) + 0.0 * t.to(ts.f32), target="cpu")
    found = [traced(ts.Tensor(np.int64(t))).item() for t in range(12)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_one_schedule_after_the_other_equals_that_of_torch():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    m = torch.optim.lr_scheduler
    parts = [m.LinearLR(optimizer, 0.1, 1.0, 3), m.CosineAnnealingLR(optimizer, 6), m.ConstantLR(optimizer, 0.5, 2)]
    theirs, expected = m.SequentialLR(optimizer, parts, [3, 8]), []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    parts = [optim.LinearLR(0.2, 0.1, 1.0, 3), optim.CosineAnnealingLR(0.2, 6), optim.ConstantLR(0.2, 0.5, 2)]
    ours = optim.SequentialLR(parts, [3, 8])
    np.testing.assert_allclose([ours(t) for t in range(12)], expected, rtol=1e-9)
    traced = ts.jit(lambda t: ours(t), target="cpu")
    np.testing.assert_allclose([traced(ts.Tensor(np.int64(t))).item() for t in range(12)], expected, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"mode": "max", "threshold_mode": "abs"}, {"cooldown": 2, "min_lr": 0.05}])
def test_plateau_equals_that_of_torch(options):
    options = {"patience": 1, "factor": 0.5, **options}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    ours = optim.ReduceLROnPlateau(0.2, **options)
    for metric in np.random.default_rng(0).random(30):
        theirs.step(metric)
        assert ours.step(metric) == pytest.approx(optimizer.param_groups[0]["lr"])


def test_clipping_equals_that_of_torch():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((3, 4), (5,))]
    for limit in (0.5, 100.0):
        params = [torch.nn.Parameter(torch.zeros(a.shape)) for a in arrays]
        for p, a in zip(params, arrays, strict=True):
            p.grad = torch.tensor(a)
        norm = torch.nn.utils.clip_grad_norm_(params, limit)
        got, ours = optim.clip_by_norm([ts.Tensor(a) for a in arrays], limit)
        np.testing.assert_allclose(ours.item(), norm, rtol=1e-6)
        for a, p in zip(got, params, strict=True):
            np.testing.assert_allclose(a.numpy(), p.grad, rtol=1e-6)
    np.testing.assert_array_equal(
        optim.clip_by_value([ts.Tensor(arrays[0])], 0.3)[0].numpy(), arrays[0].clip(-0.3, 0.3)
    )


def test_clipped_gradients_keep_their_types():
    found, norm = optim.clip_by_norm({"a": ts.Tensor([3.0], ts.bf16), "b": ts.Tensor([4.0], ts.f32)}, 2.5)
    assert (found["a"].dtype, found["b"].dtype, norm.item()) == (ts.bf16, ts.f32, 5.0)
    assert found["a"].item() == 1.5 and found["b"].item() == pytest.approx(2.0, rel=1e-6)


def test_a_norm_of_several_types_has_the_widest():
    tensors = {"a": ts.Tensor([3.0], ts.f64), "b": ts.Tensor([4.0], ts.f32), "c": ts.Tensor([12.0], ts.bf16)}
    found = ts.optim.global_norm(tensors)
    assert found.dtype == ts.f64 and found.item() == 13


def test_lion_and_averages_follow_their_formulas():
    rng = np.random.default_rng(0)
    p, m = rng.standard_normal(6).astype(np.float32), np.zeros(6, np.float32)
    optimizer, ema = optim.Lion(lr=0.1, weight_decay=0.5), optim.EMA(0.9)
    ours, average, mean = [ts.Tensor(p)], [ts.Tensor(p)], p.copy()
    state = optimizer.init(ours)
    for _ in range(5):
        g = rng.standard_normal(6).astype(np.float32)
        ours, state = optimizer.update(ours, [ts.Tensor(g)], state)
        average = ema.update(average, ours)
        p = p - 0.1 * (np.sign(0.9 * m + 0.1 * g) + 0.5 * p)
        m = 0.99 * m + 0.01 * g
        mean = 0.9 * mean + 0.1 * p
    np.testing.assert_allclose(ours[0].numpy(), p, rtol=1e-5)
    np.testing.assert_allclose(average[0].numpy(), mean, rtol=1e-5)


BAD = [
    (lambda: optim.SGD(lr=float("nan")), "lr is nan"),
    (lambda: optim.Adam(lr=-1.0), "lr is -1.0"),
    (lambda: optim.Adam([ts.zeros((2,))]), "lr is"),
    (lambda: optim.Adam(betas=(0.9, 1.0)), r"betas\[1\]"),
    (lambda: optim.Adam(betas=0.9), "betas is 0.9"),
    (lambda: optim.SGD(nesterov=True), "nesterov"),
    (lambda: optim.StepLR(0.1, 0), "step_size"),
    (lambda: optim.WarmupCosine(0.1, 5, 5), "warmup_steps"),
    (lambda: optim.OneCycleLR(0.1, 5, anneal_strategy="cubic"), "anneal_strategy"),
    (lambda: optim.EMA(1.0), "decay"),
    (lambda: optim.OneCycleLR(0.1, 5, cycle_momentum=True), "cycle_momentum"),
    (lambda: optim.OneCycleLR(0.1), "epochs"),
    (lambda: optim.StepLR(0.1, 2, last_epoch=3), "counts the steps"),
    (lambda: optim.CyclicLR(0.1, 0.2, mode="square"), "triangular2"),
    (lambda: optim.LambdaLR(0.1, 0.5), "no function"),
    (lambda: optim.SequentialLR([optim.StepLR(0.1, 2)], [3]), "one less"),
    (lambda: optim.SequentialLR([0.1, 0.2], [3]), "takes schedules"),
    (lambda: optim.Adam().init({}), "nothing to train"),
    (lambda: optim.Adam().init([ts.zeros((2,), dtype=ts.int32)]), "no float elements"),
    (lambda: optim.Adam().update([ts.zeros((2,))], [ts.zeros((2,))], {}), "no state of Adam"),
    (lambda: _update({"w": ts.zeros((3,))}), "gradient of w has another shape"),
    (lambda: _update({"v": ts.zeros((2,))}), "no parameter 'v'"),
    (lambda: _update({"w": ts.zeros((2,))}, lr=float("nan")), "lr is nan"),
    (lambda: optim.clip_by_norm([ts.ones((2,))], float("nan")), "max_norm"),
]


def _update(grads, **named):
    params = {"w": ts.zeros((2,))}
    return optim.Adam().update(params, grads, optim.Adam().init(params), **named)


@pytest.mark.parametrize(("call", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_is_a_typed_error(call, message):
    with pytest.raises(ts.errors.TesseraError, match="(?s)" + message):
        call()

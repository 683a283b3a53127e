"""Layers, optimizers and schedulers of PyFlame: PyTorch's results, gradients, training steps and learning rates."""

import inspect
import math

import numpy as np
import pytest

import tessera as ts
import tessera.pyflame as pf

torch = pytest.importorskip("torch")
nn = torch.nn
rng = np.random.default_rng(11)


def draw(*shape):
    return rng.normal(size=shape).astype(np.float32)


LAYERS = {
    "linear": (lambda m: m.Linear(5, 3), (4, 5)),
    "linear without bias": (lambda m: m.Linear(5, 3, bias=False), (2, 4, 5)),
    "conv2d": (lambda m: m.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0), groups=2), (2, 4, 7, 6)),
    "conv1d": (lambda m: m.Conv1d(3, 4, 3, padding=2, dilation=2, bias=False), (2, 3, 8)),
    "batch norm 2d": (lambda m: m.BatchNorm2d(3, eps=1e-3, momentum=0.3), (4, 3, 2, 2)),
    "batch norm 1d": (lambda m: m.BatchNorm1d(3), (6, 3)),
    "layer norm": (lambda m: m.LayerNorm([2, 3]), (4, 2, 3)),
    "group norm": (lambda m: m.GroupNorm(2, 4), (2, 4, 3)),
    "max pool": (lambda m: m.MaxPool2d(3, 2, padding=1, ceil_mode=True), (2, 3, 7, 8)),
    "avg pool": (lambda m: m.AvgPool2d(2, padding=1, count_include_pad=False), (2, 3, 6, 5)),
    "adaptive pool": (lambda m: m.AdaptiveAvgPool2d((2, 3)), (2, 3, 5, 7)),
    "relu": (lambda m: m.ReLU(), (3, 4)),
    "encoder": (lambda m: m.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.0), (3, 2, 8)),
}


def match(kind):
    """A layer of PyFlame and one of PyTorch with the same weights."""
    theirs, ours = kind(nn), kind(pf.nn)
    ours.load_state_dict({k: v.detach().numpy() for k, v in theirs.state_dict().items()})
    return ours, theirs


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_of_pytorch(name):
    kind, shape = LAYERS[name]
    ours, theirs = match(kind)
    for _ in range(2):
        array = draw(*shape)
        x, t = pf.tensor(array, requires_grad=True), torch.tensor(array, requires_grad=True)
        y, z = ours(x), theirs(t)
        assert pf.is_lazy(y) and y.shape == list(z.shape)
        pf.autograd.backward((y * y).sum() + y.sum())
        ((z * z).sum() + z.sum()).backward()
        np.testing.assert_allclose(y.numpy(), z.detach(), rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(x.grad.numpy(), t.grad, rtol=2e-3, atol=2e-4)
    for (path, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad, rtol=2e-3, atol=2e-3, err_msg=path)
    for (path, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-5, atol=1e-6, err_msg=path)
    np.testing.assert_allclose(
        ours.eval()(pf.tensor(array)).numpy(), theirs.eval()(torch.tensor(array)).detach(), rtol=2e-4, atol=2e-5
    )


@pytest.mark.parametrize("key_size", [8, 6])
def test_cross_attention_with_weights(key_size):
    ours, theirs = match(lambda m: m.MultiheadAttention(8, 2, kdim=key_size, vdim=key_size))
    q, k = draw(3, 2, 8), draw(5, 2, key_size)
    out, weights = ours.forward(pf.tensor(q), pf.tensor(k), pf.tensor(k), need_weights=True)
    want, shares = theirs(torch.tensor(q), torch.tensor(k), torch.tensor(k))
    np.testing.assert_allclose(out.numpy(), want.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights.numpy(), shares.detach(), rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "sgd": dict(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "sgd dampening": dict(lr=0.05, momentum=0.5, dampening=0.3),
    "adam": dict(lr=0.02, weight_decay=0.1, amsgrad=True),
    "adamw": dict(lr=0.02, weight_decay=0.2),
    "rmsprop": dict(lr=0.01, alpha=0.9, momentum=0.5, centered=True),
}
KINDS = {"sgd": "SGD", "sgd dampening": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop"}


def make_models():
    return match(lambda m: m.Sequential(*[m.Linear(4, 8, bias=False), m.BatchNorm1d(8), m.ReLU(), m.Linear(8, 2)]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_thirty_steps_of_training_are_those_of_pytorch(name):
    ours, theirs = make_models()
    one = getattr(pf.optim, KINDS[name])(ours.parameters(), **OPTIMIZERS[name])
    other = getattr(torch.optim, KINDS[name])(theirs.parameters(), **OPTIMIZERS[name])
    loss = pf.nn.CrossEntropyLoss()
    for step in range(30):
        x, y = draw(16, 4), rng.integers(0, 2, 16)
        one.zero_grad()
        other.zero_grad()
        value = loss(ours(pf.tensor(x)), pf.tensor(y))
        want = nn.functional.cross_entropy(theirs(torch.tensor(x)), torch.tensor(y))
        pf.autograd.backward(value)
        want.backward()
        assert value.item() == pytest.approx(want.item(), rel=2e-3, abs=2e-4), step
        one.step()
        other.step()
    for a, (path, b) in zip(ours.state_dict().values(), theirs.state_dict().items(), strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=5e-3, atol=5e-4, err_msg=path)


DEFAULTS = [("SGD", {"lr": 0.1}), ("Adam", {}), ("AdamW", {}), ("RMSprop", {}),
            ("Adam", {"lr": 0.1, "amsgrad": True}), ("AdamW", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.5}),
            ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
            ("RMSprop", {"lr": 0.1, "centered": True, "weight_decay": 0.1, "eps": 0.1})]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), DEFAULTS, ids=str)
def test_a_hundred_steps_with_parameters_that_have_no_gradient_in_some(name, options):
    arrays, random = [draw(3, 4), draw(5)], np.random.default_rng(2)
    ours = [pf.nn.Parameter(pf.tensor(a)) for a in arrays]
    theirs = [torch.nn.Parameter(torch.tensor(a)) for a in arrays]
    one, other = getattr(pf.optim, name)(ours, **options), getattr(torch.optim, name)(theirs, **options)
    for step in range(100):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            g = random.standard_normal(arrays[i].shape).astype(np.float32)
            without = i == 1 and step % 3 == 0
            p.grad, q.grad = (None, None) if without else (pf.tensor(g), torch.tensor(g))
        one.step()
        other.step()
        if step == 50:  # the steps of each parameter are part of the state
            state, one = one.state_dict(), getattr(pf.optim, name)(ours, **options)
            one.load_state_dict(state)
    for p, q in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.numpy(), q.detach(), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_continues_with_the_same_numbers():
    pf.manual_seed(5)
    batches = [(pf.tensor(draw(8, 4)), pf.tensor(draw(8, 2))) for _ in range(6)]

    def train(model, optimizer, some):
        for x, y in some:
            optimizer.zero_grad()
            pf.nn.MSELoss()(model(x), y).backward()
            optimizer.step()

    model, _ = make_models()
    optimizer = pf.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, batches[:3])
    saved, state = model.state_dict(), optimizer.state_dict()
    train(model, optimizer, batches[3:])
    other, _ = make_models()
    again = pf.optim.Adam(other.parameters(), lr=0.5)
    other.load_state_dict(saved)
    again.load_state_dict(state)
    train(other, again, batches[3:])
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


SCHEDULES = {
    "StepLR": dict(step_size=3, gamma=0.5),
    "MultiStepLR": dict(milestones=[2, 7], gamma=0.1),
    "ExponentialLR": dict(gamma=0.9),
    "CosineAnnealingLR": dict(T_max=8, eta_min=0.01),
    "LinearLR": dict(start_factor=0.1, total_iters=5),
    "OneCycleLR": dict(max_lr=1.0, total_steps=12),
    "PolynomialLR": dict(total_iters=6, power=2.0),
}
# The first and the last steps, no steps, and steps after the end.
EDGES = [
    ("StepLR", dict(step_size=1)), ("StepLR", dict(step_size=7, gamma=0)), ("MultiStepLR", dict(milestones=[])),
    ("MultiStepLR", dict(milestones=[9, 3, 3])), ("CosineAnnealingLR", dict(T_max=1)),
    ("CosineAnnealingLR", dict(T_max=4, eta_min=0.1)), ("LinearLR", {}), ("LinearLR", dict(total_iters=1)),
    ("LinearLR", dict(start_factor=1.0, end_factor=0.0, total_iters=3)), ("PolynomialLR", dict(total_iters=1)),
    ("OneCycleLR", dict(max_lr=1.0, total_steps=11, pct_start=1e-4)),
    ("OneCycleLR", dict(max_lr=1.0, total_steps=11, anneal_strategy="linear", div_factor=2, final_div_factor=5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), [*SCHEDULES.items(), *EDGES], ids=str)
def test_learning_rates_are_those_of_pytorch(name, options):
    one = pf.optim.SGD([pf.nn.Parameter(pf.ones([1]))], lr=0.4)
    other = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.4)
    ours = getattr(pf.optim, name)(one, **options)
    theirs = getattr(torch.optim.lr_scheduler, name)(other, **options)
    for step in range(11):
        assert one.get_lr() == pytest.approx(other.param_groups[0]["lr"], rel=1e-6, abs=1e-12)
        other.step()
        if step < 10 or name != "OneCycleLR":
            ours.step()
            theirs.step()


def test_the_plateau_of_a_metric_reduces_the_rate_as_in_pytorch():
    one = pf.optim.SGD([pf.nn.Parameter(pf.ones([1]))], lr=0.4)
    other = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.4)
    options = dict(mode="max", factor=0.5, patience=1, cooldown=1, min_lr=0.06)
    ours = pf.optim.ReduceLROnPlateau(one, **options)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(other, **options)
    for metric in (1.0, 2.0, 2.0, 1.5, 1.0, 2.00001, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        ours.step(pf.tensor(metric))
        theirs.step(metric)
        assert one.get_lr() == pytest.approx(other.param_groups[0]["lr"])
    one.set_lr(0.8)
    for _ in range(3):
        ours.step(0.0)
    assert one.get_lr() == pytest.approx(0.4)


def test_a_module_of_the_user():
    class Net(pf.nn.Module):
        def __init__(self):
            self.blocks = [pf.nn.Linear(3, 3) for _ in range(2)]
            self.scale = pf.nn.Parameter(pf.full([3], 2.0))
            self.seen = pf.zeros([1])

        def forward(self, x):
            for block in self.blocks:
                x = pf.relu(block(x)) + x
            return x * self.scale

    net = Net()
    assert [n for n, _ in net.named_parameters()][-1] == "blocks.1.bias" and len(net.parameters()) == 5
    assert [n for n, _ in net.named_buffers()] == ["seen"] and net.count_parameters() == 27
    net(pf.ones([2, 3])).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    saved = net.state_dict()
    before = net.scale
    net.load_state_dict({k: v * 0.0 for k, v in saved.items()})
    assert net.scale is before and (net(pf.ones([2, 3])).numpy() == 0).all() and saved["scale"].numpy()[0] == 2


def test_frozen_parameters_stay():
    model = pf.nn.Sequential(pf.nn.Linear(2, 2), pf.nn.Linear(2, 1))
    optimizer = pf.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    model.freeze("0")
    before = model.state_dict()
    model(pf.ones([1, 2])).sum().backward()
    optimizer.step()
    changed = [(before[k].numpy() != v.numpy()).any() for k, v in model.state_dict().items()]
    assert changed == [False, False, True, True]
    assert all(p.requires_grad for p in model.unfreeze().parameters())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_tensors_of_their_own(how):
    import copy
    import pickle

    model = pf.nn.Sequential(pf.nn.Linear(2, 2), pf.nn.BatchNorm1d(2))
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    x = pf.tensor(draw(4, 2))
    np.testing.assert_array_equal(other.eval()(x).numpy(), model.eval()(x).numpy())
    other(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())


def test_a_summary_has_shapes_and_counts():
    import io

    text = io.StringIO()
    model = pf.nn.Sequential(pf.nn.Linear(4, 3), pf.nn.ReLU())
    model.summary(pf.ones([2, 4]), file=text)
    assert "15" in text.getvalue() and "2x3" in text.getvalue()
    assert model(pf.ones([1, 4])).shape == [1, 3]


def test_half_precision():
    ours, theirs = match(lambda m: m.Linear(5, 3))
    ours.to(pf.bfloat16)
    theirs.to(torch.bfloat16)
    x = draw(4, 5)
    y = ours(pf.tensor(x, dtype=pf.bfloat16))
    want = theirs(torch.tensor(x, dtype=torch.bfloat16)).detach().float()
    assert y.dtype is pf.bfloat16 and ours.weight.requires_grad
    np.testing.assert_allclose(y.numpy().astype(np.float32), want, rtol=2e-2, atol=2e-2)


def test_dropout_draws_anew_and_the_seed_repeats_it():
    layer, x = pf.nn.Dropout(0.5), pf.ones([1000])
    pf.manual_seed(1)
    a, b = layer(x), layer(x)
    pf.manual_seed(1)
    again = layer(x)
    assert (a.numpy() != b.numpy()).any() and (a.numpy() == again.numpy()).all()
    assert layer.eval()(x) is x


def test_the_gradient_of_dropout_has_the_mask_of_its_result():
    x = pf.tensor(np.ones(200, np.float32), requires_grad=True)
    y = pf.nn.Dropout(0.25)(x)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), y.numpy())


PARAMETER = pf.nn.Parameter(pf.ones([2]))
SGD = pf.optim.SGD([PARAMETER], lr=0.1)


def make_sgd():
    return pf.optim.SGD([pf.nn.Parameter(pf.ones([2]))], lr=0.1)


WRONG = {
    "nan": lambda: pf.optim.SGD([PARAMETER], lr=math.nan),
    "set nan": lambda: SGD.set_lr(math.nan),
    "negative": lambda: pf.optim.Adam([PARAMETER], lr=-1.0),
    "text": lambda: pf.optim.AdamW([PARAMETER], lr="fast"),
    "no parameters": lambda: pf.optim.SGD([], lr=0.1),
    "a result": lambda: pf.optim.SGD([PARAMETER * 2.0], lr=0.1),
    "an array": lambda: pf.optim.SGD([np.ones(2)], lr=0.1),
    "a number": lambda: pf.optim.SGD(3, lr=0.1),
    "cycle": lambda: [step() for step in [pf.optim.OneCycleLR(make_sgd(), 1.0, total_steps=2).step] * 3],
    "integers": lambda: pf.optim.SGD([pf.ones([2], dtype=pf.int32)], lr=0.1),
    "beta": lambda: pf.optim.Adam([PARAMETER], beta1=1.5),
    "state": lambda: SGD.load_state_dict({"a": 1}),
    "extra state": lambda: SGD.load_state_dict({"lr": 0.1, "state": {"other": 1}}),
    "optimizer": lambda: pf.optim.StepLR(3, step_size=1),
    "steps": lambda: pf.optim.StepLR(SGD, step_size=0),
    "milestones": lambda: pf.optim.MultiStepLR(SGD, milestones="ab"),
    "epoch": lambda: pf.optim.ExponentialLR(SGD, 0.9, last_epoch=-3),
    "metric": lambda: pf.optim.ReduceLROnPlateau(SGD).step(math.nan),
    "input": lambda: pf.nn.Linear(3, 2)(pf.ones([4, 5])),
    "rank": lambda: pf.nn.Conv2d(3, 2, 3)(pf.ones([3, 5])),
    "targets": lambda: pf.nn.MSELoss()(pf.ones([3, 1]), pf.ones([3])),
    "reduction": lambda: pf.nn.MSELoss("average"),
    "heads": lambda: pf.nn.MultiheadAttention(10, 3),
    "missing": lambda: pf.nn.Linear(3, 2).load_state_dict({"weight": np.ones((2, 3), np.float32)}),
    "shape": lambda: pf.nn.Linear(3, 2, bias=False).load_state_dict({"weight": np.ones((3, 2), np.float32)}),
    "parameter": lambda: pf.nn.Parameter([1.0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_typed_errors_at_the_line_of_the_user(name):
    with pytest.raises(ts.errors.TesseraError) as found:
        WRONG[name]()
    assert found.value.location.file == __file__
    assert found.value.location.line == WRONG[name].__code__.co_firstlineno
    assert SGD.get_lr() == 0.1 and (PARAMETER.numpy() == 1).all()


def test_a_class_out_of_range_names_the_line():
    loss = pf.nn.CrossEntropyLoss()(pf.zeros([2, 3]), pf.tensor([0, 3], dtype=pf.int32))  # here
    with pytest.raises(ts.errors.OutOfBoundsError, match="here"):
        loss.eval()


@pytest.mark.parametrize("name", ["Linear", "Conv2d", "MultiheadAttention", "KLDivLoss"])
def test_layers_show_the_arguments_that_they_take(name):
    assert inspect.signature(getattr(pf.nn, name)) == inspect.signature(getattr(ts.nn, name))
    assert "args" not in inspect.signature(getattr(pf.nn, name)).parameters


def test_classes_have_the_names_by_which_they_are_imported():
    for name in ("Embedding", "ModuleList", "ModuleDict", "Linear", "Sequential"):
        assert getattr(pf.nn, name).__name__ == name
    table = pf.nn.Sequential([pf.nn.Embedding(4, 2)])
    assert "Embedding(4, 2)" in repr(table) and "Lazy" not in repr(table)
    found = table(pf.tensor([9], dtype=pf.int32))
    with pytest.raises(ts.errors.OutOfBoundsError, match=r"token 9 .*Embedding\)"):
        found.numpy()

"""Modules as pytrees: under every transform, tied, frozen, nested, saved and loaded."""

import copy
import pickle
import warnings
from dataclasses import dataclass

import numpy as np
import pytest

import tessera as ts
from tessera import nn, optim
from tessera.errors import ArgumentError

X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)


class Tied(nn.Module):
    def __init__(self):
        self.embed = nn.Linear(4, 4, bias=False)
        self.layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)]
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        for layer in self.layers:
            x = ts.tanh(layer(self.embed(x)))
        return self.head(x)


def loss(model, x):
    return (model(x) ** 2).mean()


def test_tied_parameters_are_one_leaf_and_stay_tied():
    model = Tied()
    paths = [n for n, _ in ts.tree.leaves_with_path(model)]
    assert "embed.weight" in paths and "head.weight" not in paths
    assert {"embed.weight", "head.weight"} <= model.state_dict().keys()
    copy = Tied().load_state_dict(model.state_dict())
    for each in (ts.tree.map(lambda t: t, model), ts.jit(lambda m: m)(model), copy):
        assert each.head.weight is each.embed.weight
    apart = Tied()
    apart.load_state_dict(model.state_dict())
    apart.head.weight = apart.head.weight + 0.0
    both, one = (ts.grad(loss)(m, ts.Tensor(X)) for m in (apart, model))
    total = both.embed.weight.numpy() + both.head.weight.numpy()
    np.testing.assert_allclose(one.embed.weight.numpy(), total, rtol=1e-5, atol=1e-7)


def test_frozen_parameters_and_buffers_have_no_gradient():
    model = Tied().freeze("layers.0")
    grads = ts.grad(loss)(model, ts.Tensor(X))
    assert grads.layers[0].weight is None and grads.layers[1].running_mean is None
    assert grads.layers[1].weight.shape == (4,)
    new, _ = optim.SGD(lr=1.0).update(model, grads, optim.SGD(lr=1.0).init(model))
    np.testing.assert_array_equal(new.layers[0].weight.numpy(), model.layers[0].weight.numpy())
    assert ts.tree.map(lambda p, g: p - g, model, grads).layers[1].num_batches_tracked.item() == 1
    assert model.unfreeze() and ts.grad(loss)(model, ts.Tensor(X)).layers[0].weight is not None
    with pytest.raises(ts.errors.ArgumentError, match="no parameter absent"):
        model.freeze("absent")


def test_statistics_are_explicit_state_of_a_traced_function():
    model, batch = nn.BatchNorm1d(4), ts.Tensor(X)

    @ts.jit(target="cpu")
    def step(model, x):
        return model(x), model

    _, after = step(model, batch)
    np.testing.assert_allclose(after.running_mean.numpy(), 0.1 * X.mean(0), rtol=1e-5)
    assert model.num_batches_tracked.item() == 0
    compiled = ts.jit(model, target="cpu")  # a compiled module keeps its own statistics
    compiled(batch), compiled(batch)
    assert model.num_batches_tracked.item() == 2
    with pytest.raises(ts.errors.TraceError, match=r"BatchNorm1d\.running_mean is set"):
        ts.grad(lambda x: model(x).sum())(batch)
    model.eval()
    assert ts.grad(lambda x: model(x).sum())(batch).shape == X.shape


LOSING = {
    "vjp": lambda model, x: ts.vjp(lambda model: loss(model, x), model),
    "trace": lambda model, x: ts.jit(lambda model, x: model(x), target="cpu").trace(model, x),
    "vmap": lambda model, x: ts.vmap(lambda model, x: model(x), in_dims=(None, 0))(model, ts.stack([x, x])),
    "checkpoint": lambda model, x: ts.grad(lambda x: ts.checkpoint(loss)(model, x))(x),
    "scan": lambda model, x: nn.Stack([model, model])(x),
}


@pytest.mark.parametrize("name", LOSING)
def test_statistics_that_are_not_returned_are_told(name):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4))), ts.Tensor(X)
    lost = r"running_mean, running_var and num_batches_tracked of (model\.)?1\.0\. Return the module"
    with pytest.warns(ts.errors.LostUpdateWarning, match=lost) as told:
        LOSING[name](model, x)
    assert {w.filename for w in told} == {__file__} and model[1][0].num_batches_tracked.item() == 0
    LOSING[name](model.eval(), x)  # nothing is replaced, and nothing told: a warning is an error here


def test_a_loop_of_steps_tells_once_and_a_returned_module_nothing():
    model, x = Tied(), ts.Tensor(X)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            ts.vjp(loss, model, x)
    assert [w.category for w in told] == [ts.errors.LostUpdateWarning]
    (_, after), _ = ts.value_and_grad(lambda model: (loss(model, x), model), has_aux=True)(model)
    (_, state), _ = ts.value_and_grad(lambda model: (loss(model, x), model.state_dict()), has_aux=True)(model)
    assert after.layers[1].num_batches_tracked.item() == state["layers.1.num_batches_tracked"].item() == 1
    assert model.layers[1].num_batches_tracked.item() == 0


KEEPING = {
    "value_and_grad": lambda model, x: ts.value_and_grad(loss)(model, x),
    "argnums": lambda model, x: ts.grad(lambda x, model: loss(model, x), argnums=1)(x, model),
    "in a container": lambda model, x: ts.grad(lambda parts: loss(parts["a"][1], x))({"a": (ts.ones(2), model)}),
    "jit": lambda model, x: ts.jit(loss, target="cpu")(model, x),
    "jit by name": lambda model, x: ts.jit(loss, target="interp")(x=x, model=model),
    "jit of grad": lambda model, x: ts.jit(ts.grad(loss), target="cpu")(model, x),
    "grad of jit": lambda model, x: ts.grad(ts.jit(loss, target="cpu"))(model, x),
    "grad in jit": lambda model, x: ts.jit(lambda m, x: ts.value_and_grad(loss)(m, x)[0], target="cpu")(model, x),
    "jit of parts": lambda model, x: ts.jit(lambda *a: loss(a[0]["m"], a[1]), target="cpu")({"m": model}, x),
    "data class": lambda model, x: ts.jit(lambda h, x: loss(h.model, x))(Holder(model, "run"), x),
}


@ts.tree.register(static=("name",))
@dataclass
class Holder:
    model: nn.Module
    name: str


@pytest.mark.parametrize("name", KEEPING)
def test_the_module_that_was_passed_keeps_its_statistics(name):
    """Those of PyTorch after the same calls."""
    torch = pytest.importorskip("torch")
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)))
    peer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.BatchNorm1d(4)))
    peer.load_state_dict({n: torch.tensor(t.numpy()) for n, t in model.state_dict().items()})
    weight = model[0].weight
    for scale in (1.0, 2.0, 3.0):
        KEEPING[name](model, ts.Tensor(X * scale))
        peer(torch.tensor(X * scale))
    for path, tensor in peer.named_buffers():
        np.testing.assert_allclose(model.state_dict()[path].numpy(), tensor.numpy(), rtol=1e-5, atol=1e-6)
    assert model[0].weight is weight
    mean = model[1][0].running_mean
    KEEPING[name](model.eval(), ts.Tensor(X))
    assert model[1][0].running_mean is mean


def test_a_compiled_step_keeps_statistics_through_an_optimizer():
    """A step that returns what the optimizer made of the module, with its memory donated: those of PyTorch."""
    torch = pytest.importorskip("torch")
    model, peer = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), None
    peer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    peer.load_state_dict({n: torch.tensor(t.numpy()) for n, t in model.state_dict().items()})
    optimizer, other = optim.SGD(lr=0.1), torch.optim.SGD(peer.parameters(), lr=0.1)

    @ts.jit(target="cpu", donate=("model", "state"))
    def step(model, state, x):
        value, grads = ts.value_and_grad(loss)(model, x)
        return value, *optimizer.update(model, grads, state)

    state = optimizer.init(model)
    for i in range(4):
        _, model, state = step(model, state, ts.Tensor(X + i))
        other.zero_grad()
        (peer(torch.tensor(X + i)) ** 2).mean().backward()
        other.step()
    for path, tensor in peer.state_dict().items():
        np.testing.assert_allclose(model.state_dict()[path].numpy(), tensor.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("donate", [(), ("model",)])
def test_calls_that_are_known_by_their_key_keep_statistics(donate):
    """The second call and later ones of one compiled function; another module of the same kind has its own."""
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    run = ts.jit(lambda model, x: model(x).sum(), target="cpu", donate=donate)
    if donate:
        run(first, ts.Tensor(X))
        assert first.num_batches_tracked.item() == 1
        return
    for count in (1, 2, 3):
        run(first, ts.Tensor(X))
        assert first.num_batches_tracked.item() == count
    np.testing.assert_allclose(first.running_mean.numpy(), (1 - 0.9**3) * X.mean(0), rtol=1e-5)
    run(x=ts.Tensor(X), model=second)
    assert (first.num_batches_tracked.item(), second.num_batches_tracked.item()) == (3, 1)


def test_a_trace_keeps_nothing_in_a_module_that_it_was_not_given():
    model = nn.BatchNorm1d(4)
    with pytest.raises(ts.errors.TraceError, match=r"pass the module as an argument and return it"):
        ts.jit(lambda x: ts.value_and_grad(loss)(model, x)[0])(ts.Tensor(X))
    assert model.num_batches_tracked.item() == 0


def test_a_compiled_module_sees_new_weights():
    layer = nn.Linear(4, 2)
    compiled = ts.jit(layer, target="cpu")
    before = compiled(X).numpy()
    layer.weight = layer.weight * 2.0
    np.testing.assert_allclose(compiled(X).numpy(), layer(X).numpy(), rtol=1e-6)
    assert not np.allclose(before, compiled(X).numpy())


def test_configuration_chooses_the_program():
    model, x = nn.Dropout(0.5), ts.ones((50,))
    step = ts.jit(lambda m, x: m(x), target="cpu")
    for _ in range(3):  # after the first call by the key of its arguments
        assert (step(model.train(), x).numpy() == 0.0).any()
        np.testing.assert_array_equal(step(model.eval(), x).numpy(), x.numpy())
    grads = ts.jit(ts.grad(loss), target="cpu")
    layer = nn.Linear(4, 2)
    for _ in range(3):
        assert grads(layer.freeze("bias"), X).bias is None
        assert grads(layer.unfreeze(), X).bias is not None


def test_layers_stacked_equal_layers_in_turn():
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, 0.0) for _ in range(3)]
    x = ts.Tensor(np.random.default_rng(1).standard_normal((4, 2, 8)).astype(np.float32))
    expected = nn.TransformerEncoder(blocks)(x)
    want = ts.grad(lambda m, x: (m(x) ** 2).sum())(nn.TransformerEncoder(blocks), x)
    for remat in (False, True):
        stack = nn.Stack(blocks, rematerialise=remat)
        np.testing.assert_allclose(stack(x).numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
        g = ts.jit(ts.grad(lambda m, x: (m(x) ** 2).sum()), target="cpu")(stack, x)
        for i in range(3):
            a, b = g.layers.linear1.weight[i], want.layers[i].linear1.weight
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-5)
    ensemble = nn.stack_modules([nn.Linear(4, 2) for _ in range(3)])
    assert ts.vmap(lambda m, x: m(x), in_dims=(0, None))(ensemble, ts.Tensor(X)).shape == (3, 5, 2)
    with pytest.raises(ts.errors.ArgumentError, match="differ"):
        nn.stack_modules([nn.Linear(4, 2), nn.Linear(4, 3)])


def test_rematerialised_layers_are_computed_again():
    counts = []
    for remat in (False, True):
        stack = nn.Stack([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)], rematerialise=remat)
        body = ts.jit(ts.grad(lambda m, x: m(x).sum())).trace(stack, X).function.body
        counts.append(sum(n.op.name == "ts.tanh" for n in body.walk()))
    assert counts == [1, 2]


def test_modules_under_policies_and_checkpoints():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = ts.grad(loss)(model, ts.Tensor(X))
    saved = ts.grad(lambda m, x: (ts.checkpoint(lambda m, x: m(x))(m, x) ** 2).mean())(model, ts.Tensor(X))
    with ts.precision("mixed"):
        mixed = ts.grad(loss)(model, ts.Tensor(X))
    assert mixed[0].weight.dtype == ts.f32
    np.testing.assert_allclose(saved[0].weight.numpy(), plain[0].weight.numpy(), rtol=1e-6)
    np.testing.assert_allclose(mixed[0].weight.numpy(), plain[0].weight.numpy(), rtol=0.1, atol=2e-2)


def test_dropout_draws_anew_and_repeats_with_the_seed():
    model, x = nn.Dropout(0.5), ts.ones((100,))
    step = ts.jit(lambda m, x: m(x), target="cpu")
    ts.manual_seed(1)
    a, b = step(model, x).numpy(), step(model, x).numpy()
    ts.manual_seed(1)
    np.testing.assert_array_equal(step(model, x).numpy(), a)
    assert not np.array_equal(a, b) and set(a) == {0.0, 2.0}
    ts.manual_seed(1)
    np.testing.assert_array_equal(model(x).numpy(), a)  # eager: the same numbers


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": np.zeros((2, 3), np.float32)}, "bias is missing"),
        ({"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(2, np.float32), "b": 1}, "b is extra"),
        ({"weight": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)}, r"weight has shape \[3, 2\]"),
        ({"weight": np.zeros((2, 3)), "bias": np.zeros(2, np.float32)}, "weight holds f64, expected f32"),
        ({"weight": "x", "bias": np.zeros(2, np.float32)}, "weight is no array"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(state, message):
    layer = nn.Linear(3, 2)
    before = layer.weight.numpy().copy()
    with pytest.raises(ts.errors.StateDictError, match=message):
        layer.load_state_dict(state)
    np.testing.assert_array_equal(layer.weight.numpy(), before)


def test_hooks_apply_and_errors_name_the_module():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 2)))
    seen = []
    remove = model[1][0].register_forward_hook(lambda module, args, out: seen.append(args[0].shape) or out * 0.0)
    assert not model(X).numpy().any() and seen == [(5, 8)]
    remove()
    assert model(X).numpy().any()
    model[1].register_forward_pre_hook(lambda module, args: args[0][:, :7])
    with pytest.raises(ts.errors.ShapeError, match=r"\(in 1\.0: Linear\)"):
        model(X)
    assert [type(m).__name__ for m in model.modules()] == ["Sequential", "Linear", "Sequential", "Linear"]
    assert "1.0" in [n for n, _ in model.named_modules()] and model.count_parameters() == 58


def test_lora_trains_few_and_merges():
    base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    expected = base(X).numpy()
    model = nn.add_lora(base, rank=2)
    np.testing.assert_array_equal(model(X).numpy(), expected)
    optimizer = optim.Adam(lr=0.1)
    state = optimizer.init(model)
    assert {n.split(".")[-1] for n in state["m"]} == {"a", "b"}
    model, _ = optimizer.update(model, ts.grad(loss)(model, ts.Tensor(X)), state)
    merged = model[0].merge()
    np.testing.assert_allclose(merged(X).numpy(), model[0](X).numpy(), rtol=1e-5, atol=1e-6)


def test_registered_dataclasses_are_containers():
    @ts.tree.register(static=("name",))
    @dataclass
    class State:
        model: nn.Module
        step: object
        name: str = "run"

    state = State(nn.Linear(4, 2), ts.zeros(()), "first")
    found = ts.jit(lambda s: State(s.model, s.step + 1.0, s.name + "!"), target="cpu")(state)
    assert found.name == "first!" and found.step.item() == 1.0 and isinstance(found.model, nn.Linear)
    with pytest.raises(ts.errors.ArgumentError, match="no dataclass"):
        ts.tree.register(int)


def test_summary_and_repr_count(capsys):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).freeze("0")
    model.summary(ts.zeros((5, 1, 4, 4)))
    text = capsys.readouterr().out
    assert "5x2x2x2xf32" in text and "51" in text and "31" in text
    assert repr(model).endswith("# 51 parameters") and model[1].num_batches_tracked.item() == 0


@pytest.mark.parametrize("name", ["uniform", "normal", "truncated_normal", "xavier_uniform", "kaiming_normal"])
def test_initialisation_of_a_tensor_is_refused(name):
    with pytest.raises(ts.errors.ArgumentError, match="takes a shape"):
        getattr(nn.init, name)(nn.Linear(4, 2).weight)


def test_a_donated_module_may_hold_itself_and_is_given_whole():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    before = [t for _, t in model.named_parameters()]
    step = ts.jit(lambda m: m, donate=("m",))
    for _ in range(3):  # traced, then known by its key
        after = step(model)
        with pytest.raises(ts.errors.TesseraError, match="donated"):
            model[0].bias.numpy()
        model = after
    assert model[0].weight is model[1].weight and len(before) == len(dict(model.named_parameters()))


def test_a_configuration_set_after_a_call_is_seen_by_the_next():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    step = ts.jit(lambda m, x: (m, m(x)))
    model, _ = step(model, np.ones((1, 2), np.float32))
    model, drawn = step(model, np.ones((64, 2), np.float32))
    model.eval()
    _, kept = step(model, np.ones((64, 2), np.float32))
    assert len(np.unique(drawn.numpy()[:, 0])) > 1 and len(np.unique(kept.numpy()[:, 0])) == 1


class TokenModel(nn.Module):
    def __init__(self, count=1):
        self.tables = [nn.Embedding(10, 4) for _ in range(count)]

    def forward(self, *tokens):
        return [table(x) @ ts.ones((4, 4)) for table, x in zip(self.tables, tokens, strict=True)]


class Nested(nn.Module):
    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *tokens):
        return next(iter(self.children()))(*tokens)


GOOD, BAD = np.array([1, 2, 3]), np.array([1, 2, 13])
TOKEN_CALLS = {
    "eager": lambda m, x: m(x),
    "gradient": lambda m, x: ts.grad(lambda m, x: m(x)[0].sum())(m, x),
    **{f"module on {t}": lambda m, x, t=t: ts.jit(m, target=t)(x) for t in ("interp", "cpu", "ptx")},
    "argument": lambda m, x: ts.jit(lambda m, x: m(x), target="cpu")(m, x),
    "compiled gradient": lambda m, x: ts.jit(ts.grad(lambda m, x: m(x)[0].sum()), target="cpu")(m, x),
    "batch": lambda m, x: ts.jit(ts.vmap(lambda x: m(x)), target="cpu")(x[None]),
}


@pytest.mark.parametrize("call", TOKEN_CALLS.values(), ids=TOKEN_CALLS.keys())
def test_a_token_out_of_vocabulary_names_its_module(call):
    for name in ("first", "second"):  # programs of equal lines have their own names
        with pytest.raises(ts.errors.OutOfBoundsError, match=rf"\(in {name}\.tables\.0: Embedding\)") as found:
            call(Nested(**{name: TokenModel()}), BAD)
        error = found.value
        assert error.message == "token 13 is outside axis 0 of size 10" and error.expected == "from 0 to 9"
        assert "more rows" in error.suggestion and "table(x)" in str(error) and "^^^^" in str(error)


def test_a_kernel_of_several_modules_names_each():
    model = ts.jit(TokenModel(4), target="cpu")
    names = r"tables\.0: Embedding or tables\.1: Embedding or another"
    with pytest.raises(ts.errors.OutOfBoundsError, match=names):
        model(GOOD, GOOD, GOOD, BAD)
    two = ts.jit(TokenModel(2), target="interp")
    with pytest.raises(ts.errors.OutOfBoundsError, match=r"\(in tables\.1: Embedding\)"):
        two(GOOD, BAD)


def test_a_compiled_part_of_a_module_keeps_its_own_name():
    class Outer(nn.Module):
        def __init__(self):
            self.inner = TokenModel()
            self.compiled = ts.jit(lambda m, x: m(x), target="cpu")

        def forward(self, x):
            return self.compiled(self.inner, x)

    with pytest.raises(ts.errors.OutOfBoundsError, match=r"\(in tables\.0: Embedding\)"):
        Outer()(BAD)


def test_plain_lists_and_dicts_of_parameters_are_wrapped():
    module = nn.Module()
    module.listed = [nn.Parameter([1.0]), nn.Parameter([2.0])]
    module.named = {"a": nn.Parameter([3.0])}
    assert isinstance(module.listed, nn.ParameterList) and isinstance(module.named, nn.ParameterDict)
    assert [n for n, _ in module.named_parameters()] == ["listed.0", "listed.1", "named.a"]
    module.listed[1] = ts.tensor([5.0])
    module.named.update({"b": [6.0]})
    assert module.listed[1].item() == 5.0 and len(module.listed) == 2 and module.listed[:1][0].item() == 1.0
    assert module.named.keys() == ["a", "b"] and "b" in module.named and [*module.named] == ["a", "b"]
    assert [p.item() for p in module.named.values()] == [3.0, 6.0] and dict(module.named.items())["a"].item() == 3.0
    with pytest.raises(ArgumentError, match="no parameter 'c'"):
        module.named["c"]
    with pytest.raises(ArgumentError, match="holds a Parameter"):
        module.mixed = [nn.Parameter([1.0]), nn.ReLU()]


def test_containers_change_as_lists_and_dicts():
    def kinds(container):
        return [type(m).__name__ for m in container]

    layers = nn.ModuleList([nn.ReLU()])
    layers.extend([nn.Tanh(), nn.GELU()]).insert(1, nn.SiLU())
    assert kinds(layers) == ["ReLU", "SiLU", "Tanh", "GELU"] and [n for n, _ in layers.named_children()] == list("0123")
    assert type(layers.pop(1)).__name__ == "SiLU" and kinds(layers + [nn.Tanh()]) == ["ReLU", "Tanh", "GELU", "Tanh"]
    layers += [nn.SiLU()]
    layers[-1] = nn.ReLU()
    assert kinds(layers) == ["ReLU", "Tanh", "GELU", "ReLU"]
    with pytest.raises(ArgumentError, match="no module 9"):
        layers[9] = nn.ReLU()
    parts = nn.ModuleDict({"a": nn.ReLU()})
    parts.update({"b": nn.Tanh()})
    assert parts.keys() == ["a", "b"] and type(parts.pop("a")).__name__ == "ReLU" and len(parts) == 1
    net = nn.Sequential(nn.ReLU()).extend([nn.Tanh()]).insert(0, nn.SiLU())
    net[2] = nn.GELU()
    assert kinds(net) == ["SiLU", "ReLU", "GELU"]


def test_parts_by_their_paths():
    net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1)))
    net.add_module("last", nn.ReLU())
    assert net.get_submodule("1.0") is net[1][0] and net.get_submodule("") is net
    assert net.get_parameter("1.0.weight") is net[1][0].weight and net[2] is net.get_submodule("last")
    with pytest.raises(ArgumentError, match="no module '7'"):
        net.get_submodule("1.7")
    with pytest.raises(ArgumentError, match=r"no parameter 1\.0\.gain"):
        net.get_parameter("1.0.gain")


@pytest.mark.parametrize(("ask", "says"), [
    (lambda: nn.Linear(2, 2).half(), r"module\.to\(ts\.f16\)"), (lambda: nn.utils, "clip_by_norm"),
    (lambda: nn.init.xavier_uniform_, r"nn\.Parameter\(nn\.init\.xavier_uniform"),
    (lambda: nn.init.zeros_, r"ts\.zeros"), (lambda: nn.init.trunc_normal_, "truncated_normal"),
    (lambda: ts.multinomial, "argmax"),
])  # fmt: skip
def test_names_of_torch_say_what_to_write(ask, says):
    with pytest.raises(AttributeError, match=says):
        ask()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_models_with_activations_are_trained(how):
    """The copy of an activation had an op of its own, for which there were no rules."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu")
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Tanh(), nn.SiLU(), layer)
    other, x = how(model), ts.randn((2, 4, 3))
    assert ts.tree.structure(other) == ts.tree.structure(model)
    step = ts.jit(ts.value_and_grad(lambda model, x: (model(x) ** 2.0).sum()), target="cpu")
    for found, want in zip(ts.tree.leaves(step(other, x)), ts.tree.leaves(step(model, x)), strict=True):
        assert ts.array_equal(found, want)


def make_registered(library, array):
    class Registered(library.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("w", library.Parameter(array([1.0, 2.0])))
            self.register_parameter("none", None)
            self.register_buffer("mask", array([0.0, 1.0]), persistent=False)
            self.register_buffer("kept", array([3.0]))

        def forward(self, x):
            return x * self.w + self.mask + self.kept

    return Registered()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model,
        copy.deepcopy,
        lambda model: ts.tree.map(lambda x: x, model),
        lambda model: ts.jit(lambda m: m)(model),
    ],
)
def test_what_a_constructor_registers_is_in_the_state_as_in_torch(change):
    torch = pytest.importorskip("torch")
    wanted = make_registered(torch.nn, torch.tensor)
    model = change(make_registered(nn, ts.Tensor))
    assert list(model.state_dict()) == list(wanted.state_dict()) == ["w", "kept"]
    model.load_state_dict({"w": ts.Tensor([5.0, 6.0]), "kept": ts.Tensor([7.0])})
    assert model(ts.ones(2)).tolist() == [12.0, 14.0]
    model.register_buffer("mask", ts.zeros(2))
    assert sorted(nn.Sequential(model).state_dict()) == ["0.kept", "0.mask", "0.w"]

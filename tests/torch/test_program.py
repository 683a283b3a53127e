"""Imported programs: values, buffers, constraints, locations and errors of exported PyTorch models."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.errors import ArgumentError, DTypeError, ExecutionError, ShapeError, UnsupportedOpError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of PyTorch's export, about itself


class Block(torch.nn.Module):
    """A layer with running statistics, a counter and a constant; its results are in containers."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.scale = torch.tensor([2.0])

    def forward(self, x, *, gain):
        self.calls += 1
        h = torch.relu(self.norm(self.linear(x)))
        return {"rows": h * gain, "rest": [h.sum(-1), 3, None, self.scale * 2]}


def check_equal(found, wanted):
    np.testing.assert_allclose(ts.torch.to_torch(found).numpy(), wanted.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def dynamic():
    torch.manual_seed(0)
    sizes = {"x": {0: torch.export.Dim("B", min=2, max=64)}, "gain": None}
    exported = torch.export.export(Block(), (torch.randn(5, 4),), {"gain": torch.ones(())}, dynamic_shapes=sizes)
    return exported, ts.torch.import_program(exported)


@pytest.mark.parametrize("rows", [5, 7])
def test_results_and_buffers_are_those_of_the_module(dynamic, rows):
    exported, _ = dynamic
    program, module, x = ts.torch.import_program(exported), exported.module(), torch.randn(rows, 4)
    calls = program.buffers["calls"].item()
    for _ in range(2):
        found, wanted = program(x, gain=torch.tensor(0.5)), module(x, gain=torch.tensor(0.5))
    check_equal(found["rows"], wanted["rows"])
    check_equal(found["rest"][0], wanted["rest"][0])
    assert found["rest"][1:3] == [3, None]
    for name, buffer in module.named_buffers():
        if name in program.buffers:
            check_equal(program.buffers[name], buffer)
    assert program.buffers["calls"].item() == calls + 2


@pytest.mark.parametrize(
    "x, error, word",
    [
        (torch.ones(5, 3), ShapeError, "Bx4xf32"),
        (torch.ones(1, 4), ShapeError, "from 2 to 64"),
        (torch.ones(5, 4, dtype=torch.float64), DTypeError, "f64"),
        (torch.ones(5, 4, 1), ShapeError, "rank"),
    ],
)
def test_constraints_of_the_export_are_checked(dynamic, x, error, word):
    with pytest.raises(error) as caught:
        dynamic[1](x, gain=torch.ones(()))
    assert word in str(caught.value).replace("s77", "B") and "test_program.py" in str(caught.value)


def test_other_arguments_are_refused(dynamic):
    with pytest.raises(ArgumentError, match="structure"):
        dynamic[1](torch.ones(5, 4))


def test_parameters_have_gradients():
    torch.manual_seed(0)
    module, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1)), torch.randn(5, 3)
    program = ts.torch.import_program(module, (x,))
    given = ts.torch.from_torch(x)
    found = ts.grad(lambda p: ts.sum(program.apply(p, program.buffers, given)[0]))(program.parameters)
    module(x).sum().backward()
    for name, parameter in module.named_parameters():
        check_equal(found[name], parameter.grad)


def test_nodes_have_the_lines_of_the_model(dynamic):
    places = {(n.loc.file, n.loc.line) for n in dynamic[1].trace().function.body.nodes}
    code = Block.forward.__code__
    assert places <= {(code.co_filename, code.co_firstlineno + i) for i in range(1, 4)}


class Unsupported(torch.nn.Module):
    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        return spectrum.abs(), torch.nonzero(x)


def test_all_missing_ops_are_listed_with_their_lines():
    with pytest.raises(UnsupportedOpError) as caught:
        ts.torch.import_program(Unsupported(), (torch.ones(4),))
    first = Unsupported.forward.__code__.co_firstlineno
    assert f"{first + 1}: there is no row for aten._fft_r2c" in str(caught.value)
    assert f"{first + 2}: there is no row for aten.nonzero" in str(caught.value)


class TakesComplex(torch.nn.Module):
    def forward(self, x, unused):
        return x.abs()


def test_an_input_of_another_element_type_is_listed_although_nothing_reads_it():
    with pytest.raises(UnsupportedOpError, match=r"unused has elements of torch\.complex64"):
        ts.torch.import_program(TakesComplex(), (torch.ones(4), torch.ones(4, dtype=torch.complex64)))


class WritesInput(torch.nn.Module):
    def forward(self, x):
        x.add_(1)
        return x * 2


class Branches(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("module, word", [(WritesInput(), "writes into x"), (Branches(), "cannot export")])
def test_models_without_a_pure_program_are_refused(module, word):
    with pytest.raises(UnsupportedOpError, match=word):
        ts.torch.import_program(module, (torch.ones(4),))


def test_a_compiled_target_gives_the_same():
    module, x = (
        torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        torch.randn(1, 2, 8, 8),
    )
    check_equal(ts.torch.import_program(module, (x,), target="cpu")(x), module(x))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("target", ["interp", "cpu"])
def test_recurrent_layers_are_one_op_each(kind, target):
    torch.manual_seed(0)
    module, x = getattr(torch.nn, kind)(3, 4, 2, bidirectional=True, batch_first=True), torch.randn(2, 5, 3)
    program = ts.torch.import_program(module, (x,), target=target)
    assert program.describe_ops()[f"aten.{kind.lower()}{'_tanh' if kind == 'RNN' else ''}.input"] == 1
    found, wanted = (torch.utils._pytree.tree_leaves(f(x)) for f in (program, module))
    for own, want in zip(found, wanted, strict=True):
        check_equal(own, want)


def test_recurrent_layers_with_dropout_between_are_one_op_each():
    module, x = torch.nn.GRU(3, 4, 2, dropout=1.0, bidirectional=True), torch.randn(5, 2, 3)
    program = ts.torch.import_program(module, (x,))
    assert (program.describe_ops()["aten.gru.input"], program.describe_ops()["aten.dropout.default"]) == (2, 1)
    for own, want in zip(program(x), module(x), strict=True):
        check_equal(own, want)


NUMBERS = {
    "factor": lambda x: x * x.sum().item() + 1,
    "in a product of numbers": lambda x: x / (x.sum().item() * 0.5 + 1),
    "integer": lambda x: x.long() + x.argmax().item(),
    "alpha": lambda x: torch.add(x, x, alpha=x.max().item()),
    "fill": lambda x: torch.full((3,), x.sum().item()),
    "where": lambda x: torch.where(x > 0, x.mean().item(), 0.0),
    "index": lambda x: x[x.argmax().item() % 2] * 2,
    "indices of a known number": lambda x: torch.nonzero_static(x > 0, size=5),
    "fewer elements": lambda x: (x * 2).resize_(2, 2) + 1,
}


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_depend_on_values(function):
    x = torch.arange(6.0).reshape(2, 3) - 1.3
    program = ts.torch.import_program(Calls(function), (x,))
    for given in (x, x.flip(1) * 3):
        found, wanted = ts.torch.to_torch(program(given)), function(given)
        torch.testing.assert_close(found, wanted)


def check_a_number(x):
    torch._check(x.sum().item() > 0)
    return x * 2


@pytest.mark.parametrize(
    "function, word",
    [
        (lambda x: torch.nonzero(x) * 2, "nonzero depends on values; use torch.where, or torch.nonzero_static"),
        (lambda x: x[x > 0] * 2, "index depends on values"),
        (lambda x: torch.nn.functional.leaky_relu(x, x.max().item()), "aten.leaky_relu.default: the value of a traced"),
        (check_a_number, "a check of a number that depends on values"),
    ],
)
def test_what_depends_on_values_and_has_no_program_is_refused(function, word):
    with pytest.raises(UnsupportedOpError) as caught:
        ts.torch.import_program(Calls(function), (torch.ones(2, 3),))
    assert word in str(caught.value) and "test_program.py" in str(caught.value)


def log_density(x):
    covariance = x @ x.mT + 2 * torch.eye(x.shape[-1])
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), x[..., :1], upper=False)
    return whitened.square().sum() + torch.logdet(covariance).sum() + torch.linalg.inv(covariance).diagonal().sum()


def test_lapack_is_imported_with_derivatives():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 4, requires_grad=True)
    program, wanted = ts.torch.import_program(Calls(log_density), (x.detach(),)), log_density(x)
    given = ts.torch.from_torch(x.detach())
    wanted.backward()
    np.testing.assert_allclose(program(given).numpy(), wanted.item(), rtol=1e-5)
    np.testing.assert_allclose(ts.grad(program)(given).numpy(), x.grad.numpy(), rtol=1e-3, atol=1e-4)
    with pytest.raises(ExecutionError, match="Singular"):
        ts.torch.import_program(Calls(torch.linalg.inv), (torch.eye(2),))(torch.ones(2, 2))


@pytest.mark.parametrize("replacement", [False, True])
def test_draws_follow_their_weights(replacement):
    weights = torch.tensor([[0.0, 1.0, 3.0, 0.0, 4.0], [2.0, 0.0, 0.0, 1.0, 1.0]])
    draw = Calls(lambda w: torch.multinomial(w, 3, replacement=replacement))
    ts.manual_seed(0)
    program = ts.torch.import_program(draw, (weights.repeat(2000, 1),))
    drawn = ts.torch.to_torch(program(weights.repeat(2000, 1))).reshape(2000, 2, 3)
    for row in range(2):
        assert not weights[row][drawn[:, row]].eq(0).any()
        shares = torch.bincount(drawn[:, row, 0], minlength=5) / 2000
        torch.testing.assert_close(shares, weights[row] / weights[row].sum(), atol=0.05, rtol=0)
    distinct = all(len(set(r.tolist())) == 3 for r in drawn[:, 0])
    assert distinct != replacement

"""The backend of torch.compile: values and gradients equal eager PyTorch's, and what falls back is said."""

import configparser
import logging
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.codegen.ptx.runtime import device_memory, driver_api  # noqa: E402
from tessera.errors import ArgumentError, DTypeError, NonFiniteError, ShapeError  # noqa: E402
from tessera.torch import interop  # noqa: E402

F = torch.nn.functional


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    ts.torch.reset_report()


def compiled(function, dynamic=None, **options):
    return torch.compile(function, backend=ts.torch.backend, dynamic=dynamic, options=options or None)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(32), torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def make_perceptron():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))


def make_classifier():
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 4)
    )


MODELS = {
    "perceptron": (make_perceptron, (8, 16)),
    "attention": (Attention, (2, 10, 32)),
    "classifier": (make_classifier, (2, 3, 16, 16)),
}


@pytest.mark.parametrize("options", [{}, {"level": "graph"}, {"level": "tile"}, {"debug": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step(name, options):
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    expected = model(x)
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    out = compiled(model, **options)(x)
    found = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert out.stride() == expected.stride()
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_the_entry_point_names_the_backend():
    config = configparser.ConfigParser()
    config.read(Path(ts.__file__).parents[1] / "setup.cfg")
    name, _, value = config["options.entry_points"]["torch_dynamo_backends"].strip().partition(" = ")
    assert (name, EntryPoint(name, value, "").load()) == ("tessera", ts.torch.backend)


def test_what_falls_back_is_logged_and_counted(caplog):
    def function(x):
        return torch.fft.rfft(x * 2).abs() + 1

    x = torch.randn(3, 8)
    with caplog.at_level(logging.WARNING, "tessera.torch"):
        torch.testing.assert_close(compiled(function)(x), function(x))
    assert "aten._fft_r2c.default runs in PyTorch" in caplog.text and "test_compile_backend.py" in caplog.text
    assert {f.op for f in ts.torch.report().fallbacks} >= {"aten._fft_r2c.default"}
    assert ts.torch.report().pieces == 2


def test_without_fallback_it_is_an_error():
    with pytest.raises(Exception, match=r"1 ops? would run in PyTorch[\s\S]*_linalg_eigh"):
        compiled(lambda x: torch.linalg.eigvalsh(x), fallback=False)(torch.eye(3))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("op", [torch.max, torch.min])
def test_an_extreme_without_its_place_is_a_reduction(op, keepdim, monkeypatch):
    """The place is found only where it is used."""
    x = torch.tensor([[[1.0, -2.0], [3.0, torch.nan], [3.0, 5.0]]])

    def place(*args):
        raise AssertionError("the place is found")

    monkeypatch.setattr("tessera.torch.rows.reductions.arg_extremum", place)
    for inputs in (x, (x > 1), x.nan_to_num(7).to(torch.int32), torch.tensor(4.0)):
        want = op(inputs, -1, keepdim)[0]
        torch.testing.assert_close(
            compiled(lambda x: op(x, -1, keepdim)[0], fallback=False)(inputs), want, equal_nan=True
        )
    monkeypatch.undo()
    torch._dynamo.reset()
    found = compiled(lambda x: op(x, 1, keepdim), fallback=False)(x.nan_to_num(7))
    assert all(torch.equal(f, w) for f, w in zip(found, op(x.nan_to_num(7), 1, keepdim), strict=True))


def test_one_program_for_all_sizes():
    model = Attention()
    function = compiled(model, dynamic=True)
    for n in (3, 5, 9, 5):
        x = torch.randn(2, n, 32, requires_grad=True)
        found, wanted = function(x), model(x)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        weights = torch.randn(wanted.shape)
        gradients = [torch.autograd.grad(y, x, weights)[0] for y in (found, wanted)]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    assert (ts.torch.report().graphs, ts.torch.report().programs) == (2, 2)


def test_a_program_for_each_size_where_an_op_needs_numbers():
    function = lambda x: torch.cat([x, x[1:] * x.shape[0]]).cumsum(0)  # noqa: E731
    run = compiled(function, dynamic=True)
    for n in (3, 5, 9, 5):
        x = torch.randn(n, 4)
        torch.testing.assert_close(run(x), function(x), atol=1e-5, rtol=1e-5)
    assert ts.torch.report().graphs == 1


def test_mutation_and_views():
    def function(x, y):
        x[:, 0].add_(1.0)
        y.mul_(2.0)
        return x.t()[1:], x.view(-1)

    given, expected = [torch.ones(3, 4), torch.ones(2)], [torch.ones(3, 4), torch.ones(2)]
    wanted, found = function(*expected), compiled(function)(*given)
    assert all(torch.equal(a, b) for a, b in zip((*given, *found), (*expected, *wanted), strict=True))
    assert found[1].data_ptr() == given[0].data_ptr()


def test_memory_orders_of_arguments_and_results():
    function = lambda x, w: (x.permute(0, 2, 1) * 2, (x @ w.t()).transpose(1, 2).exp())  # noqa: E731
    x, w = torch.randn(2, 4, 3).transpose(1, 2), torch.randn(6, 8)[:, ::2]
    for a, b in zip(compiled(function)(x, w), function(x, w), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_random_numbers():
    function = compiled(lambda x: F.dropout(x, 0.25, training=True))
    x = torch.ones(400, requires_grad=True)
    y = function(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # the backward graph has the mask of the forward one
    assert 60 < (y == 0).sum() < 140
    torch.manual_seed(1)
    first, second = function(x), function(x)
    torch.manual_seed(1)
    assert torch.equal(function(x), first) and not torch.equal(first, second)


def test_random_numbers_of_eager_pytorch():
    function = lambda x: F.dropout(x, 0.25, training=True)  # noqa: E731
    torch.manual_seed(1)
    expected = function(torch.ones(50))
    torch.manual_seed(1)
    assert torch.equal(compiled(function, fallback_random=True)(torch.ones(50)), expected)


def test_debug_names_the_line_of_the_first_nan():
    def function(x):
        y = x - 1.0
        return torch.log(y)

    with pytest.raises(NonFiniteError, match="test_compile_backend.py") as error:
        compiled(function, debug=True)(torch.zeros(3))
    assert error.value.location.line == function.__code__.co_firstlineno + 2


def test_complex_numbers_fall_back():
    function = lambda x: (torch.complex(x, x) * 2).real + x  # noqa: E731
    torch.testing.assert_close(compiled(function)(torch.ones(3)), function(torch.ones(3)))
    assert any("complex64" in f.reason for f in ts.torch.report().fallbacks)


@pytest.mark.parametrize("options", [{"speed": 1}, {"level": "target"}])
def test_unknown_options_are_refused(options):
    with pytest.raises(Exception, match="ArgumentError"):
        compiled(lambda x: x * 2, **options)(torch.ones(1))
    with pytest.raises(ArgumentError):
        ts.torch.backend(None, [], options=options)


def test_lapack_stays_with_pytorch_which_reports_failures():
    def factor(x):
        found, info = torch.linalg.cholesky_ex(x * 2)
        return found.tril() + 1, info

    x = torch.stack([torch.eye(3), -torch.eye(3)])
    found, wanted = compiled(factor)(x), factor(x)
    assert found[1].tolist() == wanted[1].tolist() == [0, 1]
    torch.testing.assert_close(found[0][0], wanted[0][0])
    assert {f.op for f in ts.torch.report().fallbacks} == {"aten.linalg_cholesky_ex.default"}


@pytest.mark.parametrize("options", [{"target": "nope"}, {"level": "target"}, {"fallback": "no"}], ids=str)
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(Exception, match=r"ArgumentError|UnknownNameError"):
        compiled(lambda x: x + 1, **options)(torch.ones(3))


def shorten(x: torch.Tensor) -> torch.Tensor:
    return x[:1] * 2


def widen(x: torch.Tensor) -> torch.Tensor:
    return x.double()


@pytest.mark.parametrize("wrong, dynamic", [(shorten, False), (widen, False), (widen, True)])
def test_results_that_are_not_what_their_op_said_are_refused(wrong, dynamic):
    op = torch.library.custom_op(f"surprise::{wrong.__name__}_{dynamic}", wrong, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    with pytest.raises((ShapeError, DTypeError), match="is not what its op said") as caught:
        compiled(lambda x: op(x) + 1, dynamic=dynamic)(torch.ones(3, 4))
    assert ("[1, 4]" if wrong is shorten else "float64") in str(caught.value)


def test_elements_that_repeat_are_taken_once():
    """A tensor expanded along an axis, and one along two."""
    f = compiled(lambda x, y: x * 2.0 + y)
    for size in (3, 4):
        x, y = torch.randn(size, 1, 5).expand(size, 7, 5), torch.randn(5).expand(size, 7, 5)
        torch.testing.assert_close(f(x, y), x * 2.0 + y)


def test_a_program_on_a_gpu_takes_the_memory_of_tensors(monkeypatch):
    """What PyTorch allocates for its results, or an argument; with neither a GPU nor a program."""
    calls, made = [], []

    def allocate(sizes, dtype, device):
        made.append((torch.zeros(sizes, dtype=dtype), device))
        return made[-1][0]

    program = type("Program", (), {"launch": lambda _, *given: calls.append(given)})()
    given = partial(allocate, dtype=torch.float16, device="cuda"), ((2, 3),)
    monkeypatch.setattr(interop, "_list_gpu_allocations", lambda _: [given, 0])
    monkeypatch.setattr(interop, "_is_plain", lambda _: True)
    monkeypatch.setattr(device_memory, "get_device_memory", lambda: SimpleNamespace(find_stream=lambda: 7))
    monkeypatch.setattr(driver_api, "get_gpu", lambda: SimpleNamespace(leave_thread=lambda: calls.append("left")))
    run, x = interop._run_on_gpu(SimpleNamespace(find_resident=lambda _: program), ()), torch.zeros(4)
    out, same = run([x])
    assert same is x and made == [(out, "cuda")] and (out.shape, out.dtype) == ((2, 3), torch.float16)
    assert calls == [([x.data_ptr(), out.data_ptr(), x.data_ptr()], 7), "left"]


STEPS = torch.tensor([0.1, 0.3, 0.05])
TRAINED = {
    "rounded by one scale": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.13, 3, -8, 7),
    "rounded by channels": lambda x: torch.fake_quantize_per_channel_affine(
        x, STEPS, torch.tensor([0, 1, -2], dtype=torch.int32), 1, -8, 7
    ),
    "weight norm of rows": lambda x: torch._weight_norm(x, x[:, :1].detach() * 2, 0),
    "weight norm of columns": lambda x: torch._weight_norm(x, x[:1].detach() * 2, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", TRAINED)
def test_reparametrised_weights_are_compiled_whole(name, dtype):
    x = (torch.randn(4, 3) * 2).to(dtype).requires_grad_()
    weight = torch.randn(4, 3).to(dtype)
    found, want = compiled(TRAINED[name], fallback=False)(x), TRAINED[name](x)
    grads = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, want)]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(*grads, atol=tolerance, rtol=tolerance)

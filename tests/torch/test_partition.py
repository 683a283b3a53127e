"""What a graph leaves to PyTorch: results that share memory do so, views by strides are of its owner."""

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    ts.torch.reset_report()


def compiled(function, dynamic=None):
    return torch.compile(function, backend=ts.torch.backend, dynamic=dynamic, options={"fallback": False})


RESULTS = {
    "a result and its views": lambda y: (y, y.view(-1), y[1:], y.t()),
    "views of a hidden base": lambda y: (y.view(-1), y.t(), y[1:]),
    "views of views": lambda y: (y[1:], y[1:][:, ::2], y.detach()),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", RESULTS)
def test_results_that_share_memory_in_inference_do_so(name, dynamic):
    """A write into one is seen in the others, as in eager PyTorch, which AOTAutograd ensures only with gradients."""
    x = torch.randn(3, 4)
    found, want = compiled(lambda x: RESULTS[name](x * 2), dynamic)(x), RESULTS[name](x * 2)
    for results in (found, want):
        results[0].add_(1)
        results[1].mul_(3)
    for f, w in zip(found, want, strict=True):
        assert f.stride() == w.stride()
        torch.testing.assert_close(f, w)


def write_and_return(x):
    y = x * 2
    x.copy_(y)
    return y, y.view(-1)


def write_and_return_views(x):
    y = x * 2
    x.copy_(y)
    return y.view(-1), y.t()


def write_another(x):
    y = x * 2
    x.copy_(y.flip(0))
    return y[1:], y[:2], x.view(-1)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [write_and_return, write_and_return_views, write_another])
def test_results_that_share_memory_share_none_with_an_input_that_was_written(function, dynamic):
    found, want = [], []
    for call, tensors in ((compiled(function, dynamic), found), (function, want)):
        x = torch.arange(12.0).view(3, 4)
        tensors += [*call(x), x]
        tensors[0].add_(100)
    for f, w in zip(found, want, strict=True):
        torch.testing.assert_close(f, w)


def test_parts_of_one_value_and_results_in_training():
    x = torch.randn(3, 4)
    parts = compiled(lambda x: (x * 2).chunk(2, -1))(x)
    parts[0].zero_()
    torch.testing.assert_close(parts[1], x[:, 2:] * 2)
    torch._dynamo.reset()
    y, flat = compiled(lambda x: (lambda y: (y, y.view(-1)))(x.exp()))(x.requires_grad_())
    assert flat._base is y
    flat.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


STRIDED = {
    "transposed": lambda y: torch.as_strided(y.t() * 1, (3, 2, 2), (1, 4, 2)),
    "part of a transposed value": lambda y: torch.as_strided((y.t() * 1)[1:], (3, 2, 2), (1, 4, 2)),
    "a place of its own": lambda y: (y.t() * 1)[2:].as_strided((2,), (1,), 3),
    "windows that overlap": lambda y: y.sin().transpose(0, 1).as_strided((2, 4, 4), (8, 4, 1)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_views_by_strides_are_of_what_owns_the_memory(name):
    """Longformer's windows are of a transposed value: its whole graph ran in PyTorch."""
    x = torch.randn(6, 4, requires_grad=True)
    function = lambda x: STRIDED[name](x * 2) * 3  # noqa: E731
    found, want = compiled(function)(x), function(x)
    torch.testing.assert_close(found, want)
    weight = torch.randn_like(want)
    grads = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, want)]
    torch.testing.assert_close(*grads)


def test_a_fused_product_and_sum_has_a_row():
    """Steps of optimizers have them."""
    x, y = torch.randn(3, 4), torch.rand(3, 4) + 1
    function = lambda x, y: torch.addcmul(x, x, y, value=0.3)  # noqa: E731
    torch.testing.assert_close(compiled(function)(x, y), function(x, y))
    z = torch.rand(3, 4)
    found = compiled(torch.ops.prims.fma.default)(x, y, z)
    torch.testing.assert_close(found, x * y + z)

"""Sizes that change between calls: results that are views, numbers as arguments, element types, as in eager."""

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402


def return_halves(x):
    return x[x.shape[0] // 2 :], x.chunk(2)[1]


def return_views_of_a_result(x):
    y = x * 2
    return y, y[1:], y[1:, 1:].t(), y.unbind(1)[1]


def return_views_of_a_written_argument(x):
    x[1:].add_(1)
    return x[2:], x[:, 1], x.t()[1:]


def return_views_without_elements_of_their_own(x):
    return x[::2], x.expand(2, *x.shape), x.diagonal(), x.unfold(0, 2, 1)


VIEWS = [
    return_halves, return_views_of_a_result, return_views_of_a_written_argument,
    return_views_without_elements_of_their_own,
]  # fmt: skip
LAYOUTS = {
    "rows": lambda n, m: torch.arange(1.0 * n * m).reshape(n, m),
    "columns": lambda n, m: torch.arange(1.0 * n * m).reshape(m, n).t(),
    "gaps": lambda n, m: torch.arange(2.0 * n * m).reshape(n, 2 * m)[:, ::2],
}


def compile_for_all_sizes(function, **options):
    torch._dynamo.reset()
    given = {"fallback": False, "level": "graph", **options}
    return torch.compile(function, backend=ts.torch.backend, options=given, dynamic=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", VIEWS)
def test_results_are_views_as_in_eager(function, layout):
    """AOTAutograd reads them by the strides and the offset of what the backend returns."""
    compiled = compile_for_all_sizes(function)
    for sizes in ((6, 4), (9, 5), (5, 3)):
        x, y = LAYOUTS[layout](*sizes), LAYOUTS[layout](*sizes)
        for found, wanted in zip(compiled(x), function(y), strict=True):
            assert torch.equal(found, wanted)
            assert (found.stride(), found.storage_offset()) == (wanted.stride(), wanted.storage_offset())
        assert torch.equal(x, y)
    found[0].zero_()  # of the last call: it writes into the same memory as in eager
    wanted[0].zero_()
    assert torch.equal(x, y)


def test_results_are_views_on_a_target():
    compiled = compile_for_all_sizes(return_views_of_a_result, level=None)
    for n in (6, 9):
        x = torch.arange(4.0 * n).reshape(n, 4)
        assert all(map(torch.equal, compiled(x), return_views_of_a_result(x)))


@pytest.mark.parametrize("level", ["graph", None])
def test_numbers_that_no_shape_tells(level):
    scale = lambda x, k: (x * k, x + k, x.repeat(k, 1))  # noqa: E731
    compiled = compile_for_all_sizes(scale, level=level)
    for n, k in ((3, 2), (3, 4), (5, 3)):
        x = torch.randn(n, 4)
        assert all(map(torch.equal, compiled(x, k), scale(x, k)))


def test_views_of_one_tensor_as_arguments():
    def add(x, y):
        x.add_(1)
        return y * 2

    base, other = torch.randn(6, 3), None
    other = base.clone()
    assert torch.equal(compile_for_all_sizes(add)(base[:4], base[2:]), add(other[:4], other[2:]))
    assert torch.equal(base, other)


def test_element_types_of_16_bits():
    def normalise(x, w):
        return torch.nn.functional.layer_norm((x @ w).softmax(-1), (5,)), torch.nn.functional.gelu(x) * x.sigmoid()

    compiled = compile_for_all_sizes(normalise)
    for n in (3, 7):
        x, w = (torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in ((n, 4), (4, 5)))
        results = [(r, torch.autograd.grad(sum(map(torch.sum, r)), (x, w))) for r in (compiled(x, w), normalise(x, w))]
        torch.testing.assert_close(*results, atol=5e-2, rtol=5e-2)

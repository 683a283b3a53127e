"""Custom ops: Tessera functions and kernels in eager PyTorch, under autograd, checked by PyTorch's own opcheck."""

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera import tile  # noqa: E402
from tessera.errors import ArgumentError, DTypeError  # noqa: E402


def gelu_product(x, w, scale: float = 2.0):
    return ts.gelu(x @ w) * scale


@ts.kernel
def cube(x, out, *, BM: int = 4):
    i = tile.program_id(0) * BM
    v = tile.load(x[i : i + BM], edge="clip")
    tile.store(out[i : i + BM], v * v * v, edge="clip")


def test_a_function_and_its_gradient():
    op = ts.torch.op(gelu_product, name="test_custom_op::gelu_product")
    x = torch.randn(4, 5, requires_grad=True, dtype=torch.float64)
    w = torch.randn(5, 3, requires_grad=True, dtype=torch.float64)
    torch.testing.assert_close(op(x, w, 3.0), torch.nn.functional.gelu(x @ w) * 3)
    assert torch.autograd.gradcheck(op, (x, w))
    assert set(torch.library.opcheck(op, (x, w, 3.0)).values()) == {"SUCCESS"}


def test_a_kernel_and_its_gradient():
    op = ts.torch.op(cube, name="test_custom_op::cube", grid=lambda constants: (2,), out="out")
    x = torch.randn(6, requires_grad=True)
    y = op(x)
    y.sum().backward()
    torch.testing.assert_close(y, x**3)
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)
    assert set(torch.library.opcheck(op, (x,)).values()) == {"SUCCESS"}


def test_several_results_of_which_one_has_no_gradient():
    with pytest.raises(ArgumentError):
        ts.torch.op(lambda *xs: xs[0], name="test_custom_op::any")

    def sum_and_place(x, axis: int):
        return x.sum(axis=axis), ts.argmax(x, axis=axis)

    op = ts.torch.op(sum_and_place, name="test_custom_op::two", results=2)
    x = torch.randn(4, 3, requires_grad=True)
    total, place = op(x, 1)
    torch.testing.assert_close(total, x.sum(1))
    assert torch.equal(place, x.argmax(1)) and not place.requires_grad
    total.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_element_types_share_memory(dtype):
    op = ts.torch.op(lambda x: x + x, name=f"test_custom_op::twice_{str(dtype)[6:]}")
    x = torch.arange(12).reshape(3, 4).to(dtype)
    assert torch.equal(op(x), x + x)
    assert torch.equal(op(x.t()), (x + x).t())


def test_random_numbers_follow_manual_seed():
    op = ts.torch.op(lambda x: x + ts.rand((4,)), name="test_custom_op::noisy")
    x = torch.zeros(4)
    torch.manual_seed(3)
    first, second = op(x), op(x)
    torch.manual_seed(3)
    assert torch.equal(op(x), first) and not torch.equal(first, second)


def test_complex_numbers_are_refused():
    op = ts.torch.op(lambda x: x * 2, name="test_custom_op::double_complex")
    with pytest.raises(DTypeError, match="complex64"):
        op(torch.zeros(2, dtype=torch.complex64))


def test_the_error_of_another_number_of_results_says_what_to_write():
    op = ts.torch.op(lambda x: (x, x), name="test_custom_op::pair")
    with pytest.raises(ArgumentError, match="results=2"):
        op(torch.zeros(2))


def test_a_kernel_without_its_memory_is_refused():
    with pytest.raises(ArgumentError, match="out="):
        ts.torch.op(cube, grid=(2,))


def test_the_backend_takes_custom_ops_into_its_programs():
    torch._dynamo.reset()
    ts.torch.reset_report()
    op = ts.torch.op(gelu_product, name="test_custom_op::in_programs")
    function = lambda x, w: op(x * 2, w, 3.0).square().sum()  # noqa: E731
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    wanted, found = function(x, w), torch.compile(function, backend=ts.torch.backend)(x, w)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, (x, w)), torch.autograd.grad(wanted, (x, w)))
    assert ts.torch.report().programs == 2 and not ts.torch.report().fallbacks

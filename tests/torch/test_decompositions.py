"""Ops that keep data for their backward pass, and conversions, through torch.compile: equal to eager PyTorch."""

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402


def compile_whole(function):
    torch._dynamo.reset()
    return torch.compile(function, backend=ts.torch.backend, options={"fallback": False, "level": "graph"})


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3])
def test_bags_of_rows_and_their_gradients(mode, padding):
    torch.manual_seed(0)
    bags = torch.nn.EmbeddingBag(9, 4, mode=mode, padding_idx=padding)
    indices = torch.tensor([3, 1, 1, 8, 3, 0, 2, 3])
    offsets = torch.tensor([0, 1, 1, 4, 8])  # the second and the last one are empty
    results = []
    for call in (bags, compile_whole(bags)):
        out = call(indices, offsets)
        (by_weight,) = torch.autograd.grad(out.square().sum(), [bags.weight])
        results.append((out.detach(), by_weight))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("last", [False, True])
def test_weights_of_samples(index, last):
    torch.manual_seed(0)
    bags = torch.nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=last)
    given = torch.tensor([3, 1, 1, 8, 3], dtype=index), torch.tensor([0, 2, 5], dtype=index)
    weights = torch.rand(5, requires_grad=True)
    results = []
    for call in (bags, compile_whole(bags)):
        out = call(*given, weights)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), [bags.weight, weights])))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8])
@pytest.mark.parametrize("to", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversions_to_fp8(dtype, to):
    """e4m3 has no infinity: what is beyond its largest number becomes that."""
    x = torch.tensor([0.0, 1.0, -3.3, 100.0, -100.0])
    if dtype is not torch.int8:
        x = torch.cat([x, torch.tensor([447.0, 448.0, 455.0, 464.0, 465.0, 480.0, -500.0, 60000.0])])
    if dtype.is_floating_point:
        x = torch.cat([x, torch.tensor([float("inf"), -float("inf"), float("nan"), 17.0, 18.9, 2.0**-10])])
    x = x.to(dtype)
    found, wanted = compile_whole(lambda x: x.to(to))(x), x.to(to)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def test_counts_of_rows_are_left_to_pytorch():
    torch._dynamo.reset()
    ts.torch.reset_report()
    bags = torch.nn.EmbeddingBag(9, 4, mode="sum", scale_grad_by_freq=True)
    compiled = torch.compile(bags, backend=ts.torch.backend)
    given = torch.tensor([3, 1, 1, 8, 3]), torch.tensor([0, 2])
    found, wanted = (torch.autograd.grad(call(*given).sum(), [bags.weight])[0] for call in (compiled, bags))
    assert torch.equal(found, wanted) and len(ts.torch.report().fallbacks) == 2


@pytest.mark.parametrize(("dtype", "to"), [("float32", "int32"), ("int64", "float64"), ("float64", "int64")])
def test_elements_read_as_another_type(dtype, to):
    x = torch.tensor([0, 1, -1, 77]).to(getattr(torch, dtype))
    to = getattr(torch, to)
    found = compile_whole(lambda x: x.view(to).clone())(x)
    assert torch.equal(found.view(x.dtype), x) and found.dtype == to


def test_checks_of_values_are_no_fallbacks():
    """`one_hot` checks its indices, which PyTorch does."""
    compiled = compile_whole(lambda i: torch.nn.functional.one_hot(i, 4).float() * 2)
    i = torch.tensor([0, 3, 1])
    assert torch.equal(compiled(i), torch.nn.functional.one_hot(i, 4).float() * 2)
    with pytest.raises(RuntimeError, match="Class values must be smaller than num_classes"):
        compiled(torch.tensor([0, 4, 1]))


def test_a_tensor_rolls_as_if_it_were_flat():
    x = torch.arange(6.0).reshape(2, 3)
    for arguments in ((2,), (-1,), (1, 1), ((1, -1), (0, 1))):
        function = compile_whole(lambda x, a=arguments: torch.roll(x, *a))
        torch.testing.assert_close(function(x), torch.roll(x, *arguments))

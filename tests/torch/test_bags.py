"""Bags of rows through torch.compile: one program for each bag, and equal to eager PyTorch."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

import tessera as ts  # noqa: E402

GENERATOR = torch.Generator().manual_seed(0)
MATRIX = torch.randint(0, 9, (17, 37), generator=GENERATOR)
LIST = torch.randint(0, 9, (30,), generator=GENERATOR)
STARTS = torch.tensor([0, 0, 5, 5, 29, 30])  # the first, the third and the last one are empty
BAGS = [
    (MATRIX, None, 4, {}), (MATRIX[:, :1], None, 7, {}), (MATRIX, None, 70, {"padding_idx": 2}), (LIST, STARTS, 4, {}),
    (LIST, STARTS[1:], 600, {"include_last_offset": True, "padding_idx": 1}),
    (LIST.int(), STARTS.int(), 3, {"padding_idx": 8}),
]  # fmt: skip
TARGETS = [{"level": "graph"}, {"level": "tile"}, {"target": "llvm"}]


def check_against_eager(call, leaves, **options):
    """Results and gradients of a function of tensors."""
    torch._dynamo.reset()
    found = []
    compiled = torch.compile(call, backend=ts.torch.backend, options={"fallback": False, **options})
    for each in (compiled, call):
        out = each(*leaves)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x for x in leaves if x.requires_grad])))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", TARGETS, ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("number", range(len(BAGS)))
def test_sums_and_means(number, mode, options):
    indices, starts, width, named = BAGS[number]
    table = torch.randn(9, width, generator=GENERATOR).requires_grad_()
    check_against_eager(lambda w: F.embedding_bag(indices, w, starts, mode=mode, **named), [table], **options)


@pytest.mark.parametrize("options", TARGETS, ids=str)
@pytest.mark.parametrize("number", [0, 2, 3, 4])
def test_weights_of_samples(number, options):
    indices, starts, width, named = BAGS[number]
    table = torch.randn(9, width, generator=GENERATOR).requires_grad_()
    weights = torch.rand(indices.shape, generator=GENERATOR).requires_grad_()
    call = lambda w, s: F.embedding_bag(indices, w, starts, mode="sum", per_sample_weights=s, **named)  # noqa: E731
    check_against_eager(call, [table, weights], **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_sums_of_other_formats_are_rounded_once(dtype):
    torch._dynamo.reset()
    table = torch.randn(9, 5, generator=GENERATOR).to(dtype)
    compiled = torch.compile(lambda w: F.embedding_bag(MATRIX, w, mode="sum"), backend=ts.torch.backend)
    assert torch.equal(compiled(table), table.double()[MATRIX].sum(1).to(dtype)) or dtype == torch.float64
    torch.testing.assert_close(compiled(table).double(), table.double()[MATRIX].sum(1), rtol=0.01, atol=0.05)


@pytest.mark.parametrize("index", [9, -1])
def test_indices_outside_are_errors(index):
    torch._dynamo.reset()
    compiled = torch.compile(lambda i, w: F.embedding_bag(i, w, mode="sum"), backend=ts.torch.backend)
    with pytest.raises(ts.errors.OutOfBoundsError, match=f"index {index} is outside axis 0 of size 9"):
        compiled(torch.tensor([[1, 2], [3, index]]), torch.randn(9, 4))


def test_infinities_stay_in_their_bags():
    table = torch.randn(9, 5, generator=GENERATOR)
    table[3], table[4] = float("inf"), float("nan")
    indices = torch.tensor([[3, 1, 3], [1, 2, 0], [4, 4, 8]])
    torch._dynamo.reset()
    compiled = torch.compile(lambda w: F.embedding_bag(indices, w, padding_idx=4), backend=ts.torch.backend)
    torch.testing.assert_close(compiled(table), F.embedding_bag(indices, table, padding_idx=4))


@pytest.mark.parametrize(("count", "bags", "width"), [(0, 2, 3), (4, 2, 0), (0, 0, 3)])
def test_what_has_no_elements(count, bags, width):
    torch._dynamo.reset()
    given = torch.zeros(count, dtype=torch.int64), torch.randn(9, width), torch.zeros(bags, dtype=torch.int64)
    compiled = torch.compile(F.embedding_bag, backend=ts.torch.backend, dynamic=False)
    torch.testing.assert_close(compiled(*given), F.embedding_bag(*given))


def test_sizes_that_are_symbols():
    torch._dynamo.reset()
    bags = torch.nn.EmbeddingBag(9, 4, mode="mean")
    compiled = torch.compile(bags, backend=ts.torch.backend, dynamic=True)
    for count in (6, 11):
        torch.testing.assert_close(compiled(MATRIX[:count]), bags(MATRIX[:count]))
        torch.testing.assert_close(compiled(LIST, STARTS[:count]), bags(LIST, STARTS[:count]))


def test_the_program_of_a_gpu_has_one_launch_for_the_bags():
    """In the emulator, where no GPU is."""
    torch._dynamo.reset()
    table = torch.randn(9, 33, generator=GENERATOR)
    compiled = torch.compile(
        lambda i, w, o: F.embedding_bag(i, w, o), backend=ts.torch.backend, options={"target": "ptx"}
    )
    torch.testing.assert_close(compiled(LIST, table, STARTS), F.embedding_bag(LIST, table, STARTS))

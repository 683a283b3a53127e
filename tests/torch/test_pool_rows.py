"""Max-pools of large windows by the backend, one axis after the other, against PyTorch: maxima, indices, gradients."""

import pytest

torch = pytest.importorskip("torch")

import tessera.torch  # noqa: E402, F401

POOLS = {2: torch.nn.functional.max_pool2d, 3: torch.nn.functional.max_pool3d}
CASES = {
    "spatial pyramid": ((2, 3, 12, 16), (13, 1, 6)), "stride 1": ((1, 4, 20, 21), (5, 1, 2)),
    "ceil mode": ((2, 3, 19, 18), ((5, 4), (2, 3), (2, 1), 1, True)),
    "dilation": ((2, 3, 19, 18), ((5, 4), (2, 3), (2, 1), (2, 1))),
    "three axes": ((2, 2, 9, 9, 10), (3, 2, 1)), "rank 3": ((3, 19, 18), (6, 2, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_pool_of_large_windows_is_that_of_pytorch(name):
    sizes, settings = CASES[name]
    x = torch.randint(-3, 4, sizes, generator=torch.Generator().manual_seed(0)).float()  # with ties
    x.view(-1)[::5] = -float("inf")
    pool = POOLS[3 if len(sizes) == 5 else 2]
    compiled = torch.compile(pool, backend="tessera", dynamic=False, options={"fallback": False})
    for got, want in zip(
        compiled(x, *settings, return_indices=True), pool(x, *settings, return_indices=True), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    x.requires_grad_()
    weights = torch.randn(pool(x, *settings).shape)
    pulled = [torch.autograd.grad((f(x, *settings).relu() * weights).sum(), x)[0] for f in (compiled, pool)]
    torch.testing.assert_close(*pulled)


@pytest.mark.parametrize("kernel", [3, 5], ids=["as a whole", "by axis"])
def test_windows_of_the_lowest_number_have_the_index_of_an_element_of_theirs(kernel):
    """Not of one between the elements of a window with dilation, where its first ones are padding."""
    x = torch.full((1, 1, 9, 9), -float("inf"))
    pool = lambda x: POOLS[2](x, kernel, 3, kernel // 2, 2, return_indices=True)  # noqa: E731
    assert torch.equal(torch.compile(pool, backend="tessera")(x)[1], pool(x)[1])

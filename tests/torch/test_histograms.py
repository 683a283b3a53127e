"""Histograms through torch.compile: those of eager PyTorch, counted in shared memory on a GPU."""

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.stdlib import exact_sums  # noqa: E402

SPECIAL = torch.tensor([-2.0, 2.0, 0.0, -0.0, 1.999999, -2.000001, float("inf"), float("-inf")])
RANGES = [(100, 0, 0), (100, -2.0, 2.0), (1, -1, 1), (40000, -2, 2), (7, 0.5, 0.5)]


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize(("bins", "low", "high"), RANGES)
def test_histograms_are_those_of_pytorch(bins, low, high, target, monkeypatch):
    monkeypatch.setattr(exact_sums, "FEWEST_UPDATES", 1000)
    torch._dynamo.reset()
    x = torch.randn(5001, generator=torch.Generator().manual_seed(bins))
    x[: SPECIAL.numel()] = SPECIAL if low != high else 0.25
    call = lambda x: torch.histc(x, bins, low, high)  # noqa: E731
    compiled = torch.compile(call, backend=ts.torch.backend, options={"target": target})
    assert torch.equal(compiled(x), call(x))

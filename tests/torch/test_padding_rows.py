"""Gradients of padded arrays and of overlapping windows by the backend: sums of slices, without a scatter."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

import tessera.torch  # noqa: E402, F401
from tessera.torch.compile_backend import Piece  # noqa: E402

PADDINGS = [
    ((2, 3, 7), (3, 2)), ((2, 3, 7), (0, 4)), ((2, 3, 7), (-1, 2)), ((2, 3, 7, 5), (1, 2, 3, 0)),
    ((1, 2, 4, 5, 4), (1, 1, 2, 2, 1, 0)), ((2, 3, 12), (11, 10)),
]  # fmt: skip
WINDOWS = {
    "overlapping": ((3, 11), 1, 4, 2), "first axis": ((9, 4), 0, 3, 1), "axis between": ((2, 17, 3), 1, 5, 3),
    "gaps": ((2, 17, 3), 1, 2, 5), "adjacent": ((2, 21), -1, 7, 7), "whole": ((2, 17), 1, 17, 1),
    "single": ((5,), 0, 1, 1), "many": ((2, 300), 1, 40, 3), "scalar": ((), 0, 1, 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def ops(monkeypatch):
    """The ops of the programs that the backend traces."""
    found = []
    trace = Piece._trace

    def record(self, *args):
        traced, places = trace(self, *args)
        found.extend(n.op.name for n in traced.function.body.walk())
        return traced, places

    monkeypatch.setattr(Piece, "_trace", record)
    yield found
    assert found and not any("scatter" in name for name in found)


def check_against_eager(function, shape, dtype=torch.float64, **named):
    torch._dynamo.reset()
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=dtype, generator=drawn).requires_grad_()
    compiled = torch.compile(function, backend="tessera", options={"fallback": False}, **named)
    g = torch.randn(function(x).shape, dtype=dtype, generator=drawn)
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(function(exact), exact, g.double())
    torch.testing.assert_close(compiled(x), function(x))
    # Windows of windows have a gradient between, which is rounded to bf16 too.
    limits = {"atol": 2**-6, "rtol": 2**-8} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x, g)[0], wanted.to(dtype), **limits)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize(("shape", "sides"), PADDINGS)
def test_gradients_of_padded_arrays(mode, shape, sides):
    check_against_eager(lambda x: F.pad(x, sides, mode=mode) * 2, shape)


@pytest.mark.parametrize("name", WINDOWS)
def test_gradients_of_windows(name):
    shape, *settings = WINDOWS[name]
    check_against_eager(lambda x: x.unfold(*settings) * 2, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_windows_of_windows(dtype):
    check_against_eager(lambda x: x.unfold(1, 3, 1).unfold(2, 3, 2) * 2, (2, 8, 9), dtype)


def test_gradients_for_many_sizes():
    check_against_eager(lambda x: F.pad(x.unfold(1, 4, 2) * 2, (1, 2), mode="reflect") * 2, (3, 12), dynamic=True)

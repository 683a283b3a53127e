"""Interpolation through torch.compile: the gradient is one op without a scatter, and that of eager PyTorch."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

import tessera as ts  # noqa: E402
from tessera.torch import compile_backend  # noqa: E402

LINE, IMAGE, VOLUME = (2, 3, 7), (2, 3, 7, 5), (2, 1, 3, 4, 5)
SIZES = [
    {"size": (13, 4)}, {"size": (2, 60)}, {"size": (1, 1)}, {"scale_factor": 2.0}, {"scale_factor": (1.7, 0.6)},
    {"scale_factor": 0.5}, {"scale_factor": (1.3, 3.0), "recompute_scale_factor": True},
]  # fmt: skip
MODES = [
    {"mode": "nearest"}, {"mode": "nearest-exact"}, {"mode": "bilinear"}, {"mode": "bicubic"},
    {"mode": "bilinear", "align_corners": True}, {"mode": "bicubic", "align_corners": True},
]  # fmt: skip
OTHERS = [
    (LINE, {"mode": "linear", "scale_factor": 3.1}), (LINE, {"mode": "nearest", "scale_factor": 3.1}),
    (VOLUME, {"mode": "trilinear", "scale_factor": 1.6}), (VOLUME, {"mode": "nearest", "size": (5, 4, 9)}),
    (VOLUME, {"mode": "nearest-exact", "size": (2, 8, 10)}), (IMAGE, {"mode": "area", "size": (3, 2)}),
    (IMAGE, {"mode": "bilinear", "size": (3, 2), "antialias": True}),
]  # fmt: skip
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}


@pytest.fixture
def graphs(monkeypatch):
    """The names of the ops of each graph that the backend compiles."""
    found = []
    compile_graph_module = compile_backend.compile_graph_module

    def record(module, *args, **named):
        found.append([str(n.target) for n in module.graph.nodes if n.op == "call_function"])
        return compile_graph_module(module, *args, **named)

    monkeypatch.setattr(compile_backend, "compile_graph_module", record)
    return found


def check_against_eager(shape, named, dtype=torch.float32, change=lambda g: g, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    call = lambda x: F.interpolate(x, **named)  # noqa: E731
    out = call(x)
    g = change(torch.randn_like(out))
    (wanted,) = torch.autograd.grad(out, x, g)
    compiled = torch.compile(call, backend=ts.torch.backend, dynamic=False, options=options)
    found = compiled(x)
    (gradient,) = torch.autograd.grad(found, x, g)
    limit = TOLERANCES[dtype]
    torch.testing.assert_close(found, out, atol=limit, rtol=limit)
    torch.testing.assert_close(gradient, wanted, atol=limit, rtol=limit, equal_nan=True)


@pytest.mark.parametrize("named", SIZES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_images_are_those_of_pytorch(mode, named, graphs):
    check_against_eager(IMAGE, mode | named, level="graph")
    assert len(graphs) == 2 and len(graphs[1]) == 1 and "_backward" in graphs[1][0]


@pytest.mark.parametrize(("shape", "named"), OTHERS, ids=str)
def test_other_ranks_and_modes_are_those_of_pytorch(shape, named):
    check_against_eager(shape, named, level="graph")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", MODES[1:4], ids=str)
def test_other_formats_are_those_of_pytorch(mode, dtype):
    check_against_eager(IMAGE, mode | {"size": (9, 11)}, dtype, level="graph")


@pytest.mark.parametrize("named", [SIZES[1], SIZES[3], SIZES[4]], ids=str)
@pytest.mark.parametrize("mode", MODES[::2], ids=str)
def test_compiled_programs_are_those_of_pytorch(mode, named):
    check_against_eager(IMAGE, mode | named)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", MODES[:3], ids=str)
def test_special_gradients_reach_the_elements_that_were_read(mode, special):
    def change(g):
        g[0, 0, 3, 3], g[1, 2, 0, 0], g[1, 1, -1, -1] = special, special, special
        return g

    check_against_eager(IMAGE, mode | {"scale_factor": (1.7, 2.3)}, change=change, level="graph")


def test_unknown_sizes_and_autocast_stay_as_pytorch_takes_them_apart():
    torch._dynamo.reset()
    x = torch.randn(IMAGE, requires_grad=True)
    call = lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")  # noqa: E731
    compiled = torch.compile(call, backend=ts.torch.backend, dynamic=True, options={"level": "graph"})
    wanted, found = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (call, compiled))
    torch.testing.assert_close(found, wanted)
    with torch.autocast("cpu"):
        torch._dynamo.reset()
        wanted, found = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (call, compiled))
    torch.testing.assert_close(found, wanted)


def test_a_gradient_inside_a_compiled_function():
    torch._dynamo.reset()
    x = torch.randn(IMAGE)
    loss = lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest").square().sum()  # noqa: E731
    call = lambda x: torch.func.grad(loss)(x)  # noqa: E731
    compiled = torch.compile(call, backend=ts.torch.backend, options={"level": "graph"})
    torch.testing.assert_close(compiled(x), call(x))

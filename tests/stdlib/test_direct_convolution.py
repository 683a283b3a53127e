"""Direct convolutions on the PTX target, against PyTorch in f64."""

import math

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.codegen.ptx import BACKEND  # noqa: E402
from tessera.ir.rewrite import UseDef  # noqa: E402
from tessera.ops.tensor import contractions  # noqa: E402
from tessera.runtime import driver  # noqa: E402
from tessera.stdlib import convolution, direct_convolution, launches  # noqa: E402

nn = torch.nn.functional
# name: rank, image, weights, arguments
CASES = {
    "padding": (2, (2, 3, 7, 9), (5, 3, 3, 3), {"padding": 1}),
    "strides": (2, (1, 5, 10, 11), (17, 5, 3, 2), {"padding": 1, "stride": (2, 3)}),
    "dilation and strides": (2, (2, 3, 12, 14), (4, 3, 3, 3), {"padding": 2, "dilation": 2, "stride": 2}),
    "groups": (2, (2, 6, 8, 5), (4, 3, 3, 3), {"groups": 2}),
    "1-D": (1, (2, 6, 40), (20, 6, 5), {"padding": 3, "dilation": 2}),
    "3-D": (3, (1, 4, 5, 6, 7), (3, 4, 3, 2, 3), {"stride": (1, 2, 1), "dilation": (2, 1, 3), "padding": 2}),
    "many outputs": (2, (1, 2, 6, 6), (70, 2, 3, 3), {}),
}


@pytest.fixture
def direct(monkeypatch):
    """Nothing else pays."""
    monkeypatch.setattr(convolution, "estimate_positions", lambda product: math.inf)
    monkeypatch.setattr(launches, "match_gathered", lambda *a: None)
    monkeypatch.setattr(direct_convolution, "estimate_stacked", lambda product: math.inf)


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def run(function, *arrays):
    """The kernels of a function for a GPU, and its results in the emulator."""
    levels = driver.lower(ts.jit(function).trace(*arrays).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
    return list(artifact.manifest["plan"]["entries"]), BACKEND.interpreter(artifact)(arrays)[0]


def expect(rank, named, x, w):
    tensors = (torch.tensor(a.astype("f8")) for a in (x, w))
    return getattr(nn, f"conv{rank}d")(*tensors, **named).numpy()


@pytest.mark.parametrize("case", CASES)
def test_gathered_windows_are_the_convolution(case, direct):
    rank, image, weights, named = CASES[case]
    x, w = draw(*image), draw(*weights)
    names, got = run(lambda x, w: getattr(ts, f"conv{rank}d")(x, w, **named), x, w)
    assert any("gather_windows" in name for name in names) and len(names) <= 3
    want = expect(rank, named, x, w)
    np.testing.assert_allclose(got, want, atol=1e-5 * abs(want).max(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("case", ["padding", "strides", "1-D"])
def test_narrow_operands(case, dtype, direct):
    rank, image, weights, named = CASES[case]
    x, w = draw(*image, dtype=dtype), draw(*weights, dtype=dtype)
    names, got = run(lambda x, w: getattr(ts, f"conv{rank}d")(x, w, **named), x, w)
    assert any("gather_windows" in name for name in names)
    np.testing.assert_allclose(got.astype("f8"), expect(rank, named, x, w), rtol=2**-7, atol=2**-7)


def test_parts_of_long_windows_add_up(direct, monkeypatch):
    monkeypatch.setattr(direct_convolution, "LEAST_DEPTH", 32)
    x, w = draw(1, 13, 6, 6), draw(3, 13, 3, 3)
    names, got = run(lambda x, w: ts.conv2d(x, w, padding=1), x, w)
    assert sum("sum" in name for name in names) == 1
    np.testing.assert_allclose(got, expect(2, {"padding": 1}, x, w), atol=1e-4, rtol=1e-5)


def test_special_values_reach_the_windows_that_see_them_alone(direct):
    x, w = draw(1, 3, 8, 8), draw(5, 3, 3, 3)
    x[0, 1, 2, 3], x[0, 2, 6, 6] = np.inf, np.nan
    _, got = run(lambda x, w: ts.conv2d(x, w, padding=1), x, w)
    want = expect(2, {"padding": 1}, x, w)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)
    assert np.isnan(want).any() and np.isinf(want).any()


def test_a_transposed_convolution_has_one_product_a_phase(direct):
    x, w = draw(1, 3, 5, 6), draw(3, 4, 4, 4)
    names, got = run(lambda x, w: ts.conv_transpose2d(x, w, stride=2, padding=1), x, w)
    assert any("gather_windows" in name for name in names)
    want = nn.conv_transpose2d(torch.tensor(x).double(), torch.tensor(w).double(), stride=2, padding=1).numpy()
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3, 6, 6), (2, 3, 6, 6)])
@pytest.mark.parametrize("outputs", [0, 1])
def test_nothing_and_one(shape, outputs, direct):
    x, w = draw(*shape), draw(outputs, 3, 3, 3)
    got = np.asarray(ts.jit(lambda x, w: ts.conv2d(x, w), target="ptx")(x, w))
    want = expect(2, {}, x, w) if outputs else np.zeros((shape[0], 0, 4, 4))
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


def match(image, weights, **named):
    """The way that is chosen for a convolution of f32: implicit, direct with its blocks, or None."""
    rank = len(image) - 2
    x, w = np.zeros(image, np.float32), np.zeros(weights, np.float32)
    traced = ts.jit(lambda x, w: getattr(ts, f"conv{rank}d")(x, w, **named)).trace(x, w).function
    from tessera.lower.pipeline import expand_composites, library_lowerings

    main = expand_composites(traced, lambda op: op in library_lowerings)
    (node,) = [n for n in main.body.walk() if n.op is contractions.dot]
    if convolution.match_windows(UseDef(main), *node.args) is not None:
        return "implicit"
    found = direct_convolution.match_direct(UseDef(main), *node.args)
    return found and (found.outputs, found.places, found.parts)


def test_the_way_that_takes_least_time():
    assert match((16, 64, 56, 56), (128, 64, 3, 3), padding=1) == "implicit"
    assert match((1, 28, 13, 13, 13), (32, 28, 3, 3, 3), padding=1) == (32, 64, 5)
    assert match((8, 3, 64, 64), (16, 3, 3, 3), padding=1) == (16, 128, 1)
    assert match((17, 452, 24, 24), (64, 113, 3, 3), padding=1, groups=4)[0] == 16

"""Indirect convolutions on processors, in both forms, against PyTorch in f64."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.codegen.llvm import BACKEND  # noqa: E402
from tessera.interp.tile import interpreter  # noqa: E402
from tessera.runtime import driver  # noqa: E402
from tessera.stdlib.indirect_convolution import IndirectConvolution, choose_line, choose_places  # noqa: E402

# name: rank, image, weights, arguments
CASES = {
    "padding": (2, (2, 3, 7, 9), (5, 3, 3, 3), {"padding": 1}),
    "strides": (2, (1, 5, 10, 11), (17, 5, 3, 2), {"padding": 1, "stride": (2, 3)}),
    "dilation and strides": (2, (2, 3, 12, 14), (4, 3, 3, 3), {"padding": 2, "dilation": (2, 3), "stride": 2}),
    "strides over the window": (2, (2, 3, 13, 14), (4, 3, 2, 2), {"stride": 3}),
    "groups": (2, (2, 6, 8, 5), (4, 3, 3, 3), {"groups": 2, "padding": 1}),
    "groups and strides": (2, (2, 6, 8, 5), (36, 3, 3, 3), {"groups": 2, "padding": 1, "stride": 2}),
    "1-D": (1, (2, 6, 40), (20, 6, 5), {"padding": 3, "dilation": 2}),
    "3-D": (3, (1, 4, 5, 6, 7), (3, 4, 3, 2, 3), {"stride": (1, 2, 1), "dilation": (2, 1, 3), "padding": 2}),
    "images in uneven parts": (1, (17, 2, 20), (3, 2, 3), {}),
    "one place more than a line": (1, (1, 2, 245), (3, 2, 5), {}),
    "a depth without divisors": (1, (1, 113, 20), (5, 113, 3), {}),
    "deep, many outputs and places": (2, (1, 65, 16, 15), (75, 65, 2, 2), {"stride": 1}),
}
FORMS = {"places": True, "outputs": False}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    monkeypatch.setattr(IndirectConvolution, "has_lines", lambda self: FORMS[request.param])
    return request.param


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def lower(rank, named, x, w):
    def convolve(x, w):
        return getattr(ts, f"conv{rank}d")(x, w, **named)

    return driver.lower(ts.jit(convolve).trace(x, w).function, "llvm")["tile"]


def expect(rank, named, x, w):
    tensors = (torch.tensor(a.astype("f8")) for a in (x, w))
    return getattr(torch.nn.functional, f"conv{rank}d")(*tensors, **named).numpy()


@pytest.mark.parametrize(
    "case, dtype", [*((case, "f4") for case in CASES), ("groups and strides", "f8"), ("3-D", "f8")]
)
def test_windows_read_in_place_are_the_convolution(case, dtype, form):
    rank, image, weights, named = CASES[case]
    x, w = draw(*image, dtype=dtype), draw(*weights, dtype=dtype)
    module = lower(rank, named, x, w)
    assert {"places": "multiply_lines", "outputs": "multiply_windows"}[form] in [f.name for f in module.functions]
    got, want = driver.make_runtime(module, "llvm").run((x, w))[0], expect(rank, named, x, w)
    np.testing.assert_allclose(got, want, rtol=0, atol=(1e-6 if dtype == "f4" else 1e-14) * 4 * np.abs(want).max())


@pytest.mark.parametrize("case", ["strides", "3-D", "one place more than a line"])
def test_the_tile_interpreter_agrees(case, form):
    rank, image, weights, named = CASES[case]
    x, w = draw(*image), draw(*weights)
    (got,) = interpreter.run(lower(rank, named, x, w), [x, w])
    want = expect(rank, named, x, w)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_products_gather_nothing(form):
    """Tables of offsets are all that is computed for windows."""
    rank, image, weights, named = CASES["deep, many outputs and places"]
    text = BACKEND.emit(lower(rank, named, draw(*image), draw(*weights)), {"vector_bytes": 64}).text("kernels.ll")
    kernels = re.findall(r"^define [^\n]*@multiply_(?:lines|windows)\(.*?^}", text, re.M | re.S)
    assert len(kernels) == 1 and "masked.gather" not in kernels[0]
    letter = {"places": "b", "outputs": "a"}[form]
    assert len(set(re.findall(rf"call void @ts\.dot\S+\.(add|set)\.indexed\.{letter}\(", kernels[0]))) == 2


@pytest.mark.parametrize("named, channels", [({"padding": 1}, 128), ({"stride": 2}, 6), ({"groups": 2}, 6),
                                             ({"padding": (0, 2)}, 6)])  # fmt: skip
def test_channels_last_stay_last(named, channels):
    """Images and results with channels last are read and written as they are: nothing but padding is copied."""
    x, w = draw(2, 9, 8, channels), draw(10, channels // named.get("groups", 1), 3, 3)

    def convolve(x, w):
        return ts.permute(ts.conv2d(ts.permute(x, (0, 3, 1, 2)), w, **named), (0, 2, 3, 1))

    module = driver.lower(ts.jit(convolve).trace(x, w).function, "llvm")["tile"]
    assert len(module.functions) == 4 + ("padding" in named)
    got, want = driver.make_runtime(module, "llvm").run((x, w))[0], expect(2, named, x.transpose(0, 3, 1, 2), w)
    np.testing.assert_allclose(got, want.transpose(0, 2, 3, 1), rtol=0, atol=4e-6 * np.abs(want).max())


def test_channels_last_that_are_padded_on_one_side():
    x, w, sides = draw(2, 9, 8, 6), draw(10, 6, 3, 3), ((0, 0), (0, 0), (0, 1), (0, 3))

    def convolve(x, w):
        return ts.conv2d(ts.pad(ts.permute(x, (0, 3, 1, 2)), sides), w)

    module = driver.lower(ts.jit(convolve).trace(x, w).function, "llvm")["tile"]
    got = driver.make_runtime(module, "llvm").run((x, w))[0]
    want = expect(2, {}, np.pad(np.moveaxis(x, 3, 1), sides), w)
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-6 * np.abs(want).max())


def test_places_have_32_bits(form):
    """Larger images are convolved in another way."""
    x, w = np.broadcast_to(np.float32(0), (1, 2, 1 << 14, 1 << 15)), draw(3, 2, 3, 3)
    names = {f.name for f in lower(2, {}, x, w).functions}
    assert not names & {"multiply_lines", "multiply_windows"}


GRADIENTS = ["padding", "strides", "groups", "1-D", "3-D", "deep, many outputs and places", "images in uneven parts"]


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_of_weights_read_windows_in_place(case):
    rank, image, weights, named = CASES[case]
    x, w = draw(*image), draw(*weights)
    cotangent = draw(*expect(rank, named, x, w).shape)

    def inner(x, w, g):
        return ts.sum(getattr(ts, f"conv{rank}d")(x, w, **named) * g)

    module = driver.lower(ts.jit(ts.grad(inner, argnums=1)).trace(x, w, cotangent).function, "llvm")["tile"]
    assert "multiply_elements" in [f.name for f in module.functions]
    got = driver.make_runtime(module, "llvm").run((x, w, cotangent))[0]
    tensors = [torch.tensor(a.astype("f8"), requires_grad=True) for a in (x, w)]
    out = getattr(torch.nn.functional, f"conv{rank}d")(*tensors, **named)
    (want,) = torch.autograd.grad(out, tensors[1], torch.tensor(cotangent.astype("f8")))
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=4e-6 * want.abs().max().item())


def test_phases_of_a_transposed_convolution_are_interleaved_axis_by_axis():
    """Rows of phases are copied whole, and columns interleaved in registers: nothing is gathered."""
    x, w = draw(2, 6, 8, 16), draw(6, 10, 4, 4)
    function = ts.jit(lambda x, w: ts.conv_transpose2d(x, w, stride=2, padding=1)).trace(x, w).function
    text = BACKEND.emit(driver.lower(function, "llvm")["tile"], {"vector_bytes": 64}).text("kernels.ll")
    kernels = "".join(re.findall(r"^define [^\n]*@k\d+_where\(.*?^}", text, re.M | re.S))
    assert "shufflevector" in kernels and "gather" not in kernels and "scatter" not in kernels


def test_few_outputs_lie_beside_many_places():
    """Lanes hold outputs where there are whole registers of them and windows have strides, and places for few."""

    def name(outputs, stride):
        return lower(2, {"stride": stride, "padding": 1}, draw(1, 16, 33, 33), draw(outputs, 16, 3, 3)).functions

    assert any("multiply_lines" in f.name for f in name(9, 1))
    assert any("multiply_windows" in f.name for f in name(64, 2))


def test_blocks_waste_little():
    for positions in (1, 49, 63, 196, 197, 784, 3136):
        size = choose_places(positions)
        assert size <= 196 and -(-positions // size) * size <= max(1.15 * positions, positions + 13)
        assert choose_line(positions) % 16 == 0

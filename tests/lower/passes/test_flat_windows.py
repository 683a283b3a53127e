"""Flat windows: products with windows read flat lines of the padded array; values are PyTorch's."""

from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.llvm import TILING_PLAN
from tessera.ir.core import Module
from tessera.lower import pipeline
from tessera.ops.tensor import contractions
from tessera.runtime.driver import lower

torch = pytest.importorskip("torch")

PLAN = replace(TILING_PLAN, indirect_windows=False)
CASES = {
    "3x3": ((2, 8, 9, 13), (5, 8, 3, 3), {"padding": 1}),
    "no padding": ((1, 8, 9, 17), (5, 8, 3, 3), {}),
    "tall kernel": ((1, 16, 9, 11), (4, 16, 5, 2), {"padding": (2, 1)}),
    "dilated": ((1, 8, 21, 23), (5, 8, 3, 3), {"padding": 2, "dilation": (2, 1)}),
    "groups": ((2, 32, 10, 10), (6, 16, 3, 3), {"padding": 1, "groups": 2}),
    "strided rows": ((1, 8, 15, 15), (5, 8, 3, 3), {"padding": 1, "stride": (2, 1)}),
    "strided": ((1, 8, 15, 15), (5, 8, 3, 3), {"padding": 1, "stride": 2}),
    "3-D": ((1, 4, 5, 7, 12), (3, 4, 3, 3, 3), {"padding": 1}),
    "1-D": ((2, 24, 40), (5, 24, 3), {"padding": 1}),
    "kernel as wide as the input": ((1, 16, 6, 4), (3, 16, 3, 4), {}),
    "one row": ((1, 24, 3, 40), (3, 24, 3, 3), {}),
}
FLAT = {"3x3", "no padding", "tall kernel", "dilated", "groups", "3-D", "one row"}


def draw(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def convolve(x, w, **attrs):
    return getattr(ts, f"conv{x.ndim - 2}d")(x, w, **attrs)


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    shape, kernel, attrs = CASES[name]
    x, w = draw(shape, 0), draw(kernel, 1)
    got = ts.jit(lambda x, w: convolve(x, w, **attrs), target="llvm")(x, w).numpy()
    function = getattr(torch.nn.functional, f"conv{len(shape) - 2}d")
    want = function(torch.from_numpy(x).double(), torch.from_numpy(w).double(), **attrs).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_product_computes_whole_lines(name):
    shape, kernel, attrs = CASES[name]
    traced = ts.jit(lambda x, w: convolve(x, w, **attrs)).trace(draw(shape, 0), draw(kernel, 1))
    module = Module("graph", (traced.function,))
    for step_name, step in pipeline.list_steps(PLAN):
        if step_name == "schedule":
            break
        module = step(module)
    (dot,) = [n for n in module.main.body.nodes if n.op is contractions.dot]
    windows = np.prod(traced.function.results[0].type.shape[2:])
    assert (dot.out.type.shape[-1] > windows) == (name in FLAT)


def test_windows_are_not_written_to_memory():
    x, w = draw((1, 64, 28, 28), 0), draw((64, 64, 3, 3), 1)
    traced = ts.jit(lambda x, w: ts.conv2d(x, w, padding=1)).trace(x, w)
    workspace = lower(traced.function, "llvm")["tile"].main.attrs["workspace"]
    assert workspace < 64 * 9 * 28 * 28 * 4  # less than im2col needs


def test_lines_are_cut_after_the_product():
    """A slice that leaves gaps between the rows of a product is a kernel of its own: the product keeps whole lines."""
    x, w = draw((1, 64, 28, 28), 0), draw((64, 64, 3, 3), 1)
    traced = ts.jit(lambda x, w: ts.conv2d(x, w, padding=1)).trace(x, w)
    *_, (_, module) = pipeline.lower(Module("graph", (traced.function,)), PLAN)
    names = [f.name for f in module.functions[1:]]
    assert len(names) == 3 and "matmul" in names[1]


def test_a_product_of_the_first_columns_is_computed_in_its_kernel():
    """A slice that leaves no gaps in an axis is fused with the product that it is cut from."""
    a, b = draw((64, 40), 0), draw((40, 96), 1)
    traced = ts.jit(lambda a, b: (a @ b)[:, :64]).trace(a, b)
    assert len(lower(traced.function, "llvm")["tile"].functions) == 2


def test_a_product_of_several_axes_of_pixels_has_one():
    """A 1x1 convolution reads the pixels as one axis; its results, with a bias, are walked along it, too."""
    x, w, b = draw((2, 5, 7, 9), 0), draw((4, 5, 1, 1), 1), draw((4,), 2)
    traced = ts.jit(ts.conv2d).trace(x, w, b)
    module = lower(traced.function, "llvm")["tile"]
    (kernel,) = module.functions[1:]
    assert kernel.params[-1].type.shape == (2, 4, 63)
    got = ts.jit(ts.conv2d, target="llvm")(x, w, b).numpy()
    want = torch.nn.functional.conv2d(*(torch.from_numpy(a).double() for a in (x, w, b))).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

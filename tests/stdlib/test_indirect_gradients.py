"""Gradients of weights of depthwise convolutions on the PTX target, against PyTorch in f64."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.codegen.ptx import BACKEND  # noqa: E402
from tessera.runtime import driver  # noqa: E402

nn = torch.nn.functional
CONVOLUTIONS = {1: (ts.conv1d, nn.conv1d), 2: (ts.conv2d, nn.conv2d), 3: (ts.conv3d, nn.conv3d)}
# name: image, window, arguments, whether channels are last in memory, element type
CASES = {
    "channels first": ((3, 5, 6, 7), (3, 3), {"padding": 1}, False, np.float32),
    "channels last": ((3, 40, 6, 7), (3, 3), {"padding": 1}, True, np.float32),
    "f16": ((2, 8, 9, 8), (3, 2), {"padding": 1}, True, np.float16),
    "bf16": ((2, 3, 9, 8), (2, 3), {}, False, ml_dtypes.bfloat16),
    "strides": ((2, 4, 10, 11), (3, 3), {"stride": (2, 3), "padding": 1}, False, np.float32),
    "strides, channels last": ((2, 4, 10, 11), (3, 3), {"stride": 2, "dilation": (1, 2)}, True, np.float16),
    "steps of rows": ((2, 4, 10, 9), (3, 3), {"stride": (2, 1), "dilation": (1, 2)}, True, np.float16),
    "a long row of a prime size": ((1, 24, 2, 41), (2, 2), {"padding": 1, "dilation": (1, 2)}, True, np.float32),
    "1-D": ((2, 4, 300), (5,), {"padding": 2}, False, np.float32),
    "1-D, channels last": ((2, 4, 60), (5,), {"padding": 2}, True, np.float32),
    "3-D": ((1, 3, 5, 6, 7), (2, 3, 2), {"padding": 1}, False, np.float32),
    "3-D, channels last": ((2, 3, 5, 4, 7), (2, 3, 2), {"padding": 1, "stride": (2, 1, 1)}, True, np.float32),
}


def differentiate(image, weight, gradient, arguments, channels_last):
    """The gradient of the weights, of arrays whose channels lie last in memory or not."""
    rank = len(weight.shape) - 2
    order = (0, rank + 1, *range(1, rank + 1))

    def run(image, gradient, weight):
        x, g = ((ts.permute(v, order) if channels_last else v) for v in (image, gradient))
        x, g = ts.cast(x, ts.f32), ts.cast(g, ts.f32)
        loss = lambda w: ts.sum(CONVOLUTIONS[rank][0](x, w, groups=w.shape[0], **arguments) * g)  # noqa: E731
        return ts.grad(loss)(weight)

    back = (0, *range(2, rank + 2), 1)
    operands = [np.ascontiguousarray(v.transpose(back)) if channels_last else v for v in (image, gradient)]
    return run, (*operands, weight)


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_adds_up_all_sums_and_the_gradient_is_pytorchs(name):
    sizes, window, arguments, channels_last, dtype = CASES[name]
    rng, rank = np.random.default_rng(len(name)), len(window)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    image, weight = draw(*sizes), rng.standard_normal((sizes[1], 1, *window)).astype(np.float32)
    wide = [torch.from_numpy(v.astype(np.float64)) for v in (image, weight)]
    wide[1].requires_grad_()
    out = CONVOLUTIONS[rank][1](*wide, groups=sizes[1], **arguments)
    gradient = draw(*out.shape)
    (want,) = torch.autograd.grad(out, wide[1], torch.from_numpy(gradient.astype(np.float64)))
    run, operands = differentiate(image, weight, gradient, arguments, channels_last)
    levels = driver.lower(ts.jit(run).trace(*operands).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
    assert sum("sum_shifted" in name for name in artifact.manifest["plan"]["entries"]) == 1
    np.testing.assert_allclose(BACKEND.interpreter(artifact)(operands)[0], want, rtol=1e-4, atol=1e-4)


def test_values_that_are_not_finite_reach_the_sums_that_they_are_part_of():
    image, weight = np.ones((1, 2, 5, 5), np.float32), np.ones((2, 1, 3, 3), np.float32)
    image[0, 0, 0, 4] = np.inf  # the last element of a row, which no window but those of the last column has
    for channels_last in (False, True):
        run, operands = differentiate(image, weight, np.ones((1, 2, 3, 3), np.float32), {}, channels_last)
        want = np.full((2, 1, 3, 3), 9.0)
        want[0, 0, 0, 2] = np.inf
        levels = driver.lower(ts.jit(run).trace(*operands).function, "ptx")
        artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
        np.testing.assert_array_equal(BACKEND.interpreter(artifact)(operands)[0], want)

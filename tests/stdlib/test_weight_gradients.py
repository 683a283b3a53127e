"""Gradients of weights as products with a shifted image on the PTX target: against PyTorch in f64, in the emulator."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.codegen.ptx import BACKEND  # noqa: E402
from tessera.core.symbolic_dim import round_up  # noqa: E402
from tessera.core.types import bf16  # noqa: E402
from tessera.interp.tile import interpreter  # noqa: E402
from tessera.runtime import driver  # noqa: E402
from tessera.stdlib import launches, split_products, weight_gradients  # noqa: E402
from tessera.stdlib.convolution import StackedWindows  # noqa: E402
from tessera.stdlib.weight_gradients import PlacedOperand, TapProducts, WeightGradient  # noqa: E402

# image, weights, arguments of the convolution
CASES = {
    "odd sizes": ((3, 20, 9, 11), (24, 20, 3, 3), {"padding": 1}),
    "one image": ((1, 20, 9, 11), (24, 20, 3, 3), {"padding": 1}),
    "no padding": ((2, 24, 9, 8), (70, 24, 3, 3), {}),
    "wide padding": ((2, 24, 6, 7), (20, 24, 3, 3), {"padding": 4}),
    "one line": ((2, 24, 9, 11), (32, 24, 1, 3), {"padding": (0, 1)}),
    "many taps": ((2, 24, 9, 11), (32, 24, 5, 5), {"padding": 2}),
    "even window": ((2, 24, 9, 11), (32, 24, 3, 2), {"padding": (2, 1)}),
    "dilation": ((2, 24, 9, 11), (32, 24, 3, 3), {"padding": 3, "dilation": (2, 1)}),
    "wide blocks": ((2, 140, 6, 6), (256, 140, 3, 3), {"padding": 1}),
    "more channels than outputs": ((2, 256, 6, 6), (36, 256, 3, 3), {"padding": 1}),
    "several parts": ((2, 16, 24, 23), (16, 16, 3, 3), {"padding": 1}),
    "1-D": ((3, 24, 40), (32, 24, 3), {"padding": 1}),
    "strides": ((2, 20, 10, 11), (24, 20, 3, 3), {"padding": 1, "stride": 2}),
    "long strides": ((2, 16, 17, 15), (24, 16, 3, 2), {"padding": (0, 1), "stride": (2, 3)}),
    "strides and gaps": ((2, 70, 14, 13), (140, 70, 3, 3), {"padding": 2, "stride": 2, "dilation": (1, 3)}),
    "3-D strides": ((2, 16, 5, 6, 7), (20, 16, 3, 2, 3), {"padding": 1, "stride": (1, 2, 2)}),
    "3-D, one plane of results": ((2, 3, 3, 6, 4), (90, 3, 3, 2, 1), {"padding": (1, 2, 3), "dilation": (2, 1, 1)}),
    "3-D": ((2, 16, 5, 6, 7), (20, 16, 3, 2, 3), {"padding": (1, 0, 1)}),
}


@pytest.fixture
def found(monkeypatch):
    """What the rule found, which is always used."""
    seen, match = [], launches.match_weight_gradient
    monkeypatch.setattr(WeightGradient, "estimate_stacked", lambda gradient: math.inf)
    monkeypatch.setattr(launches, "match_weight_gradient", lambda *a: seen.append(match(*a)) or seen[-1])
    return seen


def differentiate(named, last=False):
    """The gradient of a convolution's weights; `last`: of an image and a gradient whose channels are last."""

    def gradient(x, w, g):
        if last:
            order = (0, x.ndim - 1, *range(1, x.ndim - 1))
            x, g = ts.permute(x, axes=order), ts.permute(g, axes=order)
        convolve = getattr(ts, f"conv{w.ndim - 2}d")
        return ts.vjp(lambda w: convolve(x, w, **named), w)[1](g)[0]

    return gradient


def draw(image, weights, named, dtype=np.float16):
    """An image, weights, and a gradient of the results."""
    rng = np.random.default_rng(len(image))
    x, w = (rng.standard_normal(sizes).astype(dtype) for sizes in (image, weights))
    return x, w, rng.standard_normal(convolve(x, w, named).shape).astype(dtype)


def convolve(x, w, named):
    x, w = (torch.as_tensor(v.astype("f8") if isinstance(v, np.ndarray) else v) for v in (x, w))
    return getattr(torch.nn.functional, f"conv{w.ndim - 2}d")(x, w, **named)


def expect(x, w, g, named):
    weights = torch.tensor(w.astype("f8"), requires_grad=True)
    convolve(x, weights, named).backward(torch.tensor(g.astype("f8")))
    return weights.grad.numpy()


def put_last(x):
    return np.ascontiguousarray(np.moveaxis(x, 1, -1))


def lower(function, *arrays):
    return driver.lower(ts.jit(function).trace(*arrays).function, "ptx")["tile"]


def emulate(module, arrays, arch="sm_90a"):
    """The text for a GPU, and its result in the emulator."""
    artifact = BACKEND.emit(module, {"arch": arch})
    return "".join(str(text) for text in artifact.files.values()), BACKEND.interpreter(artifact)(arrays)[0]


def assert_close(got, want, dtype=np.float16):
    tolerance = 2**-9 if dtype is np.float16 else 2**-6
    finite = want[np.isfinite(want)]
    np.testing.assert_allclose(got.astype("f8"), want, rtol=tolerance, atol=1e-3 * abs(finite).max())


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_shifted_products_are_the_gradient_of_the_weights(case, last, found):
    image, weights, named = CASES[case]
    dtype = ml_dtypes.bfloat16 if last else np.float16
    x, w, g = draw(image, weights, named, dtype)
    want = expect(x, w, g, named)
    arrays = (put_last(x), w, put_last(g)) if last else (x, w, g)
    text, got = emulate(lower(differentiate(named, last), *arrays), arrays)
    assert [each for each in found if each is not None] and "wgmma.mma_async" in text
    assert_close(got, want, dtype)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sides", [(3, 0), (0, 3), (1, 2)])
def test_padding_of_one_side_is_seen_by_no_other_line(sides, stride, found):
    """Nor is what surrounds an image: the last line of one is beside the first of the next."""
    low, high = sides
    x, w, g = draw((2, 16, 6 + low + high, 7 + low + high), (16, 16, 4, 4), {"stride": stride})
    x = x[:, :, low : low + 6, low : low + 7]
    arrays = put_last(x), w, put_last(g)
    padded = np.pad(x, ((0, 0), (0, 0), sides, sides))

    def gradient(x, w, g):
        x, g = (ts.permute(v, axes=(0, 3, 1, 2)) for v in (x, g))
        x = ts.pad(x, ((0, 0), (0, 0), sides, sides))
        return ts.vjp(lambda w: ts.conv2d(x, w, stride=stride), w)[1](g)[0]

    got = interpreter.run(lower(gradient, *arrays), arrays)[0]
    (made,) = [each for each in found if each is not None]
    assert (made.image.low[1:], made.image.high[1:]) == ((low, low), (high, high))
    assert_close(got, expect(padded, w, g, {"stride": stride}))


@pytest.mark.parametrize(("width", "value"), [
    (((0, 0), (0, 0), (1, 1), (1, 1)), 2), (((0, 0), (0, 4), (1, 1), (1, 1)), 0), (((0, 0), (4, 0), (0, 0), (0, 1)), 0),
    (((1, 0), (0, 0), (1, 1), (1, 1)), 0),
])  # fmt: skip
def test_padding_that_is_no_border_of_zeros_is_written(width, value, found):
    x, w, g = draw((3, 16, 8, 8), (16, 16, 3, 3), {})
    inner = tuple(slice(a, n - b) for (a, b), n in zip(width, x.shape, strict=True))
    padded = np.pad(x[inner], width, constant_values=value)

    def gradient(x, w, g):
        return ts.vjp(lambda w: ts.conv2d(ts.pad(x, width, value=value), w), w)[1](g)[0]

    arrays = np.ascontiguousarray(x[inner]), w, g
    got = interpreter.run(lower(gradient, *arrays), arrays)[0]
    assert any(found)
    assert_close(got, expect(padded, w, g, {}))


def test_the_gradient_of_a_loss_reaches_it(found):
    image, weights, named = CASES["odd sizes"]
    x, w, g = draw(image, weights, named)

    def gradient(x, w, g):
        return ts.grad(lambda w: (ts.cast(ts.conv2d(x, w, **named), ts.f32) * ts.cast(g, ts.f32)).sum())(w)

    got = emulate(lower(gradient, x, w, g), (x, w, g))[1]
    assert any(found)
    assert_close(got, expect(x, w, g, named))


@pytest.mark.parametrize("last", [False, True])
def test_channels_that_are_last_are_read_as_they_are(last, found):
    x, w, g = draw(*CASES["no padding"])
    arrays = (put_last(x), w, put_last(g)) if last else (x, w, g)
    lower(differentiate({}, last), *arrays)
    (gradient,) = [each for each in found if each is not None]
    assert (gradient.image.last, gradient.gradient.last) == (last, last)


def test_many_parts_are_added_up_before_the_check(found, monkeypatch):
    monkeypatch.setattr(split_products, "MOST_ADDED", 2)
    image, weights, named = CASES["several parts"]
    x, w, g = draw(image, weights, named)
    module = lower(differentiate(named), x, w, g)
    assert [f for f in module.functions if "sum" in f.name]
    assert_close(emulate(module, (x, w, g))[1], expect(x, w, g, named))


@pytest.mark.parametrize("case", ["odd sizes", "several parts", "strides", "3-D"])
def test_the_tile_interpreter_agrees(case, found):
    image, weights, named = CASES[case]
    x, w, g = draw(image, weights, named)
    got = interpreter.run(lower(differentiate(named), x, w, g), (x, w, g))[0]
    assert_close(got, expect(x, w, g, named))


def test_an_older_gpu_multiplies_blocks_that_begin_anywhere(found):
    image, weights, named = CASES["odd sizes"]
    x, w, g = draw(image, weights, named)
    text, got = emulate(lower(differentiate(named), x, w, g), (x, w, g), "sm_80")
    assert "mma.sync" in text and any(found)
    assert_close(got, expect(x, w, g, named))


@pytest.mark.parametrize(("padding", "stride"), [(0, 1), (1, 1), (1, 2)])
@pytest.mark.parametrize("swapped", [False, True])
def test_special_values_reach_the_weights_that_meet_them_alone(padding, stride, swapped, found, monkeypatch):
    monkeypatch.setattr(WeightGradient, "choose_products", lambda gradient, grid: TapProducts(64, 128, swapped, 2))
    named = {"padding": padding, "stride": stride}
    x, w, g = draw((3, 20, 9, 11), (24, 20, 3, 3), named)
    x[0, 0, 0, 0], x[1, 3, -1, -1], x[2, 4, 4, 5] = np.inf, -np.inf, np.nan
    g[1, 2, 0, 3], g[0, 5, 2, 2] = np.inf, np.nan
    want = expect(x, w, g, named)
    got = emulate(lower(differentiate(named), x, w, g), (x, w, g))[1]
    assert any(found) and np.isinf(want).any() and np.isnan(want).any() and np.isfinite(want[0, 1]).all()
    assert_close(got, want)


@pytest.mark.parametrize("block", [*weight_gradients.BLOCK_RATES])
def test_blocks_of_any_size_are_the_gradient(block, found, monkeypatch):
    monkeypatch.setattr(WeightGradient, "choose_products", lambda gradient, grid: TapProducts(*block, True, 3))
    image, weights, named = CASES["several parts"]
    x, w, g = draw(image, weights, named)
    text, got = emulate(lower(differentiate(named), x, w, g), (x, w, g))
    assert any(found) and f"wgmma.mma_async.sync.aligned.m64n{block[1]}k16" in text
    assert_close(got, expect(x, w, g, named))


def test_the_sanitizer_finds_nothing(found):
    image, weights, named = CASES["strides"]
    x, w, g = draw(image, weights, named)
    x[0, 0, 0, 0] = np.inf  # the check multiplies, too
    artifact = BACKEND.emit(lower(differentiate(named), x, w, g), {"arch": "sm_90a"})
    assert_close(BACKEND.sanitized(artifact)((x, w, g))[0], expect(x, w, g, named))


def test_a_border_that_is_not_finite_is_no_part_of_other_taps(found):
    x, w, g = draw((2, 16, 8, 8), (16, 16, 3, 3), {})
    x[:, :, 0, :] = np.inf  # only windows' first line sees it
    got = emulate(lower(differentiate({}), x, w, g), (x, w, g))[1]
    assert np.isfinite(got[:, :, 1:]).all() and not np.isfinite(got[:, :, 0]).any() and any(found)


def test_pytorch_reaches_it(found):
    pytest.importorskip("tessera.torch")
    x, w, g = (torch.tensor(v.astype("f4")).to(torch.float16) for v in draw(*CASES["odd sizes"]))

    def backward(g, x, w):
        settings = [24], [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        return torch.ops.aten.convolution_backward(g, x, w, *settings, [False, True, False])[1]

    got = torch.compile(backward, backend="tessera", dynamic=False, options={"target": "ptx"})(g, x, w)
    assert any(found)
    assert_close(got.numpy(), expect(*(v.numpy() for v in (x, w, g)), {"padding": 1}))


@pytest.mark.parametrize(("image", "weights", "named", "dtype"), [
    ((2, 20, 9, 9), (24, 10, 3, 3), {"groups": 2}, np.float16),
    ((2, 20, 9, 9), (24, 20, 3, 3), {}, np.float32),
])  # fmt: skip
def test_other_gradients_stay(image, weights, named, dtype, found):
    x, w, g = draw(image, weights, named, dtype)
    got = emulate(lower(differentiate(named), x, w, g), (x, w, g))[1]
    assert found and not any(found)
    assert_close(got, expect(x, w, g, named))


def make(batch, channels, outputs, size, kernel, last=False):
    """The gradient of windows with padding that keeps the image's size."""
    sides = (0, kernel // 2, kernel // 2)
    image = PlacedOperand(None, last, channels, (1, size, size), sides, sides)
    windows = StackedWindows(None, (kernel, kernel), (1, 1), (1, 1), (size, size))
    return WeightGradient(image, PlacedOperand(None, last, outputs, (1, size, size)), windows, batch, bf16, ())


@pytest.mark.parametrize(("sizes", "pays"), [
    ((64, 128, 128, 28, 3), True), ((32, 512, 512, 7, 3), True), ((64, 64, 64, 56, 3), True),
    ((4, 3, 16, 64, 3), False), ((1, 64, 64, 32, 3), False),
])  # fmt: skip
def test_few_channels_and_small_images_have_windows_in_memory(sizes, pays):
    gradient = make(*sizes)
    assert (gradient.estimate_seconds() < gradient.estimate_stacked()) == pays


@pytest.mark.parametrize(("sizes", "grid"), [((64, 128, 128, 28, 3), (1, 29, 29)), ((3, 16, 16, 9, 5), (1, 11, 11))])
def test_zeros_behind_a_line_are_before_the_next_one(sizes, grid):
    assert make(*sizes, last=True).find_grid() == grid  # rows of channels: any number of positions
    found = make(*sizes).find_grid()
    assert sizes[0] * math.prod(found) % 8 == 0 and all(n >= m for n, m in zip(found, grid, strict=True))


@pytest.mark.parametrize("sizes", [
    (64, 128, 128, 28, 3), (32, 512, 512, 7, 3), (64, 192, 128, 28, 3), (64, 128, 192, 28, 3), (64, 64, 64, 56, 3),
])  # fmt: skip
def test_blocks_and_parts_fill_the_gpu(sizes):
    gradient = replace(make(*sizes), any_columns=True)
    way = gradient.choose_products(gradient.find_grid())
    m, n = sizes[1:3] if way.swapped else sizes[2:0:-1]
    programs = 9 * way.parts * -(-m // way.rows) * -(-n // way.columns)
    assert programs / (-(-programs // 132) * 132) > 0.75
    assert m * n / (round_up(m, way.rows) * round_up(n, way.columns)) > 0.85  # few of the results are padding


def test_blocks_without_wgmma_have_powers_of_two():
    gradient = make(64, 192, 128, 28, 3)
    columns = [replace(gradient, any_columns=n).choose_products(gradient.find_grid()).columns for n in (False, True)]
    assert columns[0] & (columns[0] - 1) == 0 and columns[1] % 96 == 0

"""Gradients of windows, and sums of windows, are computed from the windows of each element, in few kernels."""

import functools
from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from tessera.lower.passes.window_sums import gather_window_sums
from tessera.ops.tensor import basic, reduce, shape
from tests.lower.levels import SMALL, agree, modules, traced

PLANS = {"threads": replace(SMALL, parallel=8), "rows": SMALL}


def draw(*sizes):
    return np.random.default_rng(sum(sizes)).integers(-3, 3, sizes).astype("f4")  # with ties


def pull_back(pool, **how):
    return ts.grad(lambda x: ts.sum(pool(x, **how) ** 2))


@pytest.mark.parametrize("kernel, stride, padding, more", [
    (2, 2, 0, {}), (3, 2, 1, {}), (3, 1, 1, {}), ((2, 3), (3, 2), (0, 1), {}), (2, 3, 0, {}),
    (3, 2, 1, {"ceil_mode": True}),
])  # fmt: skip
@pytest.mark.parametrize("pool", [ts.max_pool2d, ts.avg_pool2d])
def test_gradients_of_pools(pool, kernel, stride, padding, more):
    how = {"kernel_size": kernel, "stride": stride, "padding": padding, **more}
    x = draw(2, 1, 8, 7)
    results = agree(pull_back(pool, **how), x, plans=PLANS)
    torch = pytest.importorskip("torch")
    if pool is ts.avg_pool2d:  # gradients of ties differ
        given = torch.tensor(x, requires_grad=True)
        (torch.nn.functional.avg_pool2d(given, **how) ** 2).sum().backward()
        np.testing.assert_allclose(results[0], given.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_dilated_windows():
    agree(pull_back(ts.max_pool2d, kernel_size=3, stride=1, dilation=2), draw(1, 2, 9, 8), plans=PLANS)
    agree(pull_back(ts.max_pool2d, kernel_size=2, stride=2, dilation=3), draw(1, 2, 9, 8), plans=PLANS)


def test_sums_of_other_slices():
    def mixed(x):
        return ts.sum(ts.sin(x[:, ::3]) * x[:, 1::3] + x[:, 2::3] ** 2)

    agree(ts.grad(mixed), draw(4, 30), plans=PLANS)
    agree(ts.grad(lambda x: ts.sum(x[::2, 1::2] ** 2 * x[1::2, ::2])), draw(6, 8), plans=PLANS)
    agree(lambda x: ts.concatenate([ts.sum(x[:, a:b], axis=1, keepdims=True) for a, b in ((0, 3), (3, 4), (1, 6))], 1),
          draw(4, 6), plans=PLANS)  # fmt: skip


@pytest.mark.parametrize("size", [3, (7, 4), (1, 5), 8])
def test_adaptive_averages(size):
    x = draw(1, 2, 16, 17)
    results = agree(lambda x: ts.adaptive_avg_pool2d(x, size), x, plans=PLANS)
    torch = pytest.importorskip("torch")
    want = torch.nn.functional.adaptive_avg_pool2d(torch.tensor(x), size)
    np.testing.assert_allclose(results[0], want.numpy(), rtol=1e-5, atol=1e-6)
    agree(pull_back(ts.adaptive_avg_pool2d, output_size=size), x, plans=PLANS)


def test_slices_that_compute_other_things_are_summed_as_they_are():
    x, w = draw(4, 30) / 3, draw(4, 10)

    def two(x):
        return ts.sum(ts.sin(x[:, ::2])) + ts.sum(ts.exp(x[:, 1::2]))

    def three(x, w):
        return ts.sum(ts.sin(x[:, ::3])) + ts.sum(x[:, 1::3] * w) + ts.sum(ts.exp(x[:, 2::3]))

    for loss, parts in (
        (two, [np.cos(x[:, ::2]), np.exp(x[:, 1::2])]), (three, [np.cos(x[:, ::3]), w, np.exp(x[:, 2::3])])
    ):  # fmt: skip
        (found,) = agree(ts.grad(loss), *(x, w)[: len(parts) - 1], plans={"threads": PLANS["threads"]})
        np.testing.assert_allclose(found, np.stack(parts, axis=-1).reshape(x.shape), rtol=1e-6)


def test_slices_that_multiply_each_other_are_not_taken_for_their_own_elements():
    x = draw(4, 30)
    (found,) = agree(ts.grad(lambda x: ts.sum(x[:, ::2] * x[:, 1::2])), x, plans={"threads": PLANS["threads"]})
    np.testing.assert_array_equal(found, x.reshape(4, 15, 2)[..., ::-1].reshape(4, 30))


def count_ops(function, op, *arrays):
    """The ops of one kind that a function has after the pass."""
    return [node.op for node in gather_window_sums(traced(function, *arrays)[0]).body.nodes].count(op)


@pytest.mark.parametrize(("depth", "pads"), [(9, 0), (10, 4)])
def test_an_element_computes_at_most_64_ops_for_a_window(depth, pads):
    """Of sines of sines there are the products, the cosines, and for each of these the sines before it: 54 or 65."""

    def chain(x):
        return functools.reduce(lambda y, _: ts.sin(y), range(depth), x)

    gradient = ts.grad(lambda x: ts.sum(chain(x[:, ::2]) + chain(x[:, 1::2])))
    assert count_ops(gradient, shape.pad, draw(4, 30)) == pads


@pytest.mark.parametrize(("stop", "sums"), [(35, 0), (36, 2)])
def test_windows_of_more_than_32_elements_are_summed_alone(stop, sums):
    def windows(x):
        return ts.concatenate([ts.sum(x[:, a:b], axis=1, keepdims=True) for a, b in ((0, 3), (3, stop))], 1)

    assert count_ops(windows, reduce.sum, draw(4, 40)) == sums


def test_what_windows_are_given_is_computed_again_for_each_element():
    """It takes an op or two from the parameters: no kernel of its own."""
    x, w = draw(1, 2, 9, 9), draw(1, 2, 4, 4)
    gradient = ts.grad(lambda x, w: ts.sum(ts.avg_pool2d(x, 3, 2) * (w + 1.0)))
    (found,) = agree(gradient, x, w, plans={"threads": PLANS["threads"]})
    want = np.zeros_like(x)
    for row, column in np.ndindex(4, 4):
        want[..., 2 * row : 2 * row + 3, 2 * column : 2 * column + 3] += (w[..., row, column] + 1)[..., None, None] / 9
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)
    assert count_ops(gradient, basic.fusion_barrier, x, w) == 0


@pytest.mark.parametrize(("places", "phases"), [(2, 0), (3, 2), (16, 2)])
def test_targets_that_read_rows_interleave_phases_of_windows_that_overlap(places, phases):
    def windows(x):
        return ts.sum(sum(ts.sin(x[:, a : 14 + a : 2]) for a in range(places)) ** 2)

    function = traced(ts.grad(windows), draw(4, 31))[0]
    assert count_parts(gather_window_sums(function, overlapping=False)) == phases
    assert count_parts(gather_window_sums(function)) == 0


def count_parts(function):
    """The parts of the concatenations of a function."""
    return sum(len(n.args) for n in function.body.nodes if n.op is shape.concatenate)


@pytest.mark.parametrize(("step", "phases"), [(1, 0), (8, 8), (9, 0)])
def test_few_phases_are_interleaved(step, phases):
    def windows(x):
        return ts.sum(sum(ts.sin(x[:, a : a + 2 * step + 1 : step]) for a in range(step + 1)) ** 2)

    gradient, x = ts.grad(windows), draw(2, 40)
    assert count_parts(gather_window_sums(traced(gradient, x)[0], overlapping=False)) == phases
    agree(gradient, x, plans={"rows": SMALL})


# Windows of 125 taps take as long as all others together: those of 5 are along two axes.
@pytest.mark.parametrize("sizes", [(1, 2, 9), (2, 1, 5, 7, 6)])
@pytest.mark.parametrize("kernel, stride, padding", [(3, 2, 1), (3, 2, 0), (2, 3, 1), (5, 3, 2)])
def test_phases_of_windows_along_any_number_of_axes(sizes, kernel, stride, padding):
    x = draw(*sizes[: 4 if kernel == 5 else 5])
    pool = {1: ts.max_pool1d, 2: ts.max_pool2d, 3: ts.max_pool3d}[x.ndim - 2]
    gradient = pull_back(pool, kernel_size=kernel, stride=stride, padding=padding)
    (want,) = agree(gradient, x, plans={"rows": SMALL})
    np.testing.assert_allclose(np.asarray(ts.jit(gradient, target="llvm")(x)), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("first", "count", "margin"), [(0, 9, 0), (5, 4, 0), (0, 1, 1), (3, 9, 2), (17, 1, 0)])
def test_phases_of_windows_in_a_part_of_an_array(first, count, margin):
    """The sum is read whole, or without what pads the array; windows start and end at any element."""

    def windows(x, w):
        padded = ts.pad(x, margin, 1.5)[margin : margin + 3] if margin else x
        parts = [padded[:, first + a : first + a + 2 * count - 1 : 2] for a in range(5)]
        return ts.sum(sum(ts.sin(v) / w for v in parts) ** 2)

    x, w = draw(3, 22), np.random.default_rng(count).integers(1, 4, (3, count)).astype("f4")
    gradient = ts.grad(windows)
    assert count_parts(gather_window_sums(traced(gradient, x, w)[0], overlapping=False)) == 2
    agree(gradient, x, w, plans={"rows": SMALL}, rtol=1e-5)


def test_windows_behind_the_last_one_add_nothing_to_phases():
    """Their values are zeros, of which reciprocals are infinite."""
    x, w = draw(2, 9), np.ones((2, 4), "f4")
    gradient = ts.grad(lambda x, w: ts.sum(sum(x[:, a : a + 7 : 2] for a in range(3)) / w))
    found = np.asarray(ts.jit(gradient, target="llvm")(x, w))
    np.testing.assert_array_equal(found, np.tile([1, 1, 2, 1, 2, 1, 2, 1, 1], (2, 1)).astype("f4"))


def test_gradients_of_maxima_on_processors():
    """Ties share the gradient, and elements behind the last window have none."""
    x = draw(3, 2, 15, 37)
    x[0, 0, 4, 4] = np.inf
    found = np.asarray(ts.jit(ts.grad(lambda x: ts.sum(ts.max_pool2d(x, 2))), target="llvm")(x))
    whole = x[..., :14, :36].reshape(3, 2, 7, 2, 18, 2)
    held = whole == whole.max((3, 5), keepdims=True)
    want = np.zeros_like(x)
    want[..., :14, :36] = (held / held.sum((3, 5), keepdims=True)).reshape(3, 2, 14, 36)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("size, kernel, stride, padding, dilation", [
    ((2, 3, 8, 7), (3, 3), 2, 1, 1), ((1, 2, 9, 10), (5, 2), (2, 3), 2, 1), ((2, 2, 7, 7), (2, 4), (3, 2), 0, 1),
    ((1, 2, 9, 9), (3, 3), 2, 2, 2),
])  # fmt: skip
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_of_depthwise_convolutions(size, kernel, stride, padding, dilation, channels_last):
    """The weights differ from place to place in a window."""
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": size[1]}
    x, w = draw(*size), draw(size[1], 1, *kernel)

    def run(x):
        x = ts.permute(x, (0, 3, 1, 2)) if channels_last else x
        return ts.sum(ts.conv2d(x, w, **how) ** 2)

    given = np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if channels_last else x
    (found, *_) = agree(ts.grad(run), given, plans=PLANS)
    torch = pytest.importorskip("torch")
    want = torch.tensor(x, requires_grad=True)
    (torch.nn.functional.conv2d(want, torch.tensor(w), **how) ** 2).sum().backward()
    want = want.grad.numpy()
    np.testing.assert_allclose(found, want.transpose(0, 2, 3, 1) if channels_last else want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("plan", PLANS)
def test_a_gradient_of_a_strided_depthwise_convolution_takes_few_kernels(plan):
    """Each of the 25 products would be an array with zeros between its elements."""
    x, w, g = draw(2, 3, 8, 8), draw(3, 1, 5, 5), draw(2, 3, 4, 4)
    pull = lambda g: ts.vjp(lambda x: ts.conv2d(x, w, stride=2, padding=2, groups=3), x)[1](g)  # noqa: E731
    kernels = modules(traced(pull, g)[0], PLANS[plan])["tile"].functions[1:]
    assert len(kernels) == {"threads": 1, "rows": 5}[plan]

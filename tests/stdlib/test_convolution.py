"""Convolutions as implicit GEMMs on the PTX target, against PyTorch in f64."""

import math

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.ir.analysis import AffineForm  # noqa: E402
from tessera.ir.printer import print_module  # noqa: E402
from tessera.runtime import driver  # noqa: E402
from tessera.stdlib import convolution  # noqa: E402

nn = torch.nn.functional
# name: rank, image, weights, arguments
CASES = {
    "padding": (2, (2, 12, 10, 11), (20, 12, 3, 3), {"padding": 1}),
    "one part after the other": (2, (1, 64, 9, 9), (16, 64, 3, 3), {"padding": 1}),
    "whole blocks of positions": (2, (2, 8, 14, 14), (20, 8, 3, 3), {"padding": 1}),
    "strides": (2, (2, 5, 10, 11), (20, 5, 3, 3), {"padding": 1, "stride": 2}),
    "long strides": (2, (1, 3, 30, 27), (20, 3, 7, 7), {"padding": 2, "stride": (4, 3)}),
    "dilation": (2, (2, 3, 12, 14), (20, 3, 3, 3), {"padding": 2, "dilation": 2}),
    "groups": (2, (2, 6, 12, 14), (20, 3, 3, 3), {"groups": 2}),
    "1-D": (1, (2, 6, 40), (20, 6, 3), {"padding": 1}),
    "3-D": (3, (2, 6, 7, 8, 9), (20, 6, 3, 3, 2), {"stride": (1, 2, 1)}),
}


@pytest.fixture
def found(monkeypatch):
    """What the rule found of each product, which is always used."""
    from tessera.stdlib import launches

    seen, match = [], launches.match_windows
    monkeypatch.setattr(convolution, "estimate_gathered", lambda product: math.inf)
    monkeypatch.setattr(convolution, "estimate_stacked", lambda product: math.inf)
    monkeypatch.setattr(launches, "match_gathered", lambda *a: None)
    monkeypatch.setattr(launches, "match_windows", lambda *a: seen.append(match(*a)) or seen[-1])
    return seen


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def compute(rank, named, x, w):
    name = f"conv{rank}d"
    return np.asarray(ts.jit(lambda x, w: getattr(ts, name)(x, w, **named), target="ptx")(x, w))


def expect(rank, named, x, w):
    tensors = (torch.tensor(a.astype("f8")) for a in (x, w))
    return getattr(nn, f"conv{rank}d")(*tensors, **named).numpy()


@pytest.mark.parametrize("case", CASES)
def test_an_implicit_gemm_is_the_convolution(case, found):
    rank, image, weights, named = CASES[case]
    x, w = draw(*image), draw(*weights)
    got, want = compute(rank, named, x, w), expect(rank, named, x, w)
    assert len(found) == 1 and found[0] is not None
    np.testing.assert_allclose(got, want, atol=1e-5 * abs(want).max(), rtol=1e-5)


def test_special_values_reach_the_windows_that_see_them_alone(found):
    x, w = draw(2, 12, 10, 11), draw(20, 12, 3, 3)
    x[0, 3, 4, 5], x[1, 2, 3, 4], x[1, 1, 1, 1] = np.inf, 1e-40, np.nan
    got, want = compute(2, {"padding": 1}, x, w), expect(2, {"padding": 1}, x, w)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)
    assert found[0] is not None and np.isnan(want).sum() == 20 * 9 and np.isinf(want).any()


@pytest.mark.parametrize(("busy", "parts"), [(1, 6), (2, 3), (132, 1)])
def test_few_results_are_cut_by_parts(busy, parts, found, monkeypatch):
    made, launch = [], convolution.launch
    monkeypatch.setattr(convolution, "BUSY_PROGRAMS", busy)
    monkeypatch.setattr(convolution, "launch", lambda k, *a, **named: made.append((k, named)) or launch(k, *a, **named))
    x, w = draw(1, 64, 9, 9), draw(16, 64, 3, 3)
    np.testing.assert_allclose(compute(2, {}, x, w), expect(2, {}, x, w), atol=1e-4, rtol=1e-5)
    assert [named["parts"] for k, named in made if k is convolution.multiply_windows] == [parts]


@pytest.mark.parametrize(("channels", "most", "pieces"), [(40, 576, 4), (40, 1152, 2), (128, 576, 2), (80, 1728, 3)])
def test_long_sums_are_cut_by_channels(channels, most, pieces, found, monkeypatch):
    made, launch = [], convolution.launch
    monkeypatch.setattr(convolution, "MAX_DEPTH", most)
    monkeypatch.setattr(convolution, "launch", lambda k, *a, **named: made.append((k, named)) or launch(k, *a, **named))
    x, w = draw(1, channels, 6, 7), draw(8, channels, 3, 3)
    want = expect(2, {}, x, w)
    np.testing.assert_allclose(compute(2, {}, x, w), want, atol=1e-6 * abs(want).max(), rtol=1e-5)
    assert [named["pieces"] for k, named in made if k is convolution.multiply_windows] == [pieces]


@pytest.mark.in_turn("dtype")
@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("channels", [3, 40], ids=["taps are channels", "many channels"])
@pytest.mark.parametrize(("size", "stride"), [((3, 3), 2), ((7, 5), (3, 2)), ((4, 4), 2)], ids=str)
def test_infinities_reach_no_taps_that_a_phase_lacks(size, stride, channels, dtype, found, monkeypatch):
    folded = []
    folds = lambda self, image, outputs: self.taps[-1] > 1 and channels == 3  # noqa: E731
    monkeypatch.setattr(convolution.PositionConvolution, "_folds_taps", folds)
    check = convolution.PositionConvolution._check
    monkeypatch.setattr(
        convolution.PositionConvolution, "_check", lambda self, *a: folded.append(self.stacked > 1) or check(self, *a)
    )
    x, w = draw(2, channels, 11, 12, dtype=dtype), draw(20, channels, *size, dtype=dtype)
    x[0, 2, 4, 5], x[1, 1, 3, 7] = np.inf, np.nan
    named = {"padding": 1, "stride": stride}
    got, want = compute(2, named, x, w).astype("f8"), expect(2, named, x, w)
    assert found[0] is not None and np.isnan(want).any() and np.isinf(want).any()
    assert folded in ([], [channels == 3])  # all phases of the last size have as many taps
    np.testing.assert_allclose(got, want, atol=1e-4 if dtype == "f4" else 3e-2, rtol=1e-5 if dtype == "f4" else 2e-3)


def test_tiny_numbers_keep_their_digits(found):
    x, w = draw(1, 4, 6, 6) * np.float32(1e-36), draw(8, 4, 3, 3) * np.float32(1e3)
    got, want = compute(2, {}, x, w), expect(2, {}, x, w)
    np.testing.assert_allclose(got, want, atol=1e-6 * abs(want).max())


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_operands_are_one_product(dtype, found):
    x, w = draw(2, 12, 10, 11, dtype=dtype), draw(20, 12, 3, 3, dtype=dtype)
    got, want = compute(2, {"padding": 1}, x, w), expect(2, {"padding": 1}, x, w)
    assert found[0].narrow.name in ("bf16", "f16")
    np.testing.assert_allclose(got.astype("f8"), want, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize(("rate", "memory"), [(1e3, "1x1x20x243xf16"), (1e30, "9x1x20x243xf32")])
def test_small_images_are_one_list_and_few_results_are_cut(rate, memory, found, monkeypatch):
    monkeypatch.setattr(convolution, "MEMORY_RATE", rate)
    monkeypatch.setattr(convolution, "LAUNCH_SECONDS", 0.0)
    x, w = draw(3, 136, 7, 7, dtype=np.float16), draw(20, 136, 3, 3, dtype=np.float16)
    traced = ts.jit(lambda x, w: ts.conv2d(x, w, padding=1)).trace(x, w)
    assert memory in print_module(driver.lower(traced.function, "ptx")["tile"])
    got, want = compute(2, {"padding": 1}, x, w), expect(2, {"padding": 1}, x, w)
    np.testing.assert_allclose(got.astype("f8"), want, rtol=2**-9, atol=2**-5)


@pytest.mark.parametrize(("pieces", "cuts"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("block", [(64, 64), (128, 128)])
def test_pieces_of_channels_and_cuts_of_taps_add_up(pieces, cuts, block, found, monkeypatch):
    """Of any number that divides the rows of taps, and of any number of blocks of channels."""
    blocks = convolution.WindowBlocks(pieces, cuts, *block)
    monkeypatch.setattr(convolution.PositionConvolution, "_choose_blocks", lambda self, results, channels: blocks)
    monkeypatch.setattr(convolution.PositionConvolution, "_folds_taps", lambda self, image, outputs: False)
    x, w = draw(2, 136, 7, 7, dtype=np.float16), draw(20, 136, 4, 3, dtype=np.float16)
    got, want = compute(2, {"padding": 1}, x, w), expect(2, {"padding": 1}, x, w)
    assert found[0] is not None
    np.testing.assert_allclose(got.astype("f8"), want, rtol=2**-9, atol=2**-5)


def test_parts_of_a_narrow_product_are_added_up_in_f32(found, monkeypatch):
    """Sums of some of the channels are beyond the largest number of f16, those of all are not."""
    monkeypatch.setattr(convolution, "MEMORY_RATE", 1e30)
    monkeypatch.setattr(convolution, "LAUNCH_SECONDS", 0.0)
    x, w = draw(1, 136, 7, 7, dtype=np.float16), draw(20, 136, 3, 3, dtype=np.float16)
    w[:, :128] = 40
    x[:, :64], x[:, 64:128] = 40, -40

    def multiply(x, w):
        windows = ts.stack([x[:, :, i : i + 5, j : j + 5] for i in range(3) for j in range(3)], axis=2)
        rows = ts.reshape(w, shape=(1, 1, 20, 136 * 9))
        return ts.matmul(rows, ts.reshape(windows, shape=(1, 1, 136 * 9, 25)))

    got = np.asarray(ts.jit(multiply, target="ptx")(x, w)).reshape(1, 20, 5, 5)
    assert found[0].narrow is None
    np.testing.assert_allclose(got.astype("f8"), expect(2, {}, x, w), rtol=2**-9, atol=2**-3)


def test_other_products_are_no_windows(found):
    x, w = draw(2, 4, 6, 6), draw(8, 4, 3, 3)
    compute(2, {"stride": 2, "dilation": 2}, x, w)
    ts.jit(lambda a, b: a @ b, target="ptx")(draw(2, 3, 4, 5), draw(2, 3, 5, 4))
    assert found and not any(found)


def test_a_nest_of_loops_begins_where_its_indices_do():
    from tessera.codegen.ptx.passes.mainloop import CollapsibleNest
    from tessera.core.types import TensorType, int64
    from tessera.ir.core import Block, Node, Value
    from tessera.ops.dialects import control_flow

    i, j, base = (Value(TensorType((), int64)) for _ in range(3))
    loops = tuple(Node(control_flow.for_, (), {}, (), (Block((v,), (), ()),)) for v in (i, j))
    nest = CollapsibleNest(loops, (3, 4), (2, 0), (1, 64))
    form, strides = nest.place(AffineForm(5, {i: 10, j: 1, base: 7}))
    assert (form.constant, dict(form.scalars), strides) == (25, {base: 7}, (10, 64))

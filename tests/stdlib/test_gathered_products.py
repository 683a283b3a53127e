"""Gathered products on the PTX target: f32 convolutions on tensor cores without copies, against PyTorch in f64."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.codegen.ptx import BACKEND  # noqa: E402
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE  # noqa: E402
from tessera.runtime import driver  # noqa: E402
from tessera.stdlib import gathered_products  # noqa: E402

nn = torch.nn.functional
# name: rank, image, weights, arguments
CASES = {
    "padding": (2, (2, 3, 7, 9), (5, 3, 3, 3), {"padding": 1}),
    "strides": (2, (1, 5, 10, 11), (17, 5, 3, 2), {"padding": 1, "stride": (2, 3)}),
    "dilation and strides": (2, (2, 3, 12, 14), (4, 3, 3, 3), {"padding": 2, "dilation": 2, "stride": 2}),
    "groups": (2, (2, 6, 8, 5), (4, 3, 3, 3), {"groups": 2}),
    "1-D": (1, (2, 6, 40), (20, 6, 5), {"padding": 3, "dilation": 2}),
    "3-D": (3, (1, 4, 5, 6, 7), (3, 4, 3, 2, 3), {"stride": (1, 2, 1), "dilation": (2, 1, 3), "padding": 2}),
    "many outputs": (2, (1, 2, 12, 14), (150, 2, 3, 3), {}),
}


@pytest.fixture
def always(monkeypatch):
    for name in ("estimate_stacked", "estimate_gathered", "estimate_positions"):
        monkeypatch.setattr(gathered_products, name, lambda product: math.inf)


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def run(function, *arrays):
    """The text of a function for a GPU, and its results in the emulator's debug mode."""
    levels = driver.lower(ts.jit(function).trace(*arrays).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
    return artifact.text(TEXT_FILE), BACKEND.sanitized(artifact)(arrays)[0]


def check(rank, named, x, w, got):
    want = getattr(nn, f"conv{rank}d")(*(torch.tensor(a.astype("f8")) for a in (x, w)), **named).numpy()
    np.testing.assert_allclose(got, want, atol=2e-6 * abs(want).max(), rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_gathered_windows_are_the_convolution(case, always):
    rank, image, weights, named = CASES[case]
    x, w = draw(*image), draw(*weights)
    text, got = run(lambda x, w: getattr(ts, f"conv{rank}d")(x, w, **named), x, w)
    entry = text[text.index(".entry multiply_gathered") :]
    assert "wgmma.mma_async" in entry and "mma.sync" not in entry
    check(rank, named, x, w, got)


def test_long_windows_are_added_up_in_chunks(always, monkeypatch):
    monkeypatch.setattr(gathered_products, "MAX_DEPTH", 64)
    x, w = draw(1, 24, 6, 7), draw(6, 24, 3, 3)
    _, got = run(ts.conv2d, x, w)
    check(2, {}, x, w, got)


def test_what_three_parts_cannot_represent_is_computed_in_f32(always):
    x, w = draw(1, 3, 20, 20), draw(5, 3, 3, 3)
    x[0, 1, 2, 3], x[0, 0, 9, 9], x[0, 2, 15:, 15:] = np.inf, np.nan, 1e-40
    _, got = run(ts.conv2d, x, w)
    want = nn.conv2d(torch.tensor(x), torch.tensor(w)).numpy()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def find(image, weights, **named):
    """What is chosen for a convolution."""
    traced = (
        ts.jit(lambda x, w: ts.conv2d(x, w, **named)).trace(np.zeros(image, "f4"), np.zeros(weights, "f4")).function
    )
    lowered = dict(driver.iterate_passes(traced, driver.find_plan("ptx")))
    return {f.name for f in lowered["tile"].functions}


def test_few_channels_are_gathered_and_many_are_not():
    assert "multiply_gathered" in find((64, 16, 128, 128), (32, 16, 5, 5))
    assert "multiply_gathered" in find((9, 160, 108, 33), (33, 160, 3, 3), stride=2, padding=1)
    assert "multiply_windows" in find((32, 512, 7, 7), (512, 512, 3, 3), padding=1)

"""Running sums on a GPU are scans in chunks and parts: they agree with NumPy along every axis, for every type."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.runtime import driver
from tessera.stdlib import running_sums

SHAPES = (((3, 100), -1), ((100, 3), 0), ((2, 40, 5), 1), ((1000,), 0), ((33, 17), 1), ((2, 3, 300), 2), ((70, 40), 0))


def run(x, axis, levels=("tile", "target"), scan=ts.cumsum, reverse=False):
    def program(x):
        return ts.flip(scan(ts.flip(x, axis), axis=axis), axis) if reverse else scan(x, axis=axis)

    lowered = driver.lower(ts.jit(program).trace(x).function, "ptx")
    names = [f.name for f in lowered["tile"].functions]
    assert any(n.startswith(("scan_rows", "scan_columns")) for n in names)
    return [driver.run_level(lowered, level, [x], "ptx")[0] for level in levels], names


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", ml_dtypes.bfloat16, "i4", "i8", "i1", "u1", "?"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES[:3])
def test_every_type(shape, axis, dtype):
    x = np.random.default_rng(0).integers(0, 4, shape).astype(dtype)
    for ours in run(x, axis)[0]:
        assert ours.dtype == ts.cumsum(ts.Tensor(x), axis=axis).numpy().dtype
        np.testing.assert_array_equal(ours.astype("f8"), x.astype("f8").cumsum(axis).astype(ours.dtype).astype("f8"))


@pytest.mark.in_turn("part")
@pytest.mark.parametrize("part", [1, 4])
@pytest.mark.parametrize("chunk", [64, 2048])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_parts_and_chunks(monkeypatch, shape, axis, chunk, part):
    monkeypatch.setattr(running_sums, "CHUNK", chunk)
    monkeypatch.setattr(running_sums, "PART_CHUNKS", part)
    x = np.random.default_rng(0).standard_normal(shape)
    (ours,), names = run(x, axis, ("tile",))
    assert len(names) == 2 if chunk == 2048 else len(names) > 2 or shape[axis] < 128 * part
    np.testing.assert_allclose(ours, x.cumsum(axis), rtol=1e-9, atol=1e-12)


@pytest.mark.in_turn("part")
@pytest.mark.parametrize("part", [1, 4])
@pytest.mark.parametrize(("scan", "reverse"), [("cumprod", False), ("cumprod", True), ("cumsum", True)])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_products_and_reversed_scans(monkeypatch, shape, axis, scan, reverse, part):
    monkeypatch.setattr(running_sums, "CHUNK", 64)
    monkeypatch.setattr(running_sums, "PART_CHUNKS", part)
    x = 1 + np.random.default_rng(0).standard_normal(shape) / 8
    ((ours,), _) = run(x, axis, ("tile",), getattr(ts, scan), reverse)
    turned = np.flip(x, axis) if reverse else x
    want = getattr(np, scan)(turned, axis=axis)
    np.testing.assert_allclose(ours, np.flip(want, axis) if reverse else want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["f4", "f2", ml_dtypes.bfloat16, "i4", "i1", "u1", "?"])
def test_types_of_products_and_reversed_scans(dtype):
    x = np.random.default_rng(0).integers(0, 3, (3, 41)).astype(dtype)
    for scan, reverse in ((ts.cumprod, False), (ts.cumprod, True), (ts.cumsum, True)):
        want = getattr(np, scan.name.removeprefix("ts."))(
            x[:, ::-1].astype("f8") if reverse else x.astype("f8"), axis=1
        )
        for ours in run(x, 1, ("tile", "target"), scan, reverse)[0]:
            np.testing.assert_array_equal(ours.astype("f8"), want[:, ::-1] if reverse else want)


@pytest.mark.parametrize(
    "dtype", ["f4", "f8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "i4", "i1", "i2", "u1", "?"]
)
def test_running_extremes(monkeypatch, dtype):
    monkeypatch.setattr(running_sums, "CHUNK", 64)
    monkeypatch.setattr(running_sums, "PART_CHUNKS", 1)
    x = np.random.default_rng(0).integers(-3 if np.dtype(dtype).kind in "fVi" else 0, 4, (2, 300)).astype(dtype)
    x = x * (1 - x % 2) if np.dtype(dtype).kind == "f" else x  # zeros of both signs
    for scan, reverse in ((ts.cummax, False), (ts.cummin, True)):
        want = scan(ts.Tensor(x[:, ::-1] if reverse else x), axis=1).numpy()
        for ours in run(x, 1, ("tile", "target"), scan, reverse)[0]:
            np.testing.assert_array_equal(ours.astype("f8"), (want[:, ::-1] if reverse else want).astype("f8"))
            assert np.array_equal(np.signbit(ours.astype("f8")), np.signbit(want[:, ::-1] if reverse else want))


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_running_extremes_of_a_processor(shape, axis):
    x = np.random.default_rng(0).standard_normal(shape).astype("f4")
    x[tuple(n // 2 for n in shape)] = np.nan
    for scan in (ts.cummax, ts.cummin):
        np.testing.assert_array_equal(ts.jit(lambda x, s=scan: s(x, axis=axis), target="llvm")(x), scan(x, axis=axis))


def test_zeros_of_products():
    """A product of -0 keeps its sign, zero times infinity is NaN, and nothing behind an element changes it."""
    x = np.ones((5, 70), "f4")
    x[0, 3], x[1, 60], x[2, 5], x[2, 65], x[3, 69], x[4, 0] = -0.0, -0.0, 0, np.inf, np.nan, -np.inf
    for reverse in (False, True):
        with np.errstate(invalid="ignore"):
            want = x[:, ::-1].cumprod(1)[:, ::-1] if reverse else x.cumprod(1)
        for ours in run(x, 1, scan=ts.cumprod, reverse=reverse)[0]:
            np.testing.assert_array_equal(ours, want)
            np.testing.assert_array_equal(np.signbit(ours) & ~np.isnan(want), np.signbit(want) & ~np.isnan(want))


def test_special_values():
    x = np.zeros((4, 64), "f4")
    x[0, 40], x[1, 30], x[1, 50], x[2, 63], x[3] = np.nan, np.inf, -np.inf, -0.0, -0.0
    for ours in run(x, -1)[0]:
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(ours, x.cumsum(-1))


def test_derivative_and_short_axes():
    x = np.random.default_rng(0).standard_normal((3, 50)).astype("f4")
    lowered = driver.lower(ts.jit(ts.grad(lambda x: ts.sum(ts.cumsum(x, axis=-1)))).trace(x).function, "ptx")
    (ours,) = driver.run_level(lowered, "tile", [x], "ptx")
    np.testing.assert_allclose(ours, np.broadcast_to(np.arange(50, 0, -1), (3, 50)))
    for n in (1, 2, 16):
        lowered = driver.lower(ts.jit(lambda x: ts.cumsum(x, axis=-1)).trace(x[:, :n]).function, "ptx")
        np.testing.assert_allclose(driver.run_level(lowered, "tile", [x[:, :n]], "ptx")[0], x[:, :n].cumsum(-1), 1e-5)


@pytest.mark.in_turn("part")
@pytest.mark.parametrize("part", [1, 4])
@pytest.mark.parametrize(("scan", "first"), [("cumsum", 0.0), ("cumsum", 2.5), ("cumprod", 3.0)])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_a_constant_before_the_elements_makes_an_exclusive_scan(monkeypatch, shape, axis, scan, first, part):
    monkeypatch.setattr(running_sums, "CHUNK", 64)
    monkeypatch.setattr(running_sums, "PART_CHUNKS", part)
    x = 1 + np.random.default_rng(0).standard_normal(shape) / 8
    filler, cut = np.full_like(x.take([0], axis), first), tuple(slice(0, n) for n in shape)

    def program(x):
        filled = ts.concatenate([ts.full(filler.shape, first, dtype=ts.f64), x], axis=axis)
        return getattr(ts, scan)(filled[cut], axis=axis)

    lowered = driver.lower(ts.jit(program).trace(x).function, "ptx")
    names = [f.name for f in lowered["tile"].functions]
    assert names[-1].startswith("scan") and not any("concatenate" in n for n in names)
    want = getattr(np, scan)(np.concatenate([filler, x], axis), axis=axis)[cut]
    for level in ("tile", "target"):
        np.testing.assert_allclose(driver.run_level(lowered, level, [x], "ptx")[0], want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", [5, 8, 21])
@pytest.mark.parametrize("scan", ["cumsum", "cumprod"])
@pytest.mark.parametrize("reverse", [False, True])
def test_many_columns_are_walked(monkeypatch, rows, scan, reverse):
    """With so many columns as fill a GPU, each program adds its rows one after the other: NumPy's bits in f32."""
    monkeypatch.setattr(running_sums, "WALKING_PROGRAMS", 2)
    monkeypatch.setattr(running_sums, "WALKED_LANES", 16)
    x = np.random.default_rng(0).standard_normal((rows, 41)).astype("f4")
    combine = {"cumsum": "sum", "cumprod": "prod"}[scan]
    found = running_sums.running_sums(ts.Tensor(x[None]), ts.f32, ts.f32, combine, reverse)
    wanted = getattr(np, scan)(x[::-1] if reverse else x, axis=0)
    np.testing.assert_array_equal(found.numpy()[0], wanted[::-1] if reverse else wanted)
    assert not running_sums._fills_with_columns(4096, 1)  # rows have a scan of their own

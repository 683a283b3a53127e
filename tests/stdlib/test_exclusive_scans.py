"""A neutral number and the scan of the elements without the last one are one exclusive scan on a GPU."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.runtime import driver
from tessera.stdlib import running_sums

SHAPES = (((3, 100), -1), ((100, 3), 0), ((2, 40, 5), 1), ((130,), 0))
SCANS = (("cumsum", 0), ("cumprod", 1))


def join(x, value, rest, axis, behind=False):
    first = ts.full(x.take([0], axis).shape, value, dtype=ts.Tensor(x).dtype)
    return ts.concatenate([rest, first] if behind else [first, rest], axis=axis)


def cut(x, axis, low, high):
    kept = [slice(None)] * x.ndim
    kept[axis] = slice(low, x.shape[axis] - high)
    return x[tuple(kept)]


# Each has the value of the exclusive scan (of the reversed one, with True) of x along an axis.
FORMS = {
    "operand cut": (False, lambda x, scan, axis: (scan(cut(x, axis, 0, 1), axis=axis), False)),
    "result cut": (False, lambda x, scan, axis: (cut(scan(x, axis=axis), axis, 0, 1), False)),
    "reversed, cut before": (
        True,
        lambda x, scan, axis: (ts.flip(scan(ts.flip(cut(x, axis, 1, 0), axis), axis=axis), axis), True),
    ),
    "reversed, operand cut": (
        True,
        lambda x, scan, axis: (ts.flip(scan(cut(ts.flip(x, axis), axis, 0, 1), axis=axis), axis), True),
    ),
    "reversed, result cut": (
        True,
        lambda x, scan, axis: (ts.flip(cut(scan(ts.flip(x, axis), axis=axis), axis, 0, 1), axis), True),
    ),
    "reversed, cut at last": (
        True,
        lambda x, scan, axis: (cut(ts.flip(scan(ts.flip(x, axis), axis=axis), axis), axis, 1, 0), True),
    ),
}


def run(program, x, levels=("tile", "target")):
    lowered = driver.lower(ts.jit(program).trace(x).function, "ptx")
    names = [f.name for f in lowered["tile"].functions[1:]]
    return [driver.run_level(lowered, level, [x], "ptx")[0] for level in levels], names


def scan_exclusively(x, scan, axis, value, reverse):
    turned = np.flip(x, axis) if reverse else x
    filled = np.concatenate([np.full_like(x.take([0], axis), value), cut(turned, axis, 0, 1)], axis)
    out = getattr(np, scan)(filled, axis=axis)
    return np.flip(out, axis) if reverse else out


@pytest.mark.in_turn("scan")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("scan", "value"), SCANS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_every_form_is_one_scan(form, scan, value, shape, axis):
    x = 1 + np.random.default_rng(0).standard_normal(shape) / 8
    reverse, write = FORMS[form]

    def program(y):
        rest, behind = write(y, getattr(ts, scan), axis)
        return join(x, value, rest, axis, behind)

    outs, names = run(program, x)
    assert len(names) == 1 and names[0].startswith("scan")
    for ours in outs:
        np.testing.assert_allclose(ours, scan_exclusively(x, scan, axis, value, reverse), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("scan", "value"), SCANS)
def test_one_that_is_turned_as_a_whole(scan, value):
    x = 1 + np.random.default_rng(0).standard_normal((3, 70)) / 8

    def program(y):
        rest = getattr(ts, scan)(cut(ts.flip(y, 1), 1, 0, 1), axis=1)
        return ts.flip(join(x, value, rest, 1), 1)

    outs, names = run(program, x)
    assert len(names) == 1
    for ours in outs:
        np.testing.assert_allclose(ours, scan_exclusively(x, scan, 1, value, True), rtol=1e-9)


@pytest.mark.in_turn("part")
@pytest.mark.parametrize("part", [1, 4])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f2", ml_dtypes.bfloat16, "i4", "i8"])
def test_types_and_parts(monkeypatch, dtype, reverse, part):
    monkeypatch.setattr(running_sums, "CHUNK", 64)
    monkeypatch.setattr(running_sums, "PART_CHUNKS", part)
    x = np.random.default_rng(0).integers(0, 3, (2, 333)).astype(dtype)
    _, write = FORMS["reversed, cut before" if reverse else "operand cut"]

    def program(y):
        rest, behind = write(y, ts.cumsum, 1)
        return join(x, 0, rest, 1, behind)

    for ours in run(program, x)[0]:
        want = scan_exclusively(x.astype("f8"), "cumsum", 1, 0, reverse)
        np.testing.assert_array_equal(ours.astype("f8"), want.astype(ours.dtype).astype("f8"))


def test_special_values():
    """A NaN or infinity reaches the elements behind it, and the last element reaches none."""
    x = np.ones((4, 70), "f4")
    x[0, 3], x[1, 60], x[1, 62], x[2, 69], x[3, 0] = np.nan, np.inf, -np.inf, np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        want = scan_exclusively(x, "cumsum", 1, 0, False)
    for ours in run(lambda y: join(x, 0, ts.cumsum(y[:, :-1], axis=1), 1), x)[0]:
        np.testing.assert_array_equal(ours, want)


OTHERS = {
    "another constant": lambda x, y: join(x, 2, ts.cumsum(y[:, :-1], axis=1), 1),
    "the wrong end": lambda x, y: join(x, 0, ts.cumsum(y[:, 1:], axis=1), 1),
    "a constant behind": lambda x, y: join(x, 0, ts.cumsum(y[:, :-1], axis=1), 1, behind=True),
    "steps": lambda x, y: join(x, 0, ts.cumsum(y[:, ::2], axis=1), 1),
    "two fewer": lambda x, y: join(x, 0, ts.cumsum(y[:, :-1], axis=1)[:, :-1], 1),
    "another axis": lambda x, y: join(x, 0, ts.cumsum(y[:, :-1], axis=0), 1),
    "one flip": lambda x, y: join(x, 0, ts.cumsum(ts.flip(y[:, :-1], 1), axis=1), 1),
    "a flip of another axis": lambda x, y: join(x, 0, ts.cumsum(ts.flip(y, 0)[:, :-1], axis=1), 1),
    "scanned twice": lambda x, y: join(x, 0, ts.cumsum(ts.cumsum(y[:, :-1], axis=1), axis=1), 1),
    "a scan of the rows": lambda x, y: ts.flip(join(x, 0, ts.cumsum(ts.flip(y, 1)[:, :-1], axis=1), 1), 0),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_no_exclusive_scan(case):
    x = np.random.default_rng(0).integers(-3, 4, (20, 40)).astype("f4")
    want = OTHERS[case](x, ts.Tensor(x)).numpy()
    outs, names = run(lambda y: OTHERS[case](x, y), x)
    assert len(names) > 1
    for ours in outs:
        np.testing.assert_array_equal(ours, want)


def flip_last(y, count, places=None):
    """The last elements of rows of 40, in the opposite order."""
    return ts.gather(y, 39 - (ts.arange(count) if places is None else places), axis=1)


SHIFTED = {
    "without the constant": lambda x, y: ts.cumsum(join(x, 2, y, 1)[:, 1:], axis=1),
    "scanned along the other axis": lambda x, y: ts.cumsum(join(x, 2, y, 0)[:20], axis=-1),
    "without two elements": lambda x, y: ts.cumsum(join(x, 2, y, 1)[:, :39], axis=1),
    "by two constants": lambda x, y: ts.cumsum(ts.concatenate([ts.full((20, 2), 3.0), y], axis=1)[:, :40], axis=1),
    "the last elements": lambda x, y: ts.flip(ts.cumsum(flip_last(y, 35), axis=1), 1),
    "in another order": lambda x, y: flip_last(
        ts.cumsum(flip_last(y, 40), axis=1), 40, ts.cast(ts.sum(ts.abs(y), axis=0), ts.int64) % 40
    ),
}


@pytest.mark.parametrize("case", SHIFTED)
def test_what_is_no_scan_of_shifted_or_flipped_elements(case):
    x = np.random.default_rng(0).integers(-3, 4, (20, 40)).astype("f4")
    want = SHIFTED[case](x, ts.Tensor(x)).numpy()
    for ours in run(lambda y: SHIFTED[case](x, y), x)[0]:
        np.testing.assert_array_equal(ours, want)


def test_a_scan_that_is_a_result_too():
    x = np.random.default_rng(0).integers(-3, 4, (3, 40)).astype("f4")

    def program(y):
        rest = ts.cumsum(y[:, :-1], axis=1)
        return join(x, 0, rest, 1), rest

    lowered = driver.lower(ts.jit(program).trace(x).function, "ptx")
    for level in ("tile", "target"):
        whole, rest = driver.run_level(lowered, level, [x], "ptx")
        np.testing.assert_array_equal(rest, x[:, :-1].cumsum(1))
        np.testing.assert_array_equal(whole, scan_exclusively(x, "cumsum", 1, 0, False))

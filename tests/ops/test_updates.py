"""`x.at[...]`, scatter and index_add: eager, traced, compiled, differentiated and batched, against NumPy in place."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, OutOfBoundsError, ShapeError

A = np.random.default_rng(0).standard_normal((4, 5, 3)).astype(np.float32)
INDICES = {
    "int": 0,
    "slice": slice(1, 3),
    "steps": slice(None, None, 2),
    "backward": slice(None, None, -2),
    "two axes": (slice(None), 1),
    "dots": (Ellipsis, slice(0, 2)),
    "none": (0, slice(4, None, -3), None),
    "whole": Ellipsis,
    "nothing": slice(3, 1),
    "list": ([0, 2, 2],),
    "array on axis 1": (slice(None), np.array([4, -1])),
    "two arrays": (np.array([1, 2]), slice(None), np.array([0, 1])),
    "matrix": (np.array([[0, 1], [1, 3]]),),
    "mask": A > 0,
    "row mask": A[..., 0] > 0,
}
CHANGES = {
    "set": lambda out, i, v: out.__setitem__(i, v),
    "add": np.add.at,
    "multiply": np.multiply.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}


def after(change, index, value):
    out = A.copy()
    CHANGES[change](out, index, value)
    return out


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_at(index, change):
    tolerance = 2e-7 if change == "multiply" else 0  # factors of one element are multiplied first
    values = np.random.default_rng(1).standard_normal(A[index].shape).astype(np.float32)
    for value in (np.float32(2.5), values):
        want = after(change, index, value)
        traced = ts.jit(lambda x, v: getattr(x.at[index], change)(v))
        np.testing.assert_allclose(getattr(ts.Tensor(A).at[index], change)(value).numpy(), want, rtol=tolerance)
        np.testing.assert_allclose(traced(A, value).numpy(), want, rtol=tolerance)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("index", [np.s_[::2], np.s_[:, ::3], np.s_[::2, 0:1:4]])
def test_steps_along_axes_of_one_element(index, change):
    x = A[:1, :1]
    want = x.copy()
    CHANGES[change](want, index, np.float32(2.5))
    np.testing.assert_array_equal(getattr(ts.Tensor(x).at[index], change)(2.5).numpy(), want)


@pytest.mark.parametrize("change", CHANGES)
def test_traced_indices_and_masks(change):
    index = np.array([1, -1, 1])
    values = A[:3, 0] * 2
    for target in ("interp", "llvm"):
        moved = ts.jit(lambda x, i, v: getattr(x.at[i, 0], change)(v), target=target)(A, index, values)
        np.testing.assert_allclose(moved.numpy(), after(change, (index, 0), values), rtol=1e-6)
        masked = ts.jit(lambda x: getattr(x.at[x > 0], change)(3.0), target=target)(A)
        np.testing.assert_array_equal(masked.numpy(), after(change, A > 0, 3.0))


def test_gradients_follow_what_stays():
    """A place overwritten passes nothing on; of two values for one place the last counts."""

    def loss(x, v):
        return (x.at[ts.Tensor([1, 1])].set(v) * ts.Tensor([1.0, 2.0, 3.0])).sum()

    x, v = ts.grad(loss, argnums=(0, 1))(ts.Tensor([1.0, 2.0, 3.0]), ts.Tensor([4.0, 5.0]))
    assert x.tolist() == [1.0, 0.0, 3.0] and v.tolist() == [0.0, 2.0]


def test_batched():
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for change in CHANGES:
        one = lambda x, i, c=change: getattr(x.at[i], c)(2.0)  # noqa: E731
        together = ts.vmap(one)(ts.Tensor(rows), ts.Tensor(np.array([[0, 1], [2, 2]])))
        apart = [
            one(ts.Tensor(r), ts.Tensor(np.array(i))).tolist() for r, i in zip(rows, [[0, 1], [2, 2]], strict=True)
        ]
        assert together.tolist() == apart


def test_bad_updates():
    x = ts.Tensor([1.0, 2.0, 3.0])
    with pytest.raises(DTypeError, match="another type"):
        ts.Tensor([1, 2]).at[0].set(1.5)
    with pytest.raises(DTypeError, match="mix"):
        x.at[0].set(ts.Tensor(1.0, ts.f16))
    with pytest.raises(ShapeError, match="broadcast"):
        x.at[:2].set([1.0, 2.0, 3.0])
    with pytest.raises(OutOfBoundsError):
        x.at[[3]].set(1.0)
    with pytest.raises(ArgumentError, match="scatter mode"):
        ts.scatter(x, [0], [1.0], mode="plus")
    with pytest.raises(DTypeError, match="not integers"):
        ts.scatter(x, [0.0], [1.0])


@pytest.mark.parametrize("rows", [65_536, 70_000])
def test_rows_whose_numbers_take_more_than_16_bits(rows):
    rng = np.random.default_rng(0)
    x, source = (rng.standard_normal((n, 2)).astype("f4") for n in (rows, 4_200))
    places = rng.integers(rows - 8_192, rows, 4_200)
    want = x.astype("f8")
    np.add.at(want, places, source)
    found = ts.jit(lambda x, i, s: ts.index_add(x, 0, i, s), target="ptx")(x, places, source).numpy()
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("index", [
    (slice(None), [1, 2, 2], [0, 3, 3]), ([1, 1, 4],), ([[0, 1], [2, 2]],), (Ellipsis, [1, -1, 3]), (2, [1, 1, 3]),
    ([0, 1], slice(None), [2, 3]), ([[0], [2]], [[1, 1]]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("mode", ["add", "multiply", "max", "set"])
def test_indices_of_some_axes_are_those_of_numpy(index, mode):
    x = np.random.default_rng(0).standard_normal((5, 6, 7)).astype("f4")
    arrays = tuple(np.array(i) if isinstance(i, list) else i for i in index)
    values = np.random.default_rng(1).standard_normal(x[arrays].shape).astype("f4")
    want = x.copy()
    if mode == "set":
        want[arrays] = values
    else:
        getattr(np, {"max": "maximum"}.get(mode, mode)).at(want, arrays, values)
    got = getattr(ts.Tensor(x).at[index], mode)(values)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)


def test_an_index_outside_an_axis_names_it():
    with pytest.raises(OutOfBoundsError, match="index 7 is outside axis 2 of size 5"):
        ts.ones((3, 4, 5)).at[:, [1], [7]].add(1.0)


SLICES = [((0, 0, 0), (4, 5, 3)), ((1, 0, 2), (2, 5, 1)), ((3, 4, 0), (1, 1, 3)), ((2, 2, 2), (0, 3, 1))]


@pytest.mark.parametrize("run", [lambda f: f, ts.jit, ts.jit(target="llvm"), ts.jit(target="ptx")])
@pytest.mark.parametrize(("start", "sizes"), SLICES)
def test_slices_are_updated(start, sizes, run):
    new = np.arange(np.prod(sizes), dtype=np.float32).reshape(sizes)
    places = tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))
    want = A.copy()
    want[places] = new
    update = lambda x, new: ts.update_slice(x, new, start=start)  # noqa: E731
    np.testing.assert_array_equal(run(update)(A, new).numpy(), want)
    weights = np.cos(A)
    loss = lambda x, new: ts.sum(update(x, new) * weights)  # noqa: E731
    of_x, of_new = run(ts.grad(loss, (0, 1)))(ts.tensor(A), ts.tensor(new))
    kept = np.ones_like(A)
    kept[places] = 0
    np.testing.assert_allclose(of_x.numpy(), kept * weights, rtol=1e-6)
    np.testing.assert_allclose(of_new.numpy(), weights[places], rtol=1e-6)
    lanes = ts.vmap(update, in_axes=(None, 0))(A, np.stack([new, -new])).numpy()
    want[places] = -new
    np.testing.assert_array_equal(lanes[1], want)


def test_slices_that_do_not_fit_are_refused():
    x = ts.tensor(A)
    with pytest.raises(ShapeError, match=r"slice 2:5 is outside axis 0 of"):
        ts.update_slice(x, ts.zeros((3, 1, 1)), start=(2, 0, 0))
    with pytest.raises(ShapeError, match=r"slice -1:0 is outside axis 1 of"):
        ts.update_slice(x, ts.zeros((1, 1, 1)), start=(0, -1, 0))
    with pytest.raises(ShapeError, match="needs 3 axes and as many starts"):
        ts.update_slice(x, ts.zeros((1, 1)), start=(0, 0))
    with pytest.raises(DTypeError, match="the new elements have another type"):
        ts.update_slice(x, ts.zeros((1, 1, 1), dtype=ts.f64), start=(0, 0, 0))

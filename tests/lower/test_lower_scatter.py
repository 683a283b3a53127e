"""scatter_add as one launch: repeated indices, any axis, the same bits in every run; small ones stay dense."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.runtime import driver

CASES = {"rows": ((40, 70), 0, (9,)), "middle": ((2, 30, 5), 1, (4, 3)), "last": ((6, 50), -1, (11,))}


def program(axis):
    return lambda x, i, u: ts.scatter_add(x, i, u, axis=axis)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
def test_against_numpy(name, dtype, rng):
    shape, axis, places = CASES[name]
    at = axis % len(shape)
    x = (rng.normal(size=shape) * 9).astype(dtype)
    u = (rng.normal(size=(*shape[:at], *places, *shape[at + 1 :])) * 9).astype(dtype)
    i = rng.integers(0, shape[at] // 3, size=places)  # many are named more than once
    want = np.moveaxis(x.copy(), at, 0)
    np.add.at(want, i, np.moveaxis(u, range(at, at + len(places)), range(len(places))))
    levels = driver.lower(ts.jit(program(axis)).trace(x, i, u).function, "llvm")
    assert any(n.op.name == "host.launch" for n in levels["schedule"].main.body.nodes)
    for level in ("schedule", "tile", "target"):
        found = driver.run_level(levels, level, [x, i, u])[0]
        np.testing.assert_allclose(found, np.moveaxis(want, 0, at), rtol=1e-6, atol=1e-5, err_msg=level)
    run = driver.compile_tile(levels["tile"], "llvm")
    first = run([x, i, u])[0]
    np.testing.assert_allclose(first, np.moveaxis(want, 0, at), rtol=1e-6, atol=1e-5)
    assert all((run([x, i, u])[0] == first).all() for _ in range(5))


@pytest.mark.parametrize("shape, dtype", [((4, 3), "f4"), ((40, 70), "f2")])
def test_what_stays_dense(shape, dtype):
    """Few pairs of a place and an update; and types whose sums need a wider one."""
    x, i, u = np.zeros(shape, dtype), np.zeros(9, np.int64), np.ones((9, shape[1]), dtype)
    module = driver.lower(ts.jit(program(0)).trace(x, i, u).function, "llvm")["schedule"]
    assert not any(n.op.name == "host.launch" for n in module.main.body.nodes)
    assert ts.jit(program(0), target="llvm")(x, i, u)[0, 0].item() == 9


SORTED = {
    "wide rows": ((50, 80), 0, (70,)),
    "two axes of indices": ((3, 33, 130), -2, (5, 9)),
    "narrow rows": ((20, 5, 3), 1, (100,)),
    "bins": ((300,), 0, (400,)),
    "few updates": ((1000, 1), 0, (3,)),
}


@pytest.mark.parametrize("dtype", ["f4", "f8", ml_dtypes.bfloat16, "f2", "i4", "i8", "i1", "u1"])
@pytest.mark.parametrize("name", SORTED)
def test_sorted_segments(name, dtype):
    """On a GPU the updates are sorted by row; each row then adds its own in the order of the indices."""
    (sizes, axis, count), rng = SORTED[name], np.random.default_rng(0)
    at = axis % len(sizes)
    x = rng.integers(0, 5, sizes).astype(dtype)
    updates = rng.integers(0, 5, (*sizes[:at], *count, *sizes[at + 1 :])).astype(dtype)
    if np.dtype(dtype).kind not in "iu":
        x, updates = x / np.asarray(7, dtype), updates / np.asarray(7, dtype)
    places = rng.integers(-sizes[at], sizes[at], count)
    program = ts.jit(lambda x, p, u: ts.scatter_add(x, p, u, axis=axis))
    levels = driver.lower(program.trace(x, places, updates).function, "ptx")
    assert any("segments" in f.name for f in levels["tile"].functions)
    want = np.moveaxis(x.astype("f8"), at, 0)
    places = places % sizes[at]
    np.add.at(want, places, np.moveaxis(updates.astype("f8"), range(at, at + len(count)), range(len(count))))
    for level in ("tile", "target"):
        (ours,) = driver.run_level(levels, level, [x, places, updates], "ptx")
        rtol = {"f8": 1e-14, "f4": 1e-6}.get(dtype, 0 if np.dtype(dtype).kind in "iu" else 2e-2)
        np.testing.assert_allclose(ours.astype("f8"), np.moveaxis(want, 0, at), rtol=rtol)


def test_sorted_segments_name_an_index_outside():
    program = ts.jit(lambda x, p, u: ts.scatter_add(x, p, u), target="ptx")
    x, updates = np.zeros((40, 3), "f4"), np.ones((50, 3), "f4")
    with pytest.raises(ts.errors.OutOfBoundsError, match="40"):
        program(x, np.full(50, 40), updates).numpy()


def test_rows_are_added_in_the_memory_of_the_result():
    """No copy of the result, none of zeros: the kernel of the launch adds to what another has filled."""
    i, u = np.array([3, 3, -1]), np.ones((3, 5, 40), "f4")
    programs = {
        "zeros": (lambda i, u: ts.scatter_add(ts.zeros((50, 5, 40)), i, u, axis=0), [i, u], np.zeros((50, 5, 40))),
        "an argument": (program(0), [np.full((50, 5, 40), 2.0, "f4"), i, u], np.full((50, 5, 40), 2.0)),
    }
    for name, (function, arrays, want) in programs.items():
        levels = driver.lower(ts.jit(function).trace(*arrays).function, "llvm")
        nodes = levels["schedule"].main.body.nodes
        large = [
            n for n in nodes if n.op.name == "schedule.kernel" and any(np.prod(v.type.shape) > 5000 for v in n.args)
        ]
        allocated = [n for n in nodes if n.op.name == "host.alloc" and np.prod(n.attrs["shape"]) > 5000]
        assert len(large) == 1 and not allocated, name
        np.add.at(want, i, u)
        for level in ("schedule", "tile", "target"):
            np.testing.assert_array_equal(driver.run_level(levels, level, arrays)[0], want, err_msg=name)

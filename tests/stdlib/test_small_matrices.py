"""Small matrices are solved and factored by kernels: they agree with NumPy, and refuse what has no result."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ExecutionError
from tessera.runtime import driver

KERNELS = ("solve_systems", "solve_in_warps", "factor_symmetric", "factor_in_warps")
SIDES = [(1, 1), (2, 3), (5, 4), (14, 4), (17, 1), (32, 32), (49, 3), (64, 33)]


def run(function, *inputs, levels=("tile", "target")):
    lowered = driver.lower(ts.jit(function).trace(*inputs).function, "ptx")
    assert any(f.name.startswith(KERNELS) for f in lowered["tile"].functions)
    return [driver.run_level(lowered, level, list(inputs), "ptx")[0] for level in levels]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(("side", "width"), SIDES)
def test_solutions(side, width, dtype):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(3, 2, side, side)).astype(dtype)
    a[0, 0] = a[0, 0, ::-1] * 1e-3
    b = rng.normal(size=(3, 2, side, width)).astype(dtype)
    # Backward error (Higham 2002, chapter 9): the solution is that of a matrix nearby.
    allowed = 2 * side * np.finfo(dtype).eps * (np.abs(a).sum(-1).max(-1)[..., None, None])
    for ours in run(ts.solve, a, b):
        assert ours.dtype == dtype
        wide = ours.astype("f8")
        assert (np.abs(a.astype("f8") @ wide - b) <= allowed * np.abs(wide).max(-2, keepdims=True)).all()


def test_pivots():
    """Zeros on the diagonal, permuted rows, and rows of very different sizes."""
    a = np.array([[0, 2, 0], [0, 0, 3], [4, 0, 0]], "f4")
    near = np.array([[1e-9, 1, 1], [1, 1, 2], [3, 1, 1]], "f4")
    b = np.arange(1, 7, dtype="f4").reshape(3, 2)
    for matrix in (a, near):
        for ours in run(ts.solve, matrix, b):
            np.testing.assert_allclose(ours, np.linalg.solve(matrix.astype("f8"), b), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("side", [1, 2, 9, 20, 32, 50])
def test_factors(side, dtype):
    """The lower triangle is read, as LAPACK does."""
    x = np.random.default_rng(0).normal(size=(5, side, side))
    x = (x @ x.transpose(0, 2, 1) + side * np.eye(side)).astype(dtype)
    x += np.triu(np.ones((side, side), dtype), 1)
    want = np.linalg.cholesky(x.astype("f8"))
    for ours in run(ts.cholesky, x):
        np.testing.assert_allclose(
            ours, want, rtol=2e-5 if dtype == "f4" else 1e-12, atol=1e-5 if dtype == "f4" else 1e-14
        )
        assert not np.triu(ours, 1).any()


def solve_as_lapack(a, b):
    """LU with partial pivoting of one system, whose rows are exchanged, in the type of its numbers."""
    a, b = a.copy(), b.copy()
    for k in range(len(a)):
        p = k + int(np.argmax(np.abs(a[k:, k])))
        a[[k, p]], b[[k, p]] = a[[p, k]], b[[p, k]]
        factor = (a[k + 1 :, k] / a[k, k])[:, None]
        a[k + 1 :], b[k + 1 :] = a[k + 1 :] - factor * a[k], b[k + 1 :] - factor * b[k]
    for k in reversed(range(len(a))):
        b[k] = b[k] / a[k, k]
        b[:k] = b[:k] - a[:k, k : k + 1] * b[k]
    return b


@pytest.mark.parametrize(("side", "width", "dtype"), [(5, 1, "f4"), (17, 3, "f8"), (33, 2, "f4")])
def test_equal_candidates_are_chosen_as_with_exchanges(side, width, dtype):
    """Matrices of few different numbers have many pivots of one size: another order of them rounds otherwise."""
    rng = np.random.default_rng(side)
    a, b = rng.integers(-1, 2, (6, side, side)).astype(dtype), rng.normal(size=(6, side, width)).astype(dtype)
    a = np.where(np.abs(np.linalg.det(a))[:, None, None] > 0.5, a, np.eye(side, dtype=dtype)[::-1])
    want = np.stack([solve_as_lapack(x, y) for x, y in zip(a, b, strict=True)])
    np.testing.assert_array_equal(run(ts.solve, a, b, levels=("tile",))[0], want)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize(("side", "width"), [(1, 9), (3, 17), (8, 8), (9, 1)])
def test_programs_of_several_matrices_and_several_programs_of_right_sides(batch, side, width):
    """The last matrix alone has no result, in a program that has places for more; the others are not read past."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(batch, side, side)).astype("f4"), rng.normal(size=(batch, side, width)).astype("f4")
    for ours in run(ts.solve, a, b):
        np.testing.assert_allclose(ours, np.linalg.solve(a.astype("f8"), b), rtol=2e-3, atol=2e-3)
    x = a @ a.transpose(0, 2, 1) + side * np.eye(side, dtype="f4")
    for ours in run(ts.cholesky, x):
        np.testing.assert_allclose(ours, np.linalg.cholesky(x.astype("f8")), rtol=1e-4, atol=1e-4)
    a[-1, :, 0], x[-1, -1, -1] = 0, -1
    for level in ("tile", "target"):
        with pytest.raises(ExecutionError, match="singular"):
            run(ts.solve, a, b, levels=(level,))
        with pytest.raises(ExecutionError, match="positive definite"):
            run(ts.cholesky, x, levels=(level,))


def test_an_unknown_number_stays_in_its_matrix():
    """And, with LAPACK's steps, out of the unknowns that are found before it."""
    a, b = np.stack([np.triu(np.ones((4, 4), "f4"))] * 3), np.ones((3, 4, 1), "f4")
    a[1, 1, 2] = np.nan
    for found in run(ts.solve, a, b):
        np.testing.assert_array_equal(np.isnan(found[1]), np.isnan(solve_as_lapack(a[1], b[1])))
        assert np.isnan(found[1]).any() and np.isfinite(found[[0, 2]]).all()


def test_operands_with_a_policy_are_those_of_the_host():
    """The kernels know no policies."""
    policy, a, b = ts.Policy(storage=ts.f32, saturate=True), np.eye(3, dtype="f4")[None] * 2, np.ones((1, 3, 2), "f4")
    for left, right in ((policy, ts.f32), (ts.f32, policy)):
        lowered = driver.lower(
            ts.jit(lambda a, b, x=left, y=right: ts.solve(a.to(x), b.to(y))).trace(a, b).function, "ptx"
        )
        assert not any(f.name.startswith(KERNELS) for f in lowered["tile"].functions)
        np.testing.assert_array_equal(driver.run_level(lowered, "target", [a, b], "ptx")[0], b / 2)


def test_what_has_no_result():
    singular, indefinite = np.ones((3, 4, 4), "f4"), np.eye(4, dtype="f4")[None].repeat(3, 0)
    indefinite[1, 2, 2] = -1
    with pytest.raises(ExecutionError, match="singular"):
        run(ts.solve, singular, np.ones((3, 4, 2), "f4"))
    with pytest.raises(ExecutionError, match="positive definite"):
        run(ts.cholesky, indefinite)
    with pytest.raises(ExecutionError, match="singular"):
        ts.jit(ts.solve, target="ptx")(singular, np.ones((3, 4, 2), "f4"))
    unknown = np.eye(4, dtype="f4")[None] * np.float32(np.nan)
    assert np.isnan(run(ts.solve, unknown, np.ones((1, 4, 1), "f4"))[0]).all()
    with pytest.raises(ExecutionError, match="positive definite"):
        run(ts.cholesky, unknown)


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
@pytest.mark.parametrize("function", [lambda a: ts.cholesky(a), lambda a: ts.solve(a, a)], ids=["cholesky", "solve"])
def test_an_error_is_at_the_op_of_the_user(function, target):
    """Not in the kernel of the library that finds it."""
    a = np.tile(np.eye(4, dtype="f4"), (40, 1, 1))
    a[3] = 0
    with pytest.raises(ExecutionError) as found:
        np.asarray(ts.jit(function, target=target)(a))
    assert found.value.location.file == __file__


@pytest.mark.parametrize(("dtype", "side", "warps"), [("f4", 64, True), ("f8", 32, True), ("f8", 33, False)])
def test_columns_of_a_warp_fit_its_registers(dtype, side, warps):
    x = np.eye(side, dtype=dtype)[None]
    for function, given in ((ts.solve, (x, x)), (ts.cholesky, (x,))):
        lowered = driver.lower(ts.jit(function).trace(*given).function, "ptx")
        assert any(f.name.endswith("_in_warps") for f in lowered["tile"].functions) == warps


def test_larger_matrices_stay_with_the_host():
    lowered = driver.lower(ts.jit(ts.cholesky).trace(np.eye(65, dtype="f4")).function, "ptx")
    assert any(n.op.name == "host.call" for n in lowered["tile"].main.body.walk())


def launch_in_lanes(function, *inputs):
    """The result of a program for the processor, which has a matrix in each lane."""
    lowered = driver.lower(ts.jit(function).trace(*inputs).function, "llvm")
    assert any(f.name.startswith(("solve_in_lanes", "factor_in_lanes")) for f in lowered["tile"].functions)
    return driver.compile_tile(lowered["tile"], "llvm")(list(inputs))[0]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_batches_in_lanes(side, dtype):
    """More matrices than lanes, and some lanes of the last program without one; they are computed in f64."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(3, 7, side, n)).astype(dtype) for n in (side, 3))
    a[0, :, 0, 0] = 0 if side > 1 else 2  # exchanges rows
    want = np.linalg.solve(a.astype("f8"), b)
    rtol = {"f4": 1e-6, "f8": 1e-8}[dtype]
    np.testing.assert_allclose(launch_in_lanes(ts.solve, a, b), want, rtol=rtol, atol=rtol * np.abs(want).max())
    x = (a @ a.swapaxes(-1, -2) + side * np.eye(side)).astype(dtype)
    found = launch_in_lanes(ts.cholesky, x + np.triu(np.ones((side, side), dtype), 1))
    np.testing.assert_allclose(found, np.linalg.cholesky(x.astype("f8")), rtol=rtol, atol=rtol)
    assert not np.triu(found, 1).any()


def test_lanes_name_what_has_no_result():
    ones, eye = np.ones((9, 2, 2), "f4"), np.eye(2, dtype="f4")[None].repeat(9, 0)
    with pytest.raises(ExecutionError, match="singular"):
        launch_in_lanes(ts.solve, np.concatenate([eye, ones[:1]]), np.ones((10, 2, 1), "f4"))
    with pytest.raises(ExecutionError, match="positive definite"):
        launch_in_lanes(ts.cholesky, -eye)
    unknown = eye * np.float32(np.nan)
    assert np.isnan(launch_in_lanes(ts.solve, unknown, np.ones((9, 2, 1), "f4"))).all()


@pytest.mark.parametrize("shape", [(2, 3, 3), (15, 14, 14), (100, 65, 65)])
def test_few_or_larger_matrices_stay_with_the_host(shape):
    x = np.eye(shape[-1], dtype="f4")[None].repeat(shape[0], 0)
    lowered = driver.lower(ts.jit(ts.cholesky).trace(x).function, "llvm")
    assert any(n.op.name == "host.call" for n in lowered["tile"].main.body.walk())


@pytest.mark.parametrize("sides", [(1, 1), (2, 2), (4, 4), (7, 7), (5, 3), (3, 5), (4, 1), (1, 4)], ids=str)
def test_orthogonal_factors_in_lanes(sides):
    """The signs are LAPACK's; what is 0 below the diagonal stays, and a column of zeros has no direction."""
    x = np.random.default_rng(0).normal(size=(3, 7, *sides)).astype("f4")
    x[0, 0] = np.eye(*sides)
    x[0, 1, :, 0] = 0
    x[0, 2] = np.triu(x[0, 2])
    x[0, 3] *= np.float32(1e30)
    x[0, 4] *= np.float32(1e-30)
    lowered = driver.lower(ts.jit(ts.linalg.qr).trace(x).function, "llvm")
    assert any(f.name.startswith("orthogonalise_in_lanes") for f in lowered["tile"].functions)
    q, r = driver.compile_tile(lowered["tile"], "llvm")([x])
    for found, wanted in zip((q, r), np.linalg.qr(x), strict=True):
        scale = np.abs(wanted).max((-1, -2), keepdims=True)
        assert (np.abs(found - wanted) <= 2e-6 * scale).all()
    for level in ("tile", "target"):
        for found, same in zip(driver.run_level(lowered, level, [x], "llvm"), (q, r), strict=True):
            np.testing.assert_allclose(found, same, rtol=1e-6, atol=1e-6 * np.abs(same).max())


@pytest.mark.parametrize("sides", [(1, 1), (5, 5), (5, 3), (3, 5), (1, 4), (17, 33), (64, 64)], ids=str)
def test_orthogonal_factors_of_blocks(sides):
    """On a GPU, with the signs of LAPACK: of f32, and the host factors f64, whose squares f64 may not hold."""
    x = np.random.default_rng(0).normal(size=(5, *sides)).astype("f4")
    x[0], x[1, :, 0], x[2], x[3], x[4] = np.eye(*sides), 0, np.triu(x[2]), x[3] * 1e30, x[4] * 1e-30
    lowered = driver.lower(ts.jit(ts.linalg.qr).trace(x).function, "ptx")
    assert any(f.name.startswith("orthogonalise_matrices") for f in lowered["tile"].functions)
    wide = driver.lower(ts.jit(ts.linalg.qr).trace(x.astype("f8")).function, "ptx")
    assert any(n.op.name == "host.call" for n in wide["tile"].main.body.walk())
    for level in ("tile", "target") if max(sides) < 64 else ("target",):
        for found, wanted in zip(driver.run_level(lowered, level, [x], "ptx"), np.linalg.qr(x), strict=True):
            assert found.dtype == np.float32
            assert (np.abs(found - wanted) <= 3e-6 * np.abs(wanted).max((-1, -2), keepdims=True)).all()


def test_numbers_that_are_not_known_have_no_orthogonal_factors():
    x = np.full((9, 3, 3), np.nan, "f4")
    lowered = driver.lower(ts.jit(ts.linalg.qr).trace(x).function, "llvm")
    q, r = driver.compile_tile(lowered["tile"], "llvm")([x])
    assert np.isnan(q).all() and np.isnan(np.diagonal(r, axis1=-2, axis2=-1)).all()


@pytest.mark.parametrize("shape", [(2, 3, 3), (20, 9, 9), (40, 65, 65)])
def test_few_or_larger_matrices_have_orthogonal_factors_of_the_host(shape):
    for dtype in ("f4", "f8"):
        x = np.ones(shape, dtype)
        lowered = driver.lower(ts.jit(ts.linalg.qr).trace(x).function, "llvm")
        assert any(n.op.name == "host.call" for n in lowered["tile"].main.body.walk())


def launch_in_columns(function, *inputs, levels=("target",)):
    """The results of a program for the processor whose matrices lie in memory, column by column."""
    lowered = driver.lower(ts.jit(function).trace(*inputs).function, "llvm")
    assert any("_columns" in f.name for f in lowered["tile"].functions)
    found = [driver.run_level(lowered, level, list(inputs), "llvm") for level in levels[:-1]]
    return [driver.compile_tile(lowered["tile"], "llvm")(list(inputs)), *found]


@pytest.mark.parametrize(("dtype", "batch"), [("f4", 37), ("f8", 16)])
@pytest.mark.parametrize(("side", "width"), [(9, 4), (14, 1), (17, 3), (32, 2)])
def test_solutions_in_columns(side, width, dtype, batch):
    """More matrices than lanes, rows that are exchanged, and elements of very different sizes."""
    rng = np.random.default_rng(side)
    a, b = (rng.normal(size=(batch, side, n)).astype(dtype) for n in (side, width))
    a[3, 0, 0], a[4], a[5, :, 2] = 0, a[4, ::-1] * 1e-6, a[5, :, 2] * 1e6
    allowed = 2 * side * np.finfo(dtype).eps * np.abs(a).sum(-1).max(-1)[..., None, None]
    (found,) = launch_in_columns(ts.solve, a, b)[0]
    assert found.dtype == dtype
    wide = found.astype("f8")
    assert (np.abs(a.astype("f8") @ wide - b) <= allowed * np.abs(wide).max(-2, keepdims=True)).all()


@pytest.mark.parametrize(("dtype", "shape"), [("f4", (35,)), ("f8", (2, 9))])
@pytest.mark.parametrize("side", [14, 23, 32, 50, 64])
def test_factors_in_columns(side, dtype, shape):
    x = np.random.default_rng(side).normal(size=(*shape, side, side))
    x = (x @ x.swapaxes(-1, -2) + side * np.eye(side)).astype(dtype)
    (found,) = launch_in_columns(ts.cholesky, x + np.triu(np.ones((side, side), dtype), 1))[0]
    rtol = {"f4": 2e-5, "f8": 1e-12}[dtype]
    np.testing.assert_allclose(found, np.linalg.cholesky(x.astype("f8")), rtol=rtol, atol=rtol)
    assert not np.triu(found, 1).any()


@pytest.mark.parametrize(("rows", "columns"), [(9, 9), (14, 6), (6, 14), (31, 33), (49, 20), (64, 64)])
def test_orthogonal_factors_in_columns(rows, columns):
    x = np.random.default_rng(rows).normal(size=(33, rows, columns)).astype("f4")
    x[2, :, 0], x[3], x[4, 1:, 0] = 0, 0, 0
    x[5] *= 1e30
    q, r = launch_in_columns(ts.qr, x)[0]
    wide, size = np.abs(x).max((-1, -2), keepdims=True).astype("f8"), min(rows, columns)
    assert (np.abs(q.astype("f8") @ r - x) <= 4e-6 * wide).all() and not np.tril(r, -1).any()
    np.testing.assert_allclose(q.swapaxes(-1, -2) @ q, np.broadcast_to(np.eye(size), (33, size, size)), atol=3e-6)


def test_the_interpreter_agrees_on_columns():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(33, 9, 9)).astype("f4"), rng.normal(size=(33, 9, 2)).astype("f4")
    for function, given in ((ts.solve, (a, b)), (ts.qr, (a,))):
        ours, tile = launch_in_columns(function, *given, levels=("tile", "target"))
        for x, y in zip(ours, tile, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-4)


def test_what_has_no_result_in_columns():
    eye = np.eye(14, dtype="f4")[None].repeat(40, 0)
    singular, unknown = eye.copy(), eye.copy()
    singular[39, 3], unknown[7, 5, 5] = 0, np.nan
    with pytest.raises(ExecutionError, match="singular"):
        launch_in_columns(ts.solve, singular, np.ones((40, 14, 4), "f4"))
    with pytest.raises(ExecutionError, match="positive definite"):
        launch_in_columns(ts.cholesky, singular)
    with pytest.raises(ExecutionError, match="positive definite"):
        launch_in_columns(ts.cholesky, unknown)
    (found,) = launch_in_columns(ts.solve, unknown, np.ones((40, 14, 4), "f4"))[0]
    assert np.isnan(found[7, 5]).all() and np.isfinite(np.delete(found, 7, 0)).all()

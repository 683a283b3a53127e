"""scatter_add as one launch: repeated indices, any axis, the same bits in every run; small ones stay dense."""

import json
import math

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.core.errors import OutOfBoundsError
from tessera.runtime import driver
from tessera.stdlib import deterministic_reductions, exact_sums, launches

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


def test_what_stays_dense():
    """Few pairs of a place and an update."""
    x, i, u = np.zeros((4, 3), "f4"), np.zeros(9, np.int64), np.ones((9, 3), "f4")
    module = driver.lower(ts.jit(program(0)).trace(x, i, u).function, "llvm")["schedule"]
    assert not any(n.op.name == "host.launch" for n in module.main.body.nodes)
    assert ts.jit(program(0), target="llvm")(x, i, u)[0, 0].item() == 9


def test_narrow_floats_are_added_in_a_wider_type():
    """One launch, whose sums are rounded once: ones added to 2048 change nothing in f16."""
    x, i, u = np.full((40, 70), 2048, "f2"), np.zeros(9, np.int64), np.ones((9, 70), "f2")
    levels = driver.lower(ts.jit(program(0)).trace(x, i, u).function, "llvm")
    assert any(n.op.name == "host.launch" for n in levels["schedule"].main.body.nodes)
    found = driver.compile_tile(levels["tile"], "llvm")([x, i, u])[0]
    assert (found[0] == 2056).all() and (found[1:] == 2048).all()


@pytest.mark.parametrize("mode", ["add", "set", "multiply", "max"])
def test_symbolic_sizes_are_one_launch(mode, tmp_path, rng):
    """One update after the other: comparing all pairs takes hundreds of times as long."""
    change = {"add": np.add.at, "multiply": np.multiply.at, "max": np.maximum.at, "set": np.ndarray.__setitem__}[mode]

    @ts.jit
    def update(x, i, u):
        return ts.scatter_add(x, i, u) if mode == "add" else ts.scatter(x, i, u, mode=mode)

    def draw(rows, width, count):
        x, u = (rng.integers(1, 5, (n, width)).astype("f4") for n in (rows, count))
        return x, rng.integers(-rows, rows, count), u

    ts.build(update, *draw(30, 5, 7), out=tmp_path / "a", target="llvm", dynamic=True)
    built = ts.load(tmp_path / "a")
    for sizes in [(30, 5, 7), (3, 2000, 11), (50, 3, 1)]:
        x, i, u = draw(*sizes)
        want = x.copy()
        change(want, i, u)
        np.testing.assert_array_equal(built(x, i, u), want)
    plan = json.loads((tmp_path / "a/manifest.json").read_text())["plan"]
    assert plan["launches"][-1]["kernel"].startswith("update_rows_in_place") or mode == "multiply"


def test_symbolic_sizes_name_an_index_outside():
    compiled = ts.jit(lambda x, i, u: ts.scatter_add(x, i, u), target="llvm")
    for rows, count in ((30, 7), (40, 9)):
        compiled(np.ones((rows, 5), "f4"), np.zeros(count, np.int64), np.ones((count, 5), "f4"))
    with pytest.raises(ts.errors.OutOfBoundsError, match="50"):
        compiled(np.ones((50, 5), "f4"), np.full(2, 50), np.ones((2, 5), "f4")).numpy()


SORTED = {
    "wide rows": ((50, 80), 0, (70,)),
    "two axes of indices": ((3, 33, 130), -2, (5, 9)),
    "narrow rows": ((20, 5, 3), 1, (100,)),
    "bins": ((300,), 0, (400,)),
    "few updates": ((1000, 1), 0, (3,)),
}


# Each shape with two types, each type with one shape.
SUMS = [(name, dtype) for name in SORTED for dtype in ("f4", "i4")]
SUMS += [("narrow rows", dtype) for dtype in ("f8", ml_dtypes.bfloat16, "f2", "i8", "i1", "u1")]


@pytest.mark.parametrize(("name", "dtype"), SUMS)
@pytest.mark.parametrize("way", ["segments", "exact"])
def test_sums_by_place(name, dtype, way, monkeypatch):
    """On a GPU few numbers are exact; else the updates are sorted by row, and each adds its own in their order."""
    if way == "segments":
        monkeypatch.setattr(launches, "is_exact", lambda *_: False)
    monkeypatch.setattr(exact_sums, "MAX_WIDTH", 1 << 20)
    (sizes, axis, count), rng = SORTED[name], np.random.default_rng(0)
    at = axis % len(sizes)
    x = rng.integers(0, 5, sizes).astype(dtype)
    updates = rng.integers(0, 5, (*sizes[:at], *count, *sizes[at + 1 :])).astype(dtype)
    if np.dtype(dtype).kind not in "iu":
        x, updates = x / np.asarray(7, dtype), updates / np.asarray(7, dtype)
    places = rng.integers(-sizes[at], sizes[at], count)
    program = ts.jit(lambda x, p, u: ts.scatter_add(x, p, u, axis=axis))
    levels = driver.lower(program.trace(x, places, updates).function, "ptx")
    made = {f.name for f in levels["tile"].functions}
    assert {"segments": "find_segments", "exact": "find_segments" if dtype == "f8" else "add_"}[way] in " ".join(made)
    assert (way == "exact" and dtype != "f8") == any(n.startswith(("add_floats", "add_integers")) for n in made)
    want = np.moveaxis(x.astype("f8"), at, 0)
    places = places % sizes[at]
    np.add.at(want, places, np.moveaxis(updates.astype("f8"), range(at, at + len(count)), range(len(count))))
    for level in ("tile", "target"):
        (ours,) = driver.run_level(levels, level, [x, places, updates], "ptx")
        rtol = {"f8": 1e-14, "f4": 1e-6}.get(dtype, 0 if np.dtype(dtype).kind in "iu" else 2e-2)
        np.testing.assert_allclose(ours.astype("f8"), np.moveaxis(want, 0, at), rtol=rtol)


def test_exact_sums_are_rounded_once():
    """Numbers of every magnitude, cancellation, denormals, and those that are not finite."""
    rng = np.random.default_rng(1)
    updates = (rng.normal(size=4000) * 10.0 ** rng.integers(-45, 30, 4000)).astype("f4")
    places = rng.integers(0, 200, 4000)
    updates[2000:3900], places[2000:3900] = -updates[100:2000], places[100:2000]
    updates[:6], places[:6] = [np.inf, np.inf, -np.inf, np.inf, -np.inf, np.nan], [200, 200, 201, 202, 202, 203]
    x = np.float32([*rng.normal(size=204), -0.0, 1e-45, np.inf])
    lists = [[float(v)] for v in x]
    for place, value in zip(places, updates, strict=True):
        lists[place].append(float(value))
    sums = [math.fsum(each) if np.isfinite(each).all() else sum(each) for each in lists]
    levels = driver.lower(ts.jit(ts.scatter_add).trace(x, places, updates).function, "ptx")
    for level in ("tile", "target"):
        (ours,) = driver.run_level(levels, level, [x, places, updates], "ptx")
        np.testing.assert_array_equal(ours, np.float32(sums), level)
        assert np.signbit(ours[204])


@pytest.mark.parametrize("most", [1 << 22, 0], ids=["one word", "three words"])
def test_exact_sums_of_f16_are_rounded_once(most, monkeypatch):
    """Numbers of every magnitude, denormals, cancellation, and those that are not finite."""
    monkeypatch.setattr(exact_sums, "MAX_IN_WORD", most)
    rng = np.random.default_rng(1)
    updates = (rng.normal(size=4000) * 2.0 ** rng.integers(-26, 14, 4000)).astype("f2")
    places = rng.integers(0, 200, 4000)
    updates[2000:3900], places[2000:3900] = -updates[100:2000], places[100:2000]
    updates[:8] = [np.inf, -np.inf, np.inf, -np.inf, np.nan, 65504, 2.0**-24, -(2.0**-24)]
    places[:8] = [200, 201, 202, 202, 203, 204, 205, 206]
    x = np.float16([*rng.normal(size=204), -65504, 2.0**-24, 0.0, -0.0])
    lists = [[float(v)] for v in x]
    for place, value in zip(places, updates, strict=True):
        lists[place].append(float(value))
    sums = [math.fsum(each) if np.isfinite(each).all() else sum(each) for each in lists]
    levels = driver.lower(ts.jit(ts.scatter_add).trace(x, places, updates).function, "ptx")
    kernels = [f for f in levels["tile"].functions if f.name.startswith("add_floats")]
    words = {p.type.shape[1] for f in kernels for p in f.params if len(p.type.shape) == 3}  # of the table
    assert words == ({2} if most else {4})
    for level in ("tile", "target"):
        (ours,) = driver.run_level(levels, level, [x, places, updates], "ptx")
        np.testing.assert_array_equal(ours, np.float16(sums), level)
        assert np.signbit(ours[207])


def test_sums_in_copies():
    """Few numbers have copies of their own for the programs that add to them."""
    places, rng = np.arange(5000) % 7, np.random.default_rng(2)
    for updates in (rng.integers(-(1 << 40), 1 << 40, 5000), rng.normal(size=5000).astype("f4")):
        x = np.ones(7, updates.dtype)
        levels = driver.lower(ts.jit(ts.scatter_add).trace(x, places, updates).function, "ptx")
        want = [math.fsum([1.0, *updates[places == n].tolist()]) for n in range(7)]
        (ours,) = driver.run_level(levels, "target", [x, places, updates], "ptx")
        np.testing.assert_array_equal(ours, np.asarray(want).astype(updates.dtype))


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


def test_programs_add_to_copies_in_turn():
    updates, places = ts.Tensor(np.ones(4096, "i8")), ts.Tensor(np.arange(4096) % 3)
    empty = ts.zeros((2, 3), ts.int64)
    sizes = {"rows": 3, "count": 4096, "rest": 1, "block": 1024}
    table = ts.launch(exact_sums.add_integers, (4,), places, updates, empty, **sizes).numpy()
    np.testing.assert_array_equal(table.sum(0), [1366, 1365, 1365])
    np.testing.assert_array_equal(table.sum(1), [2048, 2048])


def test_which_sums_are_exact():
    """Wide rows are sorted, f64 has no words, and few updates of many numbers do not pay for the words of all."""
    assert exact_sums.is_exact(ts.f32, (1, 1817, 1), 1 << 20) and exact_sums.is_exact(ts.int8, (2, 50, 4), 1000)
    assert not exact_sums.is_exact(ts.f32, (1, 1000, 256), 65536) and not exact_sums.is_exact(ts.f64, (1, 9, 1), 999)
    assert not exact_sums.is_exact(ts.f32, (1, 1 << 20, 1), 1000) and not exact_sums.is_exact(
        ts.f32, (1, 9, 1), 1 << 24
    )


def test_places_are_checked_as_they_are_read():
    """One launch reads the places, and its error names the line of the user, not that of the kernel."""
    x, i, u = np.zeros(5000, np.float32), np.zeros(30000, np.int64), np.ones(30000, np.float32)
    i[3], i[77] = -1, 5000
    function = ts.jit(program(0), target="llvm")
    module = driver.lower(function.trace(x, i, u).function, "llvm")["tile"]
    launches_of_places = [
        n for n in module.main.body.walk() if n.op.name == "host.launch" and module.main.params[1] in n.args
    ]
    assert len(launches_of_places) == 1
    with pytest.raises(ts.errors.OutOfBoundsError, match="index 5000 is outside axis 0") as error:
        np.asarray(function(x, i, u))
    assert error.value.location.file == __file__
    i[77] = 4
    np.testing.assert_array_equal(np.asarray(function(x, i, u))[[0, 4, -1]], [29998, 1, 1])


@pytest.mark.parametrize("dtype", ["f4", "f2", "i4"])
@pytest.mark.parametrize(("rows", "width", "count"), [(60, 70, 9), (300, 64, 70), (40, 1500, 10)])
def test_few_updates_walk_their_segments_alone(rows, width, count, dtype, monkeypatch):
    """Rows without an update are copied, and each other one has the program of its first update."""
    monkeypatch.setattr(deterministic_reductions, "MOST_UNSORTED", 0)
    rng = np.random.default_rng(0)
    x, updates = ((rng.standard_normal(s) * 4).astype(dtype) for s in ((rows, width), (count, width)))
    at = rng.integers(0, rows, count)
    at[: count // 2] = rows - 1  # more than are loaded together
    levels = driver.lower(
        ts.jit(lambda x, at, u: ts.scatter_add(x, at, u, axis=0)).trace(x, at, updates).function, "ptx"
    )
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    assert "combine_few_segments" in artifact.manifest["plan"]["entries"]
    wanted = x.astype("f8")
    np.add.at(wanted, at, updates.astype("f8"))
    for found in (get_backend("ptx").sanitized(artifact)([x, at, updates])[0], ts.scatter_add(x, at, updates, axis=0)):
        np.testing.assert_allclose(
            np.asarray(found).astype("f8"), wanted, rtol=2e-3, atol=2e-2 if dtype == "f2" else 1e-4
        )


@pytest.mark.parametrize("dtype", ["f4", "f2", "i4"])
@pytest.mark.parametrize("repeated", [1, 5, 40])
def test_few_updates_of_many_rows_are_not_sorted(dtype, repeated, rng):
    """On a GPU the program of a row's first update adds all of them in order, found among all or walked."""
    x, u = ((rng.normal(size=(2, n, 70)) * 9).astype(dtype) for n in (400, 40))
    i = rng.integers(-400, 400, 40)
    i[rng.permutation(40)[:repeated]] = -7
    levels = driver.lower(ts.jit(program(1)).trace(x, i, u).function, "ptx")
    (launched,) = (n.attrs["kernel"] for n in levels["schedule"].main.body.nodes if n.op.name == "host.launch")
    assert launched.startswith("combine_unsorted")
    want = x.astype("f8" if dtype != "i4" else "i8")
    np.add.at(want, (slice(None), i), u)
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    found = [driver.run_level(levels, "tile", [x, i, u])[0], get_backend("ptx").sanitized(artifact)([x, i, u])[0]]
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0].astype("f8"), want, rtol=1e-3 if dtype == "f2" else 1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["f4", "f2", "i1", "?"])
def test_few_rows_that_are_replaced(dtype, rng):
    """On a GPU the program of a row's last update stores it; the others end, so that no two store the same row."""
    x, u = ((rng.normal(size=(2, n, 70)) * 9).astype(dtype) for n in (400, 40))
    i = rng.integers(-400, 400, 40)
    i[rng.permutation(40)[:15]] = -7
    replace = ts.jit(lambda x, i, u: ts.scatter(x, i, u, axis=1))
    levels = driver.lower(replace.trace(x, i, u).function, "ptx")
    (launched,) = (n.attrs["kernel"] for n in levels["schedule"].main.body.nodes if n.op.name == "host.launch")
    assert launched.startswith("replace_unsorted")
    want = x.copy()
    for p, row in enumerate(i):
        want[:, row] = u[:, p]
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    for found in (driver.run_level(levels, "tile", [x, i, u]), get_backend("ptx").sanitized(artifact)([x, i, u])):
        np.testing.assert_array_equal(found[0], want)


@pytest.mark.parametrize("update", [ts.scatter_add, ts.scatter])
def test_one_of_few_updates_outside(update):
    x, u = np.zeros((400, 70), "f4"), np.zeros((2, 70), "f4")
    with pytest.raises(OutOfBoundsError, match="index 400 is outside axis 0 of size 400"):
        ts.jit(lambda x, i, u: update(x, i, u, axis=0), target="ptx")(x, np.array([3, 400]), u)


@pytest.mark.parametrize(
    ("numbers", "update", "dtype"), [(101, 1, "i8"), (7, -3, "i4"), (1024, 100, "i1"), (1, 1, "u1")]
)
def test_one_number_added_everywhere_is_counted_in_shared_memory(numbers, update, dtype, monkeypatch, rng):
    """Programs count their own places; sums of narrow integers wrap."""
    monkeypatch.setattr(exact_sums, "FEWEST_UPDATES", 1000)
    x = rng.integers(0, 5, numbers).astype(dtype)
    places = rng.integers(-numbers, numbers, (3, 3001)) if numbers > 7 else rng.integers(0, numbers, (3, 3001))
    program = ts.jit(lambda x, p: ts.scatter_add(x, p, ts.full((3, 3001), update, dtype=x.dtype), axis=0))
    levels = driver.lower(program.trace(x, places).function, "ptx")
    made = [n for n in levels["tile"].main.body.nodes if n.op.name == "host.launch"]
    assert any("count_few" in n.attrs["kernel"] for n in made)
    assert sum(any(math.prod(v.type.shape) == places.size for v in n.args) for n in made) == 1  # nobody stores 1s
    want = x + (np.bincount(places.reshape(-1) % numbers, minlength=numbers) * update).astype(dtype)
    for level in ("tile", "target"):
        np.testing.assert_array_equal(driver.run_level(levels, level, [x, places], "ptx")[0], want, err_msg=level)
    places[2, 5] = numbers
    with pytest.raises(OutOfBoundsError, match=f"index {numbers} is outside axis 0 of size {numbers}"):
        driver.run_level(levels, "target", [x, places], "ptx")


def test_which_numbers_are_counted():
    assert exact_sums.has_few_numbers(100, 4_000_000) and exact_sums.has_few_numbers(4096, 1 << 16)
    assert not exact_sums.has_few_numbers(5000, 4_000_000) and not exact_sums.has_few_numbers(100, 1000)
    assert not exact_sums.has_few_numbers(4096, (1 << 14) - 1)

"""Sorts by digits of long rows agree with NumPy's stable sorts on every target, whatever the parts of a row."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.runtime import driver
from tessera.runtime.program import prepare
from tessera.stdlib import digit_sorting
from tessera.stdlib.digit_sorting import list_digits
from tests.stdlib.test_row_sorting import DTYPES, draw, has, order, run


@pytest.fixture(autouse=True)
def _few_words(monkeypatch):
    """Groups move 512 words at a time, and hold rows of so many."""
    monkeypatch.setattr(digit_sorting, "ITEMS", 2)
    monkeypatch.setattr(digit_sorting, "CHUNK", 512)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("number", "dtype"), list(enumerate([*DTYPES, "i2", "u2"])))
def test_sorts_of_every_type(number, dtype, descending):
    """Of each type one order as text and the other in the Tile interpreter, in turn."""
    x, level = draw(dtype, 2, 700), "target" if (number + descending) % 2 else "tile"
    names, (ours,) = run(lambda x: ts.argsort(x, axis=-1, descending=descending), x, "ptx", level)
    assert has(names, "count_digits", "move_words")
    np.testing.assert_array_equal(ours, order(x, descending))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("number", "dtype"), list(enumerate([*DTYPES, "i2", "u2"])))
def test_rows_in_shared_memory(number, dtype, descending):
    """Rows that one group holds; 512 is all that it can, so that no word is one past the end."""
    x, level = draw(dtype, 3, (129, 300, 512)[number % 3]), "target" if (number + descending) % 2 else "tile"
    names, (ours,) = run(lambda x: ts.argsort(x, axis=-1, descending=descending), x, "ptx", level)
    assert has(names, "sort_rows") and not has(names, "count_digits")
    np.testing.assert_array_equal(ours, order(x, descending))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", ["i8", "u8", "f8"])
def test_elements_of_64_bits(dtype, descending):
    """Elements that differ in the high or the low 32 bits alone, both signs and zeros, and the extremes."""
    x = draw(dtype, 2, 150)
    near = np.random.default_rng(3).integers(0, 1 << 34, (2, 50), dtype=np.int64) - (1 << 33)
    x[:, :50] = near.view(np.uint64) if dtype == "u8" else near
    want = order_exactly(x, descending)
    names, (ours,) = run(lambda x: ts.argsort(x, axis=-1, descending=descending), x, "ptx", "target")
    assert sum(n.startswith("sort_rows") for n in names) == 2
    np.testing.assert_array_equal(ours, want)
    first, place = (
        lambda x: ts.topk(x, 5, largest=descending)[1],
        lambda x: ts.argsort(x, axis=-1, descending=descending)[:, 70:71],
    )
    for function, places, size, kernel in (
        (first, slice(0, 5), 150, "sort_rows"), (first, slice(0, 5), 600, "choose_first"),
        (place, slice(70, 71), 150, "find_places"),
    ):  # fmt: skip
        longer = np.pad(x, ((0, 0), (0, size - 150)), mode="edge")
        names, (ours,) = run(function, longer, "ptx", "tile")
        assert has(names, kernel)
        np.testing.assert_array_equal(ours, order_exactly(longer, descending)[:, places])


def order_exactly(x, descending):
    """The stable order of rows; integers are not compared as floats, which have 53 bits."""
    if x.dtype.kind == "f":
        return order(x, descending)
    return np.argsort(~x if descending else x, axis=-1, kind="stable")  # the complement has the opposite order


@pytest.mark.parametrize(("dtype", "most"), [("f4", 512), ("f2", 256), ("i1", 128)])
def test_many_short_rows_are_sorted_by_networks(monkeypatch, dtype, most):
    """A network has the same stages for every type; a narrow one has fewer digits, and few rows do not fill a GPU."""
    monkeypatch.setattr(digit_sorting, "CHUNK", 4096)
    for rows, size, kernel in ((9999, most, "sort_chunks"), (9999, most + 1, "sort_rows"), (2, 129, "sort_rows")):
        x = np.broadcast_to(np.zeros((), dtype), (rows, size))
        levels = driver.lower(ts.jit(lambda x: ts.argsort(x, axis=-1)).trace(x).function, "ptx")
        assert has([f.name for f in levels["tile"].functions], kernel), (rows, size)


@pytest.mark.parametrize(
    ("rows", "size", "programs", "level"),
    [(1, 2049, 1, "target"), (1, 2049, 100, "tile"), (3, 513, 1, "tile"), (3, 513, 100, "target"),
     (2, 1023, 1, "tile"), (2, 1023, 100, "target"), (2, 1024, 1, "target"), (2, 1024, 100, "tile")],
)  # fmt: skip
def test_parts_of_rows(monkeypatch, rows, size, programs, level):
    monkeypatch.setattr(digit_sorting, "PROGRAMS", programs)
    x = np.random.default_rng(size).standard_normal((rows, size)).astype("f4")
    _, (ours,) = run(lambda x: ts.argsort(x, axis=-1), x, "ptx", level)
    np.testing.assert_array_equal(ours, np.argsort(x, axis=-1, kind="stable"))


def test_all_equal_and_all_digits():
    rng = np.random.default_rng(2)
    x = np.stack([np.full(1500, 7, "i4"), rng.integers(-(2**31), 2**31, 1500).astype("i4")])
    _, (ours,) = run(lambda x: ts.argsort(x, axis=-1), x, "ptx", "target")
    np.testing.assert_array_equal(ours, np.argsort(x, axis=-1, kind="stable"))


@pytest.mark.parametrize("programs", [1, 100])
def test_threads_wait_for_each_other(monkeypatch, programs):
    monkeypatch.setattr(digit_sorting, "PROGRAMS", programs)  # parts of several rounds, or of one
    x = np.random.default_rng(0).standard_normal((1, 1100)).astype("f2")
    levels = driver.lower(ts.jit(lambda x: ts.argsort(x, axis=-1)).trace(x).function, "ptx")
    (ours,) = BACKEND.sanitized(BACKEND.emit(levels["tile"], {}))([x])
    np.testing.assert_array_equal(ours, np.argsort(x, axis=-1, kind="stable"))


def test_threads_wait_for_each_other_in_shared_memory():
    x = np.random.default_rng(0).standard_normal((1, 300)).astype("f4")
    levels = driver.lower(ts.jit(lambda x: ts.argsort(x, axis=-1)).trace(x).function, "ptx")
    (ours,) = BACKEND.sanitized(BACKEND.emit(levels["tile"], {}))([x])
    np.testing.assert_array_equal(ours, np.argsort(x, axis=-1, kind="stable"))


def test_sorted_values_along_another_axis():
    x = draw("f4", 300, 3)
    _, (ours,) = run(lambda x: ts.sort(x, axis=0, descending=True), x, "ptx", "target")
    np.testing.assert_array_equal(ours, np.take_along_axis(x, order(x.T, True).T, 0))


def test_digits_cover_the_order():
    assert list_digits(ts.f32) == [31, 39, 47, 55]
    assert list_digits(ts.bf16) == [31, 39]
    assert list_digits(ts.bool) == list_digits(ts.uint8) == [31]


@ts.kernel
def votes_and_elements(x, out):
    at = tile.program_id(0) * 64 + tile.local_id()
    block = x[at, 0:3]
    votes = tile.warp.ballot(block > 0)
    out[at, 0:3] = votes
    out[at, 3] = tile.warp.ballot(x[at, 1] > 1)
    out[at, 4] = tile.cast(block[2], "int64") + votes[0]


def test_votes_are_one_instruction():
    x = np.random.default_rng(0).integers(-1, 3, (128, 3)).astype("i4")
    program = prepare(votes_and_elements, [x, np.zeros((128, 5), "i8")], grid=(2,), group=64)
    text = next(iter(BACKEND.emit(program.levels["tile"], {}).files.values()))
    assert text.count("vote.sync.ballot") == 5 and "shfl" not in text and ".local" not in text
    bits = lambda v: (v.reshape(-1, 32).astype("i8") << np.arange(32)).sum(1).repeat(32)  # noqa: E731
    wanted = np.stack([*(bits(x[:, i] > 0) for i in range(3)), bits(x[:, 1] > 1), x[:, 2] + bits(x[:, 0] > 0)], 1)
    for level in ("tile", "target"):
        np.testing.assert_array_equal(program.run(level, "ptx")[-1], wanted)

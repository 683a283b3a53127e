"""Artifacts of kernels with symbolic sizes: one build serves every size that the constraints allow."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from examples.block_reduction import block_reduction
from examples.matmul import matmul
from examples.softmax import softmax
from examples.vector_add import vector_add
from tessera import tile
from tessera.core.errors import ArgumentError, ShapeError
from tessera.core.symbolic_dim import UnknownSizeError
from tessera.runtime.program import CallArguments, prepare

BF16 = ml_dtypes.bfloat16


def draw(*shape, dtype="f4"):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


# For each kernel of an example: how its arguments follow from sizes, and sizes.
EXAMPLES = {
    vector_add: (lambda n: (draw(n), draw(n + 1)[1:], np.zeros(n, "f4")), ((300,), (1,), (1025,), (64,))),
    block_reduction: (lambda m, n: (draw(m, n), np.zeros(m, "f4")), ((5, 100), (1, 1), (3, 257))),
    matmul: (
        lambda m, k, n: (draw(m, k, dtype=BF16), draw(k, n, dtype=BF16), np.zeros((m, n), "f4")),
        ((65, 33, 70), (1, 1, 1), (64, 32, 64), (130, 7, 63)),
    ),
}


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("kernel", EXAMPLES, ids=lambda k: k.__name__)
def test_an_example_built_once_serves_every_size(kernel, target, tmp_path):
    make, sizes = EXAMPLES[kernel]
    example = kernel.example
    grid, group = example.grid, example.group
    ts.build(kernel, *make(*sizes[0]), grid=grid, group=group, out=tmp_path / "a", target=target, dynamic=True)
    program = ts.load(tmp_path / "a")
    for each in sizes:
        arrays = make(*each)
        found = program(*arrays).numpy()
        want = example.reference(*arrays)
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4 * np.sqrt(max(each)))
        np.testing.assert_array_equal(arrays[-1], found)  # written in place


def test_a_block_of_whole_rows_needs_the_size(tmp_path):
    with pytest.raises(ShapeError, match="the size of this slice of x is not known while compiling") as error:
        ts.build(softmax, draw(9, 20), draw(9, 20), grid=softmax.example.grid, out=tmp_path / "a", dynamic=True)
    assert error.value.location.file.endswith("softmax.py")
    rows = {"x": {0: "M"}, "out": {0: "M"}}
    ts.build(softmax, draw(9, 20), draw(9, 20), grid=softmax.example.grid, out=tmp_path / "a", dynamic=rows)
    for m in (1, 8, 33):
        x = draw(m, 20)
        np.testing.assert_allclose(ts.load(tmp_path / "a")(x, x.copy()).numpy(), softmax.example.reference(x, x), 1e-5)


@ts.require("B <= 300 and D % 4 == 0")
@ts.kernel
def scale(x: ts.Tensor["B", "D"], out: ts.Tensor["B", "D"], factor, *, BM: int = 8, EXTRA: int = 0):
    first = tile.program_id(0) * BM
    if x.shape[0] % 2:
        factor = factor + 1.0
    for c in tile.range(0, D, 16):  # noqa: F821
        block = tile.load(x[first : first + BM, c : c + 16], edge="clip") * factor + EXTRA
        tile.store(out[first : first + BM, c : c + 16], block, edge="clip")


def build_scale(entry, rows, path, target="llvm", **named):
    x = draw(rows, 20)
    ts.build(entry, x, x.copy(), 2.0, out=path, target=target, dynamic=True, **named)
    return ts.load(path)


BY_CONSTANTS = scale[lambda c: (tile.cdiv(c["B"], c["BM"]),)]


def by_inputs(x, out, factor, BM, **_):
    return (tile.cdiv(x.shape[0], BM),)


@pytest.mark.parametrize(("entry", "grid"), [(BY_CONSTANTS, None), (scale, by_inputs)])
@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_grids_of_sizes_and_run_time_numbers(tmp_path, entry, grid, target):
    program = build_scale(entry, 10, tmp_path / "a", target, grid=grid)
    for rows, columns in ((10, 20), (2, 4), (300, 36)):
        x, out = draw(rows, columns), np.zeros((rows, columns), "f4")
        program(x, out, np.float32(3))
        np.testing.assert_array_equal(out, x * 3)


def test_sizes_outside_the_constraints_name_the_line(tmp_path):
    program = build_scale(BY_CONSTANTS, 10, tmp_path / "a")
    for rows, columns, text, line in (
        (302, 4, "B <= 300 and D % 4 == 0", '@ts.require("B <= 300 and D % 4 == 0")'),
        (4, 6, "B <= 300 and D % 4 == 0", '@ts.require("B <= 300 and D % 4 == 0")'),
    ):
        with pytest.raises(ShapeError) as error:
            program(draw(rows, columns), draw(rows, columns), np.float32(3))
        number = Path(__file__).read_text().splitlines().index(line) + 1
        assert error.value.message == f"{text} does not hold"
        assert f"{text}, as {__file__}:{number}" in error.value.expected


def test_a_kernels_comparisons_name_their_line():
    x = draw(10, 4)
    program = prepare(BY_CONSTANTS, CallArguments((x, x.copy(), 2.0)), "llvm", dynamic=True)
    number = Path(__file__).read_text().splitlines().index("    if x.shape[0] % 2:") + 1
    assert program.rules.texts == ("B <= 300 and D % 4 == 0", "B % 2 == 0")
    assert program.rules.guards[0].place.startswith(f"{__file__}:{number}:")


def test_a_kernels_constraint_holds_for_launches_too():
    with pytest.raises(ShapeError, match="B <= 300 and D % 4 == 0 does not hold"):
        scale[(4,)](draw(4, 6), draw(4, 6), 1.0)
    with pytest.raises(ShapeError, match="B <= 300 and D % 4 == 0 does not hold"):
        scale.configured({"BM": 4})[(100,)](draw(400, 8), draw(400, 8), 1.0)


def test_a_constant_may_be_a_size(tmp_path):
    (B,) = ts.dims("B")
    program = build_scale(BY_CONSTANTS, 10, tmp_path / "a", EXTRA=3 * B)
    np.testing.assert_array_equal(program(np.zeros((6, 4), "f4"), np.zeros((6, 4), "f4"), np.float32(1)).numpy(), 18.0)


@pytest.mark.parametrize("grid", [2, (2,), (2, 1)])
def test_a_grid_of_numbers_is_refused(tmp_path, grid):
    with pytest.raises(ArgumentError, match="does not follow its symbolic sizes"):
        build_scale(scale, 10, tmp_path / "a", grid=grid)


@ts.kernel
def stride_over(x: ts.Tensor["N"], out: ts.Tensor["N"]):
    for i in tile.range(tile.program_id(0), N, tile.num_programs(0)):  # noqa: F821
        out[i] = x[i] + 1.0


@ts.kernel
def norm(x: ts.Tensor["N"]):
    total = 0.0
    for i in tile.range(0, N):  # noqa: F821
        total += x[i] * x[i]
    return total


def test_programs_that_stride_take_any_grid_and_results_come_back(tmp_path):
    ts.build(stride_over[(3,)], draw(5), draw(5), out=tmp_path / "a", dynamic=True)
    ts.build(norm, draw(5), out=tmp_path / "b", dynamic=True)
    for n in (1, 2, 3, 50):
        x = draw(n)
        np.testing.assert_array_equal(ts.load(tmp_path / "a")(x, np.zeros(n, "f4")).numpy(), x + np.float32(1))
        np.testing.assert_allclose(ts.load(tmp_path / "b")(x).numpy(), (x * x).sum(), rtol=1e-5)


def test_a_size_as_a_number_and_wrong_names_are_refused(tmp_path):
    @ts.kernel
    def unroll(x: ts.Tensor["N"], out):
        for i in tile.static_range(x.shape[0]):
            out[i] = x[i]

    with pytest.raises(UnknownSizeError) as error:
        ts.build(unroll, draw(4), draw(4), out=tmp_path / "a", dynamic={"x": {0: "N"}, "out": {0: "N"}})
    assert error.value.location.file == __file__
    for dynamic in ({"y": {0: "N"}}, {"factor": {0: "N"}}, {"x": 3}):
        with pytest.raises(ArgumentError, match="no array"):
            ts.build(BY_CONSTANTS, draw(4, 4), draw(4, 4), 1.0, out=tmp_path / "a", dynamic=dynamic)
    with pytest.raises(ShapeError, match="out of range"):
        ts.build(BY_CONSTANTS, draw(4, 4), draw(4, 4), 1.0, out=tmp_path / "a", dynamic={"x": {2: "N"}})


def test_the_program_runs_at_the_tile_level_too():
    x = draw(10, 8)
    program = prepare(BY_CONSTANTS, CallArguments((x, np.zeros_like(x), 2.0)), "llvm", dynamic=True)
    np.testing.assert_array_equal(program.run("tile")[0], x * 2)

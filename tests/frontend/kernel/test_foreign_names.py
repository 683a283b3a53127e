"""Names and idioms of Triton and CUDA: what they are called here works, and each error names it."""

import importlib.util
import inspect
import linecache

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, DTypeError, TesseraError, UnknownNameError
from tessera.frontend.kernel.python_ast.scope import FOREIGN_SPELLINGS
from tessera.frontend.kernel.tile_api import tile as namespace


@ts.kernel
def activations(x, y, *, B: ts.constexpr):
    block = x[0:B]
    y[0, :] = tile.sigmoid(block)
    y[1, :] = tile.softmax(block)
    y[2, :] = tile.softmax(block[:, None], axis=0)[:, 0]
    y[3, :] = tile.cdiv(B, 3) * 1.0
    y[4, :] = tile.cdiv(tile.program_id(0) + 7, 4) * 1.0


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_functions_that_other_languages_have(target, tmp_path, rng):
    x, y = rng.standard_normal(32).astype("f4"), np.zeros((5, 32), "f4")
    if target == "interp":
        activations[1,](x, y, B=32)
    else:
        ts.build(activations, x, y, B=32, grid=(1,), target=target, out=tmp_path / target)
        ts.load(tmp_path / target)(x, y)
    e = np.exp(x.astype("f8") - x.max())
    np.testing.assert_allclose(y[0], 1 / (1 + np.exp(-x.astype("f8"))), rtol=1e-5)
    np.testing.assert_allclose(y[1], e / e.sum(), rtol=1e-5)
    np.testing.assert_allclose(y[2], y[1], rtol=1e-6)
    assert (y[3] == 11).all() and (y[4] == 2).all()


def test_cdiv_outside_a_kernel():
    assert [tile.cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def pointers(x, y, *, B):
    offs = tile.program_id(0) * B + tile.arange(0, B)
    tile.store(y + offs, tile.load(x + offs))


def row_pointers(x, y, *, B):
    row = x + tile.program_id(0) * B
    y[0:B] = tile.load(row + tile.arange(0, B))


def stores_at_pointers(x, y, *, B):
    tile.store(y + tile.program_id(0) * B + tile.arange(0, B), 1.0)


def moves_a_pointer(x, y, *, B):
    y += tile.program_id(0) * B


@pytest.mark.parametrize("body", [pointers, row_pointers, stores_at_pointers, moves_a_pointer])
def test_pointer_arithmetic_shows_the_slice(body):
    with pytest.raises(ArgumentError, match="a tensor, not a pointer") as error:
        ts.kernel(body)[2,](np.zeros(32, "f4"), np.zeros(32, "f4"), B=16)
    name = error.value.message[1]
    assert f"{name}[i : i + BI]" in str(error.value) and f"{name}[offsets]" in str(error.value)
    assert error.value.location.file == __file__ and (error.value.__suppress_context__ or not error.value.__context__)


def matrix_of_pointers(a, *, B):
    i = tile.arange(0, B)
    tile.load(a + (i[:, None] * 8 + i[None, :]))


def test_pointers_into_a_matrix():
    with pytest.raises(ArgumentError) as error:
        ts.kernel(matrix_of_pointers)[1,](np.zeros((8, 8), "f4"), B=4)
    assert "a[i : i + BI, j : j + BJ]" in str(error.value) and "a[rows[:, None], cols[None, :]]" in str(error.value)


def sums_of_tensors(x, y):
    y[0:4] = x + tile.arange(0, 4)
    y += x


def test_sums_that_are_no_pointers():
    x, y = np.full(4, 0.5, "f4"), np.zeros(4, "f4")
    ts.kernel(sums_of_tensors)[1,](x, y)
    assert y.tolist() == [1, 2, 3, 4]


def value_as_place(x):
    tile.load(x[0:4] * 2.0)


def test_a_value_is_no_place():
    with pytest.raises(ArgumentError, match="a value, not a place") as error:
        ts.kernel(value_as_place)[1,](np.zeros(4, "f4"))
    assert "A[i : i + BLOCK]" in error.value.suggestion


@pytest.mark.parametrize("name", ["trans", "float32", "make_block_ptr", "debug_barrier", "static_print", "libdevice"])
def test_a_foreign_name_has_its_spelling(name):
    scope = {"ts": ts, "tile": tile}
    source = f"def k(x):\n    x[0] = tile.{name}"
    linecache.cache["<foreign>"] = (len(source), None, source.splitlines(True), "<foreign>")
    exec(compile(source, "<foreign>", "exec"), scope)
    with pytest.raises(UnknownNameError) as error:
        ts.kernel(scope["k"])[1,](np.zeros(4, "f4"))
    assert error.value.suggestion == FOREIGN_SPELLINGS[name]


def test_no_spelling_hides_a_name_that_exists():
    assert not {n for n in FOREIGN_SPELLINGS if hasattr(namespace, n)}


def foreign_argument(x):
    x[0:4] = tile.load(x[0:4], boundary_check=(0,))


def thread_index(x):
    x[threadIdx.x] = 1.0


def test_foreign_arguments_and_variables():
    with pytest.raises(ArgumentError, match="unexpected keyword argument 'boundary_check'") as error:
        ts.kernel(foreign_argument)[1,](np.zeros(4, "f4"))
    assert "tile.load(place, " in error.value.expected and "other=0.0" in error.value.suggestion
    with pytest.raises(UnknownNameError) as unknown:
        ts.kernel(thread_index)[1,](np.zeros(4, "f4"))
    assert "tile.arange" in unknown.value.suggestion


def foreign_method(x):
    x[0:4] = x[0:4].float()


def test_foreign_methods():
    with pytest.raises(UnknownNameError) as error:
        ts.kernel(foreign_method)[1,](np.zeros(4, "f4"))
    assert error.value.suggestion == "write x.to(ts.f32)"


def takes_tensor(x: ts.Tensor["N", ts.f32]):
    x[0] = 1.0


def test_a_list_is_shown_short():
    with pytest.raises(DTypeError, match="argument `x` is not a tensor") as error:
        ts.kernel(takes_tensor)[1,](list(range(10_000)))
    assert len(str(error.value)) < 600 and error.value.suggestion == "np.asarray(x, 'float32')"


def named_buffers(x):
    first, second = tile.alloc_shared((4,), ts.f32), tile.alloc_shared((4,), ts.f32)
    several = [tile.alloc_shared((4,), ts.f32), tile.alloc_shared((4,), ts.f32)]
    first[0:4] = 0.0
    several[1][0:4] = first[0:4]
    x[0:4] = {read}


@pytest.mark.parametrize(("read", "name"), [("second[0:4]", "second"), ("several[0][0:4]", "several")])
def test_shared_memory_has_the_name_of_its_variable(read, name, tmp_path):
    path = tmp_path / "buffers.py"
    source = inspect.getsource(named_buffers).replace("{read}", read)
    path.write_text(f"import tessera as ts\nfrom tessera import tile\n@ts.kernel\n{source}")
    spec = importlib.util.spec_from_file_location("buffers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with ts.debug.checked(), pytest.raises(TesseraError) as error:
        module.named_buffers[1,](np.zeros(4, "f4"))
    assert f"the shared memory `{name}`" in str(error.value)


def blocks_of(x, y, BLOCK: ts.constexpr = 4):
    i = tile.program_id(0) * BLOCK
    y[i : i + BLOCK] = x[i : i + BLOCK]


def stores_where(x, y):
    v = x[0:4]
    v[v > 0] = 0.0


def loads_an_artifact(x, y):
    y[0:4] = ts.load(x[0:4])


@pytest.mark.parametrize(
    ("body", "grid", "named", "suggestion"),
    [
        (blocks_of, None, {}, "choose the grid: without one a program runs for each element, blocks_of[(16,)](...)"),
        (blocks_of, (4,), {"num_warps": 8}, "blocks_of.with_schedule(ts.Schedule(warps=8))"),
        (stores_where, (1,), {}, "choose elements: A[...] = tile.where(condition, new, old)"),
        (loads_an_artifact, (1,), {}, "in a kernel, tile.load(place) reads memory"),
    ],
)
def test_launches_as_elsewhere(body, grid, named, suggestion):
    entry = ts.kernel(body)
    with pytest.raises(TesseraError) as error:
        (entry if grid is None else entry[grid])(np.zeros(16, "f4"), np.zeros(16, "f4"), **named)
    assert error.value.suggestion == suggestion

"""Neighbours of a thread: 16 bytes where accesses are aligned, else the threads of a warp access neighbours."""

import math

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.codegen.ptx.emission import GlobalAccess
from tessera.codegen.ptx.layout import make_blocked_layout
from tessera.codegen.ptx.ops import get_fact
from tessera.codegen.ptx.pipeline import list_passes
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.codegen.ptx.table.blocks.layout_conversion import pad_rows
from tessera.runtime import driver
from tessera.runtime.program import prepare


def widths(function, *inputs):
    """The vector width of each kernel of a function."""
    module = driver.lower(ts.jit(function).trace(*inputs).function, "ptx")["tile"]
    for each in list_passes("sm_90a"):
        module = each.run(module)
        if all("ptx.vector" in f.attrs for f in module.functions[1:]):
            break
    return [get_fact(f, "vector") for f in module.functions[1:]]


def softmax(x):
    return ts.softmax(x, axis=-1)


@pytest.mark.parametrize(
    ("columns", "dtype", "wanted"),
    [(512, "f4", 4), (515, "f4", 1), (512, "f2", 8), (515, "f2", 1), (514, "f2", 2), (514, "f4", 2), (513, "f8", 1)],
)
def test_rows_that_start_anywhere(columns, dtype, wanted):
    assert widths(softmax, np.zeros((40, columns), dtype)) == [wanted]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: x.T * 1.0, 1),
        (lambda x: ts.cumsum(x, axis=1), 4),
        (lambda x: ts.permute(ts.reshape(x, (40, 515, 1)), (0, 2, 1)) * 2.0, 1),
    ],
)
def test_scans_hold_neighbours_and_transposes_what_rows_allow(function, wanted):
    """A transposed block is exchanged where it is stored; a warp would write one element of each of 32 rows."""
    assert set(widths(function, np.zeros((40, 515), "f4"))) == {wanted}


def test_short_rows_weigh_shuffles():
    """Rows of 37 elements would be reduced across all lanes of a warp, eight of them in each thread."""
    assert widths(softmax, np.zeros((5000, 37), "f4"))[0] > 1 and widths(softmax, np.zeros((50, 8191), "f4")) == [1]


def test_two_blocks_of_a_sorting_network_share_a_multiprocessor():
    x = np.zeros((9999, 500), "f4")
    module = driver.lower(ts.jit(lambda x: ts.argsort(x, axis=-1)).trace(x).function, "ptx")["tile"]
    text = emit_artifact(get_backend("ptx"), module, {"arch": "sm_90a"}).text(TEXT_FILE)
    assert ".reqntid 256, 1, 1 .minnctapersm 2" in text


def test_costs_of_accesses():
    """Loads of aligned rows cost least in vectors; a store of parts of sectors costs each of them."""
    aligned, single = GlobalAccess(1, 4, 4, False), GlobalAccess(1, 4, 1, True)
    assert aligned.cost(4) < aligned.cost(1) and single.cost(1) < single.cost(2) < single.cost(4)
    assert GlobalAccess(1, 2, 8, True).cost(8) < GlobalAccess(1, 2, 1, True).cost(1)


@pytest.mark.parametrize("dtype", ["f4", "f2", ml_dtypes.bfloat16])
def test_results_of_odd_rows(dtype, rng):
    x = rng.normal(size=(3, 4099)).astype(dtype)
    lowered = driver.lower(ts.jit(softmax).trace(x).function, "ptx")
    (ours,) = driver.run_level(lowered, "target", [x], "ptx")
    wide = np.exp(x.astype("f8"))
    np.testing.assert_allclose(
        ours.astype("f8"), wide / wide.sum(-1, keepdims=True), rtol=1e-6 if dtype == "f4" else 1e-2
    )


def test_long_rows_are_cut_finer_where_there_are_many():
    whole = {"shares_rows": False}  # each row is the work of one program

    def tiles(rows):
        module = driver.lower(ts.jit(softmax).trace(np.zeros((rows, 40001), "f4")).function, "ptx", whole)["schedule"]
        return [n.attrs["schedule"]["tile"][1] for n in module.main.body.nodes if n.op.name == "schedule.kernel"]

    assert tiles(2000) == [8192] and tiles(200) == [32768] and tiles(300) == [16384]


@pytest.mark.parametrize(
    ("source", "to", "wanted"), [("i1", ts.f32, 4), ("f2", ts.f32, 4), ("f4", ts.bf16, 8), ("i1", ts.f64, 2)]
)
def test_what_a_thread_writes_at_once_lies_beside_what_its_neighbour_writes(source, to, wanted):
    assert widths(lambda x: ts.cast(x, to), np.zeros(1 << 16, source)) == [wanted]


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"), [(96, 64, "f4"), (75, 131, "f4"), (70, 66, "f2"), (130, 33, "f2")]
)
def test_transposed_blocks_are_stored_by_rows(rows, columns, dtype):
    """Neighbours of a warp lie side by side in loads and stores."""
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(dtype)
    f = ts.jit(lambda x: x.T, target="ptx")
    np.testing.assert_array_equal(f(x).numpy(), x.T)
    artifact = emit_artifact(get_backend("ptx"), driver.lower(f.trace(x).function, "ptx")["tile"], {})
    entry = artifact.manifest["plan"]["entries"]["k0_copy"]
    assert entry["shared"] > 32 * 32 * x.itemsize  # rows are padded against bank conflicts
    assert artifact.text(TEXT_FILE).count("bar.sync") == 1
    for place, width in (("ld.global", columns), ("st.global", rows)):
        vector = math.gcd(width, 16 // x.itemsize)
        count = 8 // vector if x.itemsize == 4 or vector < 8 else 1
        assert artifact.text(TEXT_FILE).count(place) == count


def test_permutations_of_short_axes_are_stored_by_rows():
    x = np.random.default_rng(0).standard_normal((5, 17, 6, 67)).astype("f4")
    f = ts.jit(lambda x: ts.permute(x, (3, 2, 1, 0)), target="ptx")
    np.testing.assert_array_equal(f(x).numpy(), x.transpose(3, 2, 1, 0))
    artifact = emit_artifact(get_backend("ptx"), driver.lower(f.trace(x).function, "ptx")["tile"], {})
    assert artifact.manifest["plan"]["entries"]["k0_copy"]["shared"]


def test_rows_of_shared_memory_are_not_exchanged_first():
    """A transposed block is stored there as it is: that costs as much as an exchange."""

    @ts.kernel
    def turn(x, out):
        block = tile.alloc_shared((64, 32), ts.f32)
        tile.store(block[0:64, 0:32], tile.transpose(tile.load(x[0:32, 0:64])))
        tile.barrier()
        tile.store(out[0:32], tile.load(block[5, 0:32]))

    x, out = np.arange(2048, dtype="f4").reshape(32, 64), np.zeros(32, "f4")
    program = prepare(turn, {"x": x, "out": out}, "ptx:sm_90a", (1,))
    generator = get_backend("ptx:sm_90a")
    artifact = generator.emit(program.levels["tile"], {})
    generator.sanitized(artifact)(program.arrays)
    np.testing.assert_array_equal(program.arrays[1], x[:, 5])
    assert artifact.text(TEXT_FILE).count("bar.sync") == 1


def test_rows_of_a_length_that_a_call_gives():
    f = ts.jit(lambda x: x.T, target="ptx", dynamic=True)
    for rows in (64, 75):
        x = np.random.default_rng(rows).standard_normal((rows, 66)).astype("f4")
        np.testing.assert_array_equal(f(x).numpy(), x.T)


@pytest.mark.parametrize("dtype", [ts.f64, ts.f32, ts.bf16], ids=str)
def test_padded_rows_begin_with_whole_elements(dtype):
    rows = make_blocked_layout((32, 8), 128, 2)
    strides = pad_rows(rows, make_blocked_layout((8, 32), 128, 1).permuted((1, 0)), dtype)
    assert strides is not None and strides[0] > 8 * strides[1] and strides[0] % strides[1] == 0

"""Blocks brought ahead of their programs: which loads are, and that programs in a loop over them are right."""

import numpy as np
import pytest
from ptxcheck import emit_checked

from tessera import tile
from tessera.codegen.ptx import BACKEND, emission, pipeline
from tessera.codegen.ptx.ops import PREFETCHING, get_fact, prefetched_load
from tessera.codegen.ptx.passes import persistent_prefetch
from tessera.codegen.ptx.passes.persistent_prefetch import plan_prefetch
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.types import bf16, f32
from tessera.frontend.kernel import kernel
from tessera.interp.tile import interpreter
from tessera.runtime.program import prepare


@kernel
def scaled(x, y, w, out, *, N: int, edge: str = "error"):
    """Rows of `x` by their sums, plus rows of `y` by weights that all rows share."""
    row = tile.program_id(0)
    values = tile.cast(tile.load(x[row, 0:N], edge=edge), f32)
    values = values * tile.sum(values, axis=-1) / N
    weights = tile.cast(tile.load(w[0:N]), f32)
    more = tile.cast(tile.load(y[row, 0:N]), f32)
    tile.store(out[row, 0:N], tile.cast(values + more * weights, out.dtype))


def given(dtype, rows, columns, **more):
    random = np.random.default_rng(0)
    shapes = {"x": (rows, columns), "y": (rows, columns), "w": (columns,)}
    found = {k: random.integers(-4, 5, s).astype(dtype.numpy) for k, s in shapes.items()}
    return {**found, "out": np.zeros((rows, columns), dtype.numpy), "N": columns, **more}


def prepared(dtype, rows, columns, **more):
    return prepare(scaled, given(dtype, rows, columns, **more), "ptx", (rows,)).levels["tile"]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(emission, "MIN_PREFETCHED_PROGRAMS", 1)


@pytest.mark.parametrize(
    ("dtype", "columns", "team"), [(bf16, 16384, 512), (bf16, 20000, 1024), (f32, 13000, 512), (bf16, 24576, 1024)]
)
def test_programs_find_what_they_load(monkeypatch, dtype, columns, team):
    monkeypatch.setattr(emission, "MIN_PREFETCHED_THREADS", team)
    arrays = [a for a in given(dtype, 17, columns).values() if isinstance(a, np.ndarray)]
    module = prepared(dtype, 17, columns)
    artifact, theirs = emit_checked(module, "sm_90a"), [a.copy() for a in arrays]
    (entry,) = artifact.manifest["plan"]["entries"].values()
    assert entry["programs"] == 17 and entry["threads"] == team and "cp.async.bulk" in artifact.text(TEXT_FILE)
    BACKEND.interpreter(artifact)(arrays)
    interpreter.run(module, theirs)
    np.testing.assert_array_equal(arrays[-1].astype(np.float64), theirs[-1].astype(np.float64))


def test_which_loads_are_brought_ahead(monkeypatch):
    function = prepared(bf16, 17, 16384).functions[1]
    found = plan_prefetch(function, (17,))
    same = [n.attrs["same"] for n in found.function.body.nodes if n.op is prefetched_load]
    assert same == [False, True, False] and found.stages == 2
    clipped = prepared(bf16, 17, 16384, edge="clip").functions[1]
    assert [n.op for n in plan_prefetch(clipped, (17,)).function.body.nodes].count(prefetched_load) == 3
    assert plan_prefetch(function, (18,)) is None  # a program reads outside
    monkeypatch.setattr(persistent_prefetch, "SHARED_BYTES", 1 << 17)
    monkeypatch.setattr(persistent_prefetch, "MIN_FITTING_PROGRAMS", 1)
    wide = plan_prefetch(prepared(bf16, 17, 24576).functions[1], (17,))  # the weights do not fit beside the rows
    assert [n.attrs["same"] for n in wide.function.body.nodes if n.op is prefetched_load] == [False, False]


@kernel
def shifted(x, out, *, N: int, first: int):
    row = tile.program_id(0)
    tile.store(out[row, 0:N], tile.load(x[row, first : first + N]) * 2.0)


@pytest.mark.parametrize(("columns", "first", "count"), [(2056, 4, 1), (2056, 1, 0), (2049, 0, 0)])
def test_a_bulk_copy_begins_at_a_multiple_of_16_bytes(columns, first, count):
    arrays = {"x": np.zeros((17, columns), np.float32), "out": np.zeros((17, 2048), np.float32)}
    function = prepare(shifted, {**arrays, "N": 2048, "first": first}, "ptx", (17,)).levels["tile"].functions[1]
    found = plan_prefetch(function, (17,))
    nodes = () if found is None else found.function.body.nodes
    assert [n.op for n in nodes].count(prefetched_load) == count


def select_kernel(module):
    for each in pipeline.list_passes("sm_90a"):
        module = each.run(module)
        if each.name == "kernel selection":
            return get_fact(module.functions[1], "kernel")


def test_what_is_too_small_or_too_large_is_loaded_as_it_was(monkeypatch):
    module = prepared(bf16, 17, 16384)
    monkeypatch.setattr(emission, "MIN_PREFETCHED_THREADS", 512)
    assert select_kernel(module) == PREFETCHING
    monkeypatch.setattr(emission, "MIN_PREFETCHED_PROGRAMS", 18)
    assert select_kernel(module) != PREFETCHING
    monkeypatch.setattr(emission, "MIN_PREFETCHED_PROGRAMS", 1)
    monkeypatch.setattr(emission, "MIN_PREFETCHED_THREADS", 1024)
    assert select_kernel(module) != PREFETCHING
    assert plan_prefetch(prepared(f32, 17, 16384).functions[1], (17,)) is None

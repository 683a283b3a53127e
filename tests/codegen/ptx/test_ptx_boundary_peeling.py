"""Boundary peeling: which kernels get a branch without bounds checks, and that both branches compute the same."""

import numpy as np
import pytest
from ptxcheck import emit_checked

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.pipeline import list_passes
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.interp.tile import interpreter
from tessera.ops.dialects import control_flow, tile
from tessera.runtime import driver

PROGRAMS = {
    "a chain": lambda x: ts.sin(x) * 2 + 1,
    "a cast": lambda x: ts.cast(x, ts.bf16),
    "a shifted read": lambda x: ts.roll(x, 5, axis=0) + 1,
    "a reversed read": lambda x: ts.flip(x, 0) * 2,
    "a choice": lambda x: ts.where(x > 0, x, x * 2),
}


def peel(function, x):
    """The tile module before and after the pass."""
    module = driver.lower(ts.jit(function).trace(x).function, "ptx")["tile"]
    for each in list_passes("sm_90a"):
        before, module = module, each.run(module)
        if each.name == "boundary peeling":
            return before, module
    raise AssertionError("no such pass")


def branches(module):
    return [n for f in module.functions[1:] for n in f.body.walk() if n.op is control_flow.if_]


@pytest.mark.parametrize("sizes", [(40003,), (333, 129), (17, 65, 33)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_within_memory_are_not_checked(name, sizes):
    x = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    before, after = peel(PROGRAMS[name], x)
    wanted = interpreter.run(before, [x])[0]
    np.testing.assert_array_equal(interpreter.run(after, [x])[0], wanted)
    for branch in branches(after):
        inside, outside = (
            [n.attrs["edge"] for n in r.nodes if n.op in (tile.load, tile.store)] for r in branch.regions
        )
        assert set(inside) == {"error"} and "clip" in outside
    artifact = emit_checked(driver.lower(ts.jit(PROGRAMS[name]).trace(x).function, "ptx")["tile"], "sm_90a")
    got = BACKEND.interpreter(artifact)([x])[0]
    np.testing.assert_allclose(np.asarray(got).astype("f4"), np.asarray(wanted).astype("f4"), rtol=1e-6, atol=1e-6)


def test_where_there_is_a_branch():
    chain = PROGRAMS["a chain"]
    assert len(branches(peel(chain, np.zeros(40003, np.float32))[1])) == 1
    assert not branches(peel(chain, np.zeros(1 << 16, np.float32))[1])  # no program reaches past the end
    assert not branches(peel(chain, np.zeros(1003, np.float32))[1])  # one program
    assert not branches(peel(lambda x: ts.sum(x, axis=1), np.zeros((1003, 77), np.float32))[1])  # threads exchange sums


def test_the_text_has_both_forms():
    x = np.zeros(700003, np.float16)  # of fewer elements a thread has one
    module = driver.lower(ts.jit(PROGRAMS["a chain"]).trace(x).function, "ptx")["tile"]
    text = emit_checked(module, "sm_90a").text(TEXT_FILE)
    loads = [line.split()[0] for line in text.splitlines() if "ld.global" in line]
    assert "ld.global.v4.b32" in loads and any(each.startswith("@") for each in loads)


WINDOWS = {
    "largest": lambda x: ts.max_pool2d(x[None], 3, 1, 1)[0],
    "mean": lambda x: ts.avg_pool2d(x[None], (3, 5), 1, (1, 2))[0],
    "dilated": lambda x: ts.max_pool2d(x[None], 3, 1, 1, dilation=2)[0],
    "padded": lambda x: ts.pad(x, ((0, 0), (2, 1), (3, 4)), 2.5) * 2,
    "shifted": lambda x: ts.roll(x, (3, -2), axis=(1, 2)) - x,
}


@pytest.mark.parametrize("sizes", [(5, 50, 37), (3, 65, 153), (9, 64, 64), (2, 129, 19)])
@pytest.mark.parametrize("name", WINDOWS)
def test_masks_that_hold_inside_are_left_out(name, sizes):
    x = np.random.default_rng(1).standard_normal(sizes).astype(np.float32)
    x[0, 0, 0], x[-1, -1, -1], x[1, 7, 5] = np.nan, np.inf, -np.inf
    before, after = peel(WINDOWS[name], x)
    wanted = interpreter.run(before, [x])[0]
    np.testing.assert_array_equal(interpreter.run(after, [x])[0], wanted)
    for branch in branches(after):
        inside, outside = ([n for n in r.nodes if n.op.__name__ == "where"] for r in branch.regions)
        assert not outside or len(inside) < len(outside)
    artifact = emit_checked(driver.lower(ts.jit(WINDOWS[name]).trace(x).function, "ptx")["tile"], "sm_90a")
    np.testing.assert_allclose(BACKEND.interpreter(artifact)([x])[0], wanted, rtol=1e-6, atol=1e-6)


def test_rows_beside_themselves_stay_checked_along_the_row():
    """A block of whole rows, read one element to the side, reaches past an end in every program."""
    _, after = peel(WINDOWS["largest"], np.zeros((3, 65, 120), np.float32))
    (branch,) = branches(after)
    edges = [n.attrs["edge"] for n in branch.regions[0].nodes if n.op is tile.load]
    assert edges.count("error") == 3 and edges.count("clip") == 6

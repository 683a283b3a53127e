"""Divergence analysis: which values differ between the tiles of a group."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.lower.passes.tail_duplication import DivergenceAnalysis
from tessera.ops.dialects import control_flow
from tessera.runtime.program import prepare


@ts.kernel
def summed(x, out):
    total = 0
    for _ in tile.range(0, 3):
        total = total + tile.local_id()
    out[tile.local_id()] = total


@ts.kernel
def begun(x, out):
    total = tile.local_id()
    for i in tile.range(0, 3):
        total = total + i
    out[tile.local_id()] = total


@ts.kernel
def counted(x, out):
    total = 0
    for _ in tile.range(0, tile.local_id()):
        total = total + 1
    out[tile.local_id()] = total


@ts.kernel
def alike(x, out):
    total = 0
    for i in tile.range(0, 3):
        total = total + i
    out[tile.local_id()] = total


@ts.kernel
def waited(x, out):
    total = 0
    while total < tile.local_id():
        total = total + 1
    out[tile.local_id()] = total


@ts.kernel
def chosen(x, out):
    total = 0
    if tile.local_id() > 2:
        total = 5
    out[tile.local_id()] = total


@ts.kernel
def waited_together(x, out):
    total = 0
    while total < x[0] + 3:
        total = total + 1
    out[tile.local_id()] = total


@ts.kernel
def beside(x, out):
    total, varying = 0, 0
    for _ in tile.range(0, 3):
        total, varying = total + 2, varying + tile.local_id()
    out[tile.local_id()] = total + 0 * varying


@pytest.mark.parametrize(
    ("kernel", "differs"),
    [
        (summed, True),
        (begun, True),
        (counted, True),
        (alike, False),
        (waited, True),
        (chosen, True),
        (waited_together, False),
        (beside, False),
    ],
)
def test_what_a_region_gives(kernel, differs):
    program = prepare(kernel, (np.zeros(4, np.int32), np.zeros(4, np.int32)), grid=(1,), group=4)
    (body,) = [f.body for f in program.levels["tile"].functions[1:]]
    found = DivergenceAnalysis(set())
    found.walk(body)
    (node,) = [n for n in body.nodes if n.op in (control_flow.for_, control_flow.while_, control_flow.if_)]
    assert (node.results[0] in found.values) == differs
    out = np.zeros(4, np.int32)
    kernel[(1,), 4](np.zeros(4, np.int32), out)
    want = {"summed": [0, 3, 6, 9], "begun": [3, 4, 5, 6], "counted": [0, 1, 2, 3], "alike": [3] * 4,
            "waited": [0, 1, 2, 3], "chosen": [0, 0, 0, 5], "waited_together": [3] * 4, "beside": [6] * 4}  # fmt: skip
    assert out.tolist() == want[kernel.__name__]


@ts.kernel
def met(out, each: ts.constexpr):
    me, done = tile.local_id(), tile.mbarrier(1, 4)
    tile.barrier()
    done[0].arrive()
    done[me if each else 0].wait(0)
    out[me] = me


@pytest.mark.parametrize("each", [False, True])
def test_only_a_wait_for_another_phase_is_uneven(each):
    program = prepare(met, {"out": np.zeros(4, np.int32), "each": each}, grid=(1,), group=4)
    (body,) = [f.body for f in program.levels["tile"].functions[1:]]
    found = DivergenceAnalysis(set())
    found.walk(body)
    assert found.uneven == each

"""Launches in random programs: each kernel does what its NumPy twin does, in a batch and under derivatives too."""

from random import Random

import numpy as np
import pytest

from tessera.runtime.program import prepare
from tessera.tools.fuzz import variants
from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.derivative_relations import compare_derivatives
from tessera.tools.fuzz.graph_programs import make_program
from tessera.tools.fuzz.launch_statements import KERNELS, list_kernel_sources
from tessera.tools.fuzz.programs import Input, RandomProgram


def totals(x):
    parts = [x[:, :4], np.pad(x[:, 4:], ((0, 0), (0, 1)))]
    return (parts[0] * 0.5 + parts[1]).sum(1)


def fold(x):
    found = np.empty_like(x)
    found[:, np.arange(x.shape[1]).reshape(2, -1).T.ravel()] = x - 1.0
    return found


# For each kernel the statement, and its results in NumPy.
LAUNCHES = {
    "squared_blocks": ("(2, 2), x, ts.like(x), BM=4, BN=4", lambda x: x * x - x),
    "turned_blocks": ("(1, 4, 3), x, ts.like(shape=(7, 5), dtype=ts.f32), BM=2, BN=2", lambda x: x.T),
    "row_totals": ("(5,), x, ts.like(shape=(5,), dtype=ts.f32), COUNT=2, BN=4", totals),
    "dot_blocks": (
        "(3, 2), x, ts.permute(x, (1, 0)), ts.like(shape=(5, 5), dtype=ts.f32), COUNT=2, BM=2, BN=3",
        lambda x: x @ x.T,
    ),
    "copied_rows": ("(5,), x, ts.like(x), COLUMNS=7", lambda x: x * x),
    "parted": ("(2,), x, ts.like(x), ts.like(x), BM=4, COLUMNS=7", lambda x: np.minimum(x, 0.5)),
    "stored_twice": (
        "(5,), x, ts.like(x), COLUMNS=7",
        lambda x: np.where(np.arange(7) % 2 == 0, x - 1.0, x * np.float32(0.5)),
    ),  # fmt: skip
    "placed_rows": ("(5,), x, ts.flip(ts.arange(5), 0), ts.like(x), COLUMNS=7", lambda x: x[::-1] * 0.5),
    "folded_rows": ("(5,), x[:, :6], ts.like(shape=(5, 6), dtype=ts.f32), COLUMNS=6", lambda x: fold(x[:, :6])),
    "met_rows": ("(5,), x, ts.like(shape=(5,), dtype=ts.f32), ts.like(x), COLUMNS=7", lambda x: x + x[0].sum() * 0.25),
    "shared_edges": ("(5, 2), x, ts.like(x), BN=4", lambda x: x + np.pad(x, ((0, 0), (1, 0)))[:, :-1]),
}


SECOND = {"parted": "[0]", "met_rows": "[1]"}  # which of two results


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    statement, twin = LAUNCHES[name]
    text = f"    return ts.launch({name}, {statement}){SECOND.get(name, '')}\n"
    source = f"{list_kernel_sources(text)}def program(x):\n{text}"
    program = RandomProgram(source, (Input("x", (5, 7), "f32", "uniform", 3),))
    (x,) = program.arguments().values()
    found = [prepare(program.load(), program.arguments()).run("tile"), variants._run_batch(program)]
    if name not in ("copied_rows", "met_rows"):  # copies, and what others wrote, have no derivative
        found.append(compare_derivatives("forward mode", program, Random(0)))
    for (result,) in found:
        np.testing.assert_allclose(result, twin(x), rtol=1e-5, atol=1e-6)


def test_launches_are_drawn():
    drawn = [make_program(Choices((), Random(seed))) for seed in range(60)]
    assert sum("ts.launch" in p.source for p in drawn) >= 5
    assert all(p.source.startswith(("@ts.kernel", "def program")) for p in drawn)


def test_a_launch_whose_programs_meet_beside_others():
    text = (
        "    v0 = ts.launch(met_rows, (5,), x, ts.like(shape=(5,), dtype=ts.f32), ts.like(x), COLUMNS=7)[1]\n"
        "    return ts.launch(shared_edges, (5, 2), v0, ts.like(v0), BN=4)\n"
    )
    source = f"{list_kernel_sources(text)}def program(x):\n{text}"
    program = RandomProgram(source, (Input("x", (5, 7), "f32", "uniform", 3),))
    (x,) = program.arguments().values()
    (found,) = prepare(program.load(), program.arguments(), "llvm").run("device", "llvm")
    met = LAUNCHES["met_rows"][1](x)
    np.testing.assert_allclose(found, LAUNCHES["shared_edges"][1](met), rtol=1e-5)

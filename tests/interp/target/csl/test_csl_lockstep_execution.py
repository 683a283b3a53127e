"""Lockstep and sequential execution agree: values, cycles, traffic, order, faults."""

import operator

import numpy as np
import pytest
from csl_random_programs import DATA, PIECES, bodies, compiled, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.core.errors import TesseraError
from tessera.interp.target.csl.pe import lockstep_execution, task_trace


@pytest.fixture(autouse=True, scope="module")
def small_grids():
    """Enable lockstep execution on small grids."""
    before, lockstep_execution.MIN_PES = lockstep_execution.MIN_PES, 2
    yield
    lockstep_execution.MIN_PES = before


def agree(folder, body, arch="wse3", seed=None, turns=3):
    layout = compiled(folder, body, arch)
    run, found = outcome(layout, seed, True, turns)
    assert found == outcome(layout, seed, False, turns)[1]
    return run


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(body=bodies(), arch=st.sampled_from(["wse2", "wse3"]), seed=st.sampled_from([None, 1, 2]))
def test_random_programs_agree(body, arch, seed, tmp_path):
    agree(tmp_path, body, arch, seed)


@pytest.mark.parametrize("piece", PIECES)
def test_each_statement_agrees(piece, tmp_path):
    text = piece.format(i=1, n=3, f="0.75")
    agree(tmp_path, "\n".join(["@fmacs(da, da, db, 0.5);"] * 6 + [text] * 2))


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize("seed", [None, 3])
def test_data_tasks_agree(arch, seed, tmp_path):
    layout = compiled(tmp_path, "", arch, DATA)
    run, found = outcome(layout, seed, True)
    assert found == outcome(layout, seed, False)[1]
    assert sum(h.reused for c in run.lockstep_groups.values() for n, h in c.histories.items() if "take" in n) == 8 * 9


def steps(run) -> list[lockstep_execution.TaskHistory]:
    """The histories of the computing task in each program."""
    return [h for cohort in run.lockstep_groups.values() for name, h in cohort.histories.items() if "step" in name]


def test_records_are_used(tmp_path):
    run = agree(tmp_path, "for (@range(i16, 8)) |i| { a[i] = a[i] * 0.5 + b[7 - i]; }")
    assert [h.reused for h in steps(run)] == [9] * 4  # three PEs of each column, three iterations


def test_pes_diverge_where_their_variables_differ(tmp_path):
    run = agree(tmp_path, "@fadds(da, da, db);" * 6 + "if (turn == mine) { @fmuls(da, da, 2.0); }")
    assert max(h.recorded for h in steps(run)) >= 3 and all(h.reused == 9 for h in steps(run))


def test_control_flow_that_depends_on_memory_runs_on_the_pe(tmp_path):
    run = agree(tmp_path, "@fadds(da, da, db);" * 6 + "if (a[0] > 2.0) { a[1] = 7.0; }", turns=4)
    assert all(h.failed and not h.reused for h in steps(run))


@pytest.mark.parametrize(
    ("end", "message"),
    [("a[@as(u16, mine * 4)] = 1.0;", "out of bounds"), ("turns = @as(i16, 9 / @as(u16, mine));", "division by zero")],
)
def test_a_fault_is_the_same(end, message, tmp_path):
    body = "@fadds(da, da, db);" * 6 + end
    layout = compiled(tmp_path, body, "wse3")
    words = []
    for way in (True, False):
        with pytest.raises(TesseraError) as caught:
            outcome(layout, None, way)
        words.append((str(caught.value), caught.value.location))
    assert words[0] == words[1] and message in words[0][0]


def test_aliased_operands_execute_serially():
    from tessera.interp.target.csl.pe.dsd_operations import _same_memory

    rows = np.zeros((2, 4), np.float32)
    assert _same_memory(rows[0].view(np.uint32), rows[0]) and not _same_memory(rows[0], rows[1])


def test_what_64_bits_hold():
    numbers = np.arange(3)
    for shift in (operator.lshift, operator.rshift):
        assert task_trace.fits_64_bits(shift, (numbers, 31))
        assert not any(task_trace.fits_64_bits(shift, (numbers, n)) for n in (-1, 32, numbers))
    assert task_trace.fits_64_bits(operator.add, (numbers, numbers))

"""Faults of random kernels: debug mode reports each kind, and a debug mode that is blind to one is a failure."""

from contextlib import nullcontext
from random import Random

import pytest

from tessera.tools.fuzz import oracle
from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.kernel_programs import _list_group_faults, make_kernel
from tessera.tools.fuzz.programs import PlantedFault, RandomProgram


def list_faults():
    """The first kernel with each kind of fault."""
    found = {}
    for seed in range(80):
        program = make_kernel(Choices((), Random(seed)))
        for fault in program.faults:
            found.setdefault(fault.what, (program, fault))
    return found


FAULTS = list_faults()


def test_kinds():
    assert set(FAULTS) == {
        "a store past the end", "a store without its limit", "an assertion", "memory that is not written",
        "no barrier between a write and a read",
    }  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_found(what):
    verdict = oracle.Verdict()
    oracle._look_for_fault(verdict, *FAULTS[what], ("ptx",))
    assert not verdict.failures
    assert verdict.outcomes == {"faults found by debug mode": 1, "faults found by ptx sanitized": 1}


def test_blindness_is_a_failure(monkeypatch):
    monkeypatch.setattr(oracle, "checked", lambda collect: nullcontext(()))
    verdict = oracle.Verdict()
    oracle._look_for_fault(verdict, *FAULTS["no barrier between a write and a read"], ())
    assert verdict.failures[0].detail.startswith("does not find no barrier between a write and a read")
    oracle._look_for_fault(verdict, *FAULTS["a store past the end"], ())  # the interpreter alone refuses it
    assert verdict.failures[1].detail.startswith("AssertionError: debug mode did not report: index")


LOOP = ["for turn in tile.range(0, 2):", "    shared[0, me] = value", "    tile.barrier()",
        "    other = shared[0, (me + 1) % N]", "    value = value + other", "    tile.barrier()"]  # fmt: skip
PLAIN = [line.strip() for line in LOOP[1:]]


def test_faults_are_whole_lines_of_the_first_exchange():
    assert [f.what for f in _list_group_faults(["value = x[me]", *LOOP, *PLAIN], 8)] == ["a store past the end"]
    lines = ["value = x[me]", *PLAIN, *LOOP]
    _, write, barrier = _list_group_faults(lines, 8)
    source = "".join(f"    {line}\n" for line in lines)
    kernel = RandomProgram(source, (), (1,))
    assert kernel.break_by(write).source == source.replace("    shared[0, me] = value\n", "", 1)
    assert kernel.break_by(barrier).source == source.replace("    tile.barrier()\n", "", 1)


def test_a_fault_that_cannot_be_run_is_a_failure():
    program, _ = FAULTS["a store past the end"]
    verdict = oracle.Verdict()
    oracle._look_for_fault(verdict, program, PlantedFault("text", "@ts.kernel", "    @ts.kernel"), ())
    assert verdict.failures[0].key == "debug mode: IndentationError: unexpected indent (, line )"

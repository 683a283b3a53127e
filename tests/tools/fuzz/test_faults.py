"""Faults of random kernels: debug mode reports each kind, and a debug mode that is blind to one is a failure."""

from random import Random

import pytest

from tessera.tools.fuzz import oracle
from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.kernel_programs import make_kernel


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
        "a store past the end", "a store without its limit", "memory that is not written",
        "no barrier between a write and a read",
    }  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_found(what):
    verdict = oracle.Verdict()
    oracle._look_for_fault(verdict, *FAULTS[what], ("ptx",))
    assert not verdict.failures
    assert verdict.outcomes == {"faults found by debug mode": 1, "faults found by ptx sanitized": 1}


def test_blindness_is_a_failure(monkeypatch):
    monkeypatch.setattr(oracle, "_run_checked", lambda prepared: None)
    verdict = oracle.Verdict()
    oracle._look_for_fault(verdict, *FAULTS["no barrier between a write and a read"], ())
    assert verdict.failures[0].detail.startswith("does not find no barrier between a write and a read")

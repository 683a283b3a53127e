"""Random Graph programs: every kind of statement is drawn, on values that fit, and no used value is returned."""

import re
from random import Random

import pytest

from tessera.tools.fuzz import graph_programs
from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.graph_programs import make_program


@pytest.fixture(scope="module")
def programs():
    return [make_program(Choices((), Random(seed))) for seed in range(600)]


# One op of each rule, in the order of the rules.
OPS = (
    "exp add less remainder shift_left where logical_not cast accum sum cumsum softmax reshape pad matmul take scan "
    "grad"
).split()


@pytest.mark.parametrize("op", OPS)
def test_each_kind_of_statement_is_drawn(op, programs):
    assert any(f"ts.{op}(" in program.source for program in programs)


def test_the_list_of_ops_has_one_of_each_rule():
    assert len(OPS) + 1 == len(set(graph_programs.RULES))  # a slice is no call


def test_only_values_that_no_statement_uses_are_returned(programs):
    for program in programs:
        lines = program.source.splitlines()
        returned = lines[-1].partition("return ")[2].split(", ")
        used = set(re.findall(r"\b[vx]\d+\b", " ".join(line.partition(" = ")[2] for line in lines[1:-1])))
        assert len(returned) == 1 or not used & set(returned), program.source

"""Random Graph programs: every kind of statement is drawn, on values that fit, and no used value is returned."""

import re
from random import Random

import pytest

import tessera as ts
from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.graph_programs import STATEMENTS, make_program
from tessera.tools.fuzz.graph_statements import FLOAT_UNARY
from tessera.tools.fuzz.value_pool import RULES


@pytest.fixture(scope="module")
def programs():
    return [make_program(Choices((), Random(seed))) for seed in range(900)]


# A text of each rule, in the order of the rules.
TEXTS = (
    "ts.exp( ts.add( ts.less( ts.remainder( ts.shift_left( ts.where( ts.logical_not( ts.cast( ts.accum( ts.sum( "
    "ts.cumsum( ts.softmax( [::-1 ts.reshape( ts.pad( ts.matmul( ts.take( [[-1, .at[ ts.embedding( ts.topk( ts.unbind( "
    "ts.masked_fill( ts.einsum( ts.conv1d( ts.max_pool1d( ts.layer_norm( ts.scaled_dot_product_attention( ts.cbrt( "
    "ts.bitcast( ts.scan( ts.grad( ts.value_and_grad( ts.fold( "
    "ts.launch("
).split()


@pytest.mark.parametrize("text", TEXTS)
def test_each_kind_of_statement_is_drawn(text, programs):
    assert any(text in program.source for program in programs)


def test_the_list_of_texts_has_one_of_each_rule():
    assert len(TEXTS) == len(set(RULES)) and len(STATEMENTS) == 5


def test_an_op_that_fails_without_a_typed_error_stays_in_the_program(monkeypatch):
    def fail(*_):
        raise KeyError("uint4")

    for name in FLOAT_UNARY:
        monkeypatch.setattr(ts, name, fail)
    sources = [make_program(Choices((), Random(seed))).source for seed in range(30)]
    ends = [s.splitlines()[-2] for s in sources if any(f"= ts.{name}(" in s for name in FLOAT_UNARY)]
    assert ends and all(re.fullmatch(r" +v\d+ = ts.\w+\(.*\)", end) for end in ends)


def test_only_values_that_no_statement_uses_are_returned(programs):
    for program in programs:
        lines = program.source.splitlines()
        returned = lines[-1].partition("return ")[2].split(", ")
        used = set(re.findall(r"\b[vx]\d+\b", " ".join(line.partition(" = ")[2] for line in lines[1:-1])))
        assert len(returned) == 1 or not used & set(returned), program.source

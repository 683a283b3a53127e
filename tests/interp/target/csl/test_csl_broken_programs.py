"""Broken programs end in a typed error: no Python error of the simulator reaches a user, and every run ends."""

import random

import pytest
from csl_mutations import attack, mutate, programs

from tessera.core.errors import TesseraError
from tessera.interp.target.csl.compiler import compile_program

GET_PARAMS = 'const m = @import_module("<memcpy/get_params>", .{ .width = %s, .height = 1 });\n'
GET_COLORS = 'const m = @import_module("<collectives_2d/params>");\n'
# Found by mutation: the layout's text, and a part of the message.
BROKEN = (
    ("@set_tile_code(0, 0, undefined);", "", "expected type 'comptime_string', got: 'undefined'"),
    ("const v = @import_comptime_value(i16, undefined);", "", "expected type 'comptime_string', got: 'undefined'"),
    ("const p = m.get_params(color);", GET_PARAMS % 1, "'get_params' does not accept these arguments"),
    ("const p = m.get_params(0);", GET_PARAMS % "undefined", "'<memcpy/get_params>' does not accept"),
    ("const p = m.get_params(0, 0, undefined);", GET_COLORS, "'get_params' does not accept these arguments"),
    ("const p = m.get_params(0, 0, .{ .x_colors = undefined });", GET_COLORS, "'get_params' does not accept"),
)


@pytest.mark.parametrize(("statement", "head", "message"), BROKEN)
def test_libraries_and_files_refuse_values_of_other_kinds(statement, head, message, tmp_path):
    (tmp_path / "layout.csl").write_text(head + "layout { @set_rectangle(1, 1); " + statement + " }")
    with pytest.raises(TesseraError) as caught:
        compile_program(tmp_path / "layout.csl")
    assert message in str(caught.value) and "internal" not in str(caught.value)
    assert caught.value.location.line


def test_mutants_end_in_typed_errors():
    assert not list(attack(150, seed=7))


def test_most_programs_run_and_most_mutants_differ():
    known, dice = list(programs()), random.Random(0)
    changed = sum(mutate(files["layout.csl"], dice) != files["layout.csl"] for _, files in known)
    assert len(known) > 100 and changed > len(known) * 0.8

"""Expressions and statements of CSL programs on one PE."""

import ast

import numpy as np
import pytest
from csl_harness import build, make_pe, run, sections

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.sema.values import ComptimeValue, make_hashable
from tessera.interp.target.csl.text.diagnostics import CslFault


@pytest.mark.parametrize(("title", "text"), sections("lang_values.csl"))
def test_value(title, text, tmp_path):
    want = ast.literal_eval(text.split("//= ", 1)[1].split("\n", 1)[0])
    pe = run(tmp_path, text)
    np.testing.assert_array_equal(pe.get_variable("out").reshape(-1), np.ravel(want))


def test_launch_arguments_take_their_types(tmp_path):
    text = "export var out: [2]f32; export fn main(a: f32, b: i16) void { out[0] = a; out[1] = @as(f32, b); }"
    assert run(tmp_path, text, "main", 1.5, 65535).get_variable("out").tolist() == [1.5, -1.0]


def test_modules_are_copies(tmp_path):
    (tmp_path / "counter.csl").write_text("param step: i16; var n: i16 = 0; fn next() i16 { n += step; return n; }")
    text = """const a = @import_module("counter.csl", .{ .step = 1 });
      const b = @import_module("counter.csl", .{ .step = 10 });
      export var out: [3]i16;
      export fn main() void { out[0] = a.next(); out[1] = a.next(); out[2] = b.next(); }"""
    assert run(tmp_path, text).get_variable("out").tolist() == [1, 2, 10]


def test_coordinates_in_a_comptime_block_give_each_pe_its_program(tmp_path):
    text = """const where = @import_module("<layout>");
      export var out: u16;
      export fn main() void { out = where.get_x_coord(); }
      comptime { @comptime_assert(where.get_x_coord() < 1); }"""
    assert run(tmp_path, text).program.unit.uses_coordinates


def test_pes_share_a_program_unless_it_reads_a_param_that_differs(tmp_path):
    """What is read by no statement, or only by a function that nothing calls and nothing checks, differs freely."""
    layout = """layout { @set_rectangle(3, 1); for (@range(i16, 3)) |x| {
      @set_tile_code(x, 0, "pe.csl", .{ .column = x, .parity = x % 2 }); } }"""
    (tmp_path / "layout.csl").write_text(layout)
    for value, groups in (("7", [0, 0, 0]), ("parity", [0, 1, 0]), ("column", [0, 1, 2])):
        text = "param column: i16; param parity: i16; const late = column; var out: i16 = VALUE;"
        (tmp_path / "pe.csl").write_text(text.replace("VALUE", value) + "fn main() void { out += 1; }")
        placed = compile_program(tmp_path / "layout.csl").tiles
        programs = [placed[x, 0].program for x in range(3)]
        assert [programs.index(p) for p in programs] == groups


def test_types_are_values_in_sdk_2_10(tmp_path):
    text = "export var out: i16; export fn main() void { if (i16 == @type_of(out)) { out = 1; } }"
    assert run(tmp_path, text, sdk="2.10").get_variable("out") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("var a: [4]i16; export fn main(i: i16) void { a[i - 5] = 1; }", "index -1 is out of bounds"),
        ("var a: [4]i16; export fn main(i: i16) void { a[i] = 1; }", "out of bounds"),
        ("var a: [2, 3]i16; export fn main(i: i16) void { a[1, i] = 1; }", "out of bounds for dimension of length 3"),
        ("export var a: i16; export fn main(i: i16) void { a = 1 / (i - 4); }", "division by zero"),
        ("export fn main(i: i16) void { @assert(i == 3); }", "assertion failed"),
        ("export fn main(i: i16) void { @activate(@get_local_task_id(9)); }", "no task is bound to it"),
        ("var p: [*]i16; export fn main(i: i16) void { p[i] = 1; }", "uninitialized pointer"),
    ],
)
def test_faults_have_a_location(text, message, tmp_path):
    with pytest.raises(CslFault) as caught:
        run(tmp_path, text, "main", 4)
    assert message in caught.value.message and caught.value.message.startswith("PE (0, 0): ")
    assert caught.value.location.line == 1


def test_memory_is_accounted(tmp_path):
    pe = make_pe(build(tmp_path, "export var a: [100]f32; export var b: [3]u16; var unused: [50]f32;"))
    assert pe.memory_used == 400 + 6


def test_cycles_are_counted(tmp_path):
    text = "export var out: [64]f32; export fn main(n: i16) void { for (@range(i16, n)) |i| { out[i] = 1.0; } }"
    short, long = (run(tmp_path, text, "main", n).clock for n in (8, 64))
    assert (long - short) / 56 == pytest.approx(10, abs=5)


def test_imported_json(tmp_path):
    (tmp_path / "table.json").write_text("[1, 2, 3]")
    (tmp_path / "settings.json").write_text('{"n:i16": 4, "on:bool": true, "xs:[2]f32": [0.5, 2]}')
    text = """const a = @import_comptime_value([3]u16, "table.json");
      const s = @import_comptime_value(comptime_struct, "settings.json");
      export var out: [3]f32;
      export fn main() void { out[0] = @as(f32, a[2]); out[1] = @as(f32, s.n); if (s.on) { out[2] = s.xs[0]; } }"""
    assert run(tmp_path, text).get_variable("out").tolist() == [3, 4, 0.5]


SPANS = """
var cells = @zeros([8]i16); var wide = @zeros([8]i16); export var low: i16 = 0;
export fn main() void {
  for (@range(i16, 2, 8, 1)) |i| { cells[i - 2] = cells[i - 1] + i * 9000; }
  for (@range(i16, 7, -1, -1)) |i| { wide[i] = @as(i16, @as(i8, i * 20)) / (i + 1) - i % 3; }
}
export fn below() void { for (@range(i16, 3)) |i| { low = cells[i - 1]; } }
"""


def test_integers_of_loops_with_known_bounds_wrap_and_are_checked(tmp_path):
    """Interval analysis leaves out what cannot happen, and nothing else."""
    pe = run(tmp_path, SPANS)
    i = np.arange(2, 8, dtype=np.int16)
    assert pe.get_variable("cells").tolist() == [*(i * np.int16(9000)).tolist(), 0, 0]  # they wrap
    narrow = (np.arange(8) * 20).astype(np.int8)
    assert pe.get_variable("wide").tolist() == [int(n / (k + 1)) - k % 3 for k, n in enumerate(narrow.tolist())]
    text = pe.program.source
    assert "below(" in text.split("def f_below")[1] and "below(" not in text.split("def f_below")[0]
    with pytest.raises(CslFault, match="index -1 is out of bounds"):
        run(tmp_path, SPANS, "below")


def test_equal_comptime_values_have_equal_keys():
    """Of arrays and of structs with arrays, which have no hash of their own."""
    array, struct = (lambda n: ComptimeValue("[2]i16", np.array([1, n], "i2"))), (lambda n: {"a": array(n), "b": 3})
    for make in (array, struct, lambda n: ComptimeValue("struct", struct(n))):
        one, same, other = (make_hashable(make(n)) for n in (2, 2, 5))
        assert one == same != other and hash(one) == hash(same)

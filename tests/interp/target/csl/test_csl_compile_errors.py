"""Compile errors of CSL programs, with their line and message."""

import pytest
from csl_harness import ERRORS, build, cases, outcome

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.sema import compilation_unit
from tessera.interp.target.csl.text.diagnostics import CslError

COLOR = "@set_color_config(0, 0, @get_color(1), .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ EAST } } });"


@pytest.mark.parametrize(("name", "title"), cases(*(name for name in ERRORS if name.startswith("lang_errors"))))
def test_compile_error(name, title):
    error, line, message = outcome(name, title)
    assert isinstance(error, CslError) and message in error.message
    assert error.location.line == line and error.location.column > 0
    assert error.location.file.endswith("layout.csl" if "layout" in name else "pe.csl")


@pytest.mark.parametrize(
    ("text", "message", "options"),
    [
        ("const a = @get_local_task_id(7);", "invalid local_task_id 7: must be between 8 and 30", {"arch": "wse3"}),
        ("const a = @get_local_task_id(31);", "invalid local_task_id 31", {"arch": "wse2"}),
        ("const a = @get_ut_id(1);", "'@get_ut_id' is not supported on wse2", {"arch": "wse2"}),
        ("const a = @get_data_task_id(@get_color(1));", "expected type 'input_queue', got: 'color'", {"arch": "wse3"}),
        ("const a = @concat_structs(.{}, .{});", "invalid builtin function: '@concat_structs'", {"sdk": "2.10"}),
        ("param a: comptime_struct = .{};", "use of undeclared identifier 'comptime_struct'", {"sdk": "2.10"}),
        ("const a = i16 == u16;", "invalid operands to binary operator '=='", {"sdk": "1.4"}),
    ],
)
def test_compile_error_of_a_version(text, message, options, tmp_path):
    with pytest.raises(CslError) as caught:
        build(tmp_path, f"{text}\nexport fn main() void {{ _ = a; }}\n", **options)
    assert message in caught.value.message and caught.value.location.line == 1


def test_switches_on_wse3_colors(tmp_path):
    text = (
        "comptime { @set_local_color_config(@get_color(10), .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ EAST } },"
        " .switches = .{ .pos1 = .{ .tx = WEST } } }); }"
    )
    build(tmp_path, text, arch="wse2")
    with pytest.raises(CslError, match="color 10 does not support switches on wse3"):
        build(tmp_path, text, arch="wse3")


def test_error_shows_the_line(tmp_path):
    with pytest.raises(CslError) as caught:
        build(tmp_path, "export fn main() void {\n  var x: u16 = y;\n}\n")
    assert "pe.csl:2:16" in str(caught.value) and "^" in str(caught.value)


@pytest.mark.parametrize("loop", ["while (true) {}", "for (@range(i32, 1 << 30)) |i| {}"])
def test_a_loop_at_comptime_ends(tmp_path, monkeypatch, loop):
    monkeypatch.setattr(compilation_unit, "MAX_COMPTIME_ITERATIONS", 1000)
    with pytest.raises(CslError, match="the loops at comptime exceed 1,000 iterations"):
        build(tmp_path, f"comptime {{ {loop} }}")


LAYOUT = 'layout {{ @set_rectangle(1, 1); @set_tile_code(0, 0, "{}"); }}'
SECRETS = [
    ('const m = @import_module("{}/secret.csl");', "unable to find module"),
    ('const m = @import_comptime_value(i32, "{}/secret.json");', "unable to find file"),
    ('const m = @import_module("../secret.csl");', "unable to find module"),
    ('const m = @import_module("linked.csl");', "unable to find module"),
]


@pytest.mark.parametrize(("text", "message"), SECRETS)
def test_a_confined_program_reads_its_own_folder_alone(tmp_path, text, message):
    """A program of an artifact; one that a user compiles may import what the user may read."""
    (tmp_path / "secret.csl").write_text("const x = 1;")
    (tmp_path / "secret.json").write_text("1")
    (folder := tmp_path / "in").mkdir()
    (folder / "linked.csl").symlink_to(tmp_path / "secret.csl")
    (folder / "pe.csl").write_text(text.format(tmp_path) + "comptime { _ = m; }")
    (folder / "layout.csl").write_text(LAYOUT.format("pe.csl"))
    compile_program(folder / "layout.csl")
    with pytest.raises(CslError, match=message):
        compile_program(folder / "layout.csl", confined=True)

"""What the CSL compiler refuses, at which line, in which words."""

import pytest
from csl_lang import build, expected, sections

from tessera.errors import ParseError
from tessera.interp.target.csl.faults import CslError
from tessera.interp.target.csl.layout import compile_program

NAMES = '@export_name("floats", [*]f32, true);'


ONE = '@set_rectangle(1, 1); @set_tile_code(0, 0, "pe.csl");'
COLOR = "@set_color_config(0, 0, @get_color(1), .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ EAST } } });"
FILES = [f"lang_errors{part}.csl" for part in ("", "_values", "_dsd", "_program")]


@pytest.mark.parametrize(("title", "text"), [section for name in FILES for section in sections(name)])
def test_refused(title, text, tmp_path):
    line, message = expected(text)
    with pytest.raises(CslError) as caught:
        build(tmp_path, text, NAMES, arch="wse3" if "wse3" in title else "wse2")
    assert message in caught.value.message
    assert caught.value.location.line == line and caught.value.location.column > 0
    assert caught.value.location.file.endswith("pe.csl")


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
def test_refused_by_version(text, message, options, tmp_path):
    with pytest.raises(CslError) as caught:
        build(tmp_path, f"{text}\nexport fn main() void {{ _ = a; }}\n", **options)
    assert message in caught.value.message and caught.value.location.line == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('layout { @set_rectangle(2, 1); @set_tile_code(2, 0, "pe.csl"); }', "outside of the 2 x 1 rectangle"),
        ("layout { @set_rectangle(1, 1); @set_rectangle(1, 1); }", "has already been called"),
        ("layout { @set_rectangle(9, 9); }", "does not fit into a fabric of (8, 3)"),
        ('layout { @set_rectangle(1, 1); @set_tile_code(0, 0, "no.csl"); }', "unable to find file 'no.csl'"),
        ('layout { @set_rectangle(1, 1); @export_name("a", f32, true); }', "must have pointer or function type"),
        ('layout { @set_tile_code(0, 0, "pe.csl"); }', "only valid after '@set_rectangle'"),
        ("const a = 1;", "the layout never calls '@set_rectangle'"),
        ("layout { @set_rectangle(0, 1); }", "rectangle of 0 x 1 PEs is empty"),
        ("const r = @get_rectangle(); layout { @set_rectangle(r.width, 1); }", "only valid after '@set_rectangle'"),
        (f'layout {{ {ONE} @set_tile_code(0, 0, "pe.csl"); }}', "code for PE (0, 0) has already been set"),
        ('layout { @set_rectangle(1, 1); @set_tile_code(0, 0, "pe.csl", 4); }', "got: 'comptime_int'"),
        (f"layout {{ {ONE} {COLOR} {COLOR} }}", "config for this color has already been set"),
        (f"layout {{ {ONE} {NAMES} {NAMES} }}", "name 'floats' has already been declared"),
        ('layout { @set_rectangle(1, 1); @export_name("a", [*]f32); }', "of pointer type needs a mutability"),
        (
            "layout { @set_rectangle(1, 1); @set_color_config(0, 0, @get_color(1), .{ .routes = .{ .rx = .{ RAMP } },"
            " .switches = .{ .pos1 = .{ .rx = WEST, .tx = EAST } } }); }",
            "may change one direction",
        ),
    ],
)
def test_refused_layout(text, message, tmp_path):
    (tmp_path / "pe.csl").write_text("")
    (tmp_path / "layout.csl").write_text(text)
    with pytest.raises(CslError, match="layout.csl:1:") as caught:
        compile_program(tmp_path / "layout.csl", fabric_dims=(8, 3), fabric_offsets=(4, 1))
    assert message in caught.value.message


def test_switches_on_wse3_colors(tmp_path):
    text = (
        "comptime { @set_local_color_config(@get_color(10), .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ EAST } },"
        " .switches = .{ .pos1 = .{ .tx = WEST } } }); }"
    )
    build(tmp_path, text, arch="wse2")
    with pytest.raises(CslError, match="color 10 does not support switches on wse3"):
        build(tmp_path, text, arch="wse3")


def test_a_color_configured_by_layout_and_program(tmp_path):
    text = COLOR.replace("@set_color_config(0, 0, ", "comptime { @set_local_color_config(") + " }"
    with pytest.raises(CslError, match="pe.csl:1:.*config for this color has already been set"):
        build(tmp_path, text, COLOR)


def test_an_exported_function_of_another_type(tmp_path):
    text = 'export fn main() void { } comptime { @export_symbol(main, "main"); }'
    with pytest.raises(CslError, match="pe.csl:1:.*exported symbol type mismatch"):
        build(tmp_path, text, '@export_name("main", fn(i16)void);')


def test_imported_values(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[1, 2]")
    for name, message in (
        ("none.json", "unable to find file 'none.json'"), ("bad.json", "'bad.json' is not JSON"),
        ("list.json", "a JSON value of this kind cannot be a 'i16'"),
    ):  # fmt: skip
        text = f'const a = @import_comptime_value(i16, "{name}"); export fn main() void {{ var b = a; }}'
        with pytest.raises(CslError, match=message):
            build(tmp_path, text)


def test_comment_of_another_language(tmp_path):
    with pytest.raises(ParseError, match="pe.csl:1:1: ParseError: unexpected character '/'"):
        build(tmp_path, "/* no */")


def test_error_shows_the_line(tmp_path):
    with pytest.raises(CslError) as caught:
        build(tmp_path, "export fn main() void {\n  var x: u16 = y;\n}\n")
    assert "pe.csl:2:16" in str(caught.value) and "^" in str(caught.value)

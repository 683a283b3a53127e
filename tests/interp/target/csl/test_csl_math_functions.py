"""Math and standard libraries agree with Python's functions."""

import math

import numpy as np
import pytest
from csl_harness import run

from tessera.interp.target.csl.text.diagnostics import CslError


@pytest.mark.parametrize(
    ("call", "want"),
    [
        ("sqrt_f32(2.0)", math.sqrt(2)),
        ("invsqrt_f32(2.0)", 1 / math.sqrt(2)),
        ("inv(x)", 1 / 1.25),
        ("abs(-x)", 1.25),
        ("exp_f32(x)", math.exp(1.25)),
        ("log_f32(x)", math.log(1.25)),
        ("log2_f32(x)", math.log2(1.25)),
        ("sin_f32(x)", math.sin(1.25)),
        ("cos(x)", math.cos(1.25)),
        ("tanh_f32(x)", math.tanh(1.25)),
        ("pow_f32(x, 3.0)", 1.25**3),
        ("max_f32(x, 3.0)", 3.0),
        ("min(x, 3.0)", 1.25),
        ("floor_f32(-x)", -2.0),
        ("ceil_f32(x)", 2.0),
        ("sign(-x)", -1.0),
        ("NEGATIVE_INF_f32", -math.inf),
    ],
)
def test_math(call, want, tmp_path):
    text = f"""const m = @import_module("<math>"); export var out: f32;
      export fn main(x: f32) void {{ out = m.{call}; }}"""
    assert run(tmp_path, text, "main", 1.25).get_variable("out")[0] == np.float32(want)


def test_math_at_compile_time_and_in_f16(tmp_path):
    text = """const m = @import_module("<math>"); const root = m.sqrt_f16(2.0); export var out: f16;
      export fn main() void { out = root; }"""
    assert run(tmp_path, text).get_variable("out")[0] == np.float16(math.sqrt(2))


def test_math_of_a_wrong_type(tmp_path):
    text = """const m = @import_module("<math>"); export var out: i16;
      export fn main(x: i16) void { out = m.sqrt(x); }"""
    with pytest.raises(CslError, match="pe.csl:2:.*function 'sqrt' is not defined for type 'i16'"):
        run(tmp_path, text)


def test_layout_and_directions(tmp_path):
    text = """const l = @import_module("<layout>"); const d = @import_module("<directions>");
      export var out: [2]u16; export var ways: [3]bool;
      export fn main() void { out[0] = l.get_x_coord(); out[1] = l.get_y_coord() + 1;
        ways[0] = d.flip(EAST) == WEST; ways[1] = d.rotate_clockwise(NORTH) == EAST;
        ways[2] = d.rotate_counterclockwise(NORTH) == WEST; }"""
    pe = run(tmp_path, text)
    assert pe.get_variable("out").tolist() == [0, 1] and pe.get_variable("ways").all()


def test_time_counts_cycles(tmp_path):
    text = """const t = @import_module("<time>"); export var a = @zeros([t.tsc_size_words]u16);
      export var b = @zeros([t.tsc_size_words]u16);
      export fn main(n: i16) void { t.enable_tsc(); t.reset_tsc_counter(); t.get_timestamp(&a);
        for (@range(i16, n)) |i| { a[1] = 0; } t.get_timestamp(&b); t.disable_tsc(); }"""
    pe = run(tmp_path, text, "main", 100)
    stamps = [int(x[0]) | int(x[1]) << 16 | int(x[2]) << 32 for x in (pe.get_variable("a"), pe.get_variable("b"))]
    assert 300 < stamps[1] - stamps[0] < 3000


def test_random_is_the_same_each_time(tmp_path):
    text = """const r = @import_module("<random>"); export var out: [3]f32; export var k: i16; var p: u32;
      export fn main() void { for (@range(i16, 3)) |i| { out[i] = r.random_f32(-1.0, 1.0); } k = @as(i16, @random16());
        r.set_global_prng_seed(5); out[2] = r.random_normal_f32(); p = r.random_pow_u32(3); }"""
    one, two = (run(tmp_path, text).get_variable("out").tolist() for _ in range(2))
    assert one == two and len(set(one)) == 3 and all(-1 <= x < 1 for x in one[:2])


def test_debug_and_simprint(tmp_path):
    text = """const d = @import_module("<debug>", .{ .key = "log", .buffer_size = 9 });
      const p = @import_module("<simprint>");
      export fn main() void { d.trace_string("go"); d.trace_u16(7); d.trace_f32(1.5); d.trace_timestamp();
        p.print_string("n = "); p.print_u16_decimal(12); p.print_string("\\nx = "); p.print_f32(0.5);
        p.print_string("\\n"); }"""
    pe = run(tmp_path, text)
    assert pe.traces["log"][:3] == ["go", 7, 1.5] and pe.traces["log"][3] > 0
    assert pe.output == ["n = 12", "x = 0.5"]


def test_control_payloads(tmp_path):
    text = """const c = @import_module("<control>"); export var out: [2]u32;
      export fn main() void { out[0] = c.encode_control_task_payload(@get_control_task_id(43));
        out[1] = c.encode_single_payload(c.opcode.SWITCH_ADV, true, {}, 0); }"""
    task, advance = run(tmp_path, text).get_variable("out").tolist()
    assert (task >> 16 & 63, task >> 22 & 7) == (43, 0)
    assert (advance >> 16 & 63, advance >> 22 & 7) == (31, 5)


def test_file_on_the_search_path(tmp_path):
    (tmp_path / "lib" / "tools").mkdir(parents=True)
    (tmp_path / "lib" / "tools" / "pe.csl").write_text("fn one() i16 { return 1; }")
    text = 'const m = @import_module("<tools/pe>"); export var out: i16; export fn main() void { out = m.one(); }'
    assert run(tmp_path, text, import_paths=(tmp_path / "lib",)).get_variable("out")[0] == 1

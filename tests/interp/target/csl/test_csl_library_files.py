"""Libraries written in CSL, and libraries that print: each function behaves as the vendor documents it."""

import numpy as np
import pytest
from csl_harness import run

from tessera.interp.target.csl.libraries.host_io import format_text
from tessera.interp.target.csl.text.diagnostics import CslFault

VECTORS = """
var a = [4]f32 { 1.0, -2.0, 3.0, 4.0 }; var h: [4]f16; export var out: [4]f32; export var k: [4]i16; export var m: f32;
const va = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> a[i] });
const vo = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> out[i] });
const vh = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> h[i] });
const vk = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> k[i] });
const o = @import_module("<dsd_ops>"); const half = @fp16();
"""
A = np.array([1, -2, 3, 4], np.float32)


@pytest.mark.parametrize(
    ("body", "name", "want"),
    [
        ("o.mov(f32, vo, va, .{}); o.neg(f32, vo, vo, .{});", "out", -A),
        ("o.abs(f32, vo, va, .{}); o.max(f32, &m, @as(f32, 0.0), vo, .{});", "m", [4]),
        ("o.convert(half, f32, vh, va, .{}); o.add(f32, half, vo, va, vh, .{});", "out", 2 * A),
        ("o.add(f32, f32, vo, va, @as(f32, 1.0), .{}); o.sub(f32, vo, vo, va, .{});", "out", [1] * 4),
        ("o.mul(f32, vo, va, va, .{}); o.fmac(f32, f32, vo, vo, va, 2.0, .{});", "out", A * A + 2 * A),
        ("o.convert(i16, f32, vk, va, .{}); o.add(i16, i16, vk, vk, @as(i16, 3), .{});", "k", A + 3),
        ("o.convert(i16, f32, vk, va, .{}); o.sub(i16, vk, vk, @as(i16, 3), .{});", "k", A - 3),
        ("o.scale(f32, &m, @as(f32, 1.5), @as(i16, 2), .{});", "m", [6]),
        ("o.norm(f32, &m, @as(f32, 12.0), .{});", "m", [1.5]),
        ("o.convert(half, f32, vh, va, .{}); o.neg(half, vh, vh, .{}); o.abs(half, vh, vh, .{}); "
         "o.mul(half, vh, vh, vh, .{}); o.max(half, vh, vh, vh, .{}); o.fmac(half, half, vh, vh, vh, 1.0, .{}); "
         "o.convert(f32, half, vo, vh, .{});", "out", 2 * A * A),
        ("o.convert(i16, f32, vk, va, .{}); o.convert(f32, i16, vo, vk, .{}); o.convert(half, i16, vh, vk, .{}); "
         "o.sub(half, vh, vh, vh, .{}); o.mov(half, vh, vh, .{}); o.convert(i16, half, vk, vh, .{});", "k", [0] * 4),
    ],
)  # fmt: skip
def test_operations_by_type(body, name, want, tmp_path):
    found = run(tmp_path, VECTORS + f"export fn main() void {{ {body} }}").get_variable(name)
    np.testing.assert_array_equal(found, want)


def test_complex_numbers(tmp_path):
    text = """const c = @import_module("<complex>"); export var out: [6]f32; var x: f32 = 1.0; var y: f16 = 2.0;
      export fn main() void { const z = c.multiply_complex(c.get_complex(x, x), c.get_complex_64(2.0, 3.0));
        out[0] = z.real; out[1] = z.imag; const w = c.subtract_complex_64(c.add_complex_64(z, z), z);
        out[2] = w.real; out[3] = w.imag;
        const v = c.multiply_complex_32(c.get_complex_32(y, y), c.get_complex(y, y)); out[4] = @as(f32, v.imag);
        const u: c.complex_32 = c.subtract_complex(c.add_complex(v, v), v); out[5] = @as(f32, u.imag); }"""
    z = (1 + 1j) * (2 + 3j)
    assert run(tmp_path, text).get_variable("out").tolist() == [z.real, z.imag, z.real, z.imag, 8, 8]


def test_partial_memory_operations(tmp_path):
    text = """const mem = @import_module("<malloc>", .{ .buffer_num_words = 9, .asserts_enabled = true });
      export var out: [2]f32; export var fits: [4]bool;
      export fn main() void { const p = mem.malloc_i16(1); p[0] = 3; const q = mem.malloc(f32, 2);
        q[0] = 1.5; q[1] = 2.5; out[0] = q[0] + q[1]; out[1] = @as(f32, p[0]);
        fits[0] = mem.has_enough_words(3); fits[1] = mem.has_enough_words(4); fits[2] = mem.has_enough_space(u32, 1);
        mem.free(); fits[3] = mem.has_enough_double_words(4); %s }"""
    pe = run(tmp_path, text % "")
    assert pe.get_variable("out").tolist() == [4, 3] and pe.get_variable("fits").tolist() == [True, False, True, True]
    with pytest.raises(CslFault, match="assertion failed"):
        run(tmp_path, text % "const r = mem.malloc_f32(5);")


def test_timers_count_cycles(tmp_path):
    text = """const tm = @import_module("<timer>", .{ .timerCount = 2 }); var r: tm.timerType; var x: f32 = 0.0;
      export var n: [2]u16; fn work(count: i16) void { for (@range(i16, count)) |i| { x += 1.0; } }
      export fn main() void { tm.start(1); work(50); tm.stop(1); tm.start(0); work(100); tm.stop(0);
        tm.elapsed(1, &r); n[0] = r[0]; tm.elapsed(0, &r); n[1] = r[0]; }"""
    one, two = run(tmp_path, text).get_variable("n").tolist()
    assert 100 < one < two < 2.1 * one


def test_an_import_of_an_empty_module(tmp_path):
    text = 'const e = @import_module("<empty>"); export var k: i16; export fn main() void { k = 1; }'
    assert run(tmp_path, text).get_variable("k")[0] == 1


def test_formats(tmp_path):
    """The lines of the vendor's own examples."""
    text = """const p = @import_module("<simprint>"); var n: u16 = 42; var w: u32 = 10;
      const off = @import_module("<simprint>", .{ .enable = false });
      export fn main() void { p.fmt("{d} {X} {b} {f}", .{ n, n, n, @as(f16, 42.0) }); p.fmt_no_nl("{X}", .{ w });
        p.print_string("\\n"); p.print_u16_binary(5); p.print_u32_hex(255); p.fmt_with_coords(" {{", .{});
        off.fmt("{d}", .{ n }); }"""
    lines = ["42 002A 0000000000101010 42.0", "0000000A", "0000000000000101000000ffPE(0,0):  {"]
    assert run(tmp_path, text).output == lines


@pytest.mark.parametrize("text, message", [("{q}", "'{q}' is no format"), ("{d} {d}", "more fields than values")])
def test_wrong_formats_are_errors(text, message):
    with pytest.raises(CslFault, match=message):
        format_text(text, [1], [16])


def test_records_of_every_type(tmp_path):
    text = """const d = @import_module("<debug>", .{ .key = "k" });
      export fn main() void { d.trace_u8(1); d.trace_i8(-1); d.trace_bool(true); d.trace(@as(u32, 5)); }"""
    assert run(tmp_path, text).traces["k"] == [1, -1, True, 5]


def test_a_payload_of_several_commands(tmp_path):
    """The payload of <memcpy/memcpy_switches> for two commands."""
    text = """const c = @import_module("<control>"); export var k: [2]u32; const s = c.opcode;
      const m = @import_module("<memcpy/memcpy_switches>");
      export fn main() void { k[0] = c.encode_payload(2, [2]s { s.SWITCH_ADV, s.SWITCH_ADV }, [2]bool { true, true },
        true, {}); k[1] = m.ctrl(m.switch_cmd_11()); @assert(c.MAX_CMDS == 8); }"""
    first, second = run(tmp_path, text).get_variable("k")
    assert first == second


def test_constants_and_powers_of_math(tmp_path):
    text = """const m = @import_module("<math>"); export var out: [4]f32; var x: f32 = 3.0;
      export fn main() void { out[0] = m.NEGATIVE_INF(f32); out[1] = m.fscale(x, 2); out[2] = m.fscale_f32(1.5, -1);
        out[3] = if (m.isNaN(m.NaN(f32)) and m.POSITIVE_INF(f16) > m.NEGATIVE_INF_f16) 1.0 else 0.0; }"""
    assert run(tmp_path, text).get_variable("out").tolist() == [-np.inf, 12, 0.75, 1]

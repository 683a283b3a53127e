"""Hardware builtins: random numbers, registers, filters, symbols by number, exports."""

import numpy as np
import pytest
from csl_harness import build, make_pe, run, simulate

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.libraries.hardware_builtins import PRNG_SEED, advance_lfsr
from tessera.interp.target.csl.simulation import Simulation
from tessera.interp.target.csl.text.diagnostics import CslFault


def one_bit(state):
    """One step of the LFSR by its polynomial."""
    return (state << 1 | (state >> 22 ^ state >> 17) & 1) & 0xFFFFFFFF


def test_random16_follows_the_documented_lfsr(tmp_path):
    state = PRNG_SEED
    for _ in range(128):
        state = one_bit(state)
    assert advance_lfsr(PRNG_SEED) == state
    text = "export var k: [3]u16; export fn main() void { for (@range(u16, 3)) |i| { k[i] = @random16(); } }"
    found = run(tmp_path, text).get_variable("k")
    assert found[0] == state >> 7 & 0xFFFF and len(set(found.tolist())) == 3


def test_each_random_generator_has_its_own_state(tmp_path):
    text = """export var k: [4]u16; export fn main() void { k[0] = @random16(); @set_active_prng(5); k[1] = @random16();
      k[2] = @random16(); @set_active_prng(0); k[3] = @random16(); }"""
    first, other, after, again = run(tmp_path, text).get_variable("k").tolist()
    assert first == other and after == again != first


def test_registers_by_address(tmp_path):
    """Read the route of color 1, turn its output from the PE to the east, and read it again."""
    text = """export fn main() void { const at: u16 = 0x7f21; order[0] = @as(i16, @get_config(at));
        @set_config(at, 0x0202, .{ 0x7f20, 0x7f37 }); order[1] = @as(i16, @get_config_unchecked(at));
        @set_config_unchecked(at, 0x0210); }"""
    pe = simulate(tmp_path, text, "wse2")
    assert pe.get_variable("order").tolist()[:2] == [0x0210, 0x0202]


def test_a_register_address_known_only_at_run_time(tmp_path):
    with pytest.raises(CslFault, match="register at address 0xfc00 is not simulated"):
        simulate(tmp_path, "var at: u16 = 0x7e00; export fn main() void { order[0] = @as(i16, @get_config(at)); }")


def test_a_filter_by_its_number(tmp_path):
    text = """const tc = @import_module("<tile_config>"); const kept = @get_filter_id(@get_color(2));
      comptime { @set_local_color_config(@get_color(2), .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ RAMP } },
        .filter = .{ .kind = .{ .counter = true }, .limit1 = 3, .max_counter = 1, .count_data = true } }); }
      export fn main() void { tc.filters.set_counter(kept, 2); tc.filters.set_max_counter(kept, 9);
        tc.filters.set_active_limit(kept, 7); }"""
    found = simulate(tmp_path, text).fabric.get_route(2).filter
    assert (found.counter, found.top, found.limit) == (2, 9, 7)


NAMES = '@export_name("n", i16, true); @export_name("a", [*]f32, true); @export_name("f", fn(i16)void);'
SYMBOLS = """
var n: i16 = 7; var a = [2]f32 { 1.0, 2.0 }; var p: [*]f32 = &a; export var out: [4]u16; var number: u16 = 0;
fn f(x: i16) void { n = x; }
export fn main() void { out[0] = @get_symbol_id(n); out[1] = @as(u16, @get_symbol_value(i16, number));
  if (@has_exported_tensors()) { out[2] = @get_tensor_ptr(1)[3]; } out[3] = @get_symbol_id(f); }
comptime { @export_symbol(n); @export_symbol(p, "a"); @export_symbol(f); }
"""


def test_symbols_by_their_numbers(tmp_path):
    pe = make_pe(build(tmp_path, SYMBOLS, NAMES))
    pe.boot()
    pe.start(pe.get_export("main"))
    pe.events.run()
    assert pe.get_variable("out").tolist() == [0, 7, np.float32(2).view(np.uint32) >> 16, 2]


def test_the_host_copies_an_exported_scalar(tmp_path):
    run_ = Simulation(build(tmp_path, SYMBOLS, NAMES))
    run_.boot()
    row = np.zeros(1, np.uint16)
    run_.copy_in("n", {(0, 0): np.array([9], np.uint16)})
    run_.wait(run_.copy_out("n", {(0, 0): row}))
    assert row[0] == 9


def test_tile_code_in_the_layout_file(tmp_path):
    (tmp_path / "all.csl").write_text("layout { @set_rectangle(1, 1); @set_tile_code(0, 0); }\nexport var a: [3]f32;")
    assert compile_program(tmp_path / "all.csl").tiles[0, 0].program.memory_used == 12


def test_imports_are_relative_to_the_layout_folder(tmp_path):
    """A module in a subfolder imports another by its path from the layout's folder."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "one.csl").write_text(
        'const two = @import_module("lib/two.csl"); fn one() i16 { return two.x; }'
    )
    (tmp_path / "lib" / "two.csl").write_text("const x: i16 = 5;")
    text = 'const m = @import_module("lib/one.csl"); export var k: i16; export fn main() void { k = m.one(); }'
    assert run(tmp_path, text).get_variable("k")[0] == 5

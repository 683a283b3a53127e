"""Queues that change their color, teardown handlers, and router registers, on a PE whose colors loop back."""

import re
from pathlib import Path

import numpy as np
import pytest
from csl_harness import HEAD, LOOP, build, run, simulate

from tessera.interp.target.csl.fabric.routing import (
    EAST,
    NORTH,
    RAMP,
    WEST,
    ColorRoute,
    RouterRegisters,
    decode_route,
    decode_switch,
    encode_route,
    encode_switch,
)
from tessera.interp.target.csl.pe.dsd_table import DSD_OPS
from tessera.interp.target.csl.pe.scheduler import is_idle
from tessera.interp.target.csl.sema.builtins import BUILTINS
from tessera.interp.target.csl.sema.values import SwitchPosition
from tessera.interp.target.csl.simulation import Simulation

CONFIG = 'const tc = @import_module("<tile_config>");'
OTHER = """comptime { @set_local_color_config(@get_color(7), .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ RAMP } } }); }"""
FLUSH = """
var b = [4]f32 { 5.0, 6.0, 7.0, 8.0 }; var times: i16 = 0;
const vb = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> b[i] });
const vt = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> out[i + 4] });
const fo = @get_dsd(fabout_dsd, .{ .extent = 4, .output_queue = oq });
const fi = @get_dsd(fabin_dsd, .{ .extent = 4, .input_queue = iq });
export fn main() void { @fmovs(fo, va, .{ .async = true, .activate = sent }); @fmovs(vo, fi, .{ .async = true }); }
task sent() void { @queue_flush(oq); }
fn emptied() void { times += 1; tc.output_queue_config.encode_output_queue(3, 7);
  tc.input_queue_config.encode_input_queue(2, 7, false); tc.queue_flush.exit(oq); @activate(more); }
task more() void { @fmovs(fo, vb, .{ .async = true }); @fmovs(vt, fi, .{ .async = true }); }
comptime { @bind_local_task(sent, t8); @bind_local_task(more, t9); @set_empty_queue_handler(emptied, oq); }
"""


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_an_empty_queue_can_change_its_color(seed, tmp_path):
    pe = simulate(tmp_path, CONFIG + OTHER + FLUSH, "wse3", seed)
    assert pe.get_variable("out").tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pe.get_variable("times") == 1 and pe.in_colors == {2: 7} and pe.out_colors == {3: 7}


def test_a_flush_without_a_handler_is_noted(tmp_path):
    """A public program for WSE-3 flushes both of its queues, and has no handlers."""
    pe = simulate(tmp_path, "export fn main() void { @fmovs(tx, va); @queue_flush(oq); @fmovs(vo, rx); }", "wse3")
    assert pe.get_variable("out").tolist()[:4] == [1, 2, 3, 4] and is_idle(pe)
    assert pe.state["memcpy"].notes == ["output queue 3 is flushed but has no '@set_empty_queue_handler'"]


def test_a_flush_without_exit_calls_its_handler_again(tmp_path):
    text = FLUSH.replace(" tc.queue_flush.exit(oq);", "").replace(
        "@activate(more);", "if (times < 2) { @queue_flush(oq); }"
    )
    text = text.replace(" tc.output_queue_config.encode_output_queue(3, 7);", "").replace(
        " tc.input_queue_config.encode_input_queue(2, 7, false);", ""
    )
    assert simulate(tmp_path, CONFIG + text, "wse3").get_variable("times") == 2


def test_a_teardown_calls_its_handler(tmp_path):
    text = (
        CONFIG
        + """const switches = @import_module("<memcpy/memcpy_switches>");
      const ctl = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq, .control = true });
      export fn main() void { @mov32(ctl, switches.ctrl(switches.teardown_cmd_1())); }
      fn torn() void { note(7); tc.teardown.exit(c); } comptime { @set_teardown_handler(torn, c); }"""
    )
    assert simulate(tmp_path, text).get_variable("order")[0] == 7


def test_a_route_and_its_register():
    route = ColorRoute((WEST,), (EAST, RAMP), [((RAMP,), ()), ((), (NORTH,))], current=1, ring=True, pop="always_pop")
    assert encode_route(route) == 0b1_0000_0011_0010 and encode_switch(route) == 0b0011_0101_0011_1100
    other = ColorRoute((RAMP,), (WEST,))
    decode_route(other, encode_route(route))
    decode_switch(other, encode_switch(route))
    assert other.positions == route.positions and (other.ring, other.pop) == (True, "always_pop")


def test_settings_of_input_queues_are_kept(tmp_path):
    """An early program of the vendor raises the priority of a microthread through the register of its queue."""
    text = """const cfg: u16 = 0x7F59 * 2; export var found = @zeros([2]u16);
      export fn main() void {
        @bitcast(*u16, cfg).* |= 0x100; found[0] = @bitcast(*u16, cfg).*; found[1] = @bitcast(*u16, cfg + 2).*; }"""
    assert run(tmp_path, text, arch="wse2").get_variable("found").tolist() == [0x100, 0]


def test_registers_through_their_addresses(tmp_path):
    text = """export fn main() void {
        var p = @bitcast(*u16, @as(u16, 2 * (0x7f40 + 1))); order[0] = @as(i16, p.*);
        p.* = (p.* & 0xfff0) | 0xd; order[1] = @as(i16, p.*);
        var r = @bitcast(*u16, @as(u16, 2 * (0x7f20 + 1))); order[2] = @as(i16, r.*);
        r.* = 0x0201; order[3] = @as(i16, r.*); }"""
    pe = simulate(tmp_path, text, "wse2")
    assert pe.get_variable("order").tolist()[:4] == [0x555, 0x55D, 0x210, 0x201]
    assert isinstance(pe.registers, RouterRegisters) and pe.fabric.get_route(1).here == ((RAMP,), (WEST,))


def test_routes_as_bits(tmp_path):
    text = """const d = @import_module("<directions>");
      const Switches = struct { pos1: u16, pos2: u16, ring_mode: bool };
      const Config = struct { routes: u16, switches: Switches };
      const config = Config { .routes = d.RX_RAMP | d.dirToTxBits(EAST) | d.TX_RAMP,
        .switches = Switches { .pos1 = d.dirToRxBits(d.flip(EAST)), .pos2 = 0, .ring_mode = true } };
      comptime { @set_local_color_config(@get_color(5), config); }"""
    found = build(tmp_path, text).colors[0, 0][5]
    assert (found.rx, found.tx, found.ring) == (("RAMP",), ("EAST", "RAMP"), True)
    assert found.switches == (SwitchPosition("WEST", None),)


def test_lengths_of_a_fifo(tmp_path):
    text = """var space = @zeros([8]f32); const f = @allocate_fifo(space);
      export fn main() void { @set_fifo_write_length(f, 3); @fmovs(f, va); @set_fifo_read_length(f, 2);
        @fmovs(vo, f); note(1); }"""
    assert simulate(tmp_path, text).get_variable("out").tolist()[:3] == [1, 2, 0]


def test_scalar_forms_of_16_bit_numbers(tmp_path):
    text = """export var a: f16 = 12.0; export var b: f16 = 0.0; export var c: @fp16() = 0.0;
      comptime { @comptime_print("a line"); @rpc(@get_data_task_id(@get_color(9))); }
      export fn main() void { @fnormh(&a, @as(f16, 12.0)); @fscaleh(&b, @as(f16, 1.5), @as(i16, 3)); c = a; }"""
    pe = run(tmp_path, text)
    assert (pe.get_variable("a")[0], pe.get_variable("b")[0], pe.get_variable("c")[0]) == (1.5, 12.0, 1.5)


# The builtins of the vendor's documentation (SDK 1.4), in its order; SDK 2.10 removed @concat_structs.
DOCUMENTED = """
activate allocate_fifo as assert bitcast bind_control_task bind_data_task bind_local_task block comptime_assert
comptime_print concat_structs constants dimensions element_count element_type field fp16 get_array get_color get_config
get_config_unchecked get_control_task_id get_data_task_id get_dsd get_dsr get_filter_id get_input_queue get_int
get_local_task_id get_output_queue get_rectangle get_string_from_byte has_field import_comptime_value import_module
increment_dsd_offset initialize_queue is_arch is_comptime is_same_type load_to_dsr map ptrcast random16 range
range_start range_stop range_step rank set_active_prng set_color_config set_local_color_config set_config
set_config_unchecked set_dsd_base_addr set_dsd_length set_dsd_stride set_fifo_read_length set_fifo_write_length
set_rectangle set_teardown_handler set_tile_code strcat strlen type_of unblock zeros
export_name export_symbol get_symbol_id get_symbol_value get_tensor_ptr get_xdsr has_exported_tensors rpc
add16 addc16 and16 clz ctz fabsh fabss faddh faddhs fadds fh2s fh2xp16 fmach fmachs fmacs fmaxh fmaxs fmovh fmovs fmulh
fmuls fnegh fnegs fnormh fnorms fs2h fs2xp16 fscaleh fscales fsubh fsubs mov16 mov32 or16 popcnt sar16 sll16 slr16 sub16
xor16 xp162fh xp162fs dfilt
get_ut_id queue_flush set_empty_queue_handler
""".split()


def test_every_documented_builtin_exists():
    assert {f"@{name}" for name in DOCUMENTED} == set(BUILTINS)


def test_every_builtin_is_used_by_a_program_here():
    files = [*Path(__file__).parent.glob("*.py"), *(Path(__file__).parent / "programs").rglob("*.csl")]
    used = set(re.findall(r"@\w+", "\n".join(file.read_text() for file in files)))
    # `test_operation` generates a program for every DSD operation.
    assert {name for name in BUILTINS if name[1:] not in DSD_OPS} - used == set()


def test_a_color_keeps_its_wavelets_when_its_queue_changes_color(tmp_path):
    text = CONFIG + OTHER + FLUSH.replace("@fmovs(vt, fi, .{ .async = true }); ", "")
    run_ = Simulation(build(tmp_path, HEAD + text, LOOP, arch="wse3"))
    run_.boot()
    pe = run_.pes[0, 0]
    pe.start(pe.get_export("main"))
    run_.settle()
    assert np.array_equal(pe.get_variable("out")[:4], [1, 2, 3, 4])
    assert any("of color 7 wait in the input queue" in text for text in run_.describe_stall())

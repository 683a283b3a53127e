"""Options of fabric DSDs behave as the vendor documents them."""

import numpy as np
import pytest
from csl_harness import HEAD, build, run, simulate

from tessera.interp.target.csl.simulation import Simulation

BOTH = pytest.mark.parametrize("arch", ["wse2", "wse3"])
HALVES = """
var h = [5]f16 { 1.0, 2.0, 3.0, 4.0, 5.0 }; export var g: [5]f16;
const vh = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{5} -> h[i] });
const vg = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{5} -> g[i] });
const send = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 5, .output_queue = oq%s });
const take = @get_dsd(fabin_dsd, .{ .fabric_color = c, .extent = 5, .input_queue = iq%s });
export fn main() void { @fmovh(send, vh, .{ .async = true }); @fmovh(vg, take, .{ .async = true }); }
"""
ONE = """
const ctl = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq, .control = true });
const one = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq });
"""


@BOTH
@pytest.mark.parametrize("mode, words", [("", 5), ("simd_32", 3), ("simd_64", 3), ("simd_32_or_64", 3)])
def test_two_16_bit_elements_per_wavelet(mode, words, arch, tmp_path):
    option = f", .simd_mode = .{{ .{mode} = true }}" if mode else ""
    pe = simulate(tmp_path, HALVES % (option, option), arch)
    assert pe.get_variable("g").tolist() == [1, 2, 3, 4, 5]
    assert sum(pe.fabric.node.traffic) == words


def test_an_odd_16_bit_element_is_kept_for_the_next_word(tmp_path):
    """A FIFO of three elements between pairs of two: the extra element of a wavelet is kept."""
    text = """var space = @zeros([3]f16); const fifo = @allocate_fifo(space);
      var h = [6]f16 { 1.0, 2.0, 3.0, 4.0, 5.0, 6.0 }; export var g: [6]f16;
      const vh = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{6} -> h[i] });
      const vg = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{6} -> g[i] });
      const send = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 6, .output_queue = oq,
        .simd_mode = .{ .simd_32 = true } });
      const take = @get_dsd(fabin_dsd, .{ .fabric_color = c, .extent = 6, .input_queue = iq,
        .simd_mode = .{ .simd_32 = true } });
      export fn main() void { @fmovh(send, vh, .{ .async = true }); @fmovh(fifo, take, .{ .async = true });
        @fmovh(vg, fifo, .{ .async = true }); }"""
    assert simulate(tmp_path, text).get_variable("g").tolist() == [1, 2, 3, 4, 5, 6]


@BOTH
def test_a_source_is_cleared_after_its_send(arch, tmp_path):
    text = """const z = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 4, .output_queue = oq,
        .zero = .{ .first_source = true } });
      var b = [4]f32 { 5.0, 6.0, 7.0, 8.0 }; const vb = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> b[i] });
      export fn main() void { @fadds(z, va, vb, .{ .async = true }); @fmovs(vo, rx, .{ .async = true }); }"""
    pe = simulate(tmp_path, text, arch)
    assert pe.get_variable("out").tolist()[:4] == [6, 8, 10, 12]
    assert pe.get_variable("a").tolist() == [0] * 4 and pe.get_variable("b").tolist() == [5, 6, 7, 8]


@BOTH
def test_control_wavelets_are_stored_in_memory(arch, tmp_path):
    text = (
        ONE
        + """export var got: [3]u32; const vg = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{3} -> got[i] });
      const mark = @get_dsd(fabin_dsd, .{ .fabric_color = c, .extent = 3, .input_queue = iq,
        .control_transform = true });
      const back = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 3, .output_queue = oq,
        .control_transform = true });
      const next = @get_dsd(fabin_dsd, .{ .fabric_color = c, .extent = 1, .input_queue = iq });
      const v1 = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{1} -> word[i] }); export var word: [1]u32;
      task t() void { @mov32(back, vg, .{ .async = true }); @mov32(v1, next, .{ .async = true }); }
      comptime { @bind_local_task(t, t8); }
      task seen() void { note(41); } comptime { @bind_control_task(seen, @get_control_task_id(41)); }
      export fn main() void { @mov32(vg, mark, .{ .async = true, .activate = t }); @mov32(one, @as(u32, 7));
        @mov32(ctl, @as(u32, 41 << 16)); @mov32(one, @as(u32, 9)); }"""
    )
    pe = simulate(tmp_path, text, arch)
    assert pe.get_variable("got").tolist() == [7, 3 << 30 | 41 << 16, 9]
    assert pe.get_variable("word")[0] == 7 and pe.get_variable("order")[0] == 41 and pe.fabric.pop(1, 1) == [9]


@BOTH
def test_dfilt_drops_data_until_control_wavelets_arrive(arch, tmp_path):
    text = (
        ONE
        + """const two = @get_dsd(fabin_dsd, .{ .fabric_color = c, .extent = 2, .input_queue = iq });
      task go() void { @fmovs(vo, rx, .{ .async = true }); } comptime { @bind_local_task(go, t8); }
      fn all(x: f32) void { @fmovs(tx, x); @mov32(ctl, @as(u32, 41 << 16)); }
      export fn main() void { @dfilt(two, .{ .async = true, .activate = go }); all(1.0); all(2.0); @fmovs(tx, va); }"""
    )
    assert simulate(tmp_path, text, arch).get_variable("out").tolist()[:4] == [1, 2, 3, 4]


def test_the_last_wavelet_advances_the_switch(tmp_path):
    config = """@set_color_config(0, 0, @get_color(1), .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ RAMP } },
      .switches = .{ .pos1 = .{ .rx = EAST } } });"""
    text = """const last = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 4, .output_queue = oq,
        .advance_switch = true });
      export fn main() void { @fmovs(last, va, .{ .async = true }); @fmovs(vo, rx, .{ .async = true }); }"""
    run_ = Simulation(build(tmp_path, HEAD + text, config))
    run_.boot()
    run_.pes[0, 0].start(run_.pes[0, 0].get_export("main"))
    run_.events.run()
    assert run_.pes[0, 0].get_variable("out").tolist()[:4] == [1, 2, 3, 4]
    assert run_.fabric.nodes[0, 0].channels[1].route.current == 1


def test_a_register_is_loaded_before_the_program_begins(tmp_path):
    text = """const d = @get_dsr(dsr_dest, 1); comptime { @load_to_dsr(d, vo); }
      export fn main() void { @fmovs(d, va); }"""
    assert simulate(tmp_path, text).get_variable("out").tolist()[:4] == [1, 2, 3, 4]


def test_a_tensor_access_is_a_struct(tmp_path):
    """The strides of the vendor's own example, and DSDs from the fields of a struct."""
    text = """var A: [4, 5]i16; var B: [10]i16; export var k: [5]i16;
      const all: comptime_struct = |i, j, k, l|{5, 5, 5, 5} -> A[i + j, k + l + 2];
      comptime { @comptime_assert(all.stride[0] == 1 and all.stride[1] == -3 and all.stride[2] == -3);
        @comptime_assert(all.stride[3] == -23 and all.offset == 2 and all.extent[0] == 5); }
      const odd = |i|{5} -> B[2 * i + 1];
      const d = @get_dsd(mem1d_dsd, .{ .base_address = odd.base_address, .offset = odd.offset, .stride = odd.stride,
        .extent = odd.extent });
      const e = @get_dsd(mem1d_dsd, .{ .tensor_access = .{ .base_address = &B, .stride = 2, .extent = 5 } });
      const vk = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{5} -> k[i] });
      export fn main() void { @mov16(d, @as(i16, 3)); @mov16(e, @as(i16, 4));
        @mov16(vk, @get_dsd(mem4d_dsd, .{ .base_address = &B, .extent = .{ 5 } })); }"""
    np.testing.assert_array_equal(run(tmp_path, text).get_variable("k"), [4, 3, 4, 3, 4])


def test_a_fifo_in_selected_dsrs(tmp_path):
    """The FIFO is written by its name and read through its DSR; an empty FIFO ends the operation."""
    text = """var space = @zeros([4]f32); export var done: [2]bool; const from = @get_dsr(dsr_src1, 4);
      const fifo = @allocate_fifo(space, .{ .dest = @get_dsr(dsr_dest, 4), .src = from, .xdsr = @get_xdsr(1) });
      const known = @get_dsr(dsr_fifo_src1, from);
      export fn main() void { done[0] = @fmovs(fifo, va); done[1] = @fmovs(@set_dsd_length(vo, 6), known); }"""
    pe = simulate(tmp_path, text)
    assert pe.get_variable("out").tolist()[:5] == [1, 2, 3, 4, 0] and pe.get_variable("done").tolist() == [True, False]


def test_a_saved_address_advances(tmp_path):
    """The vendor's example with chunks, and the same with rows of a tensor."""
    text = """var b: [6, 2]f32; const vb = @get_dsd(mem4d_dsd, .{ .tensor_access = |i, j|{2, 2} -> b[i, j] });
      const d = @get_dsr(dsr_dest, 1); const e = @get_dsr(dsr_dest, 2); const two = @set_dsd_length(vo, 2);
      comptime { @load_to_dsr(d, vb, .{ .save_address = true }); @load_to_dsr(e, two, .{ .save_address = true }); }
      export fn main() void { for (@range(i16, 3)) |i| { @fmovs(d, @as(f32, i)); @fmovs(e, @as(f32, i)); }
        @fmovs(@set_dsd_length(@increment_dsd_offset(vo, 6, f32), 2), b[5, 1]); }"""
    assert simulate(tmp_path, text).get_variable("out").tolist() == [0, 0, 1, 1, 2, 2, 2, 2]

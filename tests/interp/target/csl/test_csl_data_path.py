"""The data path that the microthreads of a PE of WSE-2 share: senders use the cycles in which no word arrives."""

from types import SimpleNamespace

import numpy as np
import pytest

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.fabric.router_grid import Fabric
from tessera.interp.target.csl.pe.microthreads import open_source
from tessera.interp.target.csl.pe.pe_state import EventQueue
from tessera.interp.target.csl.sema.values import Fabin
from tessera.interp.target.csl.simulation import Simulation

LAYOUT = """
const memcpy = @import_module("<memcpy/get_params>", .{ .width = 3, .height = 1 });
const east = @get_color(2);
const west = @get_color(3);
layout {
  @set_rectangle(3, 1);
  for (@range(u16, 3)) |x| {
    @set_tile_code(x, 0, "pe.csl", .{ .memcpy_params = memcpy.get_params(x), .x = x, .east = east, .west = west });
  }
  ROUTES
  @export_name("main", fn()void);
}
"""
INWARDS = """
  @set_color_config(0, 0, east, .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ EAST } } });
  @set_color_config(1, 0, east, .{ .routes = .{ .rx = .{ WEST }, .tx = .{ RAMP } } });
  @set_color_config(2, 0, west, .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ WEST } } });
  @set_color_config(1, 0, west, .{ .routes = .{ .rx = .{ EAST }, .tx = .{ RAMP } } });
"""
THROUGH = """
  @set_color_config(0, 0, east, .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ EAST } } });
  @set_color_config(1, 0, east, .{ .routes = .{ .rx = .{ WEST }, .tx = .{ RAMP } } });
  @set_color_config(1, 0, west, .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ EAST } } });
  @set_color_config(2, 0, west, .{ .routes = .{ .rx = .{ WEST }, .tx = .{ RAMP } } });
"""
PE = """
param memcpy_params; param x: u16; param east: color; param west: color;
const sys = @import_module("<memcpy/memcpy>", memcpy_params);
const out_east = @get_output_queue(2); const in_east = @get_input_queue(4);
const out_west = @get_output_queue(3); const in_west = @get_input_queue(5);
var data: [60]f32; var found_east: [60]f32; var found_west: [60]f32; var ends = @zeros([2]u16);
const done: local_task_id = @get_local_task_id(9);
const done_west: local_task_id = @get_local_task_id(10);
const d = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{60} -> data[i] });
const fe = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{60} -> found_east[i] });
const fw = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{60} -> found_west[i] });
const send_east = @get_dsd(fabout_dsd, .{ .fabric_color = east, .extent = 60, .output_queue = out_east });
const send_west = @get_dsd(fabout_dsd, .{ .fabric_color = west, .extent = 60, .output_queue = out_west });
const take_east = @get_dsd(fabin_dsd, .{ .fabric_color = east, .extent = 60, .input_queue = in_east });
const take_west = @get_dsd(fabin_dsd, .{ .fabric_color = west, .extent = 60, .input_queue = in_west });
fn main() void {
  for (@range(u16, 60)) |i| { data[i] = @as(f32, i + x); }
  SENDS
}
task end() void { ends[0] += 1; sys.unblock_cmd_stream(); }
task end_west() void { ends[1] += 1; @unblock(done); }
comptime {
  @bind_local_task(end, done); @bind_local_task(end_west, done_west);
  if (x == 1) { @block(done); }
  if (@is_arch("wse3")) {
    @initialize_queue(out_east, .{ .color = east }); @initialize_queue(in_east, .{ .color = east });
    @initialize_queue(out_west, .{ .color = west }); @initialize_queue(in_west, .{ .color = west });
  }
  @export_symbol(main);
}
"""
RECEIVE_BOTH = """
  if (x == 0) { @fmovs(send_east, d, .{ .async = true, .activate = done }); }
  if (x == 2) { @fmovs(send_west, d, .{ .async = true, .activate = done }); }
  if (x == 1) {
    @fmovs(fe, take_east, .{ .async = true, .activate = done });
    @fmovs(fw, take_west, .{ .async = true, .activate = done_west });
  }
"""
RECEIVE_AND_SEND = """
  if (x == 0) { @fmovs(send_east, d, .{ .async = true, .activate = done }); }
  if (x == 2) { @fmovs(fw, take_west, .{ .async = true, .activate = done }); }
  if (x == 1) {
    @fmovs(fe, take_east, .{ .async = true, .activate = done });
    @fmovs(send_west, d, .{ .async = true, .activate = done_west });
  }
"""
CASES = {"both arrive": (INWARDS, RECEIVE_BOTH), "one arrives, one leaves": (THROUGH, RECEIVE_AND_SEND)}


def _run(folder, case, arch, lockstep=True):
    routes, sends = CASES[case]
    (folder / "layout.csl").write_text(LAYOUT.replace("ROUTES", routes))
    (folder / "pe.csl").write_text(PE.replace("SENDS", sends))
    layout = compile_program(folder / "layout.csl", arch=arch, fabric_dims=(10, 3), fabric_offsets=(4, 1))
    run = Simulation(layout, lockstep=lockstep)
    run.boot()
    launch = run.launch("main")
    run.wait(launch)
    pe = run.pes[1, 0]
    assert pe.get_variable("found_east").tolist() == [float(i) for i in range(60)]
    last = run.pes[1 if case == "both arrive" else 2, 0].get_variable("found_west").tolist()
    assert last == [float(i + (2 if case == "both arrive" else 1)) for i in range(60)]
    return launch.ended - launch.started


def test_a_sender_of_wse2_waits_for_the_words_that_arrive(tmp_path):
    (tmp_path / "2").mkdir()
    (tmp_path / "3").mkdir()
    narrow, wide = (_run(tmp_path / arch[-1], "one arrives, one leaves", arch) for arch in ("wse2", "wse3"))
    assert 45 <= narrow - wide <= 65


@pytest.mark.parametrize("case", CASES)
def test_plain_execution_shares_the_path_alike(case, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert _run(tmp_path / "a", case, "wse2") == _run(tmp_path / "b", case, "wse2", lockstep=False)


def test_senders_use_the_cycles_without_a_word():
    fabric = Fabric(EventQueue(), 1, 1, {}, arch="wse2")
    path, queue = fabric.nodes[0, 0].path, fabric.nodes[0, 0].get_input(3)
    assert path.is_idle(10)
    reader = path.open(queue, 10)
    queue.extend(0, [(12, [1, 2, 3])], 3)
    queue.extend(0, [(20, [4])], 1)
    assert [path.find_free(now) for now in (11, 12, 14, 15, 20)] == [11, 15, 15, 15, 21]
    queue.take(14, 3)
    path.used = 14  # the words are gone, the cycle is not free
    assert path.find_free(14) == 15
    other = path.open(fabric.nodes[0, 0].get_input(4), 14)
    assert (path.is_contended(14), path.is_contended(15)) == (False, True)  # from the next cycle on
    other.ended = 15
    reader.ended = 19
    assert (path.is_idle(19), path.is_idle(20), path.find_free(20)) == (False, True, 20)


@pytest.mark.parametrize(("in_pairs", "ready"), [(False, [2, 4, 6, 7]), (True, [0, 4, 4, 7])])
def test_simd_64_reads_two_wavelets_at_a_time(in_pairs, ready):
    fabric = Fabric(EventQueue(), 1, 1, {}, arch="wse3")
    pe = SimpleNamespace(fabric=fabric.view(0, 0), events=fabric.events)
    queue = fabric.nodes[0, 0].get_input(3)
    source = open_source(pe, Fabin(3, 7, 2, lanes=2, in_pairs=in_pairs), np.dtype(np.float16), 7)
    queue.extend(0, [(1, [1, 2, 3, 4])], 4)
    found = []
    for now in (1, 2, 3, 4):
        fabric.events.now = now
        found.append(source.ready(7))
    assert found == ready

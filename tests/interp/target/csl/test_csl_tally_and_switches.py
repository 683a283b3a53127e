"""The libraries `<kernels/tally>` and `<memcpy/memcpy_switches>`, and their errors."""

import numpy as np
import pytest

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.simulation import Simulation
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault

LAYOUT = """
param goal: u32;
const memcpy = @import_module("<memcpy/get_params>", .{ .width = 3, .height = 2, .MEMCPYD2H_1 = @get_color(1) });
const tally = @import_module("<kernels/tally/layout>", .{ .kernel_height = 2, .kernel_width = 3, .phase2_tally = goal,
  .colors = [3]color{ @get_color(2), @get_color(3), @get_color(4) }, .output_color = @get_color(5) });
layout {
  @set_rectangle(3, 2);
  for (@range(i16, 3)) |x| {
    for (@range(i16, 2)) |y| {
      const tally_params = tally.get_params(x, y);
      @set_tile_code(x, y, "pe.csl", .{ .memcpy_params = memcpy.get_params(x), .tally_params = tally_params });
    }
  }
  @export_name("f", fn(u32)void);
}
"""
PE = """
param memcpy_params;
param tally_params;
const sys = @import_module("<memcpy/memcpy>", memcpy_params);
const end_id = @get_local_task_id(12);
const oq = @get_output_queue(2);
const tally = @import_module("<kernels/tally/pe>", @concat_structs(tally_params, .{ .callback = end_id }));
const out = @get_dsd(fabout_dsd, .{ .extent = 1, .fabric_color = sys.MEMCPYD2H_1, .output_queue = oq });
task end() void { @mov32(out, tally.local_tally); }
fn f(n: u32) void {
  for (@range(u32, n)) |i| { tally.bump_tally(2); }
  tally.signal_completion();
  sys.unblock_cmd_stream();
}
comptime {
  @bind_local_task(end, end_id);
  @initialize_queue(oq, .{ .color = sys.MEMCPYD2H_1 });
  @export_symbol(f);
}
"""


# How the two SDK versions pass the library's parameters.
MERGED = "@concat_structs(tally_params, .{ .callback = end_id })"
NAMED = ".{ .tally_params = tally_params, .callback = end_id }"


def start(tmp_path, goal, layout=LAYOUT, params=MERGED):
    (tmp_path / "layout.csl").write_text(layout)
    (tmp_path / "pe.csl").write_text(PE.replace(MERGED, params))
    run = Simulation(compile_program(str(tmp_path / "layout.csl"), params={"goal": goal}, arch="wse3"))
    run.boot()
    return run


@pytest.mark.parametrize("params", [MERGED, NAMED])
@pytest.mark.parametrize("goal, bumps", [(0, 3), (36, 3)])
def test_a_tally_ends_when_all_pes_are_done_and_the_goal_is_reached(tmp_path, goal, bumps, params):
    run = start(tmp_path, goal, params=params)
    got = np.zeros(1, np.uint32)
    run.launch("f", bumps)
    run.wait(run.stream_out(1, {(2, 0): got}))
    assert got[0] == 2 * 6 * bumps


def test_a_goal_out_of_reach_stalls(tmp_path):
    run = start(tmp_path, 37)
    run.launch("f", 3)
    with pytest.raises(CslFault, match="stalls"):
        run.wait(run.stream_out(1, {(2, 0): np.zeros(1, np.uint32)}))


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("get_params(x),", "get_params(3),", r"get_params\(3\) is not a column"),
        (".width = 3, .height", ".widht = 3, .height", "wrong parameters of <memcpy/get_params>"),
        (".kernel_height = 2,", "", "wrong parameters of <kernels/tally/layout>"),
    ],
)
def test_wrong_library_parameters_are_errors(tmp_path, old, new, message):
    with pytest.raises(CslError, match=message):
        start(tmp_path, 0, LAYOUT.replace(old, new))


def test_payloads_of_the_switch_library(tmp_path):
    (tmp_path / "pe.csl").write_text("""
      const switches = @import_module("<memcpy/memcpy_switches>");
      export const two = [1]u32{ switches.ctrl(switches.switch_cmd_11()) };
      export const down = [1]u32{ switches.ctrl(switches.teardown_cmd_1()) };
    """)
    (tmp_path / "layout.csl").write_text('layout { @set_rectangle(1, 1); @set_tile_code(0, 0, "pe.csl", .{}); }')
    run = Simulation(compile_program(str(tmp_path / "layout.csl")))
    two, down = (int(run.pes[0, 0].get_variable(name)[0]) for name in ("two", "down"))
    assert (hex(two), hex(down)) == ("0xb5f9249", "0x9df9249")

"""Simulation of whole programs: copies, launches, streams, and the faults that a run reports."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tessera.core.errors import ArgumentError
from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.host import host_tools_folder
from tessera.interp.target.csl.simulation import Simulation
from tessera.interp.target.csl.text.diagnostics import CslFault

# Two PEs; color 5 is routed from the first to the second.
LAYOUT = """
const memcpy = @import_module("<memcpy/get_params>", .{ .width = 2, .height = 1,
  .MEMCPYH2D_1 = @get_color(0), .MEMCPYD2H_1 = @get_color(1) });
layout {
  @set_rectangle(2, 1);
  @set_tile_code(0, 0, "pe.csl", .{ .memcpy_params = memcpy.get_params(0), .first = true });
  @set_tile_code(1, 0, "pe.csl", .{ .memcpy_params = memcpy.get_params(1), .first = false });
  @set_color_config(0, 0, @get_color(5), .{ .routes = .{ .rx = .{RAMP}, .tx = .{EAST} } });
  @set_color_config(1, 0, @get_color(5), .{ .routes = .{ .rx = .{WEST}, .tx = .{RAMP} } });
  @export_name("a", [*]u32, true);
  @export_name("f", fn()void);
}
"""
PE = """
param memcpy_params;
param first: bool;
const sys = @import_module("<memcpy/memcpy>", memcpy_params);
var a = @zeros([6]u32);
var a_ptr: [*]u32 = &a;
const a_dsd = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{6} -> a[i] });
const iq = @get_input_queue(2);
const oq = @get_output_queue(3);
const in = @get_dsd(fabin_dsd, .{ .extent = 6, .fabric_color = @get_color(5), .input_queue = iq });
const out = @get_dsd(fabout_dsd, .{ .extent = 6, .fabric_color = @get_color(5), .output_queue = oq });
const done_id = @get_local_task_id(10);
task done() void { sys.unblock_cmd_stream(); }
comptime {
  @bind_local_task(done, done_id);
  @export_symbol(a_ptr, "a");
  @export_symbol(f);
  if (@is_arch("wse3")) {
    @initialize_queue(iq, .{ .color = @get_color(5) });
    @initialize_queue(oq, .{ .color = @get_color(5) });
  }
}
"""
SEND = "@mov32(out, a_dsd, .{ .async = true, .activate = done_id });"
RECEIVE = "@mov32(a_dsd, in, .{ .async = true, .activate = done_id });"


def start(tmp_path, function, arch="wse2", more="", seed=None):
    (tmp_path / "layout.csl").write_text(LAYOUT)
    (tmp_path / "pe.csl").write_text(PE + more + "fn f() void {" + function + "}")
    layout = compile_program(str(tmp_path / "layout.csl"), arch=arch, fabric_dims=(9, 3), fabric_offsets=(4, 1))
    run = Simulation(layout, seed)
    run.boot()
    return run


def words(run, place=(1, 0)):
    row = np.zeros(6, np.uint32)
    run.wait(run.copy_out("a", {place: row}), row.nbytes)
    return row


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_copy_a_launch_and_a_copy_back(tmp_path, arch, seed):
    run = start(tmp_path, f"if (first) {{ {SEND} }} else {{ {RECEIVE} }}", arch, seed=seed)
    given = np.arange(6, dtype=np.uint32) + 40
    run.copy_in("a", {(0, 0): given})
    launch = run.launch("f")
    assert (words(run) == given).all()
    assert launch.done
    assert run.fabric.nodes[0, 0].traffic[1] == 6
    assert 6 < launch.ended - launch.started < 200


def test_a_stream_in_and_a_stream_out(tmp_path):
    more = """
    const h2d = @get_data_task_id(sys.MEMCPYH2D_1);
    const back = @get_dsd(fabout_dsd, .{ .extent = 1, .fabric_color = sys.MEMCPYD2H_1, .output_queue = oq });
    task twice(x: u32) void { @mov32(back, x * 2); }
    comptime { @bind_data_task(twice, h2d); }
    """
    run = start(tmp_path, "", more=more)
    rows = {(0, 0): np.arange(50, dtype=np.uint32), (1, 0): np.arange(50, 100, dtype=np.uint32)}
    got = {place: np.zeros(50, np.uint32) for place in rows}
    run.stream_in(0, rows)
    run.wait(run.stream_out(1, got))
    assert all((got[place] == 2 * rows[place]).all() for place in rows)


@pytest.mark.parametrize(
    "function, message",
    [
        ("", r"PE \(0, 0\): 'f' did not call unblock_cmd_stream\(\)"),
        (f"if (first) {{ sys.unblock_cmd_stream(); }} else {{ {RECEIVE} }}", r"PE \(1, 0\): .*color 5"),
        (
            f"if (first) {{ {SEND} }} else {{ @mov32(a_dsd, in); sys.unblock_cmd_stream(); @mov32(a_dsd, in); }}",
            "color 5",
        ),
        (f"if (!first) {{ sys.unblock_cmd_stream(); }} else {{ {SEND} {SEND} }}", "queue|microthread|thread"),
    ],
)
def test_a_stall_names_the_waiting_tasks(tmp_path, function, message):
    run = start(tmp_path, function)
    with pytest.raises(CslFault, match=message):
        run.launch("f")
        words(run, (0, 0))
        run.wait(run.launch("f"))


def test_a_stall_of_a_copy_back_names_its_size(tmp_path):
    run = start(tmp_path, "")
    run.launch("f")
    with pytest.raises(CslFault, match=r"received length \(0 bytes\) is not expected \(24 bytes\)"):
        words(run)


def test_an_endless_run_is_a_fault(tmp_path):
    run = start(tmp_path, "@activate(again_id);", more="""
    const again_id = @get_local_task_id(11);
    task again() void { @activate(again_id); }
    comptime { @bind_local_task(again, again_id); }
    """)  # fmt: skip
    run.limit = 5000
    wanted = r"still running after the limit of 5,000 cycles[^\n]*\n *PE \(0, 0\): runs again again and again"
    with pytest.raises(CslFault, match=wanted):
        run.wait(run.launch("f"))


def test_unread_wavelets_are_reported(tmp_path):
    run = start(tmp_path, f"if (first) {{ {SEND} }} else {{ sys.unblock_cmd_stream(); }}")
    run.wait(run.launch("f"))
    run.settle()
    assert run.fabric.describe_stuck() == [
        "PE (1, 0): 6 wavelet(s) of color 5 wait in the input queue, which nothing reads"
    ]


def test_a_copy_past_the_end_of_a_variable(tmp_path):
    run = start(tmp_path, "sys.unblock_cmd_stream();")
    with pytest.raises(CslFault, match="28 bytes at 'a' passes the end"):
        run.wait(run.copy_in("a", {(0, 0): np.zeros(7, np.uint32)}))


def test_a_descriptor_past_the_end_of_a_variable(tmp_path):
    function = "@mov32(@increment_dsd_offset(a_dsd, 1, u32), 7); sys.unblock_cmd_stream();"
    run = start(tmp_path, function)
    with pytest.raises(CslFault, match="elements 1 to 6 of an array of 6"):
        run.wait(run.launch("f"))


def test_a_launch_with_too_many_arguments(tmp_path):
    run = start(tmp_path, "sys.unblock_cmd_stream();")
    with pytest.raises(ArgumentError, match="'f' is launched with 1 arguments"):
        run.wait(run.launch("f", 3))


def test_programs_for_early_sdks_name_the_launch_color(tmp_path):
    """Early SDKs pass LAUNCH to `<memcpy/get_params>`, and a PE serves launches on that color."""
    layout = LAYOUT.replace(".MEMCPYD2H_1 = @get_color(1) }", ".MEMCPYD2H_1 = @get_color(1), .LAUNCH = @get_color(8) }")
    (tmp_path / "layout.csl").write_text(layout)
    more = "comptime { @rpc(@get_data_task_id(sys.LAUNCH)); } fn f() void { a[0] = 3; sys.unblock_cmd_stream(); }"
    (tmp_path / "pe.csl").write_text(PE + more)
    run = Simulation(compile_program(str(tmp_path / "layout.csl"), fabric_dims=(9, 3), fabric_offsets=(4, 1)))
    run.boot()
    run.launch("f")
    assert words(run)[0] == 3


def test_the_host_tools_run_a_program(tmp_path):
    """The program's own shell script runs in a copy of its folder."""
    folder = tmp_path / "axpy"
    shutil.copytree(Path(__file__).parent / "programs" / "axpy", folder)
    path = f"{host_tools_folder()}{os.pathsep}{os.environ['PATH']}"
    for script in ("commands_wse2.sh", "commands_wse3.sh"):
        done = subprocess.run(
            ["bash", script], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.stdout == "SUCCESS!\n", done.stderr

"""The library `<message_passing>`: messages between any two PEs, in order, with their ends and their errors."""

import numpy as np
import pytest

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.simulation import Simulation
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault

LAYOUT = """
const memcpy = @import_module("<memcpy/get_params>", .{ .width = 3, .height = 2 });
layout { @set_rectangle(3, 2);
  for (@range(i16, 3)) |x| { for (@range(i16, 2)) |y| {
    @set_tile_code(x, y, "pe.csl", .{ .memcpy_params = memcpy.get_params(x) }); } }
  @export_name("a", [*]f32, true); @export_name("f", fn()void); }
"""
PE = """
param memcpy_params; const sys = @import_module("<memcpy/memcpy>", memcpy_params);
const place = @import_module("<layout>");
const mp = @import_module("<message_passing>", .{ .input_queue_id = 2, .output_queue_id = 3 });
var a = @zeros([40]f32); var b = @zeros([40]f32); var h = @zeros([4]i16); var p: [*]f32 = &a; var count: i16 = 0;
const got = @get_local_task_id(8); const next = @get_local_task_id(9); const second = @get_local_task_id(10);
task take() void { count += 1; if (count < 2) { mp.recv_message(&b[4], got, .{}); } else { @activate(second); } }
task leave() void { sys.unblock_cmd_stream(); }
task keep() void { for (@range(i16, 8)) |i| { a[i] = b[i]; } sys.unblock_cmd_stream(); }
fn run() void { BODY }
fn f() void { run(); }
comptime { @bind_local_task(take, got); @bind_local_task(leave, next); @bind_local_task(keep, second);
  @export_symbol(p, "a"); @export_symbol(f); }
"""
TO_THE_CORNER = """mp.init(); const x = place.get_x_coord(); const y = place.get_y_coord();
  if (x == 2 and y == 1) { mp.recv_message(&b, got, .{}); }
  else if (x == y) { mp.send_message(2, 1, &a, 4, .{ .activate = next }); } else { sys.unblock_cmd_stream(); }"""


def start(folder, body, arch="wse3"):
    (folder / "layout.csl").write_text(LAYOUT)
    (folder / "pe.csl").write_text(PE.replace("BODY", body))
    run = Simulation(compile_program(folder / "layout.csl", arch=arch))
    run.boot()
    run.copy_in("a", {(x, y): np.arange(4, dtype=np.float32) + 10 * x + 100 for x, y in run.pes})
    return run


@pytest.mark.parametrize("lockstep", [True, False])
def test_the_nearer_message_arrives_first(lockstep, tmp_path):
    run = start(tmp_path, TO_THE_CORNER)
    launch = run.launch("f")
    run.wait(launch)
    found = run.pes[2, 1].get_variable("a")[:8].tolist()
    assert found == [110, 111, 112, 113, 100, 101, 102, 103]  # from (1, 1), one hop away, and then from (0, 0)
    assert launch.ended > launch.started + 4 + 3


@pytest.mark.parametrize(
    "body, message",
    [
        ("mp.send_message(2, 1, &a, 4, .{});", "send_message is called before init"),
        ("mp.init(); mp.send_message(3, 1, &a, 4, .{});", r"PE \(3, 1\) is outside of the rectangle"),
        ("mp.init(); mp.send_message(2, 1, &a, 33, .{});", "a message has 1 to 32 wavelets"),
        ("mp.init(); mp.send_message(2, 1, &a, 0, .{});", "a message has 1 to 32 wavelets"),
        ("mp.init(); mp.send_message(2, 1, &h, 5, .{});", "pass the end of the buffer"),
        ("mp.init(); mp.recv_message(&b, got, .{});", "recv_message waits for state"),
    ],
)
def test_faults(body, message, tmp_path):
    run = start(tmp_path, body)
    with pytest.raises(CslFault, match=message):
        run.wait(run.launch("f"))


@pytest.mark.parametrize(
    "old, new, arch, message",
    [(".input_queue_id = 2, ", "", "wse3", "needs the parameter 'input_queue_id'"), ("", "", "wse2", "WSE-3 only")],
)
def test_errors_of_the_import(old, new, arch, message, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PE", PE.replace(old, new, 1) if old else PE)
    with pytest.raises(CslError, match=message):
        start(tmp_path, "", arch)

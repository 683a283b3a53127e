"""What goes wrong while a program runs, in which words; and the arguments that compiling refuses."""

import numpy as np
import pytest
from csl_lang import build, element, run, simulate

from tessera.errors import ArgumentError, FileError
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import CslError, CslFault
from tessera.interp.target.csl.layout import compile_program
from tessera.interp.target.csl.libraries_collectives import axis_params, params_module, words
from tessera.interp.target.csl.values import Pointer, Value

TASK = "task t() void { note(1); } comptime { @bind_local_task(t, t8); }"
CASES = {
    "a tensor past its array": (
        "const d = @get_dsd(mem4d_dsd, .{ .tensor_access = |i, j|{2, 2} -> a[4 * i + j] });"
        "export fn main() void { @fmovs(d, 1.0); }",
        "DSD accesses elements 0 to 5 of an array of 4",
    ),
    "a window past its array": (
        "var p: *[3]f32;export fn main() void { p = @ptrcast(*[3]f32, &a[2]); p.* = @zeros([3]f32); }",
        "elements 2 to 4 are outside of an array of 4",
    ),
    "an operation without the fabric": (
        TASK + "export fn main() void { @load_to_dsr(@get_dsr(dsr_dest, 1), vo, .{ .async = true });"
        " @fmovs(@get_dsr(dsr_dest, 1), va); }",
        "asynchronous DSD operations must have at least one fabric operand",
    ),
    "a queue that is not initialized": (
        "const z = @get_dsd(fabin_dsd, .{ .extent = 2, .input_queue = @get_input_queue(5) });"
        "export fn main() void { @fmovs(vo, z); }",
        "input queue 5 is not initialized",
    ),
    "two operations on a microthread": (
        "export fn main() void { @fmovs(vo, rx, .{ .async = true, .ut_id = @get_ut_id(4) });"
        " @fmovs(tx, va, .{ .async = true, .ut_id = @get_ut_id(4) }); }",
        "microthread 4 is in use by the operation at",
    ),
    "a control wavelet for nobody": (
        "const ctl = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq, .control = true });"
        "export fn main() void { @mov32(ctl, @as(u32, 41 << 16)); }",
        "control wavelet on color 1 names task ID 41, to which no task is bound",
    ),
    "routes of a color that has none": (
        'const tc = @import_module("<tile_config>"); export fn main() void {'
        " tc.switch_config.clear_current_position(@get_color(3)); }",
        "has no route for color 3 that could be changed",
    ),
    "a filter that is not there": (
        'const tc = @import_module("<tile_config>"); export fn main() void { tc.filters.set_counter(c, 1); }',
        "has no filter on color 1",
    ),
    "the state of a queue that is not there": (
        'const tc = @import_module("<tile_config>"); export fn main() void {'
        " if (tc.queue_status.is_empty(@get_input_queue(6))) { note(1); } }",
        "is_empty: queue 6 is not initialized",
    ),
    "a field of new routes": (
        'const tc = @import_module("<tile_config>"); export fn main() void {'
        " tc.color_config.reset_routes(tc.color_config.get_color_config_addr(c), .{ .to = .{ EAST } }); }",
        "reset_routes: unexpected field 'to'",
    ),
    "a full trace": (
        'const debug = @import_module("<debug>", .{ .key = "k", .buffer_size = 2 });'
        "export fn main() void { for (@range(i16, 3)) |i| { debug.trace_i16(i); } }",
        "the trace buffer 'k' of 2 words is full",
    ),
    "a flush without a handler": (
        "export fn main() void { @queue_flush(oq); }",
        "output queue 3 is flushed but has no '@set_empty_queue_handler'",
    ),
    "another color while words wait": (
        'const tc = @import_module("<tile_config>"); export fn main() void { @fmovs(tx, va); @fmovs(vo, rx);'
        " @fmovs(tx, va); tc.input_queue_config.encode_input_queue(2, 7, false); }",
        "input queue 2 is given color 7 while words of color 1 are in it",
    ),
    "another color for no queue": (
        'const tc = @import_module("<tile_config>"); export fn main() void {'
        " tc.output_queue_config.encode_output_queue(5, 7); }",
        "output queue 5 is not initialized",
    ),
    "a call of nothing": (
        "var f: fn() void; export fn main() void { f(); }",
        "through an uninitialized function pointer",
    ),
    "a result of a map": (
        "var d: mem1d_dsd; fn f(x: f32) f32 { return x; } export fn main() void { @map(f, va, d); }",
        "the result of '@map' must go to memory, the fabric or a pointer",
    ),
    "a stream to nowhere": (
        "var d: mem1d_dsd; export fn main() void { @fmovs(d, rx); }",
        "'@fmovs' into an uninitialized descriptor",
    ),
    "a negative index": ("export fn main() void { var i: i16 = n - 1; a[i] = 1.0; }", "index -1 is out of bounds"),
    "an assertion": ("export fn main() void { @assert(n == 1); }", "assertion failed"),
}


@pytest.mark.parametrize("title", list(CASES))
def test_fault(title, tmp_path):
    text, message = CASES[title]
    with pytest.raises(CslFault) as caught:
        simulate(tmp_path, text, "wse3")
    assert message in caught.value.message and caught.value.message.startswith("PE (0, 0)")


def test_a_register_that_is_not_simulated(tmp_path):
    with pytest.raises(CslFault, match="the register at address 0xff00 is not simulated"):
        simulate(tmp_path, "export fn main() void { @bitcast(*u16, @as(u16, 0xff00)).* = 1; }", "wse2")


def test_a_data_task_without_a_queue(tmp_path):
    text = "task t(x: u32) void {} comptime { @bind_data_task(t, @get_data_task_id(@get_input_queue(3))); }"
    with pytest.raises(CslFault, match="input queue 3 of data task 't' is not initialized"):
        element(build(tmp_path, text, arch="wse3"))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"arch": "wse1"}, "unknown arch"), ({"sdk": "3"}, "unknown sdk"), ({"fp16_format": "cb16"}, "unknown fp16")],
)
def test_options_that_are_unknown(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        build(tmp_path, "", **options)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileError, match="no such file"):
        compile_program(tmp_path / "none.csl")


def test_a_stream_of_commands_that_is_not_there(tmp_path):
    text = """const sys = @import_module("<memcpy/memcpy>", .{ .width = 1, .height = 1 });
      export fn main() void { sys.unblock_cmd_stream(); }"""
    with pytest.raises(CslFault, match=r"unblock_cmd_stream\(\) on a PE without a command stream"):
        run(tmp_path, text)


def test_what_the_collectives_refuse():
    get_params = params_module(None, {})["get_params"].data.run
    with pytest.raises(CslError, match="needs x_colors or y_colors"):
        get_params(None, None, None, Value(t.ANON, {}))
    with pytest.raises(CslError, match="two distinct x_colors"):
        axis_params("x", {"x_colors": Value(t.ANON, {"0": Value(t.COLOR, 1), "1": Value(t.COLOR, 1)})})
    with pytest.raises(CslFault, match="gather of 5 words passes the end of its buffer"):
        words("gather", Pointer(np.zeros(4, np.float32), 0), 5)

"""Programs as the public writes them: unused functions, names exported twice, early SDKs, control words among data."""

import json

import numpy as np
import pytest
from csl_harness import HEAD, LOOP, build, run, simulate

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.fabric.router_grid import Fabric
from tessera.interp.target.csl.host import cslc
from tessera.interp.target.csl.host.runtime import MemcpyDataType, MemcpyOrder, SdkRuntime
from tessera.interp.target.csl.pe.pe_state import EventQueue
from tessera.interp.target.csl.sema.values import ColorConfig
from tessera.interp.target.csl.simulation import Simulation
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault


def test_an_unused_function_leaves_nothing_behind(tmp_path):
    """A DSD of a function that nothing calls is the only use of a global."""
    text = """var scratch: [4]f32; var sum: [1]i16;
      fn idle() void { const d = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> scratch[i] }); @fmovs(d, 1.0); }
      export fn main() void { sum[0] = 3; }"""
    assert run(tmp_path, text).get_variable("sum").tolist() == [3]


def test_files_of_comptime_values_belong_to_the_compiled_program(tmp_path):
    (tmp_path / "sizes.json").write_text(json.dumps([5, 7]))
    (tmp_path / "layout.csl").write_text("""
      const memcpy = @import_module("<memcpy/get_params>", .{ .width = 1, .height = 1 });
      layout { @set_rectangle(1, 1); @set_tile_code(0, 0, "pe.csl", .{ .memcpy_params = memcpy.get_params(0) });
        @export_name("a", [*]u32, true); }""")
    (tmp_path / "pe.csl").write_text("""
      param memcpy_params; const sys = @import_module("<memcpy/memcpy>", memcpy_params);
      var a = @import_comptime_value([2]u32, "sizes.json"); var p: [*]u32 = &a;
      comptime { @export_symbol(p, "a"); }""")
    assert cslc.main([str(tmp_path / "layout.csl"), "--memcpy", "-o", str(tmp_path / "out")]) == 0
    (tmp_path / "sizes.json").unlink()
    runtime = SdkRuntime(tmp_path / "out")
    runtime.load()
    runtime.run()
    found = np.zeros(2, np.uint32)
    how = {"data_type": MemcpyDataType.MEMCPY_32BIT, "order": MemcpyOrder.ROW_MAJOR}
    runtime.memcpy_d2h(found, runtime.get_id("a"), 0, 0, 1, 1, 2, **how)
    runtime.stop()
    assert found.tolist() == [5, 7]


def test_registers_by_the_names_of_the_target(tmp_path):
    """The route of color 1 (a loop at the ramp) through `tile_config.target.addresses`, and the cycle counter."""
    pe = simulate(tmp_path, """
      const tile = @import_module("<tile_config>"); const at = tile.target.addresses;
      export var bits: [2]u16; export var spent: u16;
      fn address(color_: color) u16 { return @as(u16, at.COLOR_CONFIG) + @get_int(color_) * tile.target.word_size; }
      export fn main() void {
        @bitcast(*u16, @as(u16, tile.addresses.TIMESTAMP_COUNTER)).* = 0;
        @bitcast(*u16, @as(u16, tile.addresses.PERF_COUNTER_CONTROL)).* = 7;
        bits[0] = @bitcast(*u16, address(c)).*;
        @fmovs(vo, va);
        spent = @bitcast(*u16, @as(u16, tile.addresses.TIMESTAMP_COUNTER)).*;
        bits[1] = @bitcast(*u16, @as(u16, tile.addresses.PERF_COUNTER_CONTROL)).*; }""")  # fmt: skip
    assert pe.get_variable("bits").tolist() == [1 << 4 | 1 << 9, 7]
    assert 14 < int(pe.get_variable("spent")[0]) < 60


@pytest.mark.parametrize("mode", ["simd_32", "simd_64", "simd_32_or_64", "simd_max"])
def test_every_simd_mode_packs_two_elements(mode, tmp_path):
    halves = simulate(tmp_path, """
      var h = [4]f16 { 1.0, 2.0, 3.0, 4.0 }; export var back: [4]f16;
      const vh = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> h[i] });
      const vb = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> back[i] });
      const pairs = .{ .MODE = true };
      const th = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 4, .output_queue = oq, .simd_mode = pairs });
      const rh = @get_dsd(fabin_dsd, .{ .fabric_color = c, .extent = 4, .input_queue = iq, .simd_mode = pairs });
      export fn main() void { @fmovh(th, vh, .{ .async = true }); @fmovh(vb, rh); }""".replace("MODE", mode)
    )  # fmt: skip
    assert halves.get_variable("back").tolist() == [1, 2, 3, 4]


def test_a_name_exported_twice_is_one_export(tmp_path):
    text = """export var a: [2]u32; var p: [*]u32 = &a; export fn main() void { a[1] = 4; }
      comptime { @export_symbol(p, "a"); @export_symbol(main); }"""
    names = '@export_name("a", [*]u32, true); @export_name("main", fn()void);'
    simulation = Simulation(build(tmp_path, text, names))
    simulation.boot()
    simulation.launch("main")
    simulation.settle()
    assert simulation.pes[0, 0].get_variable("a").tolist() == [0, 4]


def test_a_queue_that_is_never_initialized_nor_used(tmp_path):
    text = """task idle(x: u32) void { note(1); }
      comptime { @bind_data_task(idle, @get_data_task_id(@get_input_queue(5))); }
      export fn main() void { note(2); }"""
    assert simulate(tmp_path, text, "wse3").get_variable("order")[0] == 2


CONTROL = """
  const control = @import_module("<control>");
  const tc = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq, .control = true });
  const t41 = @get_control_task_id(41);
  task seen() void { note(7); }
  comptime { @bind_control_task(seen, t41); }
  const more = @get_dsd(fabin_dsd, .{ .fabric_color = c, .extent = 8, .input_queue = iq });
  const eight = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{8} -> out[i] });
  task sent() void { @mov32(tc, WORD); @activate(t9); }
  task again() void { @fmovs(tx, va, .{ .async = true }); }
  comptime { @bind_local_task(sent, t8); @bind_local_task(again, t9); }
"""


@pytest.mark.parametrize(
    "word, order", [("control.encode_control_task_payload(t41)", 7), ("@as(u32, 31 << 16)", 0)], ids=["task", "no task"]
)
def test_a_control_wavelet_among_the_words_of_a_plain_operation(word, order, tmp_path):
    """The operation waits until the control task took it, or drops it if it names none; the words behind it follow."""
    text = CONTROL.replace("WORD", word)
    text += """export fn main() void {
      @fmovs(eight, more, .{ .async = true }); @fmovs(tx, va, .{ .async = true, .activate = t8 }); }"""
    pe = simulate(tmp_path, text)
    assert pe.get_variable("out").tolist() == [1, 2, 3, 4] * 2 and pe.get_variable("order")[0] == order


def test_a_control_wavelet_that_nobody_can_take_is_a_stall(tmp_path):
    """The task waits for words behind the control wavelet, whose task cannot run beside it."""
    text = CONTROL.replace("WORD", "control.encode_control_task_payload(t41)")
    text += "export fn main() void { @mov32(tc, control.encode_control_task_payload(t41)); @fmovs(eight, more); }"
    pe = simulate(tmp_path, text)
    assert pe.front is not None and pe.events.now < 10_000


def test_an_internal_error_is_a_fault_with_its_place(tmp_path, monkeypatch):
    from tessera.interp.target.csl.fabric.output_queue import OutputQueue

    def broken(self, words):
        raise KeyError("lost")

    monkeypatch.setattr(OutputQueue, "offer", broken)
    with pytest.raises(CslFault, match=r"PE \(0, 0\): .*lost.*\(cycle \d+\)"):
        simulate(tmp_path, "export fn main() void { @fmovs(tx, va); }")


EARLY_LAYOUT = """
const memcpy = @import_module("<memcpy_multi/get_params>", .{ .width = 2, .height = 1 });
const way: color = @get_color(3);
layout { @set_rectangle(2, 1);
  @set_tile_code(0, 0, "pe.csl", .{ .memcpy_params = memcpy.get_params(0), .way = way, .first = true });
  @set_tile_code(1, 0, "pe.csl", .{ .memcpy_params = memcpy.get_params(1), .way = way, .first = false });
  @set_color_config(0, 0, way, .{ .routes = .{ .rx = .{ RAMP }, .tx = .{ EAST } } });
  @set_color_config(1, 0, way, .{ .routes = .{ .rx = .{ WEST }, .tx = .{ RAMP } } });
  @export_name("a", [*]f32, true); @export_name("compute", fn()void); }
"""
EARLY_PE = """
param memcpy_params: comptime_struct; param way: color; param first: bool;
const LAUNCH: color = @get_color(8); const EXIT: color = @get_color(9);
const sys = @import_module("<memcpy_multi/memcpy>", @concat_structs(memcpy_params,
  .{ .LAUNCH = LAUNCH, .data_type = f32 }));
var a = [4]f32 { 1.0, 2.0, 3.0, 4.0 }; var p: [*]f32 = &a;
const va = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> a[i] });
const out = @get_dsd(fabout_dsd, .{ .fabric_color = way, .extent = 2, .output_queue = @get_output_queue(2) });
const reg = @get_dsr(dsr_src1, 1);
var count: i16 = 0;
fn compute() void { if (first) {
  @load_to_dsr(reg, va); @set_dsr_base_addr(reg, @ptrcast([*]f32, &a[2]));
  @fmovs(out, reg, .{ .async = true, .activate = EXIT }); } }
task take(x: f32) void { a[count] = x * 10.0; count += 1; if (count == 2) { @activate(EXIT); } }
task leave() void { sys.unblock_cmd_stream(); }
comptime { @bind_task(leave, EXIT); if (!first) { @bind_task(take, way); }
  @export_symbol(p, "a"); @export_symbol(compute); @rpc(LAUNCH); }
"""


def test_a_program_of_an_early_sdk(tmp_path):
    """`<memcpy_multi>`, tasks bound to colors, and a register whose base address moves, in the language of SDK 0.9."""
    (tmp_path / "layout.csl").write_text(EARLY_LAYOUT)
    (tmp_path / "pe.csl").write_text(EARLY_PE)
    simulation = Simulation(compile_program(tmp_path / "layout.csl", sdk="0.9"))
    simulation.boot()
    simulation.wait(simulation.launch("compute"))
    assert simulation.pes[1, 0].get_variable("a").tolist() == [30, 40, 3, 4]


def test_a_pointer_to_a_register_is_known_at_comptime(tmp_path):
    """A color without a route has no direction in its register, until the program writes one."""
    pe = simulate(tmp_path, """
      const loop: *u16 = @bitcast(*u16, 2 * @as(u16, 0x7f21)); const none = @bitcast(*u16, 2 * @as(u16, 0x7f25));
      export var bits: [3]u16;
      export fn main() void { bits[0] = loop.*; bits[1] = none.*; none.* = 0x210; bits[2] = none.*; }""")  # fmt: skip
    assert pe.get_variable("bits").tolist() == [0x210, 0, 0x210]


def test_parameters_of_function_types_may_have_names(tmp_path):
    text = """fn twice(x: i16) i16 { return 2 * x; } var f: *const fn(count: i16) i16 = &twice;
      export var r: [1]i16; export fn main(n: i16) void { r[0] = twice(n); }"""
    layout = build(tmp_path, text.replace("var f: *const fn(count: i16) i16 = &twice;", ""),
                   '@export_name("main", fn(n: i16)void);')  # fmt: skip
    simulation = Simulation(layout)
    simulation.boot()
    simulation.launch("main", 4)
    simulation.settle()
    assert simulation.pes[0, 0].get_variable("r")[0] == 8


@pytest.mark.parametrize("arch, seen", [("wse2", True), ("wse3", False)])
def test_a_control_wavelet_starts_a_data_task_of_its_id(arch, seen, tmp_path):
    """On WSE-2 all kinds of tasks share one table of ids: id 1 is that of the data task of color 1."""
    text = """const tc = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq, .control = true });
      task take(x: i16) void { note(x); } comptime { @bind_data_task(take, id); }
      export fn main() void { @mov32(tc, @as(u32, 1 << 16 | 5)); }"""
    if seen:
        assert simulate(tmp_path, text, arch).get_variable("order")[0] == 5
        return
    with pytest.raises(CslFault, match="names task ID 1, to which no task is bound"):
        simulate(tmp_path, text, arch)


def test_a_swap_on_both_axes_exchanges_the_colors_at_the_ramp():
    colors = {(0, 0): {2: ColorConfig(("RAMP",), ("RAMP", "EAST"), swap_x=True, swap_y=True)},
              (1, 0): {3: ColorConfig(("WEST",), ("RAMP",))}}  # fmt: skip
    events = EventQueue()
    fabric = Fabric(events, 2, 1, colors)
    view = fabric.view(0, 0)
    for node in fabric.nodes.values():
        node.pe = Receiver()
    view.push(2, [7, 8])
    events.run()
    assert [word for _, word in fabric.nodes[0, 0].get_input(3).words] == [7, 8]
    assert [word for _, word in fabric.nodes[1, 0].get_input(3).words] == [7, 8]


class Receiver:
    """The PE of a router, which takes no word."""

    def receive_wavelet(self, color):
        """Leave the word in its queue."""


def test_a_task_is_not_starved(tmp_path):
    """Four words that their task sends on forever keep the queue full until another task gets its turn."""
    text = """const one = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq });
      task take(x: f32) void { if (n == 0) { @fmovs(one, x); } } task third() void { n = 1; }
      comptime { @bind_data_task(take, id); @bind_local_task(third, t9); }
      export fn main() void { @fmovs(tx, va, .{ .async = true, .activate = t9 }); }"""
    simulation = Simulation(build(tmp_path, HEAD + text, LOOP), limit=20_000)
    simulation.boot()
    pe = simulation.pes[0, 0]
    pe.start(pe.get_export("main"))
    simulation.settle()
    assert pe.get_variable("n")[0] == 1 and not simulation.events.pending


def test_tasks_take_turns(tmp_path):
    """A data task whose words wait does not run three times while a local task is ready."""
    text = """task take(x: f32) void { note(@as(i16, x)); } task other() void { note(9); if (n < 6) { @activate(t9); } }
      comptime { @bind_data_task(take, id); @bind_local_task(other, t9); @bind_local_task(late, t8); }
      task late() void { for (@range(i16, 40)) |i| { out[0] += 1.0; } @activate(t9); }
      export fn main() void { @fmovs(tx, va, .{ .async = true }); @activate(t8); }"""
    order = simulate(tmp_path, text).get_variable("order")[:8].tolist()
    assert [x for x in order if x != 9][:4] == [1, 2, 3, 4] and order.count(9) >= 2
    assert order[:4].count(9) == 1, order


def test_a_struct_of_a_named_type_gives_the_params_of_a_module(tmp_path):
    (tmp_path / "part.csl").write_text("param size: i16; param way: color; fn get() i16 { return size * 2; }")
    text = """const shape = struct { size: i16, way: color }; const given = shape { .size = 4, .way = @get_color(3) };
      const part = @import_module("part.csl", given); export var r: [1]i16;
      export fn main() void { r[0] = part.get(); }"""
    assert run(tmp_path, text).get_variable("r")[0] == 8


def test_a_name_may_be_exported_as_a_pointer_to_a_whole_array(tmp_path):
    text = """var a = @zeros([2, 3]f32); var p: *[2, 3]f32 = &a; comptime { @export_symbol(p, "a"); }"""
    layout = build(tmp_path, text, '@export_name("a", *[2, 3]f32, true);')
    assert layout.exports["a"].name == "a"


def test_a_long_stride_on_wse3(tmp_path):
    text = """var a = @zeros([600]f32); const d = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{3} -> a[200 * i] });
      export var r: [3]f32; export fn main() void { @fmovs(d, 2.0); r[2] = a[400]; }"""
    assert run(tmp_path, text, arch="wse3").get_variable("r")[2] == 2
    with pytest.raises(CslError, match="stride 200 does not fit in 'i8'"):
        run(tmp_path, text, arch="wse2")


def test_an_extern_variable_is_the_exported_one_of_another_module(tmp_path):
    """Two files share one array: the part writes what the program exports."""
    (tmp_path / "part.csl").write_text("extern var shared: [2]i16; fn put() void { shared[1] += 5; }")
    text = """export var shared = [2]i16 { 1, 2 }; const part = @import_module("part.csl"); export var r: [1]i16;
      export fn main() void { part.put(); r[0] = shared[1]; }"""
    pe = run(tmp_path, text)
    assert pe.get_variable("r")[0] == 7 and pe.get_variable("shared").tolist() == [1, 7]


@pytest.mark.parametrize(
    "text, found",
    [
        ("@ptrcast(*[4]u16, &g).*[0] = 507; @ptrcast(*[4]u16, &g).*[3] = 9;", [507, 0, 0, 9]),
        ("@ptrcast([*]u16, &g)[n] = 5; @ptrcast([*]u16, &g)[2] = 6;", [0, 5, 6, 0]),
        ("@ptrcast(*[4]u16, &g).*[n] += 7; @ptrcast(*u16, &g).* = 3;", [3, 7, 0, 0]),
        ("@ptrcast(*[2, 2]u16, &g).*[1, 0] = 8;", [0, 0, 8, 0]),
        ("g[0] = 196608; g[1] = @as(u32, @ptrcast(*[4]u16, &g).*[n]);", [0, 3, 3, 0]),
        ("@ptrcast(*[4]u16, &g).* = [4]u16 { 1, 2, 3, 4 };", [1, 2, 3, 4]),
        ("const q = &@ptrcast(*[4]u16, &g).*[1]; q.* = 4;", [0, 4, 0, 0]),
        ("@ptrcast(*[2]u32, @ptrcast(*[4]u16, &g)).*[1] = 6;", [0, 0, 6, 0]),
        ("one = 5; g[0] = @as(u32, @ptrcast(*[2]u16, &one).*[0]); @ptrcast(*[2]u16, &one).*[0] = 2; g[1] = one;",
         [5, 0, 2, 0]),
        ("comptime { var a = [2]u32 { 1, 131072 }; @comptime_assert(@ptrcast(*[4]u16, &a).*[3] == 2); }", [0] * 4),
    ],
)  # fmt: skip
def test_memory_through_a_pointer_of_another_type(text, found, tmp_path):
    variables = "export var g = @zeros([2]u32); var one: u32 = 1; var n: i16 = 1;"
    pe = run(tmp_path, f"{variables} export fn main() void {{ {text} }}")
    assert pe.get_variable("g").view(np.uint16).tolist() == found


def test_the_limit_ends_a_long_loop_that_contains_no_loop(tmp_path):
    text = "export fn main() void { for (@range(i32, 2000000000)) |i| { n = 1; } }"
    with pytest.raises(CslFault, match="limit of 1,000,000 cycles in this loop") as caught:
        simulate(tmp_path, text)
    assert caught.value.location.line


def test_an_expression_that_nests_too_deep_is_an_error_at_its_place(tmp_path):
    with pytest.raises(CslError, match="nests too deep") as caught:
        simulate(tmp_path, f"export fn main() void {{ n = {'+'.join(['n'] * 5000)}; }}")
    assert caught.value.location.file.endswith("pe.csl")

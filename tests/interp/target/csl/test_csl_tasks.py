"""Tasks, microthreads, FIFOs and queues of one PE whose color 1 loops back to it."""

import pytest
from csl_harness import HEAD, LOOP, build, simulate

from tessera.interp.target.csl.pe.scheduler import describe_waits, is_idle
from tessera.interp.target.csl.simulation import Simulation
from tessera.interp.target.csl.text.diagnostics import CslFault


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_send_and_receive(arch, seed, tmp_path):
    text = """export fn main() void { @fmovs(vo, rx, .{ .async = true, .activate = t8 });
        @fmuls(tx, va, @as(f32, 2.0), .{ .async = true, .activate = done }); }
      task got() void { note(1); } task done() void { note(2); }
      comptime { @bind_local_task(got, t8); @bind_local_task(done, t9); }"""
    pe = simulate(tmp_path, text, arch, seed)
    assert pe.get_variable("out").tolist()[:4] == [2, 4, 6, 8]
    assert sorted(pe.get_variable("order").tolist()[:2]) == [1, 2] and is_idle(pe)


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
def test_data_task(arch, tmp_path):
    text = """export fn main() void { @fmovs(tx, va, .{ .async = true }); }
      task take(x: f32) void { out[n] = x; n += 1; }
      comptime { @bind_data_task(take, id); }"""
    assert simulate(tmp_path, text, arch).get_variable("out").tolist()[:4] == [1, 2, 3, 4]


def test_data_task_with_two_16_bit_parameters(tmp_path):
    text = """var w = [1]u32 { 0x00020007 }; const vw = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{1} -> w[i] });
      export fn main() void { @mov32(tx, vw, .{ .async = true }); }
      task take(data: i16, index: u16) void { order[index] = data; }
      comptime { @bind_data_task(take, id); }"""
    assert simulate(tmp_path, text).get_variable("order").tolist()[:3] == [0, 0, 7]


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
def test_control_task(arch, tmp_path):
    text = """const ctrl = @import_module("<control>"); const id40 = @get_control_task_id(40);
      const tc = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq, .control = true });
      export fn main() void { @mov32(tc, ctrl.encode_control_task_payload(id40));
        @mov32(tc, ctrl.encode_single_payload(ctrl.opcode.NOP, false, id40, 6)); }
      task control(data: i16) void { note(data); }
      comptime { @bind_control_task(control, id40); }"""
    assert simulate(tmp_path, text, arch).get_variable("n") == 2


def test_block_and_unblock(tmp_path):
    text = """export fn main() void { @activate(t8); @activate(t9); note(0); }
      task first() void { note(1); @block(t8); @activate(t8); @activate(t9); }
      task second() void { note(2); if (n < 5) { @unblock(t8); } }
      comptime { @bind_local_task(first, t8); @bind_local_task(second, t9); @block(t8); @block(id); @unblock(id); }"""
    pe = simulate(tmp_path, text)
    assert pe.get_variable("order").tolist()[:5] == [0, 2, 1, 2, 1] and is_idle(pe)


def test_activated_at_compile_time(tmp_path):
    text = "task t() void { note(7); } comptime { @bind_local_task(t, t8); @activate(t8); }"
    assert simulate(tmp_path, text).get_variable("order")[0] == 7


@pytest.mark.parametrize("seed", [None, 3])
def test_fifo(seed, tmp_path):
    text = """var space = @zeros([2]f32); const f = @allocate_fifo(space, .{ .activate_push = t8 });
      export fn main() void { @fadds(f, rx, va, .{ .async = true }); @fmovs(vo, f, .{ .async = true });
        @fmovs(tx, va, .{ .async = true }); }
      task pushed() void { note(1); } comptime { @bind_local_task(pushed, t8); }"""
    pe = simulate(tmp_path, text, seed=seed)
    assert pe.get_variable("out").tolist()[:4] == [2, 4, 6, 8] and pe.get_variable("n") >= 1


def test_synchronous_operation_waits(tmp_path):
    text = (
        """export fn main() void { @fmovs(tx, va, .{ .async = true }); @fadds(vo, rx, va); note(@as(i16, out[3])); }"""
    )
    assert simulate(tmp_path, text).get_variable("order")[0] == 8


def test_map_from_the_fabric(tmp_path):
    text = """fn keep(x: f32) f32 { return x + 1.0; }
      export fn main() void { @fmovs(tx, va, .{ .async = true }); @map(keep, rx, vo); }"""
    assert simulate(tmp_path, text).get_variable("out").tolist()[:4] == [2, 3, 4, 5]


def test_synchronous_operation_stops_at_a_fifo(tmp_path):
    text = """var space = @zeros([3]f32); const f = @allocate_fifo(space, .{ .activate_pop = popped });
      export fn main() void { note(@as(i16, @fmovs(f, va))); @set_fifo_read_length(f, 2);
        note(@as(i16, @fmovs(vo, f))); @set_fifo_read_length(f, 9); note(@as(i16, @fadds(&out[4], out[4], f))); }
      task popped() void { note(7); } comptime { @bind_local_task(popped, t8); }"""
    pe = simulate(tmp_path, text)
    assert pe.get_variable("order").tolist()[:4] == [0, 1, 0, 7]
    assert pe.get_variable("out").tolist()[:5] == [1, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("action", "order"), [(".terminate = true", [1]), (".activate = t9", [2]), (".unblock = t9", [2])]
)
def test_control_wavelet_ends_an_operation(action, order, tmp_path):
    text = """const ctrl = @import_module("<control>"); const two = @set_dsd_length(va, 2);
      const tc = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq, .control = true });
      export fn main() void { @fmovs(vo, rx, .{ .async = true, .activate = ended, .on_control = .{ %s } });
        @fmovs(tx, two); @mov32(tc, ctrl.encode_control_task_payload(@get_control_task_id(40))); }
      task ended() void { note(1); } task other() void { note(2); }
      comptime { @bind_local_task(ended, t8); @bind_local_task(other, t9); %s }"""
    start = "@block(t9); @activate(t9);" if "unblock" in action else ""
    pe = simulate(tmp_path, text % (action, start))
    assert pe.get_variable("order").tolist()[: pe.get_variable("n")[0]] == order
    assert pe.get_variable("out").tolist()[:4] == [1, 2, 0, 0] and is_idle(pe)


def test_dsr_loaded_as_asynchronous(tmp_path):
    text = """const d = @get_dsr(dsr_dest, 1); const q = @get_dsr(dsr_src1, 1);
      export fn main() void { @load_to_dsr(d, vo); @load_to_dsr(q, rx, .{ .async = true, .activate = done });
        @fmovs(d, q); @fmovs(tx, va); note(1); }
      task done() void { note(2); } comptime { @bind_local_task(done, t8); }"""
    pe = simulate(tmp_path, text)
    assert pe.get_variable("order").tolist()[:2] == [1, 2] and pe.get_variable("out")[3] == 4


def test_the_wse2_microthread_has_the_number_of_the_queue(tmp_path):
    text = """const q2 = @get_output_queue(2);
      const tx2 = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 4, .output_queue = q2 });
      export fn main() void { @fmovs(vo, rx, .{ .async = true }); @fmovs(tx2, va, .{ .async = true }); }"""
    with pytest.raises(CslFault, match="microthread 2 is in use by the operation at"):
        simulate(tmp_path, text)


def test_wavelet_index(tmp_path):
    text = """const tw = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq,
        .wavelet_index_offset = true });
      export fn main() void { @mov16(tw, @as(u16, 9), .{ .index = 3 }); }
      task take(data: u16, index: u16) void { order[index] = @as(i16, data); }
      comptime { @bind_data_task(take, id); }"""
    assert simulate(tmp_path, text).get_variable("order").tolist()[:4] == [0, 0, 0, 9]


def test_microthread_ids(tmp_path):
    text = """const u = @get_ut_id(4);
      export fn main() void { @fmovs(vo, rx, .{ .async = true, .ut_id = u });
        @fmovs(tx, va, .{ .async = true, .ut_id = %s }); }"""
    assert simulate(tmp_path, text % "@get_ut_id(5)", "wse3").get_variable("out")[3] == 4
    with pytest.raises(CslFault, match="microthread 4 is in use by the operation at .*pe.csl:15"):
        simulate(tmp_path, text % "u", "wse3")


@pytest.mark.parametrize(
    ("text", "message", "arch"),
    [
        (
            "export fn main() void { @fmovs(vo, rx, .{ .async = true }); @fmovs(vo, rx, .{ .async = true }); }",
            "the input queue of color 1 is in use",
            "wse2",
        ),
        (
            "const bad = @get_dsd(fabout_dsd, .{ .fabric_color = @get_color(4), .extent = 4, .output_queue = oq });"
            "export fn main() void { @fmovs(bad, va); }",
            "color 4 is not the color 1 of output queue 3",
            "wse2",
        ),
        (
            "const bad = @get_dsd(fabin_dsd, .{ .fabric_color = c, .extent = 4, .input_queue = @get_input_queue(5) });"
            "export fn main() void { @fmovs(vo, bad); }",
            "input queue 5 is not initialized",
            "wse3",
        ),
        (
            'const ctrl = @import_module("<control>");'
            "const tc = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq, .control = true });"
            "export fn main() void { @mov32(tc, ctrl.encode_control_task_payload(@get_control_task_id(41))); }",
            "names task ID 41, to which no task is bound",
            "wse2",
        ),
    ],
)
def test_faults(text, message, arch, tmp_path):
    with pytest.raises(CslFault, match=message):
        simulate(tmp_path, text, arch)


def test_input_queues_of_sdk_2_10_must_be_initialized(tmp_path):
    text = """const bad = @get_dsd(fabin_dsd, .{ .fabric_color = c, .extent = 4, .input_queue = @get_input_queue(5) });
      export fn main() void { @fmovs(tx, va, .{ .async = true }); @fmovs(vo, bad); }"""
    assert simulate(tmp_path, text, sdk="1.4").get_variable("out")[0] == 1
    with pytest.raises(CslFault, match="input queue 5 is not initialized"):
        simulate(tmp_path, text, sdk="2.10")


def test_descriptions_of_waits(tmp_path):
    pe = simulate(tmp_path, "export fn main() void { @fmovs(vo, rx, .{ .async = true }); }")
    assert not is_idle(pe) and "waits for a wavelet on color 1" in describe_waits(pe)[0]


REGISTERS = """const d = @get_dsr(dsr_dest, 1); task got() void { note(1); } task done() void { note(2); }
  comptime { @bind_local_task(got, t8); @bind_local_task(done, t9); }
  export fn main() void { @load_to_dsr(d, tx, .{ .async = true%s });
    @fmovs(d, va, .{ .async = true, .activate = got }); @fmovs(vo, rx, .{ .async = true, .activate = done }); }"""


@pytest.mark.parametrize(("option", "order"), [("", [2, 0]), (", .activate = got", [1, 2])])
def test_the_load_of_a_register_says_what_its_operations_activate(option, order, tmp_path):
    """The vendor's page on DSDs: `activate` and `unblock` must be given where the register is loaded."""
    pe = simulate(tmp_path, REGISTERS % option, "wse3")
    assert sorted(pe.get_variable("order").tolist()[:2]) == sorted(order)


def test_operations_on_registers_see_the_words_received_before_them(tmp_path):
    text = """const d = @get_dsr(dsr_dest, 1); const s = @get_dsr(dsr_src1, 1);
      const all = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{512} -> big[i] }); var big = @zeros([512]f32);
      export var got = @zeros([4]f32); const vg = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> got[i] });
      comptime { @load_to_dsr(d, all); @load_to_dsr(s, vo); }
      const g = @get_dsr(dsr_dest, 2); comptime { @load_to_dsr(g, vg); }
      export fn main() void { @fmovs(vo, rx, .{ .async = true }); @fmovs(tx, va, .{ .async = true });
        @fmovs(d, 1.0); @fmovs(g, s); }"""
    assert simulate(tmp_path, text).get_variable("got").tolist() == [1, 2, 3, 4]


LATER = "task later() void { note(1); } comptime { @bind_local_task(later, t8); } export fn main() void { %s }"


@pytest.mark.parametrize(("arch", "start"), [("wse2", 3), ("wse3", 4)])
def test_a_task_starts_while_the_word_that_the_last_one_sent_leaves(arch, start, tmp_path):
    """A public bridge forwards a word in 5 cycles, less than an operation and the start of a task take elsewhere."""

    def measure(statements):
        run = Simulation(build(tmp_path, HEAD + LATER % statements, LOOP, arch=arch))
        run.pes[0, 0].start(run.pes[0, 0].get_export("main"))
        run.settle()
        return next(end - begin for _, name, begin, end in run.timeline if name == "later")

    assert measure("@fmovs(tx, va); @activate(t8);") - measure("@activate(t8); @fmovs(tx, va);") == start

"""`<tile_config>`: the effect of each function and its cycle."""

import pytest
from csl_harness import HEAD, LOOP, build, simulate

from tessera.interp.target.csl.fabric.routing import EAST, NORTH, RAMP, SOUTH, WEST
from tessera.interp.target.csl.simulation import Simulation

TC = 'const tc = @import_module("<tile_config>"); const cc = tc.color_config; const sc = tc.switch_config;'


def route(tmp_path, body, color=1, arch="wse3"):
    """The route of a color after some statements."""
    return simulate(tmp_path, TC + f"export fn main() void {{ {body} }}", arch).fabric.get_route(color)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("cc.set_io_direction(c, cc.fabric_io.TX_EAST);", ((RAMP,), (RAMP, EAST))),
        ("cc.clear_io_direction(c, cc.fabric_io.TX_RAMP);", ((RAMP,), ())),
        ("const at = cc.get_color_config_addr(c); cc.toggle_io_direction(at, cc.fabric_io.RX_RAMP); "
         "cc.toggle_io_direction(c, cc.fabric_io.RX_NORTH);", ((NORTH,), (RAMP,))),
        ("cc.set_io_direction(c, cc.fabric_io.TX_RAMP);", ((RAMP,), (RAMP,))),
        ("cc.reset_routes(c, .{ .rx = WEST, .tx = [2]direction { SOUTH, RAMP } });", ((WEST,), (SOUTH, RAMP))),
    ],
)  # fmt: skip
def test_sides_of_a_route(body, want, tmp_path):
    assert route(tmp_path, body).here == want


def test_a_color_without_an_initial_route(tmp_path):
    assert route(tmp_path, "cc.reset_routes(@get_color(9), .{ .rx = WEST, .tx = RAMP });", 9).here == ((WEST,), (RAMP,))


def test_switches(tmp_path):
    body = """sc.set_rx_switch_pos1(c, WEST); sc.set_switch_pos(sc.switch_pos.POS2, c, EAST, sc.switch_select.OUTPUT);
      sc.set_rxtx_switch_pos(sc.switch_pos.POS3, c, NORTH, SOUTH); sc.set_ring_mode(c, sc.ring_mode.RING_MODE);
      sc.set_pop_mode(c, sc.pop_mode.POP_ON_ADVANCE); sc.set_current_switch_position(c, 2);"""
    found = route(tmp_path, body)
    assert list(found.positions) == [((RAMP,), (RAMP,)), ((WEST,), (RAMP,)), ((WEST,), (EAST,)), ((NORTH,), (SOUTH,))]
    assert (found.ring, found.pop, found.current) == (True, "pop_on_advance", 2)
    body += "sc.clear_current_position(sc.get_switch_config_addr(c, sc.switch_status));"
    found = route(tmp_path, body + "sc.set_rxtx_switch_pos1(c, EAST, WEST); sc.set_pop_mode(c, sc.pop_mode.NO_POP);")
    assert found.current == 0 and found.positions[1] == ((EAST,), (WEST,)) and found.pop == "no_pop"


def test_a_configuration_change_follows_earlier_code(tmp_path):
    """Four words leave before the route changes: until then the PE is busy with them and with other work."""
    text = """export fn main() void { @fmovs(tx, va); for (@range(i16, 40)) |i| { out[7] += 1.0; }
      cc.reset_routes(c, .{ .rx = RAMP, .tx = EAST }); @fmovs(vo, rx); }"""
    pe = simulate(tmp_path, TC + text)
    assert pe.get_variable("out").tolist()[:4] == [1, 2, 3, 4] and pe.fabric.get_route(1).here == ((RAMP,), (EAST,))


def test_the_state_of_all_queues(tmp_path):
    text = """const iqs = tc.input_queue_status; const oqs = tc.output_queue_status; export var seen: [8]bool;
      task late() void { const s = iqs.get(); seen[0] = iqs.is_empty(s, iq); seen[1] = iqs.is_full(s, iq);
        seen[2] = iqs.all_empty(s); seen[3] = iqs.none_full(s); seen[4] = iqs.none_empty(s); seen[5] = iqs.all_full(s);
        const t: oqs.status = oqs.get(); seen[6] = oqs.is_empty(t, oq); n = @as(i16, iqs.get_raw()); }
      comptime { @bind_local_task(late, t8); }
      export fn main() void { @fmovs(tx, va, .{ .async = true, .activate = t8 });
        for (@range(i16, 90)) |i| { out[7] += 1.0; } }"""
    pe = simulate(tmp_path, TC + text, "wse3")
    assert pe.get_variable("seen").tolist() == [False, True, False, False, False, False, True, False]
    assert pe.get_variable("n") == 0x4FB


def test_tasks_of_high_priority_go_first(tmp_path):
    text = """const tp = tc.task_priority; task a1() void { note(8); } task a2() void { note(9); }
      comptime { @bind_local_task(a1, t8); @bind_local_task(a2, t9); %s }
      export fn main() void { %s @activate(t8); @activate(t9); }"""
    orders = {
        ("", ""): [8, 9],
        ("tp.set_task_priority(t9);", ""): [9, 8],
        ("", "tp.update_task_priority(t9, tp.level.HIGH);"): [9, 8],
        ("tp.set_task_priority(t9);", "tp.clear_task_priority(t9);"): [8, 9],
    }
    for parts, want in orders.items():
        assert simulate(tmp_path, TC + text % parts).get_variable("order").tolist()[:2] == want


def test_flushes_and_teardowns_as_bits(tmp_path):
    text = """const qf = tc.queue_flush; const td = tc.teardown; fn f() void { note(@as(i16, qf.oq_status()));
        if (qf.is_flushed(qf.oq_status(), oq) and qf.iq_status() == 0) { note(1); } qf.exit(oq); }
      comptime { @set_empty_queue_handler(f, oq); }
      export fn main() void { note(@as(i16, td.get_pending())); if (!td.is_pending(td.get_pending(), c)) { note(2); }
        @queue_flush(oq); }"""
    assert simulate(tmp_path, TC + text, "wse3").get_variable("order").tolist()[:4] == [0, 2, 8, 1]


def test_machine_constants_and_coordinates(tmp_path):
    text = """comptime { tc.main_thread_priority.update_main_thread_priority(tc.main_thread_priority.level.HIGH); }
      export fn main() void { note(@as(i16, tc.get_fabric_coord(tc.fabric_coord.X)) + tc.word_size);
        const x: tc.reg_type = 3; const y: tc.double_reg_type = 4; note(@as(i16, x) + @as(i16, y));
        note(@as(i16, @strlen(tc.target_name))); }"""
    run_ = Simulation(build(tmp_path, HEAD + TC + text, LOOP))
    run_.boot()
    pe = run_.pes[0, 0]
    pe.start(pe.get_export("main"))
    run_.events.run()
    assert pe.get_variable("order").tolist()[:3] == [2, 7, 4]

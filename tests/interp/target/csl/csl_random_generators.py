"""Three generators of random CSL programs on a line of PEs: task graphs, routes with switches, pipelines of DSDs."""

import numpy as np
from csl_random_programs import PIECES, digest
from hypothesis import strategies as st

from tessera.core.errors import TesseraError
from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.simulation import Simulation

WIDTH, CELLS = 5, 8
LAYOUT = """
const memcpy = @import_module("<memcpy/get_params>", .{ .width = 5, .height = 1 });
layout {
  @set_rectangle(5, 1);
  for (@range(i16, 5)) |x| {
    @set_tile_code(x, 0, "pe.csl", .{ .memcpy_params = memcpy.get_params(x), .first = x == 0, .last = x == 4,
      .odd = x % 2 == 1 });
  }
  ROUTES
  @export_name("a", [*]f32, true); @export_name("w", [*]i32, true); @export_name("main", fn(i16)void);
}
"""
HEAD = """
param memcpy_params; param first: bool; param last: bool; param odd: bool;
const sys = @import_module("<memcpy/memcpy>", memcpy_params);
const math = @import_module("<math>"); const control = @import_module("<control>");
const way = if (odd) @get_color(5) else @get_color(4); const back = if (odd) @get_color(4) else @get_color(5);
const iq = @get_input_queue(2); const wse3 = @is_arch("wse3");
var a = @zeros([8]f32); var b = @zeros([8]f32); var c = @zeros([8]f32); var w = @zeros([8]i32);
var big = @zeros([64]f32);
var a_ptr: [*]f32 = &a; var w_ptr: [*]i32 = &w;
var turn: i16 = 0; var mine: i16 = 0; var turns: i16 = 0; var shift: f32 = 0.5; var p: [*]f32 = &a;
const da = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{8} -> a[i] });
const db = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{8} -> b[i] });
const dc = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> c[2 * i] });
const dbig = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{64} -> big[i] });
comptime { @export_symbol(a_ptr, "a"); @export_symbol(w_ptr, "w"); @export_symbol(main); }
"""
CHAIN = """
  for (@range(i16, 5)) |x| {
    const out = if (x % 2 == 1) @get_color(5) else @get_color(4);
    const in = if (x % 2 == 1) @get_color(4) else @get_color(5);
    if (x < 4) { @set_color_config(x, 0, out, .{ .routes = .{ .rx = .{RAMP}, .tx = .{EAST} } }); }
    if (x > 0) { @set_color_config(x, 0, in, .{ .routes = .{ .rx = .{WEST}, .tx = .{RAMP} } }); }
  }
"""
STATEMENT_NUMBERS = {"i": st.integers(0, 3), "n": st.integers(1, 4), "f": st.sampled_from(["0.25", "1.5", "-0.75"])}


@st.composite
def statements(draw, least: int = 1, most: int = 5) -> str:
    """A few statements on the memory of a PE."""
    chosen = draw(st.lists(st.sampled_from(PIECES), min_size=least, max_size=most))
    return "\n".join(piece.format(**{k: draw(kind) for k, kind in STATEMENT_NUMBERS.items()}) for piece in chosen)


@st.composite
def output_queues(draw) -> str:
    """The output queue of a program: on WSE-2 one of 6 words, or one of 2, which sends slower than a word a cycle."""
    return f"const oq = @get_output_queue({draw(st.integers(2, 5))});"


@st.composite
def task_graphs(draw) -> tuple[str, str]:
    """Local tasks that compute, activate, block and unblock one another until a count of turns is used up."""
    count = draw(st.integers(2, 5))
    parts = []
    for k in range(count):
        nexts = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2))
        blocks = draw(st.sampled_from(["", "", f"@block(t{nexts[0]}); @activate(wake);"]))
        moves = " ".join(f"@activate(t{n});" for n in nexts)
        parts.append(
            f"const t{k} = @get_local_task_id({8 + k});\n"
            f"task run{k}() void {{ turn += 1; {draw(statements(2, 6))}\n"
            f"  if (turn < turns) {{ {moves} {blocks} }} else if (turn == turns) {{ sys.unblock_cmd_stream(); }} }}\n"
            f"comptime {{ @bind_local_task(run{k}, t{k}); }}"
        )
    opened = " ".join(f"@unblock(t{k});" for k in range(count))
    parts.append(f"const wake = @get_local_task_id(16); task open() void {{ {opened} }}")
    parts.append("comptime { @bind_local_task(open, wake); }")
    main = "export fn main(n: i16) void { turns = n * 4; mine = @as(i16, w[0]) & 3; @activate(t0); }"
    return "", "\n".join(parts) + main.replace("export ", "")


POSITIONS = (".{ .tx = EAST }", ".{ .tx = RAMP }", ".{ .invalid = true }")


@st.composite
def switched_routes(draw) -> tuple[str, str]:
    """The first PE sends words and switch commands down a line whose routers pass them on or keep them."""
    rows = []
    for x in range(1, WIDTH):
        sides = draw(st.sampled_from(["RAMP", "EAST", "RAMP, EAST"])) if x < WIDTH - 1 else "RAMP"
        routes = f".routes = .{{ .rx = .{{WEST}}, .tx = .{{{sides}}} }}"
        pops = draw(st.sampled_from(["always_pop", "pop_on_advance", "no_pop"]))
        ring = draw(st.sampled_from(["true", "false"]))
        first, second = (draw(st.sampled_from(POSITIONS if x < WIDTH - 1 else POSITIONS[1:])) for _ in range(2))
        modes = f".ring_mode = {ring}, .pop_mode = .{{ .{pops} = true }}"
        switches = f".switches = .{{ .pos1 = {first}, .pos2 = {second}, {modes} }}"
        rows.append(f"@set_color_config({x}, 0, @get_color(4), .{{ {routes}, {switches} }});")
    rows.append("@set_color_config(0, 0, @get_color(4), .{ .routes = .{ .rx = .{RAMP}, .tx = .{EAST} } });")
    sends = []
    for _ in range(draw(st.integers(1, 5))):
        sends.append(f"@fmovs(@set_dsd_length(out, {draw(st.integers(1, 8))}), da);")
        command, kept = (
            draw(st.sampled_from(["SWITCH_ADV", "SWITCH_RST", "NOP"])),
            draw(st.sampled_from(["true", "false"])),
        )
        sends.append(f"@mov32(ctl, control.encode_single_payload(control.opcode.{command}, {kept}, {{}}, 0));")
    body = f"""
      {draw(output_queues())}
      const c4 = @get_color(4);
      const out = @get_dsd(fabout_dsd, .{{ .fabric_color = c4, .extent = 8, .output_queue = oq }});
      const ctl = @get_dsd(fabout_dsd, .{{ .fabric_color = c4, .extent = 1, .output_queue = oq, .control = true }});
      const id = if (wse3) @get_data_task_id(iq) else @get_data_task_id(c4);
      task take(x: f32) void {{ turn += 1; {draw(statements(2, 5))}
        a[1] += x; }}
      task send() void {{ {" ".join(sends)} }}
      const t8 = @get_local_task_id(8);
      fn main(n: i16) void {{ mine = @as(i16, w[0]) & 3; if (first) {{ @activate(t8); }} sys.unblock_cmd_stream(); }}
      comptime {{ @bind_local_task(send, t8); if (!first) {{ @bind_data_task(take, id); }}
        @initialize_queue(iq, .{{ .color = c4 }}); if (wse3) {{ @initialize_queue(oq, .{{ .color = c4 }}); }} }}"""
    return "\n".join(rows), body


OPERATIONS = (
    "@fmovs({to}, {in_});",
    "@fadds({to}, {in_}, {mem});",
    "@fmuls({to}, {mem}, {in_});",
    "@fmacs({to}, {mem}, {in_}, {f});",
    "@fmaxs({to}, {in_}, {mem});",
    "@fsubs({to}, {in_}, {f});",
)


@st.composite
def dsd_pipelines(draw) -> tuple[str, str]:
    """Vectors pass down a line: each PE reads them into memory or through itself, in one or several operations."""
    total = draw(st.sampled_from([5, 8, 21, 40, 64]))
    size = draw(st.integers(1, total))
    cut = [size, total - size] if size < total else [total]
    stages = []
    for number, length in enumerate(cut):
        through = draw(st.booleans())
        op = draw(st.sampled_from(OPERATIONS[:1] + OPERATIONS[1:3] + OPERATIONS[4:] if through else OPERATIONS))
        stride = draw(st.sampled_from([1, 1, 0])) if not through else 1
        memory = f"@set_dsd_length(@set_dsd_stride(dbig, {stride}), {length})"
        words = op.format(
            to="OUT" if through else memory, in_=f"@set_dsd_length(in, {length})",
            mem=f"@set_dsd_length(@increment_dsd_offset(dbig, {draw(st.integers(0, 64 - length))}, f32), {length})"
            if through else memory, f=draw(st.sampled_from(["0.5", "-2.0"])),
        )  # fmt: skip
        send = (
            ""
            if through
            else f"if (!last) {{ @fmovs(@set_dsd_length(out, {length}), @set_dsd_length(dbig, {length})); }}"
        )
        ending = words.replace("OUT", f"@set_dsd_length(dbig, {length})")
        passing = words.replace("OUT", f"@set_dsd_length(out, {length})")
        stages.append((number, f"if (last) {{ {ending} }} else {{ {passing} }} {send}"))
    steps = "\n".join(
        f"task stage{k}() void {{ {draw(statements(0, 3))}\n {text} @activate(u{k + 1}); }}" for k, text in stages
    )
    ids = "\n".join(f"const u{k} = @get_local_task_id({8 + k});" for k in range(len(stages) + 1))
    binds = " ".join(f"@bind_local_task(stage{k}, u{k});" for k, _ in stages)
    *sends, last = [f"@fmovs(@set_dsd_length(out, {length}), @set_dsd_length(dbig, {length})" for length in cut]
    begun = "".join(f"{send}); " for send in sends)
    ending = draw(st.sampled_from(["); @activate(u{n});", ", .{{ .async = true, .activate = u{n} }});"]))
    begun += last + ending.format(n=len(stages))
    body = f"""
      {draw(output_queues())}
      const out = @get_dsd(fabout_dsd, .{{ .fabric_color = way, .extent = 8, .output_queue = oq }});
      const in = @get_dsd(fabin_dsd, .{{ .fabric_color = back, .extent = 8, .input_queue = iq }});
      {ids}
      {steps}
      task source() void {{ {begun} }}
      task end() void {{ turn += 1; if (turn < turns) {{ @activate(if (first) begin else u0); }}
        else {{ @fmovs(da, @set_dsd_length(dbig, 8)); sys.unblock_cmd_stream(); }} }}
      const begin = @get_local_task_id(14);
      fn main(n: i16) void {{ turns = n; for (@range(i16, 64)) |i| {{ big[i] = a[i & 7] + @as(f32, i); }}
        @activate(if (first) begin else u0); }}
      comptime {{ {binds} @bind_local_task(source, begin); @bind_local_task(end, u{len(stages)});
        if (!first) {{ @initialize_queue(iq, .{{ .color = back }}); }}
        if (wse3) {{ @initialize_queue(oq, .{{ .color = way }}); }} }}"""
    return CHAIN, body


def compiled(folder, program: tuple[str, str], arch: str):
    """The layout of a program: its routes and the rest of its code."""
    routes, body = program
    (folder / "layout.csl").write_text(LAYOUT.replace("ROUTES", routes))
    (folder / "pe.csl").write_text(HEAD + body)
    return compile_program(folder / "layout.csl", arch=arch)


def observe(layout, seed: int | None, lockstep: bool) -> dict[str, object]:
    """Run a program to its end, stall or fault; returns everything that can be observed."""
    run = Simulation(layout, seed=seed, lockstep=lockstep, limit=200_000)
    rng, fault = np.random.default_rng(1), ""
    try:
        run.boot()
        for name, dtype in (("a", np.float32), ("w", np.int32)):
            run.copy_in(name, {place: (rng.random(CELLS) * 5).astype(dtype) for place in run.pes})
        run.launch("main", 3)
        run.settle()
    except TesseraError as error:
        fault = str(error)
    return {
        # Tasks of different PEs that end in one cycle have no order.
        "fault": fault, "cycles": run.cycles, "left": run.describe_stall(),
        "tasks": sorted(run.timeline, key=lambda one: (one[3], one[0])),
        "memory": {place: digest(pe) for place, pe in run.pes.items()},
        "traffic": {place: (node.traffic, node.links) for place, node in run.fabric.nodes.items()},
        "clocks": {place: pe.clock for place, pe in run.pes.items()},
    }  # fmt: skip

"""Random CSL programs for a grid whose columns send vectors on, and the observable state of a run."""

import hashlib

import numpy as np
from hypothesis import strategies as st

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.pe.scheduler import settle
from tessera.interp.target.csl.simulation import Simulation

WIDTH, HEIGHT, CELLS = 4, 3, 8
LAYOUT = """
const memcpy = @import_module("<memcpy/get_params>", .{ .width = WIDTH, .height = HEIGHT });
const way: [2]color = [2]color{ @get_color(4), @get_color(5) };
const out = .{ .rx = .{RAMP}, .tx = .{EAST} };
const in = .{ .rx = .{WEST}, .tx = .{RAMP} };
layout {
  @set_rectangle(WIDTH, HEIGHT);
  for (@range(i16, WIDTH)) |x| {
    for (@range(i16, HEIGHT)) |y| {
      @set_tile_code(x, y, "pe.csl", .{ .memcpy_params = memcpy.get_params(x), .give = way[@as(u16, x % 2)],
        .get = way[@as(u16, (x + 1) % 2)], .first = x == 0, .last = x == WIDTH - 1 });
      if (x < WIDTH - 1) { @set_color_config(x, y, way[@as(u16, x % 2)], .{ .routes = out }); }
      if (x > 0) { @set_color_config(x, y, way[@as(u16, (x + 1) % 2)], .{ .routes = in }); }
    }
  }
  @export_name("a", [*]f32, true);
  @export_name("w", [*]i32, true);
  @export_name("main", fn(i16)void);
}
"""
PE = """
param memcpy_params; param give: color; param get: color; param first: bool; param last: bool;
const sys = @import_module("<memcpy/memcpy>", memcpy_params);
const math = @import_module("<math>");
const t8 = @get_local_task_id(8); const t9 = @get_local_task_id(9); const t10 = @get_local_task_id(10);
const iq = @get_input_queue(2); const oq = @get_output_queue(3);
var a = @zeros([8]f32); var b = @zeros([8]f32); var c = @zeros([8]f32); var w = @zeros([8]i32);
var a_ptr: [*]f32 = &a; var w_ptr: [*]i32 = &w;
var turn: i16 = 0; var mine: i16 = 0; var turns: i16 = 0; var shift: f32 = 0.5; var p: [*]f32 = &a;
const da = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{8} -> a[i] });
const db = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{8} -> b[i] });
const dc = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> c[2 * i] });
const out = @get_dsd(fabout_dsd, .{ .fabric_color = give, .extent = 8, .output_queue = oq });
const in = @get_dsd(fabin_dsd, .{ .fabric_color = get, .extent = 8, .input_queue = iq });
export fn main(n: i16) void { turns = n; mine = @as(i16, w[0]) & 3; @activate(t8); }
task step() void {
BODY
  turn += 1;
  if (turn < turns) {
    @block(t9);
    if (last) { @activate(t10); } else { @fmovs(out, da, .{ .async = true, .activate = t10 }); }
    if (first) { @unblock(t9); } else { @fmovs(db, in, .{ .async = true, .unblock = t9 }); }
  } else { sys.unblock_cmd_stream(); }
}
task sent() void { @activate(t9); }
task next() void { @activate(t8); }
comptime {
  @bind_local_task(step, t8); @bind_local_task(next, t9); @bind_local_task(sent, t10); @block(t9);
  if (@is_arch("wse3")) { @initialize_queue(iq, .{ .color = get }); @initialize_queue(oq, .{ .color = give }); }
  @export_symbol(a_ptr, "a"); @export_symbol(w_ptr, "w"); @export_symbol(main);
}
"""
# The same grid: each wavelet activates a task, whose argument is its value.
DATA = (
    PE[: PE.index("export fn main")]
    + """
const id = if (@is_arch("wse3")) @get_data_task_id(iq) else @get_data_task_id(get);
export fn main(n: i16) void { turns = n; mine = @as(i16, w[0]) & 3;
  if (last) { @activate(t10); } else { @fmovs(out, da, .{ .async = true, .activate = t10 }); }
  if (first) { sys.unblock_cmd_stream(); } }
task sent() void { turn += 1; }
task take(x: f32) void {
  for (@range(i16, 8)) |i| { c[i] = c[i] * 0.5 + x; }
  @fmacs(dc, dc, db, x);
  shift = 0.25; mine += 1;
  if (mine > 6) { b[0] = -x; }
  turns += 1;
  if (turns == 11) { sys.unblock_cmd_stream(); }
}
comptime {
  @bind_local_task(sent, t10); @bind_data_task(take, id);
  if (@is_arch("wse3")) { @initialize_queue(iq, .{ .color = get }); @initialize_queue(oq, .{ .color = give }); }
  else { @initialize_queue(iq, .{ .color = get }); }
  @export_symbol(a_ptr, "a"); @export_symbol(w_ptr, "w"); @export_symbol(main);
}
"""
)
PIECES = (
    "@fmacs(da, da, db, {f});",
    "@fadds(dc, dc, @increment_dsd_offset(da, {n}, f32));",
    "@fmuls(db, db, c[{i}]);",
    "@fadds(&c[{i}], c[{i}], db);",
    "@fmovs(@set_dsd_length(db, {n}), @as(f32, mine));",
    "@fmaxs(da, @set_dsd_length(da, 4), @increment_dsd_offset(@set_dsd_length(db, 4), {n}, f32));",
    "@fmovs(@set_dsd_length(@increment_dsd_offset(da, 1, f32), 4), @set_dsd_length(da, 4));",
    "for (@range(i16, {n})) |i| {{ a[i] = a[i] * {f} + b[7 - i]; }}",
    "for (@range(i16, {n})) |i| {{ w[i] = w[i] * {i} + @as(i32, turn) - (w[7 - i] >> 2); }}",
    "w[{i}] = w[{i}] ^ @as(i32, @as(u16, w[3])) ; w[1] = w[1] % 7;",
    "c[{i}] = math.sqrt(math.abs(a[{i}])) - math.max(b[{i}], {f});",
    "w[{i}] = @bitcast(i32, a[{i}]); b[2] = @as(f32, w[{i}] & 255);",
    "if (turn == mine) {{ b[{i}] = {f}; p = &b; }} else {{ p[{i}] = a[1]; }}",
    "if (mine > 1) {{ @fadds(da, da, db); mine -= 1; }}",
    "if (a[{i}] > {f}) {{ a[0] = a[0] * 0.5; }}",
    "shift += {f}; a[{i}] = a[{i}] + shift;",
    "for (@range(i16, mine)) |i| {{ a[i] = -b[{i}] / {f}; }}",
    "mine = (mine + {i}) & 3;",
    "@ptrcast(*[16]u16, &w).*[{n}] = @as(u16, turn) + {i}; w[{i}] += @as(i32, @ptrcast([*]u16, &w)[{n}]);",
    "{{ var at: i16 = {i}; while (at < 6) : (at += {n}) {{ b[at] = b[at] + a[7 - at]; if (b[at] > 40.0) break; }} }}",
    "switch (mine) {{ 0 => a[{i}] = {f}, 1, 2 => b[{i}] += {f}, else => w[{i}] = 3, }}",
    "@mov32(@get_dsd(mem1d_dsd, .{{ .base_address = &w, .extent = {n} }}), @as(i32, mine) - {i});",
    "@fadds(@get_dsd(mem4d_dsd, .{{ .tensor_access = |i, j|{{2, 4}} -> a[4 * i + j] }}),"
    " @get_dsd(mem4d_dsd, .{{ .tensor_access = |i, j|{{2, 4}} -> b[i + 2 * j] }}), {f});",
    "@fmovs(da, @set_dsd_stride(@increment_dsd_offset(db, 7, f32), -1));",
    "@map(math.abs_f32, da, da); @fnegs(db, da);",
    "@add16(@get_dsd(mem1d_dsd, .{{ .base_address = @ptrcast([*]i16, &w), .extent = 8 }}),"
    " @get_dsd(mem1d_dsd, .{{ .base_address = @ptrcast([*]i16, &w), .extent = 8 }}), @as(i16, {i}) + mine);",
    "@add16(@get_dsd(mem1d_dsd, .{{ .tensor_access = |i|{{4}} -> w[i] }}),"
    " @get_dsd(mem1d_dsd, .{{ .tensor_access = |i|{{4}} -> w[2 * i] }}), @as(i16, {i}) + mine);",
    "{{ const q: [*]f32 = if (turn % 2 == 0) &a else &b; q[{i}] = q[{n}] + {f}; p = q; }}",
    "a[@as(u16, w[{i}]) & 7] = {f}; b[@as(u16, turn) & 7] = a[{i}];",
)


@st.composite
def bodies(draw) -> str:
    """The statements of one program."""
    chosen = draw(st.lists(st.sampled_from(PIECES), min_size=2, max_size=9))
    numbers = {"i": st.integers(0, 3), "n": st.integers(1, 4), "f": st.sampled_from(["0.25", "1.5", "-0.75"])}
    return "\n".join(piece.format(**{name: draw(kind) for name, kind in numbers.items()}) for piece in chosen)


def compiled(folder, body: str, arch: str, pe: str = PE):
    """The layout of a program with this body."""
    text = LAYOUT.replace("WIDTH", str(WIDTH)).replace("HEIGHT", str(HEIGHT))
    (folder / "layout.csl").write_text(text)
    (folder / "pe.csl").write_text(pe.replace("BODY", body))
    return compile_program(folder / "layout.csl", arch=arch)


def outcome(layout, seed: int | None, lockstep: bool, turns: int = 3) -> tuple[Simulation, dict[str, object]]:
    """Run a program; returns its observable state."""
    run = Simulation(layout, seed=seed, lockstep=lockstep)
    run.boot()
    rng = np.random.default_rng(1)
    for name, dtype in (("a", np.float32), ("w", np.int32)):
        rows = {place: (rng.random(CELLS) * 5).astype(dtype) for place in run.pes}
        run.copy_in(name, rows)
    back = {place: np.zeros(CELLS, np.float32) for place in run.pes}
    run.launch("main", turns)
    run.wait(run.copy_out("a", back))
    run.settle()
    seen = {
        "copied": {place: row.tobytes() for place, row in back.items()}, "cycles": run.cycles,
        # Tasks of different PEs that end in one cycle have no order.
        "tasks": sorted(run.timeline, key=lambda one: (one[3], one[0])),
        "memory": {place: digest(pe) for place, pe in run.pes.items()},
        "traffic": {place: (node.traffic, node.links) for place, node in run.fabric.nodes.items()},
        "clocks": {place: pe.clock for place, pe in run.pes.items()}, "left": run.describe_stall(),
    }  # fmt: skip
    return run, seen


def digest(pe) -> str:
    """A hash of all variables of a PE."""
    settle(pe)
    found = hashlib.sha1()
    for number in range(len(pe.program.unit.globals)):
        array = pe.space[f"G{number}"]
        found.update(b"" if array.dtype == object else array.tobytes())
        value = pe.space.get(f"v{number}")
        found.update(repr(value if isinstance(value, (int, np.floating)) else getattr(value, "index", None)).encode())
    return found.hexdigest()

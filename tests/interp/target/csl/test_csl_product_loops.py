"""Loops of products become one call, with the values, cycles and faults of their iterations."""

import numpy as np
import pytest
from csl_harness import HEAD, LOOP, build, make_pe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.core.errors import TesseraError
from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.pe import program
from tessera.interp.target.csl.pe.lockstep_execution import MIN_PES
from tessera.interp.target.csl.pe.product_loops import ProductLoop
from tessera.interp.target.csl.sema import control_flow
from tessera.interp.target.csl.simulation import Simulation

SEARCH = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
BODY = """
var x = @zeros([40]f32); var y = @zeros([40]f32); var z = @zeros([40]f32);
var p: [*]f32 = &{numbers};
export fn main(start: f32) void {{
  for (@range(i16, 40)) |i| {{ x[i] = 0.37 * @as(f32, i) - start; y[i] = 1.0 / (@as(f32, i) + 0.7); z[i] = 3.3; }}
  var d = @get_dsd(mem1d_dsd, .{{ .tensor_access = |i|{{{extent}}} -> {dest}[{stride} * i + {start}] }});
  var v = @get_dsd(mem1d_dsd, .{{ .tensor_access = |i|{{{extent}}} -> {vector}[i + 3] }});
  for (@range(i16, {count})) |i| {{
    {load}
    {anew}
    @fmacs(d, d, {used}, {number});
    {advance}
  }}
  @fadds(d, d, 0.5);
}}
"""
LOADS = (("const n = p[{index}];", "n"), ("", "{numbers}[{index}]"), ("", "{numbers}[{index}] * 0.5"))
USES = (("", "v"), ("const w = @increment_dsd_offset(v, {offset} * i, f32);", "w"))
ADVANCES = ("", "d = @increment_dsd_offset(d, {step}, f32);", "v = @increment_dsd_offset(v, {step}, f32);")
BOUNDS = {"extent": (1, 5), "stride": (1, 3), "start": (0, 9), "count": (0, 7), "offset": (-1, 4), "step": (-2, 9)}
PLAIN = {
    "dest": "x", "vector": "y", "numbers": "z", "extent": 4, "stride": 1, "start": 2, "count": 5, "offset": 2,
    "step": 5,
    "index": "2 * i + 1", "load": LOADS[1], "use": USES[0], "advance": ADVANCES[1],
}  # fmt: skip
# Loops by whether their iterations are computed at once.
CASES = {
    "rows": ({}, True),
    "one row": ({"advance": ""}, True),
    "columns": ({"stride": 6, "step": 1}, True),
    "from the end": ({"start": 28, "step": -5}, True),
    "vectors and rows": ({"advance": ADVANCES[1] + ADVANCES[2]}, True),
    "a vector anew": ({"use": USES[1], "load": LOADS[0]}, True),
    "rows overlap": ({"step": 3}, False),
    "numbers in the destination": ({"numbers": "x"}, False),
    "vectors in the destination": ({"vector": "x"}, False),
    "no iteration": ({"count": 0}, False),
    "a row out of bounds": ({"step": 9}, False),
    "a number out of bounds": ({"index": "11 * i", "load": LOADS[0]}, False),
    "a negative index": ({"index": "2 - i", "load": LOADS[0]}, False),
}


def write(**chosen) -> str:
    """The program of a loop."""
    (load, number), (anew, used), rest = chosen.pop("load"), chosen.pop("use"), chosen
    texts = {"load": load, "number": number, "anew": anew, "used": used, "advance": rest.pop("advance")}
    return BODY.format(**{name: text.format(**rest) for name, text in texts.items()}, **rest)


@st.composite
def loops(draw) -> str:
    """A loop of products: often computed at once, sometimes with overlaps or elements out of bounds."""
    chosen = {name: draw(st.sampled_from("xyz")) for name in ("dest", "vector", "numbers")}
    chosen |= {name: draw(st.integers(*ends)) for name, ends in BOUNDS.items()}
    chosen["index"] = draw(st.sampled_from(["2 * i + 1", "i", "3", "20 - 2 * i", "7 * i", "2 - i"]))
    return write(load=draw(st.sampled_from(LOADS)), use=draw(st.sampled_from(USES)),
                 advance=draw(st.sampled_from(ADVANCES)), **chosen)  # fmt: skip


MAP = """
var x = @zeros([40]f32); var y = @zeros([40]f32); var z = @zeros([40]f32);
const to = @get_dsr(dsr_dest, 1); const from = @get_dsr(dsr_src0, 1); const by = @get_dsr(dsr_src1, 2);
fn add(n: f32) void {{ @fmacs(to, from, by, n); }}
fn add_half(n: f32) void {{ @fmacs(to, from, by, 0.5 * n); }}
export fn main(start: f32) void {{
  for (@range(i16, 40)) |i| {{ x[i] = 0.37 * @as(f32, i) - start; y[i] = 1.0 / (@as(f32, i) + 0.7); z[i] = 3.3; }}
  const d = @get_dsd(mem1d_dsd, .{{ .tensor_access = |i|{{{extent}}} -> {dest}[{stride} * i + {start}] }});
  const v = @get_dsd(mem1d_dsd, .{{ .tensor_access = |i|{{{extent}}} -> {vector}[i + 3] }});
  const n = @get_dsd(mem1d_dsd, .{{ .tensor_access = |i|{{{count}}} -> {numbers}[{scale} * i + 1] }});
  @load_to_dsr(to, d, .{{ .save_address = {saves[0]} }});
  @load_to_dsr(from, {same}, .{{ .save_address = {saves[1]} }});
  @load_to_dsr(by, v, .{{ .save_address = {saves[2]} }});
  @map({function}, n);
  @fmacs(to, from, by, 0.25);
}}
"""
PLAIN_MAP = {
    "dest": "x", "vector": "y", "numbers": "z", "extent": 4, "stride": 1, "start": 2, "count": 5, "scale": 2,
    "same": "d", "saves": ("false", "false", "true"), "function": "add",
}  # fmt: skip
# Calls of `@map` by whether their products are computed at once; None: the function is no such product.
MAPS = {
    "one row": ({}, True),
    "rows": ({"saves": ("true", "true", "true")}, True),
    "one vector": ({"saves": ("true", "true", "false")}, True),
    "one number": ({"scale": 0}, True),
    "numbers from the end": ({"scale": -1, "count": 2}, True),
    "a destination that stays": ({"saves": ("false", "true", "true")}, None),
    "another source": ({"same": "v"}, None),
    "the destination is a source": ({"vector": "x"}, False),
    "no number": ({"count": 0}, False),
    "another function": ({"function": "add_half"}, None),
    "a vector out of bounds": ({"count": 10, "scale": 1}, False),
    "a number out of bounds": ({"count": 30}, False),
}


@st.composite
def maps(draw) -> str:
    """A call of `@map`: often computed at once."""
    chosen = {name: draw(st.sampled_from("xyz")) for name in ("dest", "vector", "numbers")}
    chosen |= {name: draw(st.integers(*BOUNDS[name])) for name in ("extent", "stride", "start", "count")}
    saves = draw(st.tuples(*[st.sampled_from(["true", "false"])] * 3))
    scale, same = draw(st.integers(-1, 3)), draw(st.sampled_from("dddv"))
    return MAP.format(
        **chosen, saves=saves, scale=scale, same=same, function=draw(st.sampled_from(["add", "add_half"]))
    )


def observe(folder, text, arch):
    """The variables and the clock, or the fault, of a run."""
    pe = make_pe(build(folder, text, arch=arch))
    pe.boot()
    pe.start(pe.get_export("main"), (np.float32(4.0),))
    try:
        pe.events.run()
    except TesseraError as error:
        return str(error)
    return [np.asarray(pe.get_variable(name)).tobytes() for name in "xyz"], pe.clock


def compare(folder, text, arch) -> list[bool]:
    """Whether the calls of a loop computed its iterations, whose result is that of the loop alone."""
    called: list[bool] = []
    accumulate = program.NAMES["accumulate_products"]

    def note(*args):
        called.append(accumulate(*args))
        return called[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(program.NAMES, "accumulate_products", note)
        found = observe(folder, text, arch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_flow, "combine_products", lambda lines, make_name: lines)
        patch.setattr(program, "find_register_products", lambda functions: {})
        assert observe(folder, text, arch) == found
    return called


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize("case", CASES)
def test_a_loop_is_computed_at_once_unless_the_order_could_be_seen(case, arch, tmp_path):
    changes, at_once = CASES[case]
    assert compare(tmp_path, write(**{**PLAIN, **changes}), arch) == [at_once]


ROW = """layout {{ @set_rectangle({pes}, 1);
  for (@range(i16, {pes})) |i| {{ @set_tile_code(i, 0, "pe.csl", .{{}}); }} }}"""


@pytest.mark.parametrize("case", CASES)
def test_loops_of_many_pes_are_computed_together(case, tmp_path, monkeypatch):
    (tmp_path / "layout.csl").write_text(ROW.format(pes=MIN_PES))
    (tmp_path / "pe.csl").write_text(write(**{**PLAIN, **CASES[case][0]}))
    layout = compile_program(tmp_path / "layout.csl")
    run, together = ProductLoop.run, []
    monkeypatch.setattr(ProductLoop, "run", lambda loop, *memory: (together.append(memory[0].ndim), run(loop, *memory)))
    found = run_all(layout, True)
    assert (2 in together) == CASES[case][1]
    together.clear()
    assert run_all(layout, False) == found and not together


def run_all(layout, lockstep) -> list:
    """The variables and the clock of each PE, or the fault."""
    simulation = Simulation(layout, lockstep=lockstep)
    simulation.boot()
    for (x, _), pe in simulation.pes.items():
        pe.start(pe.get_export("main"), (np.float32(x),))
    try:
        simulation.settle()
    except TesseraError as error:
        return [str(error)]
    return [[pe.get_variable(name).tobytes() for name in "xyz"] + [pe.clock] for pe in simulation.pes.values()]


def test_random_loops_equal_their_iterations(tmp_path):
    @SEARCH
    @given(text=loops(), arch=st.sampled_from(["wse2", "wse3"]))
    def search(text, arch):
        compare(tmp_path, text, arch)

    search()


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize("case", MAPS)
def test_a_map_of_products_is_computed_at_once_unless_the_order_could_be_seen(case, arch, tmp_path):
    changes, at_once = MAPS[case]
    assert compare(tmp_path, MAP.format(**{**PLAIN_MAP, **changes}), arch) == ([] if at_once is None else [at_once])


def test_random_maps_equal_their_calls(tmp_path):
    @SEARCH
    @given(text=maps(), arch=st.sampled_from(["wse2", "wse3"]))
    def search(text, arch):
        compare(tmp_path, text, arch)

    search()


def test_without_lockstep_a_map_calls_its_function(tmp_path, monkeypatch):
    run, together = ProductLoop.run, []
    monkeypatch.setattr(ProductLoop, "run", lambda loop, *memory: (together.append(loop), run(loop, *memory)))
    layout = build(tmp_path, MAP.format(**PLAIN_MAP))
    found = run_all(layout, True)
    assert len(together) == 1
    assert run_all(layout, False) == found and len(together) == 1


BESIDE = """
const to = @get_dsr(dsr_dest, 1); const from = @get_dsr(dsr_src0, 1); const by = @get_dsr(dsr_src1, 2);
export var sums = @zeros([4]f32);
const vs = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> sums[i] });
fn add(n: f32) void { @fmacs(to, from, by, n); }
export fn main() void {
  @load_to_dsr(to, vs, .{ .save_address = false }); @load_to_dsr(from, vs, .{ .save_address = false });
  @load_to_dsr(by, vo, .{ .save_address = false });
  @fmovs(tx, va, .{ .async = true }); @fmovs(vo, rx, .{ .async = true }); @map(add, va);
}
"""


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
def test_a_map_beside_a_microthread_sees_the_words_that_arrive_meanwhile(arch, tmp_path):
    layout, found = build(tmp_path, HEAD + BESIDE, LOOP, arch=arch), []
    for lockstep in (True, False):
        simulation = Simulation(layout, lockstep=lockstep)
        simulation.boot()
        pe = simulation.pes[0, 0]
        pe.start(pe.get_export("main"))
        simulation.settle()
        found.append((pe.get_variable("sums").tolist(), pe.clock))
    assert found[0] == found[1] and 0 < found[0][0][0] < 10  # not all of the four numbers, and not none


def test_other_loops_have_no_call(tmp_path):
    other = write(**{**PLAIN, "load": LOADS[2]})
    assert compare(tmp_path, other, "wse3") == []

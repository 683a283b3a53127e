"""The cost model: its ends, its text form, and programs whose counts its parts were read off."""

import pytest
from csl_harness import simulate

from tessera.core.errors import ArgumentError
from tessera.interp.target.csl.cost_model import COSTS, RANGES, CostModel, load_costs

TIMED = """
const time = @import_module("<time>"); var t0: [3]u16; var t1: [3]u16; var b: [4]f32;
const vb = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> b[i] });
export fn main() void { time.get_timestamp(&t0); %s time.get_timestamp(&t1); }
"""


def cycles(folder, statements: str, arch: str = "wse2") -> int:
    pe = simulate(folder, TIMED % statements, arch)
    first, last = (int(pe.get_variable(name)[0]) for name in ("t0", "t1"))
    return last - first


# STREAM's counts beside its elements, by the number of operands (leightonw-cerebras/stream, simulator of WSE-2).
STREAM = (
    ("@fmovs(vo, va);", 10 + 2),
    ("@fadds(vo, va, vb);", 12 + 2),
    ("@fmuls(vo, va, 2.0);", 11 + 4),
    ("@fmacs(vo, va, vb, 2.0);", 12 + 1 + 4),
)


@pytest.mark.parametrize(("statement", "expected"), STREAM)
def test_an_operation_takes_the_cycles_that_stream_recorded(statement, expected, tmp_path):
    assert cycles(tmp_path, statement) == expected


def test_fmacs_in_place_takes_two_elements_a_cycle_on_wse2(tmp_path):
    assert cycles(tmp_path, "@fmacs(va, va, vb, 2.0);") == 12 + 1 + 2


@pytest.mark.parametrize("sign", ["+", "*", "&"])
def test_an_operation_of_32_bits_takes_more_cycles(sign, tmp_path):
    def count(type_, operations):
        return cycles(tmp_path, f"var n: {type_} = 5; n = {f' {sign} '.join('n' * operations)}; b[0] = @as(f32, n);")

    short, long = (count(type_, 3) - count(type_, 2) for type_ in ("i16", "i32"))
    assert long == short + COSTS.long_integer


def test_the_default_lies_within_every_range():
    for name, (low, high) in RANGES.items():
        value = getattr(CostModel(), name)
        pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (low, value, high)), strict=True)
        assert all(a <= b <= c and a < c for a, b, c in pairs), name
    assert CostModel() == COSTS


def test_texts_select_models():
    assert load_costs("") == CostModel() and load_costs("low").task_start < load_costs("high").task_start
    changed = load_costs('{"dsd_start": [7, 9], "branch": 5}')
    assert changed.dsd_start == (7, 9) and changed.branch == 5 and changed.iteration == CostModel().iteration


@pytest.mark.parametrize(
    "text",
    ["fast", "[1]", '{"taskstart": 3}', '{"branch": -1}', '{"branch": 1.5}', '{"dsd_start": 3}', '{"call": [1, 2]}'],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ArgumentError):
        load_costs(text)


def test_the_counter_of_a_pe_begins_when_it_is_enabled(tmp_path):
    source = TIMED.replace("fn main() void {", "fn main() void { b[0] = 1.0; b[1] = 2.0; time.enable_tsc();")
    pe = simulate(tmp_path, source % "", "wse3")
    assert int(pe.get_variable("t0")[0]) == COSTS.timestamp


def test_a_color_that_a_function_returns_is_a_constant_of_a_descriptor(tmp_path):
    program = """
    fn pick() color { return @get_color(3); }
    const queue = @get_output_queue(2);
    fn send() void {
      const out = @get_dsd(fabout_dsd, .{ .extent = 1, .fabric_color = COLOR, .output_queue = queue });
      @mov32(out, @as(u32, 5), .{ .async = true });
    }
    comptime { @initialize_queue(queue, .{ .color = @get_color(3) }); }
    """
    counts = set()
    for color in ("pick()", "@get_color(3)"):
        source = program.replace("COLOR", color) + TIMED % "send();"
        pe = simulate(tmp_path, source, "wse3")
        counts.add(int(pe.get_variable("t1")[0]) - int(pe.get_variable("t0")[0]))
    assert len(counts) == 1

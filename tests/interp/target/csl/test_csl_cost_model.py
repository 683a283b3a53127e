"""The cost model: its ends, its text form, and programs whose counts its parts were read off."""

from dataclasses import replace

import numpy as np
import pytest
from csl_harness import simulate

from tessera.core.errors import ArgumentError
from tessera.interp.target.csl.cost_model import COSTS, RANGES, CostModel, load_costs
from tessera.interp.target.csl.pe import microthreads, scheduler
from tessera.interp.target.csl.pe.dsd_operations import count_bank_conflicts
from tessera.interp.target.csl.sema.values import Mem1d

TIMED = """
const time = @import_module("<time>"); var t0: [3]u16; var t1: [3]u16; var b: [5]f32;
const vb = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> b[i + 1] });
export fn main() void { time.get_timestamp(&t0); %s time.get_timestamp(&t1); }
"""


def cycles(folder, statements: str, arch: str = "wse2", declarations: str = "") -> int:
    pe = simulate(folder, declarations + TIMED % statements, arch)
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


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
def test_vectors_of_fmacs_at_equal_addresses_modulo_16_bytes_take_two_cycles_for_an_element(arch, tmp_path):
    apart, equal = (cycles(tmp_path, f"@fmacs(va, va, {other}, 2.0);", arch) for other in ("vb", "vo"))
    assert equal == apart + 4


def count_conflicts_one_by_one(first, second, count):
    places = ([o.byte // 4 + n * o.stride for n in range(count)] for o in (first, second))
    return sum((a - b) % 4 == 0 for a, b in zip(*places, strict=True))


def test_bank_conflicts_are_those_of_the_elements():
    rng, array = np.random.default_rng(5), np.zeros(64, np.float32)
    for _ in range(300):
        first, second = (Mem1d(array, 4 * int(rng.integers(0, 9)), int(rng.integers(-5, 6)), 4) for _ in range(2))
        count = int(rng.integers(0, 12))
        assert count_bank_conflicts(first, second, count) == count_conflicts_one_by_one(first, second, count)
    assert count_bank_conflicts(first, 2.0, 4) == 0


CHANGE = """
const time = @import_module("<time>"); var t0: [3]u16; var t1: [3]u16; var far: mem1d_dsd = va;
export fn main() void {
  var near: mem1d_dsd = va;
  time.get_timestamp(&t0);
  %s
  time.get_timestamp(&t1);
}
"""


def test_a_descriptor_in_a_global_variable_takes_more_cycles_than_one_in_a_local_variable(tmp_path):
    def count(text):
        pe = simulate(tmp_path, CHANGE % text, "wse2")
        first, last = (int(pe.get_variable(name)[0]) for name in ("t0", "t1"))
        return last - first

    near, far = (count(f"{name} = @increment_dsd_offset({name}, 1, f32);") for name in ("near", "far"))
    assert far - near == COSTS.global_change - COSTS.local_change
    near, far = (count(f"@fmovs(vo, {name});") for name in ("near", "far"))
    assert far - near == COSTS.global_load - COSTS.local_load[0]


@pytest.mark.parametrize("sign", ["+", "*", "&"])
def test_an_operation_of_32_bits_takes_more_cycles(sign, tmp_path):
    def count(type_, operations):
        return cycles(tmp_path, f"var n: {type_} = 5; n = {f' {sign} '.join('n' * operations)}; b[0] = @as(f32, n);")

    short, long = (count(type_, 3) - count(type_, 2) for type_ in ("i16", "i32"))
    assert long == short + COSTS.long_integer


HELD = {
    "again": ("a[2] = a[1]; a[3] = a[1];", "a[2] = a[1]; a[3] = a[0];", 1),
    "after a store": ("a[2] = 1.0; a[3] = a[2];", "a[2] = 1.0; a[3] = a[1];", 1),
    "after a loop": ("a[2] = a[1]; for (@range(i16, 9)) |i| { n = i; } a[3] = a[1];",
                     "a[2] = a[1]; for (@range(i16, 9)) |i| { n = i; } a[3] = a[0];", 0),
    "after a store to a computed index": ("a[2] = a[1]; a[n] = 1.0; a[3] = a[1];",
                                          "a[2] = a[1]; a[n] = 1.0; a[3] = a[0];", 0),
    "after a branch that stores": ("a[2] = a[1]; if (n > 0) { a[n] = 1.0; } a[3] = a[1];",
                                   "a[2] = a[1]; if (n > 0) { a[n] = 1.0; } a[3] = a[0];", 0),
    "after a branch": ("a[2] = a[1]; if (n > 0) { n = 2; } a[3] = a[1];",
                       "a[2] = a[1]; if (n > 0) { n = 2; } a[3] = a[0];", 1),
    "after an operation": ("a[2] = a[1]; @fmovs(va, vo); a[3] = a[1];",
                           "a[2] = a[1]; @fmovs(va, vo); a[3] = a[0];", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", HELD)
def test_an_element_at_a_constant_index_is_loaded_once(case, tmp_path):
    again, other, less = HELD[case]
    assert cycles(tmp_path, other) - cycles(tmp_path, again) == less


def test_casts_between_integers_take_one_cycle(tmp_path):
    assert (
        cycles(tmp_path, "m = @as(u32, n);", declarations="var m: u32 = 0;")
        == cycles(tmp_path, "m = 0;", declarations="var m: u32 = 0;") + COSTS.integer_cast
    )


RECEIVE = """
const time = @import_module("<time>"); var t0: [3]u16; var t1: [3]u16;
export fn main() void { time.get_timestamp(&t0); @fmovs(tx, va); @fmovs(vo, rx, .{ .async = true, .activate = t8 }); }
task end() void { time.get_timestamp(&t1); }
comptime { @bind_local_task(end, t8); %s }
"""


def test_an_asynchronous_operation_ends_after_its_last_word(tmp_path, monkeypatch):
    counts = []
    for lag in (0, 4):
        monkeypatch.setattr(microthreads, "COSTS", replace(COSTS, receive_end=lag))
        pe = simulate(tmp_path, RECEIVE % "")
        counts.append(int(pe.get_variable("t1")[0]) - int(pe.get_variable("t0")[0]))
    assert counts[1] - counts[0] == 4


WAVELET = """
const time = @import_module("<time>"); var t0: [3]u16; var t1: [3]u16;
const one = @get_dsd(fabout_dsd, .{ .fabric_color = c, .extent = 1, .output_queue = oq });
export fn main() void { time.get_timestamp(&t0); @fmovs(one, va, .{ .async = true }); }
task take(x: f32) void { time.get_timestamp(&t1); }
comptime { @bind_data_task(take, id); }
"""


@pytest.mark.parametrize(("arch", "later"), [("wse2", 0), ("wse3", 2)])
def test_a_data_task_on_an_idle_pe_starts_later(arch, later, tmp_path, monkeypatch):
    counts = []
    for start in ((0, 0), COSTS.wavelet_start):
        monkeypatch.setattr(scheduler, "COSTS", replace(COSTS, wavelet_start=start))
        pe = simulate(tmp_path, WAVELET, arch)
        counts.append(int(pe.get_variable("t1")[0]) - int(pe.get_variable("t0")[0]))
    assert counts[1] - counts[0] == later


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

"""Whole debugger sessions: stepping by line and op, breakpoints, values, callers, and backwards."""

import numpy as np
import pytest
from stepped import exchanged, outside, overflowing, paused, ramp, rows, session

import tessera as ts
from conformance.case import all_cases
from tessera import tile
from tessera.core.errors import ArgumentError, OutOfBoundsError
from tessera.interp.tile import interpreter
from tessera.runtime.program import prepare


def after(lines, command):
    """The lines between a command and the next one."""
    start = lines.index(f"(tessera) {command}") + 1
    stop = next((i for i in range(start, len(lines)) if lines[i].startswith("(tessera)")), len(lines))
    return lines[start:stop]


def test_lines_in_order():
    lines = session("next; next; next; next; next; next", rows[(4,)], *ramp(16))
    stops = [line.split(":")[1].split(" ")[0] for line in lines if line.startswith("> ")]
    assert stops == ["18", "19", "20", "21", "22", "21", "22"]
    assert "->    18 |     i = tile.program_id(0)" in lines


def test_a_block_with_its_type_statistics_mask_and_bound():
    lines = session("break 22; continue; continue; print block; bound total", rows[(4,)], *ramp(16))
    assert after(lines, "print block") == [
        "block = 4xf32",
        "[0., 1., 2., 0.]",
        "min 0, max 2, mean 0.75, std 0.829156",
        "loaded at line 21; mask: true for 3 of 4",
    ]
    assert after(lines, "bound total") == ["total = 0.0 ± 0"]


def test_the_bound_is_that_of_bound_mode(rng):
    x, out = rng.random(16, np.float32), np.zeros(4, np.float32)
    lines = session("break 25; continue; focus 3; bound total", rows[(4,)], x, out)
    value, _, radius = after(lines, "bound total")[0].removeprefix("total = ").partition(" ± ")
    exact = x[12:15].astype(np.float64).sum() * 2 + 1
    assert abs(float(value) - exact) < 1e-12 and abs(out[3] - exact) <= float(radius) < 1e-5


def test_a_breakpoint_with_a_condition_stops_for_its_program():
    lines = session("break 23 if i > 2; continue; print i; quit", rows[(4,)], *ramp(16))
    assert after(lines, "continue")[:2] == [
        "breakpoint 1: line 23 if i > 2",
        "> stepped.py:23 in rows, program (3,) (4 here)",
    ]
    assert after(lines, "print i") == ["i = 3 (int64)"]


def test_a_breakpoint_for_a_program_and_a_tile():
    x, out = ramp(4)
    lines = session("break stepped.py:33 for 0 tile 2; continue; p row; p me; n; p row", exchanged[(1,), 4], x, out)
    assert "> stepped.py:33 in exchanged, program (0,), tile 2 (4 here)" in lines
    assert after(lines, "p me") == ["me = 2 (int64)"]
    assert after(lines, "p row")[1] == "[0., 2., 4., 6.]"
    assert (out == [6, 4, 2, 0]).all()


def test_callers():
    lines = session("break 12; continue; where; p v; up; p total; down; p v; return; p total", rows[(4,)], *ramp(16))
    assert [line for line in after(lines, "where") if " at " in line][0].startswith("  rows at ")
    assert after(lines, "p v") == ["v = 27.0 (f32)"] and after(lines, "p total") == ["total = 27.0 (f32)"]
    assert after(lines, "return")[0] == "> stepped.py:25 in rows, program (2,) (4 here)"


def test_ops():
    lines = session("op; info; op 4; info", rows[(4,)], *ramp(16))
    assert after(lines, "op")[1:] == [
        "     18 |     i = tile.program_id(0)",
        "        |         ^^^^^^^^^^^^^^^^^^",
        "tile.program_id() {axis=0} -> int64",
    ]
    assert after(lines, "info")[:2] == ["4 of 4 instances are here", "op 1: tile.program_id() {axis=0} -> int64"]


def test_backwards_memory_too():
    script = "continue; p out; back; p out; p total; back continue; p out; continue"
    x, out = ramp(16)
    lines = session(script, rows[(4,)], x, out)
    shown = [line for line in lines if line.startswith("[")]
    assert shown == ["[ 3., 15., 55., 79.]", "[0., 0., 0., 0.]", "[0., 0., 0., 0.]"]
    assert "this is where the recording begins" in lines and out.tolist() == [3, 15, 55, 79]


def test_a_watched_value_stops_the_run():
    lines = session("n; n; watch total; continue; continue", rows[(4,)], *ramp(16), at_start=True)
    assert "total changed from 0.0 to 3.0" in lines


def test_pauses_in_the_kernel():
    lines = session("p y; continue; continue", paused[(4,)], *ramp(4), at_start=False)
    assert lines[0] == "break_here" and "program (2,)" in lines[1] and after(lines, "p y") == ["y = 4.0 (f32)"]
    assert lines.count("break_here") == 2


def test_breakpoint_without_a_session_reads_the_terminal(monkeypatch, capsys):
    typed = iter(["p y", "", "c"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    with pytest.raises(StopIteration):
        paused[(4,)](*ramp(4))
    shown = capsys.readouterr().out
    assert shown.count("y = 4.0 (f32)") == 2 and shown.splitlines().count("break_here") == 2


def test_a_failing_program_is_looked_at_where_it_fails():
    shown = []
    with pytest.raises(OutOfBoundsError), ts.debug.session("p i; back; p i; c", write=shown.append, at_start=False):
        outside[(4,)](*ramp(4))
    assert "index 4 is outside axis 0 of x" in shown[0] and "i = 3 (int64)" in shown


def test_findings_of_debug_mode_stop_too():
    shown = []
    with pytest.raises(ts.TesseraError), ts.debug.checked():
        with ts.debug.session("p me; c", write=shown.append, at_start=False):
            exchanged_at_once[(1,), 4](*ramp(4))
    assert "a data race on the shared memory" in shown[0]


@ts.kernel
def exchanged_at_once(x, out):
    me = ts.tile.local_id()
    row = ts.tile.alloc_shared((4,), ts.f32)
    row[me] = x[me] * 2.0
    out[me] = row[3 - me]


def test_a_stepped_run_gives_the_same_bits(rng):
    x = rng.random(16, np.float32)
    plain, stepped = np.zeros(4, np.float32), np.zeros(4, np.float32)
    rows[(4,)](x, plain)
    session("", rows[(4,)], x, stepped)
    assert plain.tobytes() == stepped.tobytes()


def test_what_is_typed_wrongly():
    lines = session(
        "break 1; break x; p nothing; p; delete 7; focus 9; up; op x; step 3; bound; c", rows[(4,)], *ramp(16)
    )
    assert "expected: x, out" in after(lines, "p nothing")[1] and "an expression is missing" in after(lines, "p")[0]
    assert "breakpoint 1: line 1: the run never came to this line after it was set" in lines[-1]
    assert "is not a breakpoint" in after(lines, "break x")[0] and "NameError" in after(lines, "p nothing")[0]
    assert "numbers below (4,)" in "".join(after(lines, "focus 9")) and "no number of ops" in after(lines, "op x")[0]
    assert "`step` takes nothing" in after(lines, "step 3")[0] and "a variable is missing" in after(lines, "bound")[0]


@ts.kernel
def handed_on(x, out):
    me, done = ts.tile.local_id(), ts.tile.mbarrier(1, 2)
    ts.tile.barrier()
    if me == 1:
        done[0].wait(0)
    done[me].arrive()
    out[me] = x[me]


def test_mbarriers_show_their_state_and_the_end_is_shown_to_the_focus():
    line = handed_on.kernel_function.__code__.co_firstlineno + 6
    script = f"break {line} for 0 tile 1; c; p done; p done[0][3]; focus 0 tile 1; c; p me"
    lines = session(script, handed_on[(1,), 2], *ramp(2))
    assert after(lines, "p done")[:3] == ["done = 2x4xint64", "[[1, 1, 0, 1],", " [1, 1, 0, 0]]"]
    assert after(lines, "p done[0][3]")[0] == "done[0][3] = 1 (int64)" and after(lines, "p me")[0] == "me = 1 (int64)"


def test_a_script_with_an_unknown_command_is_refused_before_anything_runs():
    x, out = ramp(16)
    with pytest.raises(ArgumentError, match=r"no command `brake`(?s:.)*expected: help, step(?s:.)*`break`\?"):
        session("next; brake 3; c", rows[(4,)], x, out)
    assert not out.any()


def test_at_the_terminal_it_is_asked_for_again(monkeypatch, capsys):
    typed = iter(["brake 3", "quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    with ts.debug.session():
        rows[(4,)](*ramp(16))
    assert "did you mean `break`?" in capsys.readouterr().out


def test_the_decorator():
    @ts.debug.interactive(commands="p i; c")
    def model(x, out):
        outside[(4,)](x, out)
        return out

    with pytest.raises(OutOfBoundsError):
        model(*ramp(4))
    x, out = ramp(5)
    assert model(x, out) is out and ts.debug.interactive(rows[(4,)], commands="quit")(*ramp(16)) is None


def test_the_origin_of_a_nan():
    lines = session("break 71; c; focus 2; trace_back w; trace_back y; fix_suggestion", overflowing[(4,)], *ramp(4))
    assert [line.rpartition("/")[2] for line in after(lines, "trace_back w")] == [
        "stepped.py:70: ts.sub",
        "stepped.py:70: ts.reshape",
        "stepped.py:70: tile.load of out",
        "stepped.py:69: ts.reshape",
        "stepped.py:68: ts.exp makes it of 200.0",
    ]
    assert after(lines, "trace_back y") == ["y is finite"] and after(lines, "fix_suggestion") == ["no error has come"]


def test_the_suggestion_of_an_error():
    shown = []
    with pytest.raises(OutOfBoundsError), ts.debug.session("fix_suggestion; c", write=shown.append, at_start=False):
        outside[(4,)](*ramp(4))
    assert shown[-2].startswith("guard it with a mask")


STEPPED = [c for c in all_cases() if c.rejects is None and c.name.startswith("tile/")][::9]


def test_kernels_of_the_suite_can_be_stepped_through_and_keep_their_bits():
    for case in STEPPED:
        plain = prepare(*case.entry(), "interp", case.grid, case.group)
        want = [a.copy() for a in plain.arrays]
        want += interpreter.run(plain.levels["tile"], want)
        with ts.debug.session("n; op 5; n; locals; info; where; back; c", write=lambda text: None):
            marked = prepare(*case.entry(), "interp", case.grid, case.group)
            found = [a.copy() for a in marked.arrays]
            found += interpreter.run(marked.levels["tile"], found)
        assert [a.tobytes() for a in found] == [a.tobytes() for a in want], case.name


def test_a_line_that_is_broken_off_is_asked_for_again(monkeypatch, capsys):
    typed = iter([KeyboardInterrupt, "p y", "c", "c"])

    def asked(prompt):
        given = next(typed)
        if given is KeyboardInterrupt:
            raise given
        return given

    monkeypatch.setattr("builtins.input", asked)
    paused[(4,)](*ramp(4))
    assert "y = 4.0 (f32)" in capsys.readouterr().out and next(typed, None) is None


def test_a_condition_that_fails_stops_and_says_so():
    lines = session("break 20 if nothing > 1; c; p i; delete 1; c", rows[(4,)], *ramp(16))
    assert "breakpoint 1: line 20 if nothing > 1: NameError: name 'nothing' is not defined" in lines
    assert after(lines, "p i") == ["i = 0 (int64)"]


@ts.kernel
def two_loops(x, out):
    total = 0.0
    if tile.program_id(0) == 0:
        for k in tile.range(0, 2):
            total += x[k]
    else:
        for k in tile.range(0, 3):
            total -= x[k]
    out[tile.program_id(0)] = total


def test_a_counter_that_another_loop_had_before():
    line = two_loops.kernel_function.__code__.co_firstlineno + 8
    lines = session(f"break {line}; c; c; p k", two_loops[(2,)], *ramp(4))
    assert after(lines, "p k") == ["k = 1 (int64)"]


def test_the_decorator_on_a_kernel_and_a_method(capsys):
    @ts.debug.interactive(commands="next; print i; continue")
    @ts.kernel
    def doubled(x, out):
        i = tile.program_id(0)
        out[i] = x[i] * 2.0

    class Model:
        @ts.debug.interactive(commands="p i; c")
        def run(self, x, out):
            outside[(4,)](x, out)

    x, out = ramp(4)
    doubled[(4,)](x, out)
    assert (out == 2 * x).all() and "i = 0 (int64)" in capsys.readouterr().out and doubled.__name__ == "doubled"
    with pytest.raises(OutOfBoundsError):
        Model().run(x, out)
    assert "i = 3 (int64)" in capsys.readouterr().out

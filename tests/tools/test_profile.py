"""Profiles: exact counts, costs that add up, places of the user, formats that other tools read."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

import tessera
import tessera as ts
from tessera.cuda.counters import LaunchCounters
from tessera.errors import ArgumentError
from tessera.runtime.program import prepare
from tessera.tools.cli.main import main
from tessera.tools.profile import profile_program, replay, session
from tessera.tools.profile.report import find_function

R = np.random.default_rng(0)
PROGRAM = """
import tessera as ts

def attention(q, k, v):
    scores = ts.softmax(q @ k.T * 0.125)
    return scores @ v

@ts.example(lambda rng: tuple(rng.standard_normal((64, 32), dtype="f4") for _ in range(3)))
@ts.jit
def model(q, k, v):
    return ts.gelu(attention(q, k, v))
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def product(m=64, k=48, n=32):
    return ts.jit(lambda x, w: x @ w), R.standard_normal((m, k)).astype("f4"), R.standard_normal((k, n)).astype("f4")


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx", "csl:2x2"])
def test_counts_are_exact_on_every_target(target):
    function, x, w = product()
    report = profile_program(prepare(function, (x, w), target), target)
    (one,) = report.kernels
    assert one.flops == 2 * 64 * 48 * 32 and one.bytes == 4 * (64 * 48 + 48 * 32 + 64 * 32)
    assert one.cost > 0 and one.location.file == __file__
    assert report.unit == {"ptx": "instructions", "csl:2x2": "cycles"}.get(target, "seconds")


def test_a_loaded_machine_gives_a_cost_too(monkeypatch):
    """One launch that took longer than many."""
    seconds = iter([2.0, 1.0])
    monkeypatch.setattr(replay, "_time_module", lambda run, arrays: next(seconds))
    function, x, w = product()
    (one,) = profile_program(prepare(function, (x, w), "llvm"), "llvm").kernels
    assert one.cost == 1.0 / (1 + 4)


def test_the_cycles_of_one_op_are_those_of_the_simulator():
    function, x, w = product(8, 8, 8)
    report = profile_program(prepare(function, (x, w), "csl:2x2"), "csl:2x2")
    assert report.kernels[0].cost == report.whole > 0


def test_the_instructions_are_those_that_the_emulator_executes():
    function, x, w = product(32, 32, 32)
    (one,) = profile_program(prepare(function, (x, w), "ptx"), "ptx").kernels
    assert isinstance(one.counters, LaunchCounters) and one.cost == sum(one.counters.instructions.values())
    assert one.counters.flops + one.counters.matrix_flops >= one.flops
    assert one.moved >= one.bytes and sum(one.lines.values()) == one.cost


def test_times_grow_with_the_work_and_add_up_to_the_call():
    small, large = (profile_program(prepare(*_split(product(n, n, n)), "llvm"), "llvm") for n in (64, 512))
    assert large.total > 5 * small.total > 0  # 512 times the work, on a machine that others use
    for n, report in ((64, small), (512, large)):
        device, (row,) = report.device, report.rows
        limit = max(2 * n**3 / device.flops, 3 * n * n * 4 / device.bandwidth)  # which one depends on the machine
        assert report.whole > 0 and row.limit_seconds == pytest.approx(limit)
        assert row.roofline == row.limit_seconds / report.total


def test_the_cost_of_a_launch_leaves_out_that_of_the_call():
    program = prepare(ts.jit(lambda x: x + 1.0), (np.ones(8, "f4"),), "llvm")
    reports = [profile_program(program, "llvm") for _ in range(5)]  # others use this machine
    assert any(0 < r.total < r.whole / 2 for r in reports)


def _split(made):
    return made[0], made[1:]


def test_a_replay_leaves_the_arguments_and_measures_kernels_that_write_in_place():
    @ts.kernel
    def double(x: ts.Tensor["N"], out: ts.Tensor["N"]):
        i = ts.tile.program_id(0)
        out[i] = x[i] * 2.0

    x, out = np.ones(64, "f4"), np.zeros(64, "f4")
    report = profile_program(prepare(double, (x, out), "llvm", grid=(64,)), "llvm")
    (one,) = report.kernels
    assert one.name == "double" and one.bytes == 2 * 64 * 4 and one.flops == 64 and (out == 0).all() and (x == 1).all()


def test_the_call_stack_is_that_of_the_user(program, capsys):
    assert main(["profile", f"{program}:model", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {k["function"] for k in found["kernels"]} == {"attention", "model"}
    softmax = next(k for k in found["kernels"] if "softmax" in k["kernel"])
    assert softmax["line"] == 5 and softmax["source"].startswith("scores = ")
    assert sum(k["share"] for k in found["kernels"]) == pytest.approx(1)
    assert found["total"] == pytest.approx(sum(k["seconds"] for k in found["kernels"]))
    assert any("scaled_dot_product_attention" in s for s in found["suggestions"]) or softmax["share"] < 0.1


def test_files_for_other_tools(program, tmp_path, capsys):
    names = [str(tmp_path / f"x{e}") for e in (".folded", ".speedscope.json", ".trace.json", ".json", ".txt")]
    assert main(["profile", f"{program}:model", "--target", "ptx", *(f"-o={n}" for n in names)]) == 0
    folded, scope, trace, plain = (Path(n).read_text() for n in names[:4])
    costs = [int(line.rsplit(" ", 1)[1]) for line in folded.splitlines()]
    assert sum(costs) == json.loads(plain)["total"] and all(line.count(";") == 3 for line in folded.splitlines())
    scope = json.loads(scope)
    (profile,) = scope["profiles"]
    assert profile["endValue"] == sum(profile["weights"]) == sum(costs)
    assert max(i for s in profile["samples"] for i in s) == len(scope["shared"]["frames"]) - 1
    events = [e for e in json.loads(trace)["traceEvents"] if e["ph"] == "X"]
    assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in zip(events, events[1:], strict=False))
    assert "no time was measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "nothing"], "not a"),
        (["-o", "x.pdf"], "names no format"),
        (["--level", "deep"], "invalid choice"),
        (["--target", "ptx", "--gpu", "Z80"], "not known"),
    ],
)
def test_what_is_refused(program, arguments, message, capsys):
    try:
        assert main(["profile", f"{program}:model", *arguments]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert message in capsys.readouterr().err


def test_12_3_the_profiler(capsys):
    weights = R.standard_normal((32, 32)).astype("f4")

    @ts.jit
    def model(x):
        return ts.softmax(ts.relu(x @ weights))

    @tessera.profile(level="detailed")
    def profile_model(x):
        """Detailed performance analysis"""
        output = model(x)
        reports = tessera.profile.report()
        assert len(reports) == 1
        return output

    x = R.standard_normal((16, 32)).astype("f4")
    np.testing.assert_allclose(profile_model(x).numpy(), ts.jit(model.function)(x).numpy())
    text = capsys.readouterr().out
    assert "Bottleneck" in text and "softmax" in text and "1 calls" in text
    with ts.profile() as session:
        ts.jit(model.function, target="llvm")(x)
    (report,) = session.reports()
    assert report.target == "llvm" and len(report.kernels) == 2


def test_12_3_kernel_debugging(capsys):
    @ts.kernel
    def custom_kernel(x: ts.Tensor["N"]):
        i = ts.tile.program_id(0)
        x[i] *= 2.0

    @tessera.debug.kernel
    def debug_custom_kernel():
        """Debug at kernel level"""
        with tessera.debug.kernel_trace():
            custom_kernel[4,](np.ones(4, "f4"))
        return tessera.debug.kernel_report()

    text = str(debug_custom_kernel())
    for part in ("custom_kernel, grid (4,)", "registers", "occupancy", "coalescing", "bank conflicts"):
        assert part in text


def test_ops_outside_of_jit_are_timed_one_by_one():
    @ts.profile
    def eager(x):
        time.sleep(0.02)
        y = ts.exp(x)
        return ts.sum(y * 2.0)

    eager(ts.ones((8, 8)))
    (report,) = ts.profile.latest().reports()
    assert [k.name for k in report.kernels][:2] == ["exp", "full"] or "exp" in [k.name for k in report.kernels]
    assert report.kernels[0].cost > 0.02 and report.rows[0].function.endswith("eager")


def test_sessions_nest_and_leave_no_trace():
    function, x, w = product()
    with ts.profile() as outer:
        with ts.profile() as inner:
            function(x, w)
        function(w.T, x.T)
    assert len(inner.reports()) == 1 and len(outer.reports()) == 1
    function(x, w)
    assert len(outer.reports()) == 1


def test_errors(tmp_path):
    with pytest.raises(ArgumentError, match="no level"):
        ts.profile(level="deep")
    with ts.profile() as session:
        pass
    with pytest.raises(ArgumentError, match="nothing has run"):
        session.save(tmp_path / "x.json")
    assert find_function(ts.errors.Location("nowhere.py", 3)) == "<module>"


PROGRAMS = {
    "scan": lambda x: ts.scan(lambda c, _: (ts.exp(c * 0.1), c), x, xs=ts.zeros((3,)))[0],
    "cond": lambda x: ts.cond(ts.sum(x) > 0, lambda x: ts.exp(x), lambda x: x * 2.0, x),
    "topk": lambda x: ts.topk(ts.exp(x), 3),
    "cholesky": lambda x: ts.cholesky(x @ x.T + ts.eye(4)),
    "dropout": lambda x: ts.dropout(x, 0.5),
}


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_loops_and_host_ops(name, target):
    x = R.standard_normal((4, 8)).astype("f4")
    report = profile_program(prepare(ts.jit(PROGRAMS[name]), (x,), target), target)
    assert 0 < len(report.kernels) < 12 and report.total > 0 and len({k.unit for k in report.kernels}) == 1
    assert str(report)


def test_composites_count_as_their_parts_and_symbolic_sizes_are_those_of_the_call():
    q = R.standard_normal((1, 1, 6, 4)).astype("f4")
    function = ts.jit(lambda q: ts.scaled_dot_product_attention(q, q, q))
    (one,) = profile_program(prepare(function, (q,), "interp"), "interp").kernels
    assert one.flops > 2 * (2 * 6 * 6 * 4)
    x = np.ones((5, 3), "f4")
    program = prepare(ts.jit(lambda x: ts.exp(x)), (x,), "llvm", dynamic={"x": {0: "B"}})
    assert profile_program(program, "llvm").kernels[0].bytes == 2 * x.nbytes


def test_prints_are_not_repeated(capsys):
    @ts.kernel
    def talk(x: ts.Tensor["N"]):
        i = ts.tile.program_id(0)
        print("hello", i)
        x[i] *= 2.0

    profile_program(prepare(talk, (np.ones(2, "f4"),), "llvm", grid=(2,)), "llvm")
    assert "hello" not in capsys.readouterr().out


def scatter(x, i, v):
    return x.at[i].add(v) * 2.0


UPDATES = np.zeros(7, np.float32), R.integers(0, 7, 300), R.standard_normal(300).astype(np.float32)


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_launches_leave_their_results_for_the_next(monkeypatch, target):
    held = []
    monkeypatch.setattr(replay.ReplayBuffers, "take", lambda self, node, take=replay.ReplayBuffers.take: (
        held.append(self), take(self, node))[1])  # fmt: skip
    monkeypatch.setattr(replay.tile_interpreter, "run", lambda *args: pytest.fail("the interpreter runs"))
    monkeypatch.setattr(replay, "count_launch", lambda *args: None)
    report = profile_program(prepare(ts.jit(scatter), UPDATES, target), target)
    x, i, v = UPDATES
    expected = x.copy()
    np.add.at(expected, i, v)
    found = list(held[-1].arrays.values())[3]
    np.testing.assert_allclose(found, expected * 2, rtol=1e-5)
    assert all(k.bytes for k in report.kernels)


@pytest.mark.parametrize(("level", "late"), [("summary", 1), ("detailed", 2)])
def test_what_would_take_long_is_not_counted_and_says_so(monkeypatch, level, late):
    monkeypatch.setattr(replay, "COUNT_SECONDS", -1.0)
    monkeypatch.setattr(session, "COUNT_SECONDS", -1.0)
    report = profile_program(prepare(ts.jit(scatter), UPDATES, "llvm"), "llvm", level)
    one = next(k for k in report.kernels if k.name == "update_rows_in_place")
    assert one.estimated and one.flops == 0 and one.bytes == sum(a.nbytes for a in UPDATES)
    assert sum(k.estimated for k in report.kernels) >= late
    assert any("not counted" in note and "update_rows_in_place" in note for note in report.notes)
    counted = [k for k in report.kernels if k.name != "update_rows_in_place"]
    assert all(k.bytes for k in counted)


def test_a_launch_is_counted_where_there_is_time():
    report = profile_program(prepare(ts.jit(scatter), UPDATES, "llvm"), "llvm")
    one = next(k for k in report.kernels if k.name == "update_rows_in_place")
    assert not one.estimated and one.flops == 300 and "not counted" not in str(report.notes)

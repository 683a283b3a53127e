"""Event timing: what is queued between two events, and the profile of a program on a GPU with a known clock."""

import json

import numpy as np
import pytest
from fake_gpu import FakeGpu

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime import driver_api, gpu_program
from tessera.codegen.ptx.runtime.event_timing import MOST, ROUNDS, SHORTEST, measure_alone, measure_repeated
from tessera.codegen.ptx.runtime.gpu_program import GpuProgram
from tessera.runtime.program import prepare
from tessera.tools.cli.main import main
from tessera.tools.profile import profile_program

R = np.random.default_rng(0)
X, W = R.standard_normal((64, 32)).astype("f4"), R.standard_normal((32, 48)).astype("f4")
TIMES = {"k0_matmul": 30e-6, "k1_softmax": 10e-6, "talk": 4e-6}


class Clock:
    """Each measurement takes what the run says, and some noise; the first also loads the code."""

    def __init__(self, noise=(0.0,)):
        self.noise, self.measured = noise, 0

    def measure(self, run):
        seconds = run() + self.noise[self.measured % len(self.noise)]
        self.measured += 1
        return seconds + (1.0 if self.measured == 1 else 0.0)


@pytest.mark.parametrize(("one", "times"), [(1e-3, 5), (1e-9, MOST), (1.0, 1), (SHORTEST, 1)])
def test_so_many_runs_as_take_long_enough(one, times):
    bound = []

    def bind(n):
        bound.append(n)
        return lambda: n * one

    assert measure_repeated(bind, Clock()) == pytest.approx(one)
    assert max(bound) == times


def test_the_median_leaves_out_what_disturbs_a_few_rounds():
    noise = (0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 7.0, 0.0, 0.0)
    assert measure_repeated(lambda n: lambda: n * 1e-3, Clock(noise)) == pytest.approx(1e-3)
    steps = []
    found = measure_alone(lambda: steps.append("prepare"), lambda: 2e-3, lambda: steps.append("check"), Clock(noise))
    assert found == pytest.approx(2e-3) and steps == ["prepare", "check"] * (1 + ROUNDS)


@pytest.fixture
def gpu(monkeypatch):
    """The PTX target runs on a fake GPU whose kernels take `TIMES`, with a gap of a microsecond between two."""

    def install(**more):
        found = FakeGpu(lambda name: TIMES.get(name, 2e-6), **{"gap": 1e-6, **more})
        kind = type(BACKEND)
        monkeypatch.setattr(driver_api, "load_driver_library", lambda: found)
        monkeypatch.setattr(kind, "has_device", True)
        monkeypatch.setattr(kind, "where", lambda self: found.name)
        monkeypatch.setattr(kind, "runtime", lambda self, artifact: GpuProgram(artifact, found))
        return found

    return install


def model(x, w):
    return ts.softmax(x @ w)


def test_kernels_are_timed_by_events_under_the_user_s_lines(gpu):
    device = gpu()
    report = profile_program(prepare(ts.jit(model), (X, W), "ptx"), "ptx")
    assert [k.name for k in report.kernels] == ["k0_matmul", "k1_softmax"]
    assert [k.cost for k in report.kernels] == pytest.approx([31e-6, 11e-6])
    assert report.whole == pytest.approx(report.total) and report.clock == "device events"
    assert {k.location.file for k in report.kernels} == {__file__} and {r.function for r in report.rows} == {"model"}
    product = report.rows[0]
    bytes_moved = 4 * (64 * 32 + 32 * 48 + 64 * 48)
    assert product.roofline == pytest.approx(bytes_moved / 4.8e12 / 31e-6)  # H200's data sheet: bound by memory
    assert report.device.name == "H200" and "by device events" in str(report)
    repeated = [names for kind, names in device.log if kind == "graph" and len(names) > 2]
    assert {len(set(names)) for names in repeated} == {1, 2}  # each kernel alone, and the whole program


def test_a_replay_on_the_gpu_leaves_results_for_the_next_kernel(gpu):
    device = gpu()
    program = BACKEND.runtime(BACKEND.emit(prepare(ts.jit(model), (X, W), "ptx").levels["tile"], {}))
    assert program.measure([X, W]) == pytest.approx(42e-6)
    (out,) = program.run([X, W])
    e = np.exp(X @ W - (X @ W).max(1, keepdims=True))
    np.testing.assert_allclose(out, e / e.sum(1, keepdims=True), rtol=1e-5)
    assert device.log[-2:] == [("kernel", "k0_matmul"), ("kernel", "k1_softmax")]


def test_a_call_of_a_long_program_is_two_graphs_and_repetitions_are_one(gpu, monkeypatch):
    monkeypatch.setattr(gpu_program, "HEAD_LAUNCHES", 1)
    monkeypatch.setattr(gpu_program, "MIN_SPLIT_LAUNCHES", 2)
    device = gpu()
    program = BACKEND.runtime(BACKEND.emit(prepare(ts.jit(model), (X, W), "ptx").levels["tile"], {}))
    given = [device.allocate(n) for n in (X.nbytes, W.nbytes, 64 * 48 * 4)]
    program.bind(given)()
    program.bind(given, times=2)()
    both = ("k0_matmul", "k1_softmax")
    assert [names for kind, names in device.log if kind == "graph"] == [both[:1], both[1:], both * 2]


def test_graphs_of_repetitions_have_a_limit(gpu, monkeypatch):
    monkeypatch.setattr(gpu_program, "MOST_NODES", 7)
    device = gpu()
    program = BACKEND.runtime(BACKEND.emit(prepare(ts.jit(model), (X, W), "ptx").levels["tile"], {}))
    assert program.measure([X, W]) == pytest.approx(42e-6)
    assert max(len(names) for kind, names in device.log if kind == "graph") == 6  # a run has two kernels


def test_kernels_that_report_are_reset_before_each_run(gpu, capsys):
    @ts.kernel
    def talk(x: ts.Tensor["N"]):
        i = ts.tile.program_id(0)
        print("hello", i)
        x[i] *= 2.0

    device = gpu()
    x = np.ones(2, "f4")
    report = profile_program(prepare(talk, (x,), "ptx", grid=(2,)), "ptx")
    assert [k.cost for k in report.kernels] == pytest.approx([5e-6]) and (x == 1).all()
    assert all(kind == "kernel" for kind, _ in device.log) and "hello" not in capsys.readouterr().out


def test_checked_indices_are_measured_in_a_graph_and_examined(gpu):
    device = gpu()
    function, x = ts.jit(lambda x, i: ts.take(x, i, axis=0)), np.ones((8, 4), "f4")
    report = profile_program(prepare(function, (x, np.array([1, 7])), "ptx"), "ptx")
    assert [k.cost for k in report.kernels] == pytest.approx([3e-6]) and any(kind == "graph" for kind, _ in device.log)
    with pytest.raises(ts.errors.OutOfBoundsError, match="index 8 is outside"):
        profile_program(prepare(function, (x, np.array([1, 8])), "ptx"), "ptx")


def test_loops_that_depend_on_results_are_measured_as_a_whole(gpu):
    gpu()
    function = ts.jit(lambda x: ts.while_loop(lambda c: ts.sum(c) < 1000.0, lambda c: c * 2.0, x))
    report = profile_program(prepare(function, (np.ones((4, 8), "f4"),), "ptx"), "ptx")
    copy, loop = report.kernels
    assert report.clock == "device events" and copy.cost == pytest.approx(3e-6)
    assert loop.cost == pytest.approx(11 * 3e-6) and report.whole == pytest.approx(12 * 3e-6)  # 6 tests, 5 rounds of 1


def test_advice_follows_from_the_driver_s_counts(gpu):
    gpu(local=96)
    report = profile_program(prepare(ts.jit(model), (X, W), "ptx"), "ptx")
    assert any("96 bytes a thread in local memory" in s for s in report.suggestions())
    (resources,) = report.kernels[0].resources
    assert resources["registers"] == 40 and resources["processors"] == 132 and resources["resident"] == 2


def test_a_gpu_without_a_data_sheet_has_no_roofline(gpu):
    gpu(name="NVIDIA Z9")
    report = profile_program(prepare(ts.jit(model), (X, W), "ptx"), "ptx")
    assert report.device is None and "peaks of NVIDIA Z9 are not known" in str(report)
    named = profile_program(prepare(ts.jit(model), (X, W), "ptx"), "ptx", gpu="A100")
    assert named.device.name == "A100" and named.rows[0].roofline


def test_the_command_and_its_chrome_trace(gpu, tmp_path, capsys):
    gpu()
    (tmp_path / "program.py").write_text(PROGRAM)
    trace = tmp_path / "x.trace.json"
    assert main(["profile", f"{tmp_path / 'program.py'}:model", "--target", "ptx", "-o", str(trace)]) == 0
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["dur"] for e in events] == pytest.approx([31.0, 11.0])
    assert events[0]["args"]["line"] == "program.py:7" and events[0]["args"]["bound"]
    assert "the whole program, by device events: 42.0 µs" in capsys.readouterr().out


PROGRAM = """
import tessera as ts

@ts.example(lambda rng: (rng.standard_normal((64, 32), dtype="f4"), rng.standard_normal((32, 48), dtype="f4")))
@ts.jit
def model(x, w):
    return ts.softmax(x @ w)
"""

"""Launch buffers and host calls of GPU programs, on a fake device memory."""

import types

import numpy as np
import pytest
from fake_gpu import FakeGpu

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime import driver_api, launch_watch, queued_plan
from tessera.codegen.ptx.runtime.driver_api import MappedMemory
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE, LaunchBuffers, choose_hardware_grid
from tessera.codegen.ptx.runtime.gpu_program import EntryLaunch, GpuProgram
from tessera.codegen.ptx.runtime.launch_watch import LaunchWatch
from tessera.codegen.ptx.runtime.queued_plan import QueuedPlan
from tessera.core import queued_failures
from tessera.core.errors import ExecutionError, OutOfBoundsError
from tessera.interp.target.ptx import PtxModule
from tessera.runtime import driver
from tessera.runtime.program import prepare


class Memory:
    """Copies to and from rooms by their addresses, as the driver makes them."""

    def __init__(self, rooms):
        self.rooms = rooms

    def memcpy_htod(self, at, data):
        self.rooms[at].reshape(-1).view(np.uint8)[: data.nbytes] = data.reshape(-1).view(np.uint8)

    def memcpy_dtoh(self, data, at):
        data.reshape(-1).view(np.uint8)[...] = self.rooms[at].reshape(-1).view(np.uint8)[: data.nbytes]


@ts.kernel
def speaks(x):
    i = tile.program_id(0)
    tile.print("holds", x[i, 0:3])
    tile.assert_(x[i, 0] < 10.0, "ten", x[i, 0])


def launched(x):
    """A launch whose buffers lie in rooms of their own, filled with what was there before; and the rooms."""
    plan = (artifact := BACKEND.emit(prepare(speaks, [x], grid=(4,)).levels["tile"], {})).manifest["plan"]
    (launch,), entry = plan["launches"], plan["entries"]["speaks"]
    buffers = LaunchBuffers(entry, (4,))
    rooms = {256 * i: np.full(n, 0xAB, np.uint8) for i, n in enumerate(buffers.sizes.values(), 1)}
    found = EntryLaunch(None, (4, 1, 1), launch, entry, buffers, dict(zip(buffers.sizes, rooms, strict=True)))
    run = PtxModule(artifact.text(TEXT_FILE)).launch
    grid = choose_hardware_grid(launch, entry, 132)
    return found, Memory(rooms), lambda: run("speaks", grid, entry["threads"], [x, *rooms.values()], entry["shared"])


def test_prints_and_assertions_of_a_launch(capsys):
    x = np.arange(20, dtype="f4").reshape(4, 5)
    found, memory, run = launched(x)
    for _ in range(2):  # nothing is left for the next run
        found.reset_buffers(memory)
        run()
        with pytest.raises(ExecutionError, match=r"ten[\s\S]*false at program \(2,\) with 10.0"):
            found.check_buffers(memory)
        lines = capsys.readouterr().out.splitlines()
        assert lines[1] == "program (1,): holds [5., 6., 7.]" and len(lines) == 4


def test_host_call(monkeypatch):
    trace = ts.jit(lambda x: ts.cholesky(x) * 2.0).trace(np.eye(65, dtype="f4"))  # smaller ones run on the GPU
    plan = BACKEND.emit(driver.lower(trace.function, "ptx")["tile"], {}).manifest["plan"]
    (call,) = plan["calls"]
    places = [(arg["param"] if "param" in arg else 1000 + arg["offset"]) for arg in call["args"]]
    rooms = dict(zip(places, (np.diag(np.arange(1, 66, dtype="f4") ** 2), np.zeros((65, 65), "f4")), strict=True))
    waited = []
    monkeypatch.setattr(queued_plan, "synchronize_stream", waited.append)
    device = types.SimpleNamespace(driver=Memory(rooms))
    program = types.SimpleNamespace(device=device, calls=plan["calls"])
    QueuedPlan(program, list(range(9)), 1, 1000).call(0)
    np.testing.assert_array_equal(rooms[places[1]], np.diag(np.arange(1, 66)))
    assert waited == [1]


@ts.kernel
def looks(x, out):
    i = tile.program_id(0)
    tile.assert_(x[i, 0] < 10.0, "ten", x[i, 0])
    out[i] = x[i, 0]


def test_the_host_sees_failures_without_copies(monkeypatch):
    x, out = np.arange(20, dtype="f4").reshape(4, 5), np.zeros(4, "f4")
    plan = (artifact := BACKEND.emit(prepare(looks, [x, out], grid=(4,)).levels["tile"], {})).manifest["plan"]
    (launch,), entry = plan["launches"], plan["entries"]["looks"]
    buffers = LaunchBuffers(entry, (4,))
    values = np.full(buffers.sizes["values"], 0xAB, np.uint8)
    reports = MappedMemory(512, np.zeros(buffers.sizes["reports"], np.uint8))
    each = EntryLaunch(None, (4, 1, 1), launch, entry, buffers, {"reports": reports, "values": 256})
    each.reset_buffers(Memory({256: values}))
    text, grid = PtxModule(artifact.text(TEXT_FILE)), choose_hardware_grid(launch, entry, 132)
    given = [x, out, reports.array, values]
    watch, waited = LaunchWatch([each], Memory({256: values})), []
    monkeypatch.setattr(launch_watch, "synchronize_stream", waited.append)

    def run():
        text.launch("looks", grid, entry["threads"], given, entry["shared"])

    assert each.is_mapped and not each.has_failed()
    examined = (
        lambda: watch.run(run, 7),  # the next call of the program
        lambda: queued_failures.examine(7),  # after a wait for its stream: a copy to the host
        lambda: queued_failures.examine(8),  # after a wait for another stream: what is seen by now
        lambda: queued_failures.wait_and_examine(7),  # an export from its stream
        queued_failures.wait_and_examine,  # ts.synchronize(), or the end of the process
    )
    for examine in examined:
        watch.run(run, 7)
        assert each.has_failed() and watch in queued_failures._queued
        with pytest.raises(ExecutionError, match=r"ten[\s\S]*false at program \(2,\) with 10.0"):
            examine()
        assert not each.has_failed()
    x[2:] = 0
    watch.run(run, 7)
    watch.run(run, 9)
    queued_failures.examine(7)
    assert watch.streams == {9} and not each.has_failed()
    queued_failures.wait_and_examine(7)
    assert watch in queued_failures._queued  # no launch on that stream
    queued_failures.wait_and_examine()
    assert watch not in queued_failures._queued and waited[-1] == 9


def test_failures_of_several_launches_are_raised_once(monkeypatch):
    class Launch:
        failed, raised = True, 0

        def has_failed(self):
            return self.failed

        def check_buffers(self, drv):
            self.raised += 1
            raise ExecutionError("failed")

        def reset_buffers(self, drv):
            self.failed = False

    first, second = Launch(), Launch()
    monkeypatch.setattr(launch_watch, "synchronize_stream", lambda stream: None)
    watch = LaunchWatch([first, second], None)
    with pytest.raises(ExecutionError):
        watch.raise_seen()
    watch.raise_seen()  # the second launch ran on what the first one left
    assert (first.raised, second.raised) == (1, 0) and not second.failed


class Communication:
    """A device's memory that tells what waits for what; `mark` gives what is queued on a stream by now."""

    def __init__(self):
        self.log = []

    def wait(self, stream, mark):
        self.log.append((stream, mark))


ALL_REDUCE = {"op": "ts.all_reduce", "args": [{"param": i, "shape": [4], "dtype": "f32"} for i in (0, 1)], "attrs": {}}


def test_launches_wait_once_for_collectives_that_started_together(monkeypatch):
    """A wait for a later collective is one for those before it: they follow each other on their stream."""
    memory, started = Communication(), []

    def start(calls, stream):
        started.append([(kind, x.address, out.address) for kind, x, out, _ in calls])
        return f"mark {len(started)}"

    monkeypatch.setattr(queued_plan, "get_device_memory", lambda: memory)
    monkeypatch.setattr(queued_plan, "start_in_place", start)
    engine = QueuedPlan(types.SimpleNamespace(calls=[ALL_REDUCE] * 4), [256, 512], 1, 0)
    engine.start(0, 2)
    engine.start(2, 4)
    for number in (0, 1, 3, 2):
        engine.wait(number)
    assert started == [[("all_reduce", 256, 512)] * 2] * 2
    assert memory.log == [(1, "mark 1"), (1, "mark 2")]


def test_collectives_of_the_host_run_where_they_start(monkeypatch):
    called = []
    monkeypatch.setattr(queued_plan, "start_in_place", lambda calls, stream: None)
    monkeypatch.setattr(queued_plan, "get_device_memory", Communication)
    monkeypatch.setattr(QueuedPlan, "call", lambda engine, number: called.append(number))
    engine = QueuedPlan(types.SimpleNamespace(calls=[ALL_REDUCE] * 2), [256, 512], 1, 0)
    engine.start(0, 2)
    engine.wait(1)
    assert called == [0, 1]


class LateGpu(FakeGpu):
    """A GPU that executes what is queued only when somebody waits for it, or copies from it."""

    def __init__(self):
        super().__init__(lambda name: 0.0)
        self._queued = []
        self.driver.Context.synchronize = self._catch_up
        self.driver.memcpy_dtoh = lambda array, address: (self._catch_up(), self._read(array, address))

    def _execute(self, launch):
        self._queued.append(launch)

    def _catch_up(self):
        while self._queued:
            self._queued.pop(0)()


def test_a_run_waits_before_it_examines_memory_that_the_host_sees(monkeypatch):
    """Kernels write it at any time; a copy would have waited for them."""
    gpu = LateGpu()
    monkeypatch.setattr(driver_api, "load_driver_library", lambda: gpu)
    x, places = np.arange(12, dtype="f4").reshape(4, 3), np.array([3, 0, 1], "i4")
    levels = driver.lower(ts.jit(lambda x, i: ts.take(x, i, axis=0)).trace(x, places).function, "ptx")
    program = GpuProgram(BACKEND.emit(levels["tile"], {"arch": "sm_90a"}), gpu)
    np.testing.assert_array_equal(program.run([x, places])[0], x[places])
    for wrong in (4, -5):
        with pytest.raises(OutOfBoundsError, match=f"index {wrong} is outside axis 0 of size 4"):
            program.run([x, np.array([0, wrong, 1], "i4")])
    np.testing.assert_array_equal(program.run([x, places])[0], x[places])

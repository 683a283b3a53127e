"""Launch buffers and host calls of GPU programs, on a fake device memory."""

import types

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime import gpu_program
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE, LaunchBuffers, choose_hardware_grid
from tessera.codegen.ptx.runtime.gpu_program import EntryLaunch, _QueuedPlan
from tessera.core.errors import ExecutionError
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
    trace = ts.jit(lambda x: ts.cholesky(x) * 2.0).trace(np.eye(3, dtype="f4"))
    plan = BACKEND.emit(driver.lower(trace.function, "ptx")["tile"], {}).manifest["plan"]
    (call,) = plan["calls"]
    places = [(arg["param"] if "param" in arg else 1000 + arg["offset"]) for arg in call["args"]]
    rooms = dict(zip(places, (np.diag(np.float32([4, 9, 16])), np.zeros((3, 3), "f4")), strict=True))
    waited = []
    monkeypatch.setattr(gpu_program, "synchronize_stream", waited.append)
    device = types.SimpleNamespace(driver=Memory(rooms))
    program = types.SimpleNamespace(device=device, calls=plan["calls"])
    _QueuedPlan(program, list(range(9)), 1, 1000).call(0)
    np.testing.assert_array_equal(rooms[places[1]], np.diag([2, 3, 4]))
    assert waited == [1]

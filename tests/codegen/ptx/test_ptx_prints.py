"""Prints compiled for a GPU: the lines that the other engine gives, whatever loops, branches and types are around."""

import numpy as np
import pytest
from ptxcheck import emitted

import tessera as ts
from tessera import tile
from tessera.codegen import artifact
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime import launch_buffers
from tessera.core.errors import ResourceError
from tessera.runtime.program import prepare

LLVM = "llvm"


@ts.kernel
def nested(x, out):
    i, j = tile.program_id(0), tile.program_id(1)
    for a in tile.range(0, 2 + i):
        tile.print("outer", a)
        b = a
        while b > 0:
            tile.print(f"inner {b} of {x[j, 0:3]}")
            b = b - 1
        if (a + j) % 2 == 0:
            tile.print("even", x[j, 1] * 2.0)
        else:
            tile.print("odd", j > 0, x[j, 0:2] > 0.0)
    out[i, j] = x[j, 0]


@ts.kernel
def tiles_part(x, out):
    me = tile.local_id()
    if me < 3:
        tile.print("below", me)
        for k in tile.range(0, me):
            tile.print("round", k, x[k])
    tile.barrier()
    tile.print("all", x[me])
    out[me] = x[me]


@ts.kernel
def kinds(x, h, b, q, small, out):
    tile.print(tile.load(x), tile.load(h), tile.load(b))
    tile.print("q", tile.load(q), tile.load(small), tile.cast(tile.load(q), ts.int4), tile.cast(x[0, 0], ts.f64))
    out[0] = x[0, 0]


X = np.arange(12, dtype="f4").reshape(3, 4) - 4
KINDS = (
    X, X.astype("f2"), X.astype(ts.bf16.numpy), np.arange(5, dtype="u1"), X[0].astype(ts.fp8_e4m3.numpy),
    np.zeros(1, "f4"),
)  # fmt: skip
PROGRAMS = {
    "nested": (nested, (X, np.zeros((2, 3), "f4")), (2, 3), None),
    "tiles": (tiles_part, (np.arange(40, dtype="f4"), np.zeros(40, "f4")), (1,), 40),
    "kinds": (kinds, KINDS, (1,), None),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_lines_are_those_of_the_processor(name, arch, capsys):
    entry, arguments, grid, group = PROGRAMS[name]
    program = prepare(entry, arguments, grid=grid, group=group)
    program.run("device", LLVM)
    want = capsys.readouterr().out
    BACKEND.interpreter(emitted(program.levels["tile"], arch))([a.copy() for a in arguments])
    assert capsys.readouterr().out == want and want


def test_a_saved_artifact_still_prints(tmp_path, capsys):
    program = prepare(tiles_part, PROGRAMS["tiles"][1], grid=(1,), group=40)
    program.run("device", LLVM)
    want = capsys.readouterr().out
    held = artifact.read_artifact(emitted(program.levels["tile"]).save(tmp_path / "a"))
    BACKEND.interpreter(held)([a.copy() for a in PROGRAMS["tiles"][1]])
    assert capsys.readouterr().out == want


@ts.kernel
def chatty(x):
    for k in tile.range(0, 100):
        tile.print(k, tile.load(x))


def test_what_has_no_room_is_told(monkeypatch, capsys):
    monkeypatch.setattr(launch_buffers, "MIN_PRINT_BYTES", 0)
    monkeypatch.setattr(launch_buffers, "MAX_PRINT_BYTES", 2000)
    module = prepare(chatty, (np.arange(7, dtype="f4"),), grid=(1,)).levels["tile"]
    with pytest.raises(ResourceError, match=r"at most 2,032 bytes\n +received: 8,032 bytes"):
        BACKEND.interpreter(emitted(module))([np.arange(7, dtype="f4")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [str(k) for k in range(25)]

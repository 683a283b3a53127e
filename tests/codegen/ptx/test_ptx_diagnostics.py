"""Prints and assertions in PTX: the lines and errors of the LLVM target, in every loop, branch and type."""

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, emit_checked

import tessera as ts
from tessera import tile
from tessera.codegen import artifact
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime import emulated_program
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.errors import ExecutionError, ResourceError
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
def test_prints_match_llvm(name, arch, capsys):
    entry, arguments, grid, group = PROGRAMS[name]
    program = prepare(entry, arguments, grid=grid, group=group)
    program.run("device", LLVM)
    want = capsys.readouterr().out
    BACKEND.interpreter(emit_checked(program.levels["tile"], arch))([a.copy() for a in arguments])
    assert capsys.readouterr().out == want and want


def test_a_saved_artifact_still_prints(tmp_path, capsys):
    program = prepare(tiles_part, PROGRAMS["tiles"][1], grid=(1,), group=40)
    program.run("device", LLVM)
    want = capsys.readouterr().out
    held = artifact.read_artifact(emit_checked(program.levels["tile"]).save(tmp_path / "a"))
    BACKEND.interpreter(held)([a.copy() for a in PROGRAMS["tiles"][1]])
    assert capsys.readouterr().out == want


@ts.kernel
def chatty(x):
    for k in tile.range(0, 100):
        tile.print(k, tile.load(x))


def test_print_buffer_overflow(monkeypatch, capsys):
    monkeypatch.setattr(emulated_program, "MIN_PRINT_BYTES", 0)
    monkeypatch.setattr(emulated_program, "MAX_PRINT_BYTES", 2000)
    module = prepare(chatty, (np.arange(7, dtype="f4"),), grid=(1,)).levels["tile"]
    with pytest.raises(ResourceError, match=r"at most 2,032 bytes\n +received: 8,032 bytes"):
        BACKEND.interpreter(emit_checked(module))([np.arange(7, dtype="f4")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [str(k) for k in range(25)]


def run(entry, arrays, grid, group=None, arch="sm_80"):
    """What a run of the text leaves in the arrays, and what it raises."""
    artifact = emit_checked(prepare(entry, arrays, grid=grid, group=group).levels["tile"], arch)
    with pytest.raises(ExecutionError) as error:
        BACKEND.interpreter(artifact)([a for a in arrays if isinstance(a, np.ndarray)])
    return str(error.value), artifact.text(TEXT_FILE)


@ts.kernel
def picked(x, places, out):
    i = tile.program_id(0)
    tile.assert_(tile.load(places[i, :]) < 10, "a place outside", tile.load(places[i, :]), i)
    out[i, :] = x[tile.load(places[i, :])]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_failed_program_exits(arch):
    places = np.arange(40).reshape(4, 10) % 10
    places[1, 7], places[3, 2] = 100, 10**6
    out = np.full((4, 10), -1, "f4")
    said, _ = run(picked, [np.arange(10, dtype="f4"), places, out], (4,), arch=arch)
    assert "a place outside" in said and "program (1,), element (7,) with 100, 1" in said
    np.testing.assert_array_equal(out[[0, 2]], places[[0, 2]])
    assert (out[[1, 3]] == -1).all()


@ts.kernel
def apart(x, out):
    me = tile.local_id()
    tile.assert_(x[me] > 0.0, "positive", x[me])
    out[me] = 1.0


@ts.kernel
def together(x, out):
    me = tile.local_id()
    shared = tile.alloc_shared((8,), ts.f32)
    tile.assert_(x[me] > 0.0, "positive", x[me])
    shared[me] = x[me]
    tile.barrier()
    out[me] = shared[7 - me]


@pytest.mark.parametrize(("entry", "left"), [(apart, 0), (together, 8)])
def test_failed_tile_exits_unless_others_wait(entry, left):
    x, out = np.arange(8, dtype="f4") - 2, np.zeros(8, "f4")
    said, _ = run(entry, [x, out], (1,), 8)
    assert "false at program (0,), tile 0 with -2.0" in said
    np.testing.assert_array_equal(out, x[::-1] if left else [0, 0, 0, 1, 1, 1, 1, 1])


@ts.kernel
def shown(a, b, c, d, e, f):
    x = tile.load(a)
    tile.assert_(x < 3, "all", x, tile.load(b), tile.load(c), tile.load(d), tile.load(e), tile.load(f))


def test_values_of_every_width():
    numbers = [np.array([1, 2, 3, 9]).astype(t) for t in ("i8", "u1", "f2", "f8", ts.bf16.numpy, ts.fp8_e4m3.numpy)]
    said, _ = run(shown, numbers, (1,))
    assert "element (2,) with 3, 3, 3.0, 3.0, 3, 3" in said


@ts.kernel
def product(a, b, out, K: ts.constexpr):
    m, n = tile.program_id(0) * 64, tile.program_id(1) * 64
    acc = tile.zeros((64, 64), ts.f32)
    for k in tile.range(0, K, 64):
        acc += tile.dot(tile.load(a[m : m + 64, k : k + 64]), tile.transpose(tile.load(b[n : n + 64, k : k + 64])))
    tile.print("corner", tile.sum(acc))
    tile.assert_(acc < 1e3, "too large")
    tile.store(out[m : m + 64, n : n + 64], acc)


def test_diagnostics_of_a_warp_specialised_kernel(capsys):
    """Threads of different kinds, which work through several programs: those go on."""
    a, b = np.zeros((192, 128), ts.bf16.numpy), np.ones((128, 128), ts.bf16.numpy)
    a[:64], a[130, 5] = 1, 2000
    out = np.zeros((192, 128), "f4")
    said, text = run(product, [a, b, out, 128], (3, 2), arch="sm_90a")
    assert "wgmma" in text and "too large" in said and "program (2, 0), element (2, 0)" in said
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"program (0, {j}): corner {64.0 * 64 * 128}" for j in (0, 1)] and len(lines) == 6
    np.testing.assert_array_equal(out, a.astype("f4") @ b.astype("f4").T)

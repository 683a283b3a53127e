"""Assertions and prints say the same on every engine: which program, tile and element, and what is held there."""

import re

import numpy as np
import pytest
from engines import ENGINES as COMMON
from engines import results

import tessera as ts
from tessera import tile
from tessera.codegen import artifact
from tessera.codegen.llvm import BACKEND
from tessera.core.errors import ExecutionError
from tessera.runtime.program import prepare

ENGINES = (*COMMON, ("target", "ptx"))


@ts.kernel
def blocks(x, out, N: ts.constexpr):
    i = tile.program_id(0) * N
    a = tile.load(x[i : i + N])
    tile.print("a is", a, tile.program_id(0))
    tile.assert_(a > -2.0, "too small", a)
    out[i : i + N] = a * 2


@ts.kernel
def tiles(x, out):
    me = tile.local_id()
    i = tile.program_id(0) * 4 + me
    if me % 2 == 0:
        print("tile", me, "holds", x[i])
    s = x[i]
    assert s < 100, "big"
    out[i] = s


@ts.kernel
def loops(x):
    total = x[0]
    for k in tile.range(3):
        total = total + x[k]
        tile.print("after", k, total)
    assert total == total


def said(capsys, entry, given, grid, group=None):
    """What each engine prints, and the text of the error that comes."""
    found = []
    for engine in ENGINES:
        error = ""
        try:
            results(entry, given, grid, group, [engine])
        except ExecutionError as caught:
            error = str(caught)
        found.append((capsys.readouterr().out, error))
    return found


@pytest.mark.parametrize("broken", [(), (13,), (3, 17)])
def test_blocks(capsys, broken):
    x = np.arange(20, dtype="f4")
    x[list(broken)] = -5
    first, *others = said(capsys, blocks, {"x": x, "out": np.zeros(20, "f4"), "N": 10}, (2,))
    assert all(o == first for o in others)
    assert first[0].startswith("program (0,): a is [")
    assert bool(first[1]) == bool(broken)
    if broken:
        assert f"program ({broken[0] // 10},), element ({broken[0] % 10},) with -5.0" in first[1]
        assert re.match(r".*test_reports\.py:\d+:5: ExecutionError: assertion failed: too small", first[1])


def test_tiles_of_a_group(capsys):
    x = np.arange(20, dtype="f4")
    x[17] = 200
    first, *others = said(capsys, tiles, {"x": x, "out": np.zeros(20, "f4")}, (5,), 4)
    assert all(o == first for o in others)
    assert first[0].splitlines()[:2] == [
        "program (0,), tile 0: tile 0 holds 0.0", "program (0,), tile 2: tile 2 holds 2.0"
    ]  # fmt: skip
    assert "false at program (4,), tile 1 with 200.0, 100.0" in first[1]


def test_a_loop_prints_in_order(capsys):
    first, *others = said(capsys, loops, {"x": np.arange(3, dtype="f4")}, (1,))
    assert all(o == first for o in others)
    assert [line.split(": ")[1] for line in first[0].splitlines()] == ["after 0 0.0", "after 1 1.0", "after 2 3.0"]


def test_many_threads_report_the_first_program(monkeypatch):
    monkeypatch.setenv("TESSERA_THREADS", "4")
    x = np.full(4000, -5, "f4")
    program = prepare(blocks, {"x": x, "out": np.zeros(4000, "f4"), "N": 10}, grid=(400,))
    for _ in range(3):
        with pytest.raises(ExecutionError, match=r"program \(0,\), element \(0,\)"):
            program.run("device", "llvm")


def test_nothing_is_kept_for_the_next_run(capsys):
    bad, good = np.full(10, -5, "f4"), np.ones(10, "f4")
    for x, fails in ((bad, True), (good, False)):
        given = {"x": x, "out": np.zeros(10, "f4"), "N": 10}
        for _, error in said(capsys, blocks, given, (1,)):
            assert bool(error) == fails


def test_a_saved_artifact_still_asserts(tmp_path, capsys):
    given = {"x": np.full(10, -5, "f4"), "out": np.zeros(10, "f4"), "N": 10}
    module = prepare(blocks, given, grid=(1,)).levels["tile"]
    held = artifact.read_artifact(BACKEND.emit(module, {}).save(tmp_path / "a"))
    with pytest.raises(ExecutionError, match=r"test_reports\.py.*too small"):
        BACKEND.runtime(held).run([given["x"], given["out"]])
    assert capsys.readouterr().out.startswith("program (0,): a is [")


@ts.kernel
def positive(x: ts.Tensor["N", "M"], out: ts.Tensor["N", "M"]):
    i, j = tile.program_id(0), tile.program_id(1)
    tile.assert_(x[i, j] > 0.0, "positive", x[i, j])
    out[i, j] = x[i, j]


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_programs_of_a_grid_that_only_the_call_knows_have_their_places(target):
    def copied(x: ts.Tensor["N", "M"]):
        return ts.launch(positive, x.shape, x, ts.like(x))

    run = ts.jit(copied, target=target, dynamic=True)
    for shape, place in (((2, 5), (1, 3)), ((4, 3), (2, 2))):
        x = np.ones(shape, np.float32)
        assert run(x).tolist() == x.tolist()
        x[place] = -1.0
        with pytest.raises(ExecutionError, match=re.escape(f"program {place}")):
            run(x)

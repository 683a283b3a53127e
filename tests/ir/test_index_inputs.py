"""Which inputs select elements: through arithmetic, loops, branches, copies in memory and launches of a function."""

import json

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.ir.analysis import find_index_inputs
from tessera.runtime.program import prepare
from tessera.tools.cli.main import main


@ts.kernel
def rows(
    x: ts.Tensor["N", ts.f32],
    start: ts.Tensor["M", ts.int64],
    scale: ts.Tensor["M", ts.int64],
    out: ts.Tensor["M", ts.f32],
):
    i = tile.program_id(0)
    total = 0.0
    for j in range(tile.load(start[i]), tile.load(start[i + 1])):
        total += tile.load(x[j])
    tile.store(out[i], total * tile.load(scale[i]).to(ts.f32))


@ts.kernel
def through_memory(x: ts.Tensor["N", ts.f32], pick: ts.Tensor[8, ts.int32], out: ts.Tensor[8, ts.f32]):
    kept = tile.alloc_shared((8,), ts.int32)
    tile.store(kept[0:8], tile.load(pick[0:8]) // 2)
    tile.store(out[0:8], tile.load(x[tile.load(kept[0:8])]))


@ts.kernel
def where_to(
    x: ts.Tensor[8, ts.f32], pick: ts.Tensor[8, ts.int32], flag: ts.Tensor[1, ts.int32], out: ts.Tensor[8, ts.f32]
):
    at = 0
    if tile.load(flag[0]) > 0:
        at = 4
    tile.store(out[at : at + 4], x[0:4] + tile.load(pick[0:4]).to(ts.f32))


X, INTEGERS = np.ones(8, np.float32), np.zeros(9, np.int64)
CASES = {
    "rows": (rows[8], (X, INTEGERS, INTEGERS, np.ones(9, np.float32)), {1}),
    "through memory": (through_memory[1], (X, INTEGERS[:8].astype(np.int32), X.copy()), {1}),
    "a branch": (where_to[1], (X, INTEGERS[:8].astype(np.int32), INTEGERS[:1].astype(np.int32), X.copy()), {2}),
    "a function": (ts.jit(lambda x, i, k: ts.exp(x)[i * 2] * k), (X, INTEGERS, INTEGERS), {1}),
    "an order": (ts.jit(lambda x, i, k: ts.sort(x)[i] * k), (X, INTEGERS, INTEGERS), {0, 1}),
    "no index": (ts.jit(lambda x, k: x[3] * k), (X, INTEGERS), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_index_inputs(name):
    entry, arguments, want = CASES[name]
    assert find_index_inputs(prepare(entry, arguments, "llvm").levels["tile"]) == want


def test_an_artifact_runs_with_zeros_for_what_selects_elements(tmp_path, capsys):
    """With other numbers a compiled kernel would read what lies beside its memory."""
    one = np.ones(1, np.float32)
    ts.build(through_memory[1], one, np.zeros(8, np.int32), X.copy(), out=tmp_path / "a")
    assert main(["run", str(tmp_path / "a"), "--output", str(tmp_path / "pick.npy")]) == 0
    assert "pick: 8xint32 (zeros: it selects elements; --input gives others)" in " ".join(
        capsys.readouterr().out.split()
    )
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert [p["name"] for p in manifest["interface"]["parameters"]] == ["x", "pick", "out"]

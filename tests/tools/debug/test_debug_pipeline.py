"""A product through a ring of stages, one tile copying and one multiplying: right everywhere; each slip is found."""

import importlib.util

import numpy as np
import pytest
from engines import ENGINES, results

import tessera as ts

KERNEL = """
import tessera as ts
from tessera import tile


@ts.kernel
def gemm(a, b, c, K: ts.constexpr, S: ts.constexpr):
    me = tile.local_id()
    i, j = tile.program_id(0) * 32, tile.program_id(1) * 32
    A, B = tile.alloc_shared((S, 32, 16), ts.f32), tile.alloc_shared((S, 16, 32), ts.f32)
    full, empty = tile.mbarrier(1, S), tile.mbarrier(1, S)
    tile.barrier()
    if me == 0:
        for k in tile.range(0, K // 16):
            s = k % S
            empty[s].wait((k // S + 1) % 2)
            full[s].expect(4096)
            tile.cp_async(A[s], a[i : i + 32, k * 16 : k * 16 + 16], barrier=full[s])
            tile.cp_async(B[s], b[k * 16 : k * 16 + 16, j : j + 32], barrier=full[s])
            full[s].arrive()
    else:
        acc = tile.zeros((32, 32))
        for k in tile.range(0, K // 16):
            s = k % S
            full[s].wait((k // S) % 2)
            acc += tile.dot(A[s, 0:32, 0:16], B[s, 0:16, 0:32])
            empty[s].arrive()
        c[i : i + 32, j : j + 32] = acc
"""
MULTIPLY = "acc += tile.dot(A[s, 0:32, 0:16], B[s, 0:16, 0:32])"
# What is changed, into what, and what is reported first.
SLIPS = {
    "no-wait-for-room": ("empty[s].wait((k // S + 1) % 2)", "pass", "async"),
    "no-wait-for-data": ("full[s].wait((k // S) % 2)", "pass", "unordered"),
    "wrong-stage": ("full[s].wait((k // S) % 2)", "full[(s + 1) % S].wait(((k + 1) // S) % 2)", "unordered"),
    "wrong-parity": ("full[s].wait((k // S) % 2)", "full[s].wait((k // S + 1) % 2)", "deadlock"),
    "wrong-parity-of-the-producer": ("empty[s].wait((k // S + 1) % 2)", "empty[s].wait((k // S) % 2)", "deadlock"),
    "parity-of-the-step": ("full[s].wait((k // S) % 2)", "full[s].wait(k % 2)", "deadlock"),
    "no-expectation": ("full[s].expect(4096)", "pass", "deadlock"),
    "too-few-bytes": ("full[s].expect(4096)", "full[s].expect(2048)", "deadlock"),
    "no-arrival": ("full[s].arrive()", "pass", "deadlock"),
    "no-release": ("empty[s].arrive()", "pass", "deadlock"),
    "released-early": (MULTIPLY, f"empty[s].arrive(); {MULTIPLY}", "unordered"),
    "counted-by-another": ("j : j + 32], barrier=full[s]", "j : j + 32], barrier=full[(s + 1) % S]", "unordered"),
    "reads-another-stage": ("B[s, 0:16, 0:32]", "B[(s + 1) % S, 0:16, 0:32]", "unordered"),
}


def kernel(path, before="", after=""):
    assert before in KERNEL
    text = KERNEL.replace(before, after, 1) if before else KERNEL
    if after.startswith("empty[s].arrive();"):
        text = text.replace("\n            empty[s].arrive()\n        c", "\n        c")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.gemm


def given(rng):
    a, b = rng.standard_normal((64, 96), np.float32), rng.standard_normal((96, 64), np.float32)
    return {"a": a, "b": b, "c": np.zeros((64, 64), np.float32), "K": 96, "S": 3}


def test_it_is_right_on_every_engine_and_clean(tmp_path, rng):
    entry, values = kernel(tmp_path / "right.py"), given(rng)
    for (c,) in results(entry, values, (2, 2), 2, ENGINES):
        np.testing.assert_allclose(c, values["a"] @ values["b"], atol=1e-4)
    assert str(ts.debug.check(entry[(2, 2), 2], **values)) == "no findings"


@pytest.mark.parametrize("slip", SLIPS)
def test_each_slip_is_found(slip, tmp_path, rng):
    before, after, kind = SLIPS[slip]
    found = ts.debug.check(kernel(tmp_path / "slip.py", before, after)[(2, 2), 2], **given(rng))
    assert found.kinds[0] == kind and all(f.location.line for f in found), str(found)


def test_a_deadlock_says_what_each_side_waits_for(tmp_path, rng):
    entry = kernel(tmp_path / "slip.py", *SLIPS["too-few-bytes"][:2])
    (found,) = ts.debug.check(entry[(2, 2), 2], **given(rng))
    assert "4 tiles wait, first program (0, 0), tile 1: mbarrier 0 is in phase 0, which lacks 0 of 1" in found.message
    assert "2048 bytes came that were not expected; others wait at" in found.message

"""A target's numbers in the interpreter: bit for bit what its own code gives, for kernels without fused ops."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError
from tessera.interp.target.csl.host import cslc
from tessera.runtime.program import prepare
from tessera.tools.cli.main import main
from tessera.tools.debug import target_numerics


@ts.kernel
def mixed(a, b, out):
    i = tile.program_id(0)
    p = tile.dot(a[i, 0:16, 0:32], b[i, 0:32, 0:16])
    p = tile.exp(p * 0.1) / (2.0 + tile.tanh(p))
    if i > 1:
        p = tile.sin(p)
    out[i, 0:16] = tile.sum(p, axis=1) + tile.max(p, axis=1)


def inputs(rng):
    a, b = rng.standard_normal((6, 16, 32)), rng.standard_normal((6, 32, 16))
    return a.astype("f4"), b.astype("f4"), np.zeros((6, 16), "f4")


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_the_bits_are_the_targets(target, rng):
    a, b, out = inputs(rng)
    with ts.debug.as_target(target):
        mixed[(6,)](a, b, out)
    own = prepare(mixed, {"a": a, "b": b, "out": np.zeros_like(out)}, grid=(6,)).run("target", target)[0]
    plain = np.zeros_like(out)
    mixed[(6,)](a, b, plain)
    assert out.tobytes() == own.tobytes() != plain.tobytes()


@ts.kernel
def product(a, b, out):
    i = tile.program_id(0)
    tile.store(out[i, 0:16, 0:16], tile.dot(a[i, 0:16, 0:32], b[i, 0:32, 0:16]))


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_products_are_multiply_adds_in_order(target, rng):
    a, b, _ = inputs(rng)
    out, want = np.zeros((2, 6, 16, 16), np.float32)
    with ts.debug.as_target(target):
        product[(6,)](a, b, out)
    for k in range(32):  # wide enough that each step rounds once
        want = (a[:, :, k, None].astype("g") * b[:, None, k, :].astype("g") + want).astype("f4")
    assert out.tobytes() == want.tobytes()


@ts.kernel
def doubled(x, out):
    i = tile.program_id(0)
    out[i, 0:8] = x[i, 0:8] + x[i, 0:8]


@pytest.mark.parametrize("target", ["llvm", "ptx", "csl"])
def test_subnormals_are_kept(target):
    x, out = np.full((3, 8), 1e-40, np.float32), np.zeros((3, 8), np.float32)
    with ts.debug.as_target(target):
        doubled[(3,)](x, out)
    assert (out == x + x).all() and (out > 0).all()


@ts.kernel
def powers(x, out):
    i = tile.program_id(0)
    out[i, 0:8] = tile.exp(x[i, 0:8]) * 3.0


def test_csl(rng):
    x, out, plain = rng.random((3, 8), np.float32), np.zeros((3, 8), np.float32), np.zeros((3, 8), np.float32)
    with ts.debug.as_target("csl"):
        powers[(3,)](x, out)
    powers[(3,)](x, plain)
    assert 0 < np.abs(out).min() and np.abs(out - plain).max() <= 4 * np.spacing(np.float32(3 * np.e))


@ts.kernel
def summed(x, out):
    i = tile.program_id(0)
    out[i] = tile.sum(x[i, 0:16])


def test_csl_compiles_a_program_once_however_often_it_runs(rng, monkeypatch):
    built, build = [], cslc.compile_settings
    monkeypatch.setattr(cslc, "compile_settings", lambda settings: built.append(settings) or build(settings))
    target_numerics._compile_op.cache_clear()
    x = rng.random((5, 16), np.float32)
    first, again = np.zeros((2, 5), np.float32)
    with ts.debug.as_target("csl"):
        summed[(5,)](x, first)
        summed[(5,)](x, again)
    assert len(built) == 1 and first.tobytes() == again.tobytes()
    np.testing.assert_allclose(first, x.sum(axis=1, dtype="f8"), rtol=1e-6)


@ts.kernel
def tensor_core(a, b, out, T: ts.constexpr):
    p = tile.dot(tile.cast(a[0:16, 0:16], T), tile.cast(b[0:16, 0:16], T))
    tile.store(out[0:16, 0:16], tile.cast(p, ts.f32))


def test_tf32_is_what_one_asks_for(rng):
    a, b = (rng.standard_normal((16, 16)).astype("f4") for _ in range(2))
    found = {}
    for dtype in (ts.f32, ts.tf32):
        out = np.zeros((16, 16), np.float32)
        with ts.debug.as_target("ptx"):
            tensor_core[(1,)](a, b, out, T=dtype)
        found[dtype] = np.abs(out - a.astype("f8") @ b.astype("f8")).max()
    assert found[ts.f32] < 1e-5 < found[ts.tf32] < 1e-1


def test_an_unknown_target():
    with pytest.raises(ArgumentError, match="no generator metal"), ts.debug.as_target("metal"):
        pass


PROGRAM = """
import numpy as np
import tessera as ts


@ts.example(lambda rng: (rng.random((3, 8), np.float32), np.zeros((3, 8), np.float32)), grid=(3,))
@ts.kernel
def powers(x, out):
    i = ts.tile.program_id(0)
    out[i, 0:8] = ts.tile.exp(x[i, 0:8])
"""


def test_the_command(tmp_path, capsys):
    (tmp_path / "powers.py").write_text(PROGRAM)
    assert main(["run", "--as-target", "ptx", str(tmp_path / "powers.py")]) == 0
    assert "numbers of ptx" in capsys.readouterr().out

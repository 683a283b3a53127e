"""`tessera ptx run`: arrays and numbers in, arrays out, and what goes wrong."""

import ml_dtypes
import numpy as np
import pytest

from tessera.tools.cli.main import main

KERNEL = """.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 y, .param .f32 by, .param .u32 n)
{
.reg .b64 %x, %y; .reg .b32 %i, %c, %n; .reg .f32 %v, %by; .reg .pred %p;
ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; ld.param.f32 %by, [by]; ld.param.u32 %n, [n];
mov.u32 %i, %tid.x; mov.u32 %c, %ctaid.x; mad.lo.u32 %i, %c, 32, %i; setp.ge.u32 %p, %i, %n; @%p exit;
mad.wide.u32 %x, %i, 4, %x; mad.wide.u32 %y, %i, 4, %y;
ld.global.f32 %v, [%x]; mul.f32 %v, %v, %by; st.global.f32 [%y], %v; ret;
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.ptx").write_text(KERNEL)
    np.save("x.npy", np.arange(50, dtype="f4"))
    return tmp_path


def run(*args):
    return main(["ptx", "run", "k.ptx", "--entry", "scale", "--grid", "2", "--block", "32", *args])


def given(*values):
    return [word for v in values for word in ("--arg", v)]


def test_saves_what_was_asked_for(folder):
    assert run(*given("x.npy", "zeros:50:f32", "2.5", "50"), "--output", "1=y.npy") == 0
    assert (np.load("y.npy") == 2.5 * np.arange(50)).all()


def test_prints_arrays_otherwise(folder, capsys):
    assert run(*given("x.npy", "zeros:5x10:f32", "1", "0x2"), "--debug") == 0
    out = capsys.readouterr().out
    assert out.startswith("0: [") and "1: [[0. 1. 0." in out


def test_types_that_npy_files_forget(folder, capsys):
    np.save("h.npy", np.arange(100).astype(ml_dtypes.bfloat16))
    assert run(*given("h.npy:bf16", "zeros:100:bf16", "1", "3")) == 0
    assert run(*given("h.npy", "zeros:100:bf16", "1", "3")) == 2
    assert "X.npy:bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args,says",
    [
        (given("x.npy", "zeros:40:f32", "1", "50"), "argument 1, which has 160 bytes"),
        (given("x.npy", "nothing.npy", "1", "50"), "no file nothing.npy"),
        (given("x.npy", "what", "1", "50"), "received: what"),
        (given("x.npy", "zeros:5:f99", "1", "50"), "unknown element type f99"),
        (given("x.npy"), "4 parameters"),
        ([*given("x.npy", "zeros:50:f32", "1", "1"), "--output", "7=y.npy"], "--output does not name an argument"),
        ([*given("x.npy", "zeros:50:f32", "1", "1"), "--grid", "a"], "up to three integers"),
        ([*given("x.npy", "zeros:50:f32", "1", "1"), "--shared", "-5"], "received: -5"),
        (given("x.npy", "zeros:50:f32", "1", "2.5"), "is an integer"),
        ([*given("x.npy", "zeros:50:f32", "1", "1"), "--block", "1025"], "at most 1024 threads"),
        ([*given("x.npy", "zeros:50:f32", "1", "1"), "--cooperative", "--grid", "9000"], "at most 8,448 of 32 threads"),
    ],
)
def test_errors(folder, capsys, args, says):
    assert run(*args) == 2
    assert says in capsys.readouterr().err


def test_no_such_file_or_entry(folder, capsys):
    assert main(["ptx", "run", "none.ptx", "--entry", "k"]) == 2
    assert main(["ptx", "run", "k.ptx", "--entry", "other"]) == 2
    assert "expected: scale" in capsys.readouterr().err


def test_tensor_maps(folder):
    (folder / "k.ptx").write_text(MAP)
    np.save("m.npy", np.arange(64, dtype="f4").reshape(8, 8))
    options = ["--block", "32", "--shared", "512", "--output", "1=out.npy"]
    assert main(["ptx", "run", "k.ptx", "--entry", "k", *given("m.npy@4x8", "zeros:4x8:f32@4x8"), *options]) == 0
    assert (np.load("out.npy") == np.arange(64).reshape(8, 8)[2:6]).all()


MAP = """.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 128 .b8 s[];
.visible .entry k(.param .align 64 .b8 m[128], .param .align 64 .b8 o[128])
{
.reg .b64 %m, %o; .reg .b32 %i, %s, %b; .reg .pred %p, %q;
mov.b64 %m, m; cvta.param.u64 %m, %m; mov.b64 %o, o; cvta.param.u64 %o, %o;
mov.u32 %i, %tid.x; mov.u32 %s, s; add.u32 %b, %s, 128; setp.ne.u32 %p, %i, 0; @%p exit;
mbarrier.init.shared::cta.b64 [%b], 1; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], 128;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%s], [%m, {0, 2}], [%b];
W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%b], 0; @!%q bra W;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%o, {0, 0}], [%s];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret;
}
"""

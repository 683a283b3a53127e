"""Registers of 128 bits and vectors of registers; atomic operations on them."""

import numpy as np

from tessera.interp.target.ptx import PtxModule

TEXT = """.version 8.6
.target sm_90a
.address_size 64
.global .align 16 .b128 spare;
.visible .entry k(.param .u64 x, .param .u64 y)
{{ .reg .b64 %x, %y, %a, %b, %c; .reg .b128 %q<4>; .reg .b32 %i, %r<4>; .reg .v4 .b32 %v; .reg .v4 .u32 %t;
ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %i, %tid.x; mad.wide.u32 %x, %i, 16, %x;
mad.wide.u32 %y, %i, 16, %y;
{} ret; }}
"""
X = np.arange(64, dtype="u8").reshape(32, 2) * np.uint64(0x9E3779B97F4A7C15)


def run(lines, x=X, block=32):
    x, y = x.copy(), np.zeros((block, 2), "u8")
    PtxModule(TEXT.format(lines)).launch("k", block=block, args=[x, y], debug=True)
    return x, y


def test_moves_of_128_bits():
    load, store = "ld.global.b128 %q0, [%x];", "st.global.b128 [%y], %q1;"
    assert (run(f"{load} mov.b128 %q1, %q0; {store}")[1] == X).all()
    swap = "mov.b128 {%a, %b}, %q0; mov.b128 %q1, {%b, %a};"
    assert (run(load + swap + store)[1] == X[:, ::-1]).all()
    words = "mov.b128 {%r0, %r1, %r2, %r3}, %q0; mov.b128 %q1, {%r3, %r2, %r1, %r0};"
    assert (run(load + words + store)[1] == np.ascontiguousarray(X.view("u4")[:, ::-1]).view("u8")).all()
    assert (run(load + "st.global.b128 [spare], %q0; ld.global.b128 %q1, [spare];" + store, block=1)[1] == X[0]).all()


def test_vectors_of_registers():
    lines = "ld.global.v4.u32 %v, [%x]; mov.u32 %r0, %v.z; mov.u32 %v.x, %r0; st.global.v4.u32 [%y], %v;"
    want = X.view("u4")[:, [2, 1, 2, 3]]
    assert (run(lines)[1].view("u4") == want).all()
    lines = "mov.v4.u32 %t, %tid; mov.v2.b32 {%t.y, %t.z}, {%t.x, %t.x}; st.global.v4.u32 [%y], %t;"
    assert run(lines)[1].view("u4")[5].tolist() == [5, 5, 5, 0]


TURNS = """ld.param.u64 %x, [x]; cvt.u64.u32 %a, %i; add.u64 %b, %a, 1; mov.b128 %q0, {%a, %a}; mov.b128 %q1, {%b, %b};
atom.global.cas.b128 %q2, [%x], %q0, %q1; st.global.b128 [%y], %q2;"""


def test_exchanges_of_128_bits():
    """Each lane finds what the one before left, and replaces it by its successor."""
    x, y = run(TURNS, np.zeros((1, 2), "u8"))
    assert (x == 32).all() and (y == np.arange(32)[:, None]).all()
    lines = TURNS.replace("atom.global.cas.b128 %q2, [%x], %q0, %q1", "atom.global.exch.b128 %q2, [%x], %q1")
    x, y = run(lines, np.full((1, 2), 7, "u8"))
    assert (x == 32).all() and y[:, 0].tolist() == [7, *range(1, 32)]


def test_vector_atomics_name_the_operation_behind_the_type():
    x = np.zeros((32, 4), "f4")
    lines = "ld.param.u64 %x, [x]; mov.b32 %r0, 0f3F800000; mov.b32 %r1, 0f40000000;"
    PtxModule(TEXT.format(lines + "red.relaxed.gpu.global.v2.f32.add [%x], {%r0, %r1};")).launch(
        "k", block=32, args=[x, x]
    )
    assert x[0].tolist() == [32, 64, 0, 0]

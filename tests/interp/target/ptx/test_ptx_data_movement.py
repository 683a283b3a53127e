"""Loads, stores, address spaces, arguments and atomics."""

import ml_dtypes
import numpy as np
import pytest
from ptx_snippets import one, same

from tessera.core.errors import ArgumentError, OutOfBoundsError, UnsupportedOpError
from tessera.interp.target.ptx import PtxModule

HEAD = ".version 8.6\n.target sm_90\n.address_size 64\n"


def entry(params, lines, world=""):
    return PtxModule(
        f"{HEAD}{world}\n.visible .entry k({params})\n{{\n"
        f".reg .b64 %p<8>; .reg .b32 %r<8>; .reg .pred %q<4>;\n{lines}\nret;\n}}"
    )


def test_vectors_and_narrow_types():
    x, y = np.arange(64, dtype="u1"), np.zeros(16, "u4")
    lines = """ld.param.u64 %p0, [x]; ld.param.u64 %p1, [y];
    ld.global.nc.L1::no_allocate.v4.u8 {%r0, %r1, %r2, %r3}, [%p0+4]; st.global.wt.v2.u32 [%p1], {%r0, %r3};
    ld.global.relaxed.gpu.v2.s8 {%r0, _}, [%p0+8]; st.global.v4.b32 [%p1+16], {%r0, %r1, 7, %r3};"""
    entry(".param .u64 x, .param .u64 y", lines).launch("k", args=[x, y])
    assert y[:8].tolist() == [4, 7, 0, 0, 8, 5, 7, 7]
    assert one("ld.param.u64 %l0, [p0]; ld.global.s8 %d, [%l0];", np.array([-3], "i1"), out="i4")[0] == -3


def test_structs_numbers_and_pointers():
    y = np.zeros(4, "f4")
    lines = """ld.param.u64 %p0, [y]; ld.param.v2.f32 {%r0, %r1}, [s+8]; ld.param.b16 %r2, [h]; ld.param.u32 %r3, [n];
    st.global.v4.b32 [%p0], {%r0, %r1, %r2, %r3};"""
    module = entry(".param .u64 y, .param .align 8 .b8 s[16], .param .b16 h, .param .u32 n", lines)
    struct = np.array([(7, 1.5, 2.5)], [("a", "i8"), ("x", "f4"), ("y", "f4")])[0]
    for s in (struct, struct.tobytes()):
        module.launch("k", args=[y, s, ml_dtypes.bfloat16(1), -1])
        assert y.view("u4").tolist() == [0x3FC00000, 0x40200000, 0x3F80, 0xFFFFFFFF]
    with pytest.raises(ArgumentError, match="s is a struct"):
        module.launch("k", args=[y, 5, 0.0, 1])
    with pytest.raises(ArgumentError, match="has 16 bytes"):
        module.launch("k", args=[y, b"", 0.0, 1])
    with pytest.raises(ArgumentError, match="4 parameters"):
        module.launch("k", args=[y])


def test_variables_keep_their_values():
    """Initial values with names in them; what a launch stores is there in the next."""
    world = """.global .align 4 .u32 count = 40; .global .align 8 .u64 place = count;
    .const .align 4 .b32 by[2] = {1, 0f3F800000};"""
    module = entry(
        ".param .u64 y",
        """ld.param.u64 %p0, [y]; ld.global.u64 %p1, [place]; ld.const.u32 %r1, [by];
    atom.add.u32 %r0, [%p1], %r1; st.global.u32 [%p0], %r0; ld.const.u32 %r2, [by+4]; st.global.u32 [%p0+4], %r2;""",
        world,
    )
    seen = []
    for _ in range(3):
        y = np.zeros(2, "u4")
        module.launch("k", args=[y])
        seen.append(y.tolist())
    assert seen == [[n, 0x3F800000] for n in (40, 41, 42)]


def test_arrays_that_share_memory_do_so_in_the_kernel():
    base = np.arange(8, dtype="u4")
    lines = """ld.param.u64 %p0, [x]; ld.param.u64 %p1, [y]; st.global.u32 [%p0+8], 99;
    ld.global.u32 %r0, [%p1]; st.global.u32 [%p1+4], %r0;"""
    entry(".param .u64 x, .param .u64 y", lines).launch("k", args=[base[:4], base[2:]])
    assert base.tolist() == [0, 1, 99, 99, 4, 5, 6, 7]


def test_arrays_that_are_not_contiguous():
    x = np.arange(12, dtype="u4").reshape(3, 4)
    lines = "ld.param.u64 %p0, [x]; st.global.u32 [%p0+4], 50;"
    entry(".param .u64 x", lines).launch("k", args=[x.T])
    assert x[1, 0] == 50 and x.sum() == 66 - 4 + 50


def test_generic_addresses_see_every_space():
    lines = """.shared .align 8 .b32 s[4]; .local .align 8 .b32 l[4]; ld.param.u64 %p0, [y]; mov.u32 %r0, %tid.x;
    mov.u64 %p1, s; cvta.shared.u64 %p1, %p1; mov.u64 %p2, l; cvta.local.u64 %p2, %p2;
    setp.eq.u32 %q0, %r0, 1; setp.eq.u32 %q1, %r0, 2; mad.wide.u32 %p3, %r0, 4, %p0;
    selp.b64 %p4, %p1, %p3, %q0; selp.b64 %p4, %p2, %p4, %q1;
    add.u32 %r1, %r0, 100; st.u32 [%p4], %r1; ld.u32 %r2, [%p4];
    isspacep.shared %q2, %p4; selp.u32 %r3, 1000, 0, %q2; isspacep.local %q3, %p4; selp.u32 %r4, 2000, 0, %q3;
    add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; st.global.u32 [%p3], %r2;
    cvta.to.shared.u64 %p5, %p1; @%q0 ld.shared.u32 %r5, [%p5]; @%q0 st.global.u32 [%p0+12], %r5;"""
    y = np.zeros(4, "u4")
    entry(".param .u64 y", lines).launch("k", block=3, args=[y])
    assert y.tolist() == [100, 1101, 2102, 101]


@pytest.mark.parametrize(
    "line,says",
    [
        ("ld.global.u32 %r0, [%p0+64];", "byte 64 of argument 0, which has 64 bytes"),
        ("ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%p0+56];", "misaligned access of 16 bytes"),
        ("ld.global.u32 %r0, [%p0-4];", "argument 0|no argument|parameter"),
        ("st.shared.u32 [16], %r0;", "byte 16 of shared memory, which has 16 bytes"),
        ("ld.global.u32 %r0, [0];", "is in no argument"),
    ],
)
def test_bad_accesses(line, says):
    with pytest.raises(OutOfBoundsError, match=says):
        entry(".param .u64 x", f"ld.param.u64 %p0, [x];\n{line}").launch("k", args=[np.zeros(16, "u4")], shared=16)


def test_masked_lanes_addresses_do_not_count():
    lines = """setp.lt.u32 %p, %i, 7; mov.b64 %l0, 1; @%p ld.param.u64 %l0, [p0]; mov.b32 %d, 9;
    @%p ld.global.u32 %d, [%l0+4];"""
    assert one(lines, np.arange(32, dtype="u4"), out="u4").tolist() == [1] * 7 + [9] * 25


ATOMIC = {"add": lambda a, b: a + b, "min": min, "max": max, "and": lambda a, b: a & b, "or": lambda a, b: a | b}
ATOMIC |= {"xor": lambda a, b: a ^ b, "exch": lambda a, b: b, "inc": lambda a, b: 0 if a >= b else a + 1}
ATOMIC |= {"dec": lambda a, b: b if a == 0 or a > b else a - 1}


BITWISE = ("and", "or", "xor", "exch")


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("op", ATOMIC)
def test_atomics_take_turns(op, space):
    """Lanes of one address in their order; each gets what it found."""
    x, kind = np.random.default_rng(0).integers(0, 9, 64).astype("u4"), "b32" if op in BITWISE else "u32"
    place = "ld.param.u64 %l0, [p1];" if space == "global" else ".shared .align 4 .b32 s[8]; mov.u64 %l0, s;"
    lines = f"{place} and.b32 %s0, %i, 3; mad.wide.u32 %l0, %s0, 4, %l0; atom.{space}.{op}.{kind} %d, [%l0], %a;"
    cells, got = np.zeros(64, "u4"), one(lines, x, np.zeros(64, "u4"), out="u4")
    for i, v in enumerate(x.tolist()):
        assert got[i] == cells[i % 4], i
        cells[i % 4] = ATOMIC[op](int(cells[i % 4]), v)


def test_compare_and_swap_and_floats():
    lines = "ld.param.u64 %l0, [p1]; atom.global.cas.b32 %d, [%l0], %i, %a;"
    assert one(lines, np.array([1, 2, 3, 4], "u4"), np.zeros(4, "u4"), out="u4").tolist() == [0, 1, 2, 3]
    x = np.random.default_rng(0).standard_normal(100).astype("f4")
    got = one("ld.param.u64 %l0, [p1]; atom.global.add.f32 %d, [%l0], %a;", x, np.zeros(100, "f4"), out="f4")
    same(got, np.r_[np.float32(0), np.cumsum(x, dtype="f4")[:-1]])
    h = np.ones(10, "f2").view("u4")
    got = one("ld.param.u64 %l0, [p1]; atom.global.add.noftz.f16x2 %d, [%l0], %a;", h, np.zeros(5, "u4"), out="u4")
    assert got.view("f2").tolist() == [float(v // 2) for v in range(10)]


def test_vector_reductions():
    y = np.zeros(4, "f4")
    lines = "ld.param.u64 %p0, [y]; mov.b32 %r0, 0f3F800000; red.global.add.v4.f32 [%p0], {%r0, %r0, %r0, %r0};"
    entry(".param .u64 y", lines).launch("k", block=5, args=[y])
    assert (y == 5).all()


@pytest.mark.parametrize("space,kept", [("global", False), ("shared", True)])
def test_float_sums_flush_subnormals_in_global_memory_alone(space, kept):
    place = "ld.param.u64 %l0, [p1];" if space == "global" else ".shared .align 4 .b32 s; mov.u64 %l0, s;"
    lines = f"{place} st.{space}.u32 [%l0], 0; red.{space}.add.f32 [%l0], %a; ld.{space}.f32 %d, [%l0];"
    tiny = np.array([1e-40], "f4")
    assert one(lines, tiny, np.zeros(1, "f4"), out="f4")[0] == (tiny[0] if kept else 0)


def test_windows_of_constants_parameters_and_other_blocks():
    lines = """.shared .align 8 .b32 s[4]; .reg .b32 %out; mov.u32 %out, 0;
    mov.u64 %p0, x; cvta.param.u64 %p0, %p0; mov.u64 %p1, table; cvta.const.u64 %p1, %p1; ld.param.u64 %p2, [x];
    mov.u64 %p3, s; cvta.shared.u64 %p3, %p3; mapa.u64 %p4, %p3, 1;"""
    asked = ["const", "param::entry", "global", "shared::cta", "shared::cluster"]
    for k in range(5):
        for j, space in enumerate(asked):
            lines += f"isspacep.{space} %q0, %p{k}; @%q0 or.b32 %out, %out, {1 << 5 * k + j};\n"
    out = np.zeros(1, "u4")
    head = ".version 8.6 .target sm_90a .address_size 64 .const .b32 table[4] = {1};"
    body = f"{{ .reg .b64 %p<8>; .reg .pred %q0; {lines} st.global.u32 [%p2], %out; ret; }}"
    PtxModule(f"{head} .visible .entry k(.param .u64 x) {body}").launch("k", args=[out])
    found = [[a for j, a in enumerate(asked) if out[0] >> 5 * k + j & 1] for k in range(5)]
    assert found[:3] == [["param::entry", "global"], ["const", "global"], ["global"]]
    assert found[3:] == [["shared::cta", "shared::cluster"], ["shared::cluster"]]


@pytest.mark.parametrize(
    "options,says",
    [
        ({"args": [1.5]}, "is an integer"),
        ({"args": [2**32]}, "has 32 bits"),
        ({"args": [1], "shared": -4}, "negative"),
        ({"args": [1], "block": 1025}, "at most 1024 threads"),
        ({"args": [1], "block": (1, 1, 65)}, "the block is too large"),
        ({"args": [1], "grid": (1, 70000)}, "the grid is too large"),
        ({"args": [1], "grid": 32, "cluster": 32}, "at most 16 CTAs"),
        ({"args": []}, "has 1 parameters"),
    ],
)
def test_what_no_launch_can_have(options, says):
    with pytest.raises(ArgumentError, match=says):
        entry(".param .u32 n", "ret;").launch("k", **options)


MULTIMEM = """.version 8.6\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 p)
{{ .reg .b64 %p, %q, %rd<2>; .reg .b32 %r<4>, %i; .reg .f32 %f<4>; .reg .b16 %h<4>; ld.param.u64 %p, [p];
mov.u32 %i, %tid.x; mad.wide.u32 %q, %i, 16, %p; {line} ret; }}"""


def test_multimem_works_on_the_one_copy_of_a_device():
    """A reducing load, a store and a reduction, of vectors: what load, store and sum do in NumPy."""
    line = """multimem.ld_reduce.relaxed.gpu.global.add.v4.f32 {%f0, %f1, %f2, %f3}, [%q];
    multimem.ld_reduce.weak.global.add.acc::f32.v4.f16x2 {%r0, %r1, %r2, %r3}, [%q + 512];
    multimem.red.release.sys.global.add.v4.f32 [%p + 1024], {%f0, %f1, %f2, %f3};
    multimem.red.relaxed.gpu.add.v4.f16x2 [%q + 512], {%r0, %r1, %r2, %r3};
    multimem.st.v4.relaxed.sys.f32.global [%q], {%f3, %f2, %f1, %f0};
    mov.u32 %r0, %tid.x; multimem.red.relaxed.gpu.global.max.s32 [%p + 1040], %r0;"""
    memory = np.zeros(264, "f4")
    values, halves = np.arange(128, dtype="f4").reshape(32, 4), np.arange(256).astype("f2")
    memory[:128], memory[128:256] = values.reshape(-1), halves.view("f4")
    PtxModule(MULTIMEM.format(line=line)).launch("k", 1, 32, [memory])
    assert (memory[:128].reshape(32, 4) == values[:, ::-1]).all()
    assert (memory[128:256].view("f2") == 2 * halves).all()
    assert (memory[256:260] == values.sum(0)).all()
    assert memory[260:261].view("i4") == 31


@pytest.mark.parametrize(
    "line",
    [
        "multimem.ld_reduce.relaxed.gpu.global.add.s64 %rd0, [%p];", "multimem.st.relaxed.gpu.global.f16 [%p], %h0;",
        "multimem.red.relaxed.gpu.global.add.v2.u32 [%p], {%r0, %r1};",
        "multimem.ld_reduce.relaxed.gpu.global.min.acc::f32.f16x2 %r0, [%p];",
        "multimem.ld_reduce.relaxed.gpu.shared.add.u32 %r0, [%p];",
        "multimem.red.relaxed.gpu.global.xor.u32 [%p], %r0;",
    ],
)  # fmt: skip
def test_multimem_has_types_of_each_operation(line):
    with pytest.raises(UnsupportedOpError, match=r"<ptx>:6:"):
        PtxModule(MULTIMEM.format(line=line)).launch("k", 1, 1, [np.zeros(4)])

"""Memory: layout, globals, copies, masked accesses, atomics, and the errors of invalid accesses."""

import numpy as np
import pytest
from llvm_native import agree
from llvmlite.binding import parse_assembly

from tessera.core.errors import ArgumentError, ExecutionError, OutOfBoundsError
from tessera.interp.target.llvm import LlvmModule, PerLane

GLOBALS = """
%pair = type { i8, double, [3 x i16] }
@table = private unnamed_addr constant [2 x %pair] [%pair { i8 1, double 2.5, [3 x i16] [i16 1, i16 2, i16 3] },
  %pair { i8 -1, double 0x7FF0000000000000, [3 x i16] zeroinitializer }], align 8
@text = internal constant [6 x i8] c"a\\22\\5Cz\\00!"
@vector = private constant <4 x i32> splat (i32 9)
@where = constant [2 x ptr] [ptr @text, ptr getelementptr inbounds (i8, ptr @text, i64 3)]
define void @f(ptr %d, ptr %h, ptr %c) {
  %p = getelementptr inbounds %pair, ptr @table, i64 1, i32 1
  %v = load double, ptr %p
  store double %v, ptr %d
  %q = load i16, ptr getelementptr inbounds (%pair, ptr @table, i64 0, i32 2, i64 2)
  store i16 %q, ptr %h
  %w = load ptr, ptr getelementptr ([2 x ptr], ptr @where, i64 0, i64 1)
  %x = load i8, ptr %w
  store i8 %x, ptr %c
  %y = load <4 x i32>, ptr @vector
  %z = extractelement <4 x i32> %y, i32 3
  %t = trunc i32 %z to i8
  %c1 = getelementptr i8, ptr %c, i32 1
  store i8 %t, ptr %c1
  %c2 = getelementptr i8, ptr %c, i32 2
  call void @llvm.memcpy.p0.p0.i64(ptr %c2, ptr align 1 @text, i64 6, i1 false)
  %c8 = getelementptr i8, ptr %c, i32 8
  call void @llvm.memset.p0.i64(ptr %c8, i8 -2, i64 3, i1 false)
  ret void
}
declare void @llvm.memcpy.p0.p0.i64(ptr noalias nocapture writeonly, ptr noalias nocapture readonly, i64, i1 immarg)
declare void @llvm.memset.p0.i64(ptr nocapture writeonly, i8, i64, i1 immarg)
"""


def test_globals():
    agree(GLOBALS, np.zeros(1), np.zeros(1, "i2"), np.zeros(12, "u1"))


def test_mutable_global_keeps_its_value():
    m = LlvmModule("""@n = internal global i32 5
define i32 @f() { %v = load i32, ptr @n
  %w = add i32 %v, 1
  store i32 %w, ptr @n
  ret i32 %w }""")
    assert [m.call("f", [])[0] for _ in range(3)] == [6, 7, 8]


@pytest.mark.parametrize("kind", ["{ i8, i32 }", "<{ i8, i32 }>", "[3 x i16]", "{ [2 x i8], <2 x float> }", "<7 x i1>"])
def test_aggregates(kind):
    text = f"""define void @f(ptr %x, ptr %y) {{
  %v = load {kind}, ptr %x
  store {kind} %v, ptr %y
  ret void
}}"""
    agree(text, np.arange(100, 116, dtype="u1"), np.zeros(16, "u1"))


@pytest.mark.parametrize("source,target", [
    ("<4 x i8>", "i32"), ("i64", "<2 x float>"), ("<16 x i1>", "i16"), ("i8", "<8 x i1>"),
    ("<2 x double>", "<16 x i8>"),
])  # fmt: skip
def test_bitcast(source, target):
    text = f"""define void @f(ptr %x, ptr %y) {{
  %v = load {source}, ptr %x, align 1
  %w = bitcast {source} %v to {target}
  store {target} %w, ptr %y, align 1
  ret void
}}"""
    agree(text, np.arange(50, 82, dtype="u1"), np.zeros(32, "u1"))


@pytest.mark.parametrize("op", [
    "%r = shufflevector <4 x i32> %a, <4 x i32> %b, <4 x i32> <i32 0, i32 5, i32 2, i32 7>",
    "%r = shufflevector <4 x i32> %a, <4 x i32> poison, <4 x i32> zeroinitializer",
    "%r = insertelement <4 x i32> %a, i32 77, i64 %k",
    "%e = extractelement <4 x i32> %b, i64 %k\n  %r = insertelement <4 x i32> %a, i32 %e, i32 1",
    "%c = icmp sgt <4 x i32> %a, %b\n  %r = select <4 x i1> %c, <4 x i32> %a, <4 x i32> %b",
    "%f = freeze <4 x i32> %a\n  %r = add <4 x i32> %f, splat (i32 3)",
])  # fmt: skip
def test_vectors(op):
    text = f"""define void @f(ptr %x, ptr %y, ptr %z) {{
  %a = load <4 x i32>, ptr %x
  %b = load <4 x i32>, ptr %y
  %k = load i64, ptr %z
  {op}
  store <4 x i32> %r, ptr %x
  ret void
}}"""
    agree(text, np.array([1, -5, 9, 3], "i4"), np.array([4, -6, 10, 2], "i4"), np.array([2]))


MASKED = """
declare <8 x float> @llvm.masked.load.v8f32.p0(ptr, i32, <8 x i1>, <8 x float>)
declare void @llvm.masked.store.v8f32.p0(<8 x float>, ptr, i32, <8 x i1>)
declare <4 x float> @llvm.masked.gather.v4f32.v4p0(<4 x ptr>, i32, <4 x i1>, <4 x float>)
declare void @llvm.masked.scatter.v4f32.v4p0(<4 x float>, <4 x ptr>, i32, <4 x i1>)
define void @f(ptr %x, ptr %y, ptr %n) {
  %c = load i32, ptr %n
  %i = insertelement <8 x i32> poison, i32 %c, i64 0
  %s = shufflevector <8 x i32> %i, <8 x i32> poison, <8 x i32> zeroinitializer
  %m = icmp sgt <8 x i32> %s, <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7>
  %v = call <8 x float> @llvm.masked.load.v8f32.p0(ptr %x, i32 4, <8 x i1> %m, <8 x float> splat (float 9.0))
  %w = fadd <8 x float> %v, splat (float 1.0)
  call void @llvm.masked.store.v8f32.p0(<8 x float> %w, ptr %y, i32 4, <8 x i1> %m)
  %p = getelementptr float, ptr %y, <4 x i64> <i64 4, i64 1, i64 3, i64 0>
  %k = shufflevector <8 x i1> %m, <8 x i1> poison, <4 x i32> <i32 4, i32 1, i32 3, i32 0>
  %g = call <4 x float> @llvm.masked.gather.v4f32.v4p0(<4 x ptr> %p, i32 4, <4 x i1> %k, <4 x float> zeroinitializer)
  %h = fmul <4 x float> %g, splat (float 10.0)
  call void @llvm.masked.scatter.v4f32.v4p0(<4 x float> %h, <4 x ptr> %p, i32 4, <4 x i1> %k)
  ret void
}"""


@pytest.mark.parametrize("n", [0, 1, 4, 5, 8])
@pytest.mark.parametrize("spell", [str, lambda text: str(parse_assembly(text))], ids=["plain", "reprinted"])
def test_masked(n, spell):
    agree(spell(MASKED), np.arange(8, dtype="f4"), np.full(8, -1, "f4"), np.array([n], "i4"))


def test_masked_elements_are_not_touched():
    x, y = np.arange(3, dtype="f4"), np.zeros(3, "f4")
    LlvmModule(MASKED).call("f", [x, y, np.array([3], "i4")])
    assert y.tolist() == [10, 20, 3]  # element 2 takes part in no gather
    with pytest.raises(OutOfBoundsError, match="masked load of 4 bytes at offset 12 of argument x"):
        LlvmModule(MASKED).call("f", [x, y, np.array([5], "i4")])


ATOMIC = "define i32 @f(ptr %x, i32 %i, i32 %v) {{ %p = getelementptr i32, ptr %x, i32 %i\n  {}\n ret i32 %o }}"


@pytest.mark.parametrize("op", "add sub max min umax umin and or xor xchg nand".split())
def test_atomics_take_turns(op):
    rng = np.random.default_rng(2)
    m = LlvmModule(ATOMIC.format(f"%o = atomicrmw {op} ptr %p, i32 %v seq_cst, align 4"))
    x, i, v = rng.integers(-9, 9, 3, "i4"), rng.integers(0, 3, 20), rng.integers(-99, 99, 20)
    alone = x.copy()
    olds = [m.call("f", [alone, *pair])[0] for pair in zip(i, v, strict=True)]
    assert m.call("f", [x, PerLane(i), PerLane(v)], lanes=20).tolist() == olds
    assert (x == alone).all()


def test_atomic_in_uniform_lanes_counts_each():
    m = LlvmModule(ATOMIC.format("%o = atomicrmw add ptr %p, i32 %v monotonic, align 4"))
    x = np.zeros(1, "i4")
    assert m.call("f", [x, 0, 2], lanes=5).tolist() == [0, 2, 4, 6, 8]


def test_compare_exchange():
    text = "%t = cmpxchg ptr %p, i32 0, i32 %v acq_rel monotonic\n  %o = extractvalue { i32, i1 } %t, 0"
    x = np.zeros(2, "i4")
    got = LlvmModule(ATOMIC.format(text)).call("f", [x, PerLane([0, 0, 1]), PerLane([5, 6, 7])], lanes=3)
    assert got.tolist() == [0, 5, 0] and x.tolist() == [5, 7]


LOAD = """define float @f(ptr %x, i64 %i) {
  %p = getelementptr float, ptr %x, i64 %i
  %v = load float, ptr %p, align 4
  ret float %v
}"""


@pytest.mark.parametrize("index,offset", [(10, 40), (-1, -4), (1 << 31, 1 << 33)])
def test_out_of_bounds(index, offset):
    with pytest.raises(OutOfBoundsError) as error:
        LlvmModule(LOAD, "k.ll").call("f", [np.zeros(10, "f4"), index])
    assert f"load of 4 bytes at offset {offset} of argument x (40 bytes)" in str(error.value)
    assert str(error.value).startswith("k.ll:3:3: OutOfBoundsError")


def test_out_of_bounds_names_the_lane():
    with pytest.raises(OutOfBoundsError, match=r"offset 400 of argument x \(40 bytes\), lane 2"):
        LlvmModule(LOAD).call("f", [np.zeros(10, "f4"), PerLane([1, 9, 100])], lanes=3)


def test_null():
    with pytest.raises(OutOfBoundsError, match="null pointer"):
        LlvmModule(LOAD).call("f", [None, 0])


def store(align, offset="1"):
    return f"""@c = constant [4 x float] zeroinitializer
define void @f(ptr %x) {{
  %p = getelementptr float, ptr %x, i64 {offset}
  store <2 x float> zeroinitializer, ptr %p, align {align}
  store float 1.0, ptr @c
  ret void
}}"""


def test_misaligned():
    with pytest.raises(ExecutionError, match=r"misaligned store \(align 8\) at offset 4 of argument x"):
        LlvmModule(store(8)).call("f", [np.zeros(4, "f4")])


def test_constant_is_read_only():
    with pytest.raises(ExecutionError, match="store to global @c, which is read-only"):
        LlvmModule(store(4)).call("f", [np.zeros(4, "f4")])


def test_dead_stack():
    text = """define ptr @g() { %a = alloca i32
  ret ptr %a }
define i32 @f() { %p = call ptr @g()
  %v = load i32, ptr %p
  ret i32 %v }"""
    with pytest.raises(OutOfBoundsError, match="which is not mapped"):
        LlvmModule(text).call("f", [])


def test_stack_begins_poisoned():
    m = LlvmModule("define i32 @f() { %a = alloca i32\n %v = load i32, ptr %a\n ret i32 %v }")
    assert m.call("f", [])[0] == np.array([0xCBCBCBCB], "u4").view("i4")[0]


def test_arrays_are_used_in_place():
    text = """define i1 @f(ptr %x, ptr %y) { store i8 7, ptr %x
  %e = icmp eq ptr %x, %y
  ret i1 %e }"""
    x = np.zeros(2, "u1")
    assert LlvmModule(text).call("f", [x, x])[0] and x[0] == 7
    with pytest.raises(ArgumentError, match="argument x must be C-contiguous"):
        LlvmModule(text).call("f", [np.zeros(8, "u1")[::2], x])


def test_division_by_zero():
    m = LlvmModule("define i32 @f(i32 %x) { %r = sdiv i32 7, %x\n  ret i32 %r }")
    with pytest.raises(ExecutionError, match="integer division by zero, lane 1"):
        m.call("f", [PerLane([1, 0])], lanes=2)

"""Every binary op, comparison and cast against LLVM's JIT, on edge values."""

import numpy as np
import pytest
from llvm_native import DTYPE, HALF, agree_on, edges, pairs

INTS = ["i8", "i16", "i32", "i64"]
FLOATS = ["half", "float", "double"] if HALF else ["float", "double"]
ANY = "add sub mul and or xor".split()
DIVIDE = "udiv sdiv urem srem".split()
SHIFT = "shl lshr ashr".split()
FCMP = "false oeq ogt oge olt ole one ord ueq ugt uge ult ule une uno true".split()


def divisible(type):
    a, b = pairs(type)
    keep = (b != 0) & ~((b == -1) & (a == np.iinfo(a.dtype).min))
    return a[keep], b[keep]


def shiftable(type):
    a, b = pairs(type)
    return a, b & (8 * b.itemsize - 1)


CHOOSE = {**dict.fromkeys(ANY, pairs), **dict.fromkeys(DIVIDE, divisible), **dict.fromkeys(SHIFT, shiftable)}


@pytest.mark.parametrize("type", INTS)
@pytest.mark.parametrize("op", CHOOSE)
def test_integer(op, type):
    agree_on(f"%r = {op} {type} %x0, %x1", [type] * 2, type, *CHOOSE[op](type))


@pytest.mark.parametrize("width", ["i5", "i1"])
@pytest.mark.parametrize("op", ANY + ["icmp slt", "icmp ult", "icmp sge", "icmp ugt"])
def test_odd_width(op, width):
    back = "i1" if "icmp" in op else width
    body = f"""%s = trunc i8 %x0 to {width}
  %t = trunc i8 %x1 to {width}
  %u = {op} {width} %s, %t
  %r = sext {back} %u to i8"""
    agree_on(body, ["i8", "i8"], "i8", *pairs("i8"))


@pytest.mark.parametrize("op", ["udiv", "sdiv", "urem", "srem", "shl", "lshr", "ashr"])
def test_odd_width_divide(op):
    body = f"""%s = trunc i8 %x0 to i5
  %t = trunc i8 %x1 to i5
  %u = {op} i5 %s, %t
  %r = zext i5 %u to i8"""
    a, b = np.meshgrid(np.arange(-15, 16, dtype=np.int8), np.array([1, 2, 3, 4], np.int8))
    agree_on(body, ["i8", "i8"], "i8", a.reshape(-1).copy(), b.reshape(-1).copy())


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("op", ["fadd", "fsub", "fmul", "fdiv", "frem"])
def test_float(op, type):
    agree_on(f"%r = {op} {type} %x0, %x1", [type] * 2, type, *pairs(type))


@pytest.mark.parametrize("type", FLOATS)
def test_fneg(type):
    agree_on(f"%r = fneg {type} %x0", [type], type, edges(type))


@pytest.mark.parametrize("word", "eq ne ugt uge ult ule sgt sge slt sle".split())
def test_icmp(word):
    agree_on(f"%c = icmp {word} i16 %x0, %x1\n  %r = zext i1 %c to i8", ["i16"] * 2, "i8", *pairs("i16"))


@pytest.mark.parametrize("word", FCMP)
def test_fcmp(word):
    agree_on(f"%c = fcmp {word} float %x0, %x1\n  %r = zext i1 %c to i8", ["float"] * 2, "i8", *pairs("float"))


@pytest.mark.parametrize("op,source,target", [
    ("trunc", "i64", "i8"), ("trunc", "i32", "i16"), ("zext", "i8", "i64"), ("zext", "i16", "i32"),
    ("sext", "i8", "i64"), ("sext", "i32", "i64"), ("bitcast", "float", "i32"), ("bitcast", "i64", "double"),
    ("sitofp", "i64", "float"), ("uitofp", "i64", "float"), ("sitofp", "i32", "double"), ("uitofp", "i8", "float"),
    ("uitofp", "i64", "double"), ("sitofp", "i16", "double"), ("fpext", "float", "double"),
    ("fptrunc", "double", "float"),
])  # fmt: skip
def test_cast(op, source, target):
    agree_on(f"%r = {op} {source} %x0 to {target}", [source], target, edges(source))


@pytest.mark.skipif(not HALF, reason="this processor has no instructions for half")
@pytest.mark.parametrize("op,source,target", [("fpext", "half", "float"), ("fptrunc", "float", "half")])
def test_half_cast(op, source, target):
    agree_on(f"%r = {op} {source} %x0 to {target}", [source], target, edges(source))


@pytest.mark.parametrize("op", ["fptosi", "fptoui"])
@pytest.mark.parametrize("target", INTS)
@pytest.mark.parametrize("source", ["float", "double"])
def test_float_to_integer(op, target, source):
    x = np.array([0, -0.0, 0.99, 1.5, 2.5, 100.7, 126.9], DTYPE[source])
    x = np.concatenate([x, -x]) if op == "fptosi" else x
    agree_on(f"%r = {op} {source} %x0 to {target}", [source], target, x)


@pytest.mark.parametrize("op", ["fptosi", "fptoui"])
@pytest.mark.parametrize("type", INTS)
def test_saturating(op, type):
    name = f"@llvm.{op}.sat.{type}.f64"
    body = f"%r = call {type} {name}(double %x0)"
    more = np.array([1e300, -1e300, 2.0**63, -(2.0**63), 2.0**64, 255.9, 127.5, -128.9])
    x = np.concatenate([edges("double"), more])
    agree_on(body, ["double"], type, x, declare=f"declare {type} {name}(double)")


def test_select():
    agree_on("%c = icmp slt i8 %x0, 3\n  %r = select i1 %c, i8 %x0, i8 %x1", ["i8"] * 2, "i8", *pairs("i8"))

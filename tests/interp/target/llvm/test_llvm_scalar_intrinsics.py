"""Intrinsics and library functions against LLVM's JIT."""

import numpy as np
import pytest
from llvm_native import DTYPE, agree, agree_on, edges, pairs

from tessera.interp.target.llvm import LlvmModule

SHORT = {"float": "f32", "double": "f64", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64"}


def check(name, type, count, inputs, extra="", output=""):
    """An intrinsic of `count` operands of one type."""
    full, output = f"@llvm.{name}.{SHORT[type]}", output or type
    operands = ", ".join(f"{type} %x{k}" for k in range(count))
    declare = f"declare {output} {full}({', '.join([type] * count)}{', i1' if extra else ''})"
    agree_on(f"%r = call {output} {full}({operands}{extra})", [type] * count, output, *inputs, declare=declare)


@pytest.mark.parametrize("type", ["float", "double"])
@pytest.mark.parametrize("name", "fabs sqrt floor ceil trunc rint nearbyint round roundeven canonicalize".split())
def test_float_unary(name, type):
    check(name, type, 1, [np.concatenate([edges(type), np.array([0.5, -0.5, 0.49999997, 3.5, -2.5], DTYPE[type])])])


@pytest.mark.parametrize("type", ["float", "double"])
@pytest.mark.parametrize("name", ["copysign", "minimum", "maximum"])
def test_float_binary(name, type):
    check(name, type, 2, pairs(type))


@pytest.mark.parametrize("name", ["minnum", "maxnum"])
def test_minnum(name):
    a, b = pairs("float")
    keep = ~((a == 0) & (b == 0))  # which zero is not said
    check(name, "float", 2, [a[keep], b[keep]])


@pytest.mark.parametrize("type", ["float", "double"])
def test_fma(type, seed=3):
    rng = np.random.default_rng(seed)
    a, b = pairs(type)
    check("fma", type, 3, [a, b, rng.permutation(a)])


@pytest.mark.parametrize("type", ["i8", "i32", "i64"])
@pytest.mark.parametrize("name", "smin smax umin umax sadd.sat uadd.sat ssub.sat usub.sat".split())
def test_integer_binary(name, type):
    check(name, type, 2, pairs(type))


@pytest.mark.parametrize("type", ["i8", "i32", "i64"])
@pytest.mark.parametrize("name,extra", [("ctpop", ""), ("bitreverse", ""), ("ctlz", ", i1 false"),
                                        ("cttz", ", i1 false"), ("abs", ", i1 false")])  # fmt: skip
def test_integer_unary(name, extra, type):
    check(name, type, 1, [edges(type)], extra)


def test_bswap():
    check("bswap", "i32", 1, [edges("i32")])


@pytest.mark.parametrize("type", ["i8", "i32", "i64"])
@pytest.mark.parametrize("name", ["fshl", "fshr"])
def test_funnel(name, type):
    a, b = pairs(type)
    check(name, type, 3, [a, b, np.arange(len(a)).astype(a.dtype)])


@pytest.mark.parametrize("type", ["i8", "i32", "i64"])
@pytest.mark.parametrize("name", [s + op for s in "su" for op in ("add", "sub", "mul")])
def test_overflow(name, type):
    full = f"@llvm.{name}.with.overflow.{type}"
    body = f"""%c = call {{ {type}, i1 }} {full}({type} %x0, {type} %x1)
  %v = extractvalue {{ {type}, i1 }} %c, 0
  %o1 = extractvalue {{ {type}, i1 }} %c, 1
  %r = select i1 %o1, {type} 77, {type} %v"""
    declare = f"declare {{ {type}, i1 }} {full}({type}, {type})"
    agree_on(body, [type] * 2, type, *pairs(type), declare=declare)


@pytest.mark.parametrize("mask", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 516, 3])
def test_is_fpclass(mask):
    body = f"%c = call i1 @llvm.is.fpclass.f32(float %x0, i32 {mask})\n  %r = zext i1 %c to i8"
    declare = "declare i1 @llvm.is.fpclass.f32(float, i32)"
    agree_on(body, ["float"], "i8", edges("float"), declare=declare)


REDUCE = [("i32", f"{op}") for op in "add mul and or xor smin smax umin umax".split()]
REDUCE += [("float", op) for op in ("fmin", "fmax")]


@pytest.mark.parametrize("type,op", REDUCE)
def test_reduce(type, op):
    rng = np.random.default_rng(1)
    name = f"@llvm.vector.reduce.{op}.v8{SHORT[type]}"
    text = f"""declare {type} {name}(<8 x {type}>)
define void @f(ptr %x, ptr %o) {{
  %v = load <8 x {type}>, ptr %x
  %s = call {type} {name}(<8 x {type}> %v)
  store {type} %s, ptr %o
  ret void
}}"""
    x = rng.normal(0, 1e4, 8).astype(DTYPE[type])
    agree(text, x, np.zeros(1, x.dtype))


@pytest.mark.parametrize("op", ["fadd", "fmul"])
def test_reduce_in_order(op):
    rng = np.random.default_rng(1)
    text = f"""declare float @llvm.vector.reduce.{op}.v16f32(float, <16 x float>)
define void @f(ptr %x, ptr %o) {{
  %v = load <16 x float>, ptr %x
  %s = call float @llvm.vector.reduce.{op}.v16f32(float 0x3FB99999A0000000, <16 x float> %v)
  store float %s, ptr %o
  ret void
}}"""
    agree(text, rng.normal(size=16).astype("f4"), np.zeros(1, "f4"))


NAMES = {"exp": np.exp, "log": np.log, "sin": np.sin, "tanh": np.tanh, "expm1": np.expm1, "cosh": np.cosh}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("letter,dtype", [("f", np.float32), ("", np.float64)])
def test_library(name, letter, dtype):
    t = "float" if letter else "double"
    m = LlvmModule(f"""declare {t} @{name}{letter}({t})
define {t} @f({t} %x) {{ %r = tail call fast {t} @{name}{letter}({t} noundef %x) #1
  ret {t} %r }}""")
    assert m.call("f", [0.7])[0] == NAMES[name](np.float64(dtype(0.7))).astype(dtype)


def test_active_lane_mask():
    text = """declare <8 x i1> @llvm.get.active.lane.mask.v8i1.i32(i32, i32)
define void @f(ptr %x, ptr %o) {
  %n = load i32, ptr %x
  %m = call <8 x i1> @llvm.get.active.lane.mask.v8i1.i32(i32 5, i32 %n)
  store <8 x i1> %m, ptr %o
  ret void
}"""
    for n in (0, 5, 6, 9, 100, -1):
        agree(text, np.array([n], "i4"), np.zeros(1, "u1"))

"""Float instructions: rounding against rational arithmetic, the others against NumPy."""

import re
from fractions import Fraction

import numpy as np
import pytest
from ptx_exact_rounding import DTYPES, rounded
from ptx_snippets import bits, one, same

from tessera.core.errors import ParseError

MODES = ["rn", "rz", "rm", "rp"]
EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "fma": lambda a, b, c: a * b + c,
}


def numbers(t, n=160, seed=0):
    """Finite numbers that meet: exponents close to each other, some far apart, some tiny."""
    rng = np.random.default_rng(seed)
    tiny = float(np.finfo(np.float32).tiny if t == "f32" else 2.0**-14 if t == "f16" else 1e-300)
    scale = np.where(rng.integers(0, 6, n) == 0, tiny * 4, 2.0 ** rng.integers(-6, 7, n))
    x = (rng.standard_normal(n) * scale).astype(DTYPES[t])
    return np.where(x == 0, x.dtype.type(1), x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("t", ["f32", "f64"])
@pytest.mark.parametrize("op", EXACT)
def test_rounding(op, t, mode):
    many = EXACT[op].__code__.co_argcount
    args = [numbers(t, seed=s) for s in range(many)]
    got = one(f"{op}.{mode}.{t} %d, {', '.join(['%a', '%b', '%c'][:many])};", *args, out=DTYPES[t])
    for row, g in zip(zip(*args, strict=False), got, strict=False):
        exact = EXACT[op](*(Fraction(float(v)) for v in row))
        assert exact == 0 or g == rounded(exact, DTYPES[t], mode), (row, g)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("t", ["f32", "f64"])
def test_square_root(t, mode):
    """By its definition: the neighbours' squares lie on both sides."""
    a = np.abs(numbers(t))
    got = one(f"sqrt.{mode}.{t} %d, %a;", a, out=DTYPES[t])
    for x, r in zip(a, got, strict=False):
        x, square = Fraction(float(x)), Fraction(float(r)) ** 2
        down, up = (Fraction(float(np.nextafter(r, v))) for v in (r.dtype.type(0), r.dtype.type(np.inf)))
        if mode in ("rz", "rm"):
            assert square <= x < up**2
        elif mode == "rp":
            assert down**2 < x <= square
        else:
            assert ((down + Fraction(float(r))) / 2) ** 2 <= x <= ((up + Fraction(float(r))) / 2) ** 2


@pytest.mark.parametrize("t", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_half(op, t):
    many = EXACT[op].__code__.co_argcount
    args = [numbers(t, seed=s) for s in range(many)]
    got = one(f"{op}.rn.{t} %d, {', '.join(['%a', '%b', '%c'][:many])};", *args, out=DTYPES[t])
    for row, g in zip(zip(*args, strict=False), got, strict=False):
        exact = EXACT[op](*(Fraction(float(v)) for v in row))
        assert exact == 0 or float(g) == rounded(exact, DTYPES[t])


def test_pairs_are_two_halves():
    a, b, c = (numbers("f16", 256, s) for s in range(3))
    want = one("fma.rn.f16 %d, %a, %b, %c;", a, b, c, out="f2")
    got = one("fma.rn.f16x2 %d, %a, %b, %c;", *(v.view("u4") for v in (a, b, c)), out="u4")
    same(got, want.view("u4"))


def test_zero_when_rounding_down():
    x, y = np.array([1, 0, 0, -0.0], "f4"), np.array([-1, 0, -0.0, -0.0], "f4")
    assert np.signbit(one("add.rm.f32 %d, %a, %b;", x, y, out="f4")).tolist() == [True, False, True, True]
    assert np.signbit(one("add.rn.f32 %d, %a, %b;", x, y, out="f4")).tolist() == [False, False, False, True]


def test_flush():
    tiny = np.array([1e-40, -1e-40, 1.5e-38, 1, 0], "f4")
    same(one("add.ftz.f32 %d, %a, %a;", tiny, out="f4"), np.array([0, -0.0, 3e-38, 2, 0], "f4"))
    same(one("mul.ftz.f32 %d, %a, 0f3F000000;", tiny, out="f4"), np.array([0, -0.0, 0, 0.5, 0], "f4"))
    assert one("add.f32 %d, %a, %a;", tiny, out="f4")[0] == np.float32(1e-40) * 2


def test_saturation_and_relu():
    x = np.array([-1, 0.25, 2, np.nan, np.inf, -np.inf], "f4")
    same(one("add.sat.f32 %d, %a, 0f00000000;", x, out="f4"), np.array([0, 0.25, 1, 0, 1, 0], "f4"))
    h = np.array([-1, 2, np.nan], "f2")
    same(one("fma.rn.relu.f16 %d, %a, %a, %b;", h, -h * h * 2, out="f2"), np.array([0, 0, np.nan], "f2"))


def test_nan_is_the_hardwares():
    nan = np.array([0x7FC01234, 0xFF800001], "u4")
    assert one("add.f32 %d, %a, 0f3F800000;", nan, out="u4").tolist() == [0x7FFFFFFF] * 2
    for op, lower in (("neg", 0x8000), ("abs", 0)):
        assert one(f"{op}.f32 %d, %a;", nan, out="u4").tolist() == [0x7FFFFFFF] * 2
        assert one(f"{op}.bf16x2 %d, %a;", nan | 1 << 16, out="u4").tolist() == [0x7FFF1234 ^ lower, 0x7FFF0001 ^ lower]


def test_nan_of_doubles_is_an_operands():
    """Quiet, with its sign; what an H200 gave for which of several."""
    a, b, c = (np.array([0xFFF0000000000000 + n], "u8") for n in (1, 2, 3))
    quiet, number = 0xFFF8000000000000, np.ones(1).view("u8")
    for op, want in {"add": 2, "mul": 2, "sub": 2, "min": 2, "div.rn": 1}.items():
        assert one(f"{op}.f64 %d, %a, %b;", a, b, out="u8")[0] == quiet + want
    for args, want in {(0, 1, 2): 2, (0, 3, 2): 3, (0, 3, 3): 1}.items():
        chosen = [(a, b, c, number)[k] for k in args]
        assert one("fma.rn.f64 %d, %a, %b, %c;", *chosen, out="u8")[0] == quiet + want
    assert one("neg.f64 %d, %a;", a, out="u8")[0] == quiet + 1
    zero = np.zeros(1)
    assert one("div.rn.f64 %d, %a, %a;", zero, out="u8")[0] == quiet
    assert one("rcp.approx.ftz.f64 %d, %a;", b, out="u8")[0] == 1 << 63  # its upper half is that of an infinity


FORMS_WITHOUT_INSTRUCTION = (
    *(f"{op}.approx.f64" for op in ("ex2", "lg2", "sin", "cos", "tanh", "rcp", "sqrt", "div")),
    *(f"{op}.approx.f16" for op in ("lg2", "sin", "cos", "rsqrt", "rcp")), "ex2.f32", "rcp.f32", "tanh.approx.ftz.f32",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS_WITHOUT_INSTRUCTION)
def test_forms_that_the_isa_lacks_are_refused(form):
    operands = "%a, %a" if form.startswith("div") else "%a"
    with pytest.raises(
        ParseError, match=rf"the PTX ISA has no {re.escape(form)}\n(?s:.*)expected: .*\.approx"
    ) as caught:
        one(f"{form} %d, {operands};", np.ones(1, DTYPES[form.rsplit(".", 1)[1]]), out="u8")
    assert caught.value.location.line > 1


def test_relu_of_minus_zero():
    zero = np.array([-0.0], "f4")
    assert one("cvt.rn.relu.f16.f32 %d, %a;", zero, out="u2")[0] == 0
    assert one("fma.rn.relu.f16 %d, %a, %b, %a;", np.array([-0.0], "f2"), np.ones(1, "f2"), out="u2")[0] == 0


@pytest.mark.parametrize("t", ["f32", "f64", "f16", "bf16"])
def test_min_max(t):
    a, b = np.meshgrid(np.array([0.0, -0.0, 1, -2, np.nan, np.inf]), np.array([0.0, -0.0, 3, -1, np.nan]))
    a, b = a.reshape(-1).astype(DTYPES[t]), b.reshape(-1).astype(DTYPES[t])
    x, y = a.astype("f8"), b.astype("f8")
    low = np.where((x == 0) & (y == 0), np.where(np.signbit(x) | np.signbit(y), -0.0, 0.0), np.fmin(x, y))
    same(one(f"min.{t} %d, %a, %b;", a, b, out=DTYPES[t]), low.astype(DTYPES[t]))
    high = np.where((x == 0) & (y == 0), np.where(np.signbit(x) & np.signbit(y), -0.0, 0.0), np.fmax(x, y))
    same(one(f"max.{t} %d, %a, %b;", a, b, out=DTYPES[t]), high.astype(DTYPES[t]))
    if t != "f64":
        got = one(f"max.NaN.{t} %d, %a, %b;", a, b, out=DTYPES[t]).astype("f8")
        assert np.array_equal(np.isnan(got), np.isnan(x) | np.isnan(y))


def test_xorsign():
    a, b = np.array([1, -2, 3, -4], "f4"), np.array([-5, 1, 2, -8], "f4")
    same(one("min.xorsign.abs.f32 %d, %a, %b;", a, b, out="f4"), np.array([-1, -1, 2, 4], "f4"))


APPROXIMATE = {"ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh}
APPROXIMATE |= {"rcp": lambda x: 1 / x, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)}


@pytest.mark.parametrize("op", APPROXIMATE)
def test_approximate(op):
    """Within the errors of the ISA: 2 to 2.5 ulp, 2^-20.5 absolute for sin and cos, 2^-11 relative for tanh."""
    x = np.linspace(0.1, 3, 300).astype("f4")
    want = APPROXIMATE[op](x.astype("f8"))
    assert np.abs(one(f"{op}.approx.f32 %d, %a;", x, out="f4") - want).max() <= 2**-21 * np.abs(want).max()


def test_division_kinds():
    a, b = numbers("f32"), numbers("f32", seed=1)
    want = a.astype("f8") / b
    for kind in ("approx", "full", "approx.ftz"):
        got = one(f"div.{kind}.f32 %d, %a, %b;", a, b, out="f4")
        normal = (np.abs(want) > 1.2e-38) & (np.abs(a) > 1.2e-38) & (np.abs(b) > 1.2e-38) & (np.abs(want) < 3e38)
        assert (np.abs(got - want)[normal] <= 2.0**-22 * np.abs(want)[normal]).all()
    got = one("div.approx.f32 %d, %a, 0f7F000000;", np.array([1, np.nan, np.inf], "f4"), out="f4")  # by 2 to the 127
    same(got, np.array([0, np.nan, np.nan], "f4"))


def test_signs_and_classes():
    x = np.array([0.0, -0.0, 1e-40, 1, -np.inf, np.nan], "f4")
    same(one("abs.f32 %d, %a;", x, out="f4"), np.abs(x))
    same(one("copysign.f32 %d, %a, 0f40000000;", x[:5], out="f4"), np.copysign(np.float32(2), x[:5]))
    classes = {"finite": [1, 1, 1, 1, 0, 0], "infinite": [0, 0, 0, 0, 1, 0], "number": [1, 1, 1, 1, 1, 0]}
    classes |= {"notanumber": [0, 0, 0, 0, 0, 1], "normal": [1, 1, 0, 1, 0, 0], "subnormal": [0, 0, 1, 0, 0, 0]}
    for word, want in classes.items():
        assert one(f"testp.{word}.f32 %p, %a; selp.u32 %d, 1, 0, %p;", x, out="u4").tolist() == want


ORDERED = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


@pytest.mark.parametrize("op", [*ORDERED, "ne"])
def test_comparison(op):
    a, b = np.meshgrid([0.0, -0.0, 1, np.nan, np.inf], [0.0, 2, np.nan, -np.inf, 1])
    a, b = a.reshape(-1).astype("f4"), b.reshape(-1).astype("f4")
    nan = np.isnan(a) | np.isnan(b)
    want = (a != b) & ~nan if op == "ne" else ORDERED[op](a, b)
    select = "selp.u32 %d, 1, 0, %p;"
    assert (one(f"setp.{op}.f32 %p, %a, %b; {select}", a, b, out="u4") == want).all()
    assert (one(f"setp.{op}u.f32 %p, %a, %b; {select}", a, b, out="u4") == want | nan).all()
    assert (one(f"set.{op}.f32.f32 %d, %a, %b;", a, b, out="f4") == want).all()
    assert (one(f"set.{op}.u32.f32 %d, %a, %b;", a, b, out="u4") == np.where(want, 2**32 - 1, 0)).all()


@pytest.mark.parametrize("combine", ["and", "or", "xor"])
def test_combined_comparison(combine):
    a, b = bits("i4", 64), bits("i4", 64, seed=1)
    lines = f"setp.gt.s32 %r, %a, 0; setp.lt.{combine}.s32 %p|%q, %a, %b, !%r;"
    lines += "selp.u32 %d, 1, 0, %p; selp.u32 %s0, 2, 0, %q; or.b32 %d, %d, %s0;"
    f = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combine]
    want = f(a < b, ~(a > 0)) + 2 * f(~(a < b), ~(a > 0))
    assert (one(lines, a, b, out="u4") == want).all()


def test_selection():
    a, b, c = bits("u4", 64), bits("u4", 64, seed=1), np.linspace(-1, 1, 64).astype("f4")
    same(one("slct.u32.f32 %d, %a, %b, %c;", a, b, c, out="u4"), np.where(c >= 0, a, b))
    same(one("slct.u32.s32 %d, %a, %b, %c;", a, b, bits("i4", 64), out="u4"), np.where(bits("i4", 64) >= 0, a, b))
    x, y = np.array([1, 2, 3, 4], "f2").view("u4"), np.array([2, 2, 2, 5], "f2").view("u4")
    got = one(
        "setp.lt.f16x2 %p|%q, %a, %b; selp.u32 %d, 1, 0, %p; selp.u32 %s0, 2, 0, %q; or.b32 %d, %d, %s0;",
        x,
        y,
        out="u4",
    )
    assert got.tolist() == [1, 2]


def test_pairs_of_floats():
    a, b, c = bits("u8"), bits("u8", seed=1), bits("u8", seed=2)
    for op, many in (("add.rn", 2), ("mul.rz", 2), ("fma.rm", 3)):
        pair = one(f"{op}.f32x2 %d, {', '.join(['%a', '%b', '%c'][:many])};", a, b, c, out="u8").view("f4")
        each = [v.view("f4") for v in (a, b, c)[:many]]
        same(pair, one(f"{op}.f32 %d, {', '.join(['%a', '%b', '%c'][:many])};", *each, out="f4"))


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_operands_of_two_widths(t):
    """A half or bf16 is widened, and the sum rounded once."""
    a, c = bits(DTYPES[t]), bits("f4", seed=1)
    wide = one(f"cvt.f32.{t} %d, %a;", a, out="f4")
    for op in ("add.rn", "sub.rz.sat"):
        same(one(f"{op}.f32.{t} %d, %a, %b;", a, c, out="f4"), one(f"{op}.f32 %d, %a, %b;", wide, c, out="f4"))
    same(one(f"fma.rp.f32.{t} %d, %a, %a, %b;", a, c, out="f4"), one("fma.rp.f32 %d, %a, %a, %b;", wide, c, out="f4"))


def test_the_smallest_of_three():
    a, b, c = np.random.default_rng(0).standard_normal((3, 64)).astype("f4")
    a[:9] = np.nan
    same(one("min.f32 %d, %a, %b, %c;", a, b, c, out="f4"), np.fmin(np.fmin(a, b), c))
    same(one("max.NaN.f32 %d, %a, %b, %c;", a, b, c, out="f4"), np.maximum(np.maximum(a, b), c))
    same(one("max.abs.f32 %d, %a, %b, %c;", a, b, c, out="f4"), np.fmax(np.fmax(abs(a), abs(b)), abs(c)))


def test_products_outside_of_a_tensor():
    """What a copy fills in place of them (an H200's bits) makes the result 0."""
    a = np.array([0x7FF7, 0x3C00, 0x3C00, 0x7E00], "u2").view("f2")
    b = np.array([0x3C00, 0x7FF7, 0x4000, 0x3C00], "u2").view("f2")
    got = one("fma.rn.oob.f16 %d, %a, %b, %a;", a, b, out="f2")
    assert got[:3].tolist() == [0, 0, 3] and np.isnan(got[3])


def test_a_sum_too_small_to_hold_is_no_zero_of_cancelling():
    """Rounded down, 2^-149 less a little is +0 (found on an H200), and only what cancels exactly is -0."""
    a, b, c = np.array([-(2.0**-100), 1], "f4"), np.array([2.0**-100, 1], "f4"), np.array([2.0**-149, -1], "f4")
    same(one("fma.rm.f32 %d, %a, %b, %c;", a, b, c, out="f4").view("u4"), np.array([0, 1 << 31], "u4"))
    a, b, c = np.array([-(2.0**-600), 1]), np.array([2.0**-600, 1]), np.array([2.0**-1074, -1])
    same(one("fma.rm.f64 %d, %a, %b, %c;", a, b, c, out="f8").view("u8"), np.array([0, 1 << 63], "u8"))

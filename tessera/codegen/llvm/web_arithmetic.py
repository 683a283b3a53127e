"""Arithmetic that WebAssembly lacks, as LLVM IR: fused multiply-add and conversions of f16.

Matrix products round each product and each sum. Where functions rely on a fused multiply-add, its result is exact: in
f32 by f64 and rounding to odd, in f64 by error-free transformations (Boldo and Melquiond 2008).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tessera.codegen.llvm.text import protocol

_FMA_CALL = re.compile(r"@llvm\.fma\.(?P<suffix>(?:v(?P<width>\d+))?f(?P<bits>32|64))\(")
_DECLARATION = re.compile(r"^declare .*@(?P<name>[\w.]+)\(.*\n", re.MULTILINE)
_PRODUCT = "@ts.dot."  # the functions whose sums of products may be rounded twice
_OWN = (protocol.POLL_FUNCTION, protocol.REPORT_FUNCTION)  # defined beside the launch plan


def define_web_functions(text: str) -> str:
    """The text of kernels with definitions of the arithmetic that it uses and the machine lacks."""
    used: dict[str, tuple[int, int]] = {}

    def exact(found: re.Match[str]) -> str:
        used[found["suffix"]] = (int(found["bits"]), int(found["width"] or 0))
        return f"@ts.exact_fma.{found['suffix']}("

    lines, inside_product = [], False
    text = _rewrite_halves(text)
    for line in _DECLARATION.sub(_keep_declaration, text).splitlines():
        if line.startswith("define "):
            inside_product = _PRODUCT in line
        lines.append(_round_products(line) if inside_product else _FMA_CALL.sub(exact, line))
    made = [line for suffix, shape in sorted(used.items()) for line in _define_fma(suffix, *shape)]
    made = [*lines, *made, *_define_half_conversions(text)]
    return "\n".join([*made, *_declare_intrinsics("\n".join(made), text)])


def _keep_declaration(found: re.Match[str]) -> str:
    own = found["name"] in _OWN or found["name"].startswith("llvm.fma.")
    return "" if own else found[0]


def _round_products(line: str) -> str:
    return line.replace("@llvm.fma.", "@llvm.fmuladd.")


def _declare_intrinsics(made: str, before: str) -> Iterator[str]:
    """The declarations of intrinsics that this module's text adds."""
    yield "declare i64 @llvm.smin.i64(i64, i64)" if "declare i64 @llvm.smin.i64" not in before else ""
    for found in sorted({m[0] for m in re.finditer(r"@llvm\.fmuladd\.(?:v\d+)?f(?:32|64)", made)}):
        t = _name_type(*_split_suffix(found.rpartition(".")[2]))
        yield f"declare {t} {found}({t}, {t}, {t})"


def _split_suffix(suffix: str) -> tuple[int, int]:
    width, _, bits = suffix.rpartition("f")
    return int(bits), int(width.removeprefix("v") or 0)


def _name_type(bits: int, width: int) -> str:
    element = "float" if bits == 32 else "double"
    return f"<{width} x {element}>" if width else element


class _Body:
    """Instructions of a function on a vector type; each method gives a new value."""

    def __init__(self, width: int) -> None:
        self.width, self.lines = width, list[str]()

    def of(self, element: str) -> str:
        """The type with this element."""
        return f"<{self.width} x {element}>" if self.width else element

    def const(self, element: str, value: str) -> str:
        """A constant in all elements."""
        if not self.width:
            return value
        return "<" + ", ".join([f"{element} {value}"] * self.width) + ">"

    def put(self, text: str) -> str:
        """An instruction."""
        name = f"%r{len(self.lines)}"
        self.lines.append(f"  {name} = {text}")
        return name

    def double(self, op: str, x: str, y: str) -> str:
        """Arithmetic in f64."""
        return self.put(f"{op} {self.of('double')} {x}, {y}")

    def integer(self, op: str, x: str, number: int) -> str:
        """Arithmetic of i32 with a constant."""
        return self.put(f"{op} {self.of('i32')} {x}, {self.const('i32', str(number))}")

    def two_sum(self, x: str, y: str) -> tuple[str, str]:
        """The rounded sum of two f64 and its error (Knuth)."""
        total = self.double("fadd", x, y)
        a = self.double("fsub", total, y)
        b = self.double("fsub", total, a)
        return total, self.double("fadd", self.double("fsub", x, a), self.double("fsub", y, b))

    def two_product(self, x: str, y: str) -> tuple[str, str]:
        """The rounded product of two f64 and its error (Dekker)."""
        product = self.double("fmul", x, y)
        (xh, xl), (yh, yl) = self._split(x), self._split(y)
        error = self.double("fsub", self.double("fmul", xh, yh), product)
        for a, b in ((xh, yl), (xl, yh), (xl, yl)):
            error = self.double("fadd", error, self.double("fmul", a, b))
        return product, error

    def _split(self, x: str) -> tuple[str, str]:
        scaled = self.double("fmul", x, self.const("double", "134217729.0"))  # 2**27 + 1 (Veltkamp)
        high = self.double("fsub", scaled, self.double("fsub", scaled, x))
        return high, self.double("fsub", x, high)

    def sum_to_odd(self, x: str, y: str) -> str:
        """The sum of two f64 rounded to odd: where it is not exact, its last bit is 1."""
        total, error = self.two_sum(x, y)
        d, i, b = self.of("double"), self.of("i64"), self.of("i1")
        bits, error_bits = (self.put(f"bitcast {d} {v} to {i}") for v in (total, error))
        inexact = self.put(f"fcmp one {d} {error}, {self.const('double', '0.0')}")
        low = self.put(f"trunc {i} {bits} to {b}")
        even = self.put(f"xor {b} {low}, {self.const('i1', 'true')}")
        unlike = self.put(f"xor {i} {bits}, {error_bits}")
        inward = self.put(f"icmp slt {i} {unlike}, {self.const('i64', '0')}")
        step = self.put(f"select {b} {inward}, {i} {self.const('i64', '-1')}, {i} {self.const('i64', '1')}")
        moves = self.put(f"and {b} {inexact}, {even}")
        added = self.put(f"select {b} {moves}, {i} {step}, {i} {self.const('i64', '0')}")
        return self.put(f"bitcast {i} {self.put(f'add {i} {bits}, {added}')} to {d}")


def _fuse_f32(body: _Body) -> str:
    """x * y is exact in f64, and its sum with z, rounded to odd, rounds once more to the f32 that is nearest."""
    f, d = body.of("float"), body.of("double")
    x, y, z = (body.put(f"fpext {f} %{v} to {d}") for v in "xyz")
    total = body.sum_to_odd(body.double("fmul", x, y), z)
    return body.put(f"fptrunc {d} {total} to {f}")


def _fuse_f64(body: _Body) -> str:
    """Exact where no part overflows or underflows; products beyond are rounded before the sum."""
    d, b = body.of("double"), body.of("i1")
    high, low = body.two_product("%x", "%y")
    t, tl = body.two_sum("%z", low)
    v, vl = body.two_sum(high, t)
    fused = body.double("fadd", v, body.sum_to_odd(tl, vl))
    plain = body.double("fadd", body.double("fmul", "%x", "%y"), "%z")
    zero = body.const("double", "0.0")
    useful = body.put(f"fcmp one {d} {fused}, {zero}")  # neither NaN nor 0, whose sign is that of the plain sum
    finite = body.put(f"fcmp ord {d} {body.double('fsub', fused, fused)}, {zero}")
    return body.put(f"select {b} {body.put(f'and {b} {useful}, {finite}')}, {d} {fused}, {d} {plain}")


_FUSE: dict[int, Callable[[_Body], str]] = {32: _fuse_f32, 64: _fuse_f64}


def _define_fma(suffix: str, bits: int, width: int) -> Iterator[str]:
    body, t = _Body(width), _name_type(bits, width)
    result = _FUSE[bits](body)
    yield f"define internal {t} @ts.exact_fma.{suffix}({t} %x, {t} %y, {t} %z) {{"
    yield from body.lines
    yield f"  ret {t} {result}"
    yield "}"


# Conversions of f16, whose vectors LLVM does not lower for this machine: registers and memory hold its bits.


def _rewrite_halves(text: str) -> str:
    """The text with f16 as i16, and calls in place of its conversions."""
    if "half" not in text:
        return text
    text = _WIDEN.sub(r"\g<head>call \g<to> @ts.widen_half\g<width>(\g<source> \g<value>)", text)
    text = _NARROW.sub(r"\g<head>call \g<to> @ts.narrow_half\g<width>(\g<source> \g<value>)", text)
    return re.sub(r"\.(v\d+)?f16\b", lambda m: f".{m[1] or ''}i16", re.sub(r"\bhalf\b", "i16", text))


_NUMBERED = r"(?:<(?P<width>\d+) x {0}>|{0})"
_CONVERSION = r"(?P<head>%\S+ = ){op} (?P<source>" + _NUMBERED + r") (?P<value>\S+) to (?P<to>(?:<\d+ x {1}>|{1}))"
_WIDEN = re.compile(_CONVERSION.replace("{op}", "fpext").replace("{0}", "half").replace("{1}", "float"))
_NARROW = re.compile(_CONVERSION.replace("{op}", "fptrunc").replace("{0}", "float").replace("{1}", "half"))


def _define_half_conversions(text: str) -> Iterator[str]:
    for name, width in sorted(set(re.findall(r"@ts\.(widen|narrow)_half(\d*)\(", text))):
        body = _Body(int(width or 0))
        source, to, convert = ("i16", "float", _widen) if name == "widen" else ("float", "i16", _narrow)
        result = convert(body)
        yield f"define internal {body.of(to)} @ts.{name}_half{width}({body.of(source)} %x) alwaysinline {{"
        yield from body.lines
        yield f"  ret {body.of(to)} {result}"
        yield "}"


def _widen(body: _Body) -> str:
    """Exponents move by 112, those of infinity and NaN by 224; a subnormal is a multiple of 2**-24."""
    i, f, b = body.of("i32"), body.of("float"), body.of("i1")
    bits = body.put(f"zext {body.of('i16')} %x to {i}")
    size = body.integer("and", bits, 0x7FFF)
    special = body.put(f"icmp uge {i} {size}, {body.const('i32', str(0x7C00))}")
    more, few = (body.const("i32", str(n << 23)) for n in (224, 112))
    up = body.put(f"select {b} {special}, {i} {more}, {i} {few}")
    normal = body.put(f"add {i} {body.integer('shl', size, 13)}, {up}")
    tiny = body.put(f"fmul {f} {body.put(f'uitofp {i} {size} to {f}')}, {body.const('float', '0x3E70000000000000')}")
    small = body.put(f"icmp ult {i} {size}, {body.const('i32', str(0x400))}")
    found = body.put(f"select {b} {small}, {i} {body.put(f'bitcast {f} {tiny} to {i}')}, {i} {normal}")
    sign = body.integer("shl", body.integer("and", bits, 0x8000), 16)
    return body.put(f"bitcast {i} {body.put(f'or {i} {found}, {sign}')} to {f}")


def _narrow(body: _Body) -> str:
    """To nearest, ties to even: by a carry into the mantissa, for a subnormal by the sum with 0.5."""
    i, f, b = body.of("i32"), body.of("float"), body.of("i1")
    bits = body.put(f"bitcast {f} %x to {i}")
    size = body.integer("and", bits, 0x7FFFFFFF)
    last = body.integer("and", body.integer("lshr", size, 13), 1)
    carried = body.integer("add", body.put(f"add {i} {size}, {last}"), 0xFFF - (112 << 23))
    found = body.integer("lshr", carried, 13)
    summed = body.put(f"fadd {f} {body.put(f'bitcast {i} {size} to {f}')}, {body.const('float', '0.5')}")
    tiny = body.integer("sub", body.put(f"bitcast {f} {summed} to {i}"), 0x3F000000)
    for test, limit, value in (("ult", 113 << 23, tiny), ("uge", 143 << 23, "31744"), ("ugt", 255 << 23, "32256")):
        where = body.put(f"icmp {test} {i} {size}, {body.const('i32', str(limit))}")
        other = value if value.startswith("%") else body.const("i32", value)
        found = body.put(f"select {b} {where}, {i} {other}, {i} {found}")
    sign = body.integer("and", body.integer("lshr", bits, 16), 0x8000)
    return body.put(f"trunc {i} {body.put(f'or {i} {found}, {sign}')} to {body.of('i16')}")

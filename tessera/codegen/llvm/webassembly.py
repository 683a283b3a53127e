"""WebAssembly: the machine code of a program for wasm32, with its launch plan, as one object file (WebAssembly 2.0).

The memory of a module is laid out ahead: after the linker's `__heap_base` come the parameters, the workspace and the
scratch memory, each at a fixed offset, so that a call allocates nothing. `tessera_run` executes the plan on one thread.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.c_plan import (
    ALIGN,
    BASE,
    DESCRIPTION_FILE,
    FIRST_SITE,
    MACHINE,
    MAX_BYTES,
    OBJECT_FILE,
    RUN,
    CParameter,
    CProgram,
    describe_site,
    read_program,
)
from tessera.codegen.llvm.runtime.jit import compile_for_machine
from tessera.codegen.llvm.runtime.program import TEXT_FILE
from tessera.codegen.llvm.text import protocol
from tessera.codegen.plan_execution import find_steps
from tessera.core.errors import ResourceError, UnsupportedOpError, user_location
from tessera.core.types import as_dtype

# Arithmetic that WebAssembly lacks, as LLVM IR: fused multiply-add and conversions of f16.
#
# Matrix products round each product and each sum. Where functions rely on a fused multiply-add, its result is exact: in
# f32 by f64 and rounding to odd, in f64 by error-free transformations (Boldo and Melquiond 2008).


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
    own = found["name"] in _OWN or found["name"].startswith(("llvm.fma.", "llvm.fmuladd."))
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
    text = _HALF_CONSTANT.sub(lambda found: f"half {_find_half_bits(found[1])}", text)
    text = _HALF_PHI.sub(lambda line: _CONSTANT.sub(lambda found: str(_find_half_bits(found[0])), line[0]), text)
    text = _WIDEN.sub(r"\g<head>call \g<to> @ts.widen_half\g<width>(\g<source> \g<value>)", text)
    text = _NARROW.sub(r"\g<head>call \g<to> @ts.narrow_half\g<width>(\g<source> \g<value>)", text)
    return re.sub(r"\.(v\d+)?f16\b", lambda m: f".{m[1] or ''}i16", re.sub(r"\bhalf\b", "i16", text))


def _find_half_bits(constant: str) -> int:
    """The bits of an f16 that LLVM writes as the bits of the f64 of the same value."""
    return int(np.uint64(int(constant, 16)).view(np.float64).astype(np.float16).view(np.uint16))


_CONSTANT = re.compile(r"0x[0-9A-F]{16}")
_HALF_CONSTANT = re.compile(rf"\bhalf ({_CONSTANT.pattern})")
_HALF_PHI = re.compile(r"= phi half .*")
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


# The object file.


TRIPLE = "wasm32-unknown-unknown"
# What all browsers have had since 2023.
FEATURES = "+simd128,+bulk-memory,+sign-ext,+mutable-globals,+nontrapping-fptoint"
VECTOR_BYTES = 16


@dataclass(frozen=True)
class MemoryLayout:
    """Where parts of a program's memory are, in bytes after the base: the parameters that a caller passes, by number,
    the workspace and the scratch memory; `total` is the size of all."""

    parameters: Mapping[int, int]
    workspace: int
    scratch: int
    total: int


def plan_layout(program: CProgram) -> MemoryLayout:
    """The layout of a program's memory.

    Raises:
        ResourceError: it is larger than the memory of a module.
    """
    sizes = {p.number: count_bytes(p) for p in program.passed}
    workspace, scratch = int(program.plan["workspace"]), max([0, *map(int, program.plan["scratch"].values())])
    places, end = {}, 0
    for number, size in sizes.items():
        places[number], end = end, _round_up(end + size)
    layout = MemoryLayout(places, end, _round_up(end + workspace), _round_up(end + workspace) + _round_up(scratch))
    needed = layout.total + len(program.weights)
    if needed > MAX_BYTES:
        raise ResourceError(
            f"{program.name} needs {needed:,} bytes of memory", location=user_location(),
            expected=f"at most {MAX_BYTES:,} on wasm32", received=f"{needed:,}", suggestion="use smaller sizes",
        )  # fmt: skip
    return layout


def count_bytes(parameter: CParameter) -> int:
    """The bytes of a parameter in memory."""
    data = parameter.data
    return math.prod(map(int, data["shape"])) * int(as_dtype(data["dtype"]).numpy.itemsize)


def _round_up(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def emit_web_object(artifact: Artifact, name: str, stored: Mapping[str, bytes]) -> dict[str, Any]:
    """The object file of a program and its description, which says where its parameters are.

    Raises:
        UnsupportedOpError: it has symbolic sizes, or needs Python.
    """
    program = read_program(artifact, name, stored)
    if program.sizes:
        raise UnsupportedOpError(
            f"the machine {MACHINE} needs the value of each size", location=user_location(),
            received=", ".join(program.sizes), suggestion="leave out `dynamic`: build a module for each size",
        )  # fmt: skip
    layout = plan_layout(program)
    text = "\n".join([define_web_functions(artifact.text(TEXT_FILE)), *_HostText(program, layout).lines(), ""])
    code = compile_for_machine(text, TRIPLE, "generic", FEATURES, (RUN, BASE))
    return {OBJECT_FILE: code, DESCRIPTION_FILE: json.dumps(describe_program(program, layout), indent=1) + "\n"}


def describe_program(program: CProgram, layout: MemoryLayout) -> dict[str, Any]:
    """What a caller needs: the parameters with their places, the memory, and the texts of failures."""
    parameters = [
        {
            "name": p.name, "shape": [int(n) for n in p.data["shape"]], "dtype": p.data["dtype"],
            "offset": layout.parameters[p.number], "bytes": count_bytes(p),
            "role": p.data["role"], "written": p.written,
        }
        for p in program.passed
    ]  # fmt: skip
    return {
        "name": program.name, "machine": MACHINE, "parameters": parameters, "bytes": layout.total,
        "errors": {str(FIRST_SITE + i): describe_site(site) for i, site in enumerate(program.sites)},
    }  # fmt: skip


# The text of the host's part.

_RUNTIME = f"""\
@__heap_base = external global i8
@tessera_failed = internal global i64 {2**63 - 1}
@tessera_slots = internal global [SLOTS x i64] zeroinitializer, align 8

define internal void @{protocol.POLL_FUNCTION}(ptr %word) {{
  ret void
}}

define internal void @{protocol.REPORT_FUNCTION}(i64 %context, i64 %site, i64 %program, ptr %table) {{
  %next = add i64 %program, 1
  %high = shl i64 %next, {protocol.FAILURE_PROGRAM_BIT}
  %key = or i64 %high, %site
  %seen = load i64, ptr @tessera_failed
  %least = call i64 @llvm.smin.i64(i64 %key, i64 %seen)
  store i64 %least, ptr @tessera_failed
  ret void
}}

declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define i64 @{BASE}() {{
  %end = ptrtoint ptr @__heap_base to i64
  %more = add i64 %end, {ALIGN - 1}
  %base = and i64 %more, -{ALIGN}
  ret i64 %base
}}
"""


class _HostText:
    """The launch plan of a program as LLVM IR; values and labels are numbered in order."""

    def __init__(self, program: CProgram, layout: MemoryLayout) -> None:
        self.program, self.layout = program, layout
        self.body: list[str] = []
        self.loops: dict[int, str] = {}
        self.count = 0

    def lines(self) -> Iterator[str]:
        """The runtime's functions, the weights, and the function that executes the plan."""
        plan = self.program.plan
        slots = max([1, *(len(e["args"]) + len(e["grid"]) for e in plan["launches"])])
        yield _RUNTIME.replace("SLOTS", str(slots))
        if self.program.weights:
            data = self.program.weights.hex("\\")
            yield f'@tessera_weights = internal constant [{len(self.program.weights)} x i8] c"\\{data}", align {ALIGN}'
        yield f"define i32 @{RUN}() {{"
        yield "entry:"
        yield f"  %base = call i64 @{BASE}()"
        yield f"  store i64 {2**63 - 1}, ptr @tessera_failed"
        yield f"  store i64 {protocol.NO_FAILURE}, ptr @{protocol.FAILURE_WORD}"
        self._clear_read_outputs()
        self._emit_steps(find_steps(plan))
        yield from (f"  {line}" if not line.endswith(":") else line for line in self.body)
        yield "  ret i32 0"
        yield "}"

    def new(self, text: str) -> str:
        """A numbered value of an instruction."""
        name = f"%t{self.count}"
        self.count += 1
        self.body.append(f"{name} = {text}")
        return name

    def label(self) -> str:
        """A numbered label."""
        self.count += 1
        return f"b{self.count}"

    def _clear_read_outputs(self) -> None:
        """Outputs that kernels read before they write them, as atomics do, begin as zeros."""
        for p in self.program.passed:
            if p.data["role"] == "output" and p.number in self.program.plan["read"]:
                at = self.new(f"inttoptr i64 {self._add('%base', self.layout.parameters[p.number])} to ptr")
                self.body.append(f"call void @llvm.memset.p0.i64(ptr {at}, i8 0, i64 {count_bytes(p)}, i1 false)")

    def _add(self, value: str, number: int) -> str:
        return self.new(f"add i64 {value}, {number}") if number else value

    def address(self, argument: Mapping[str, Any]) -> str:
        """The address of an argument of a launch, as an i64."""
        if "param" in argument:
            parameter = self.program.parameters[argument["param"]]
            if parameter.stored:
                value = self._add(self.new("ptrtoint ptr @tessera_weights to i64"), parameter.offset)
            else:
                value = self._add("%base", self.layout.parameters[parameter.number])
        else:
            value = self._add("%base", self.layout.workspace + int(argument["offset"]))
        for loop, count in argument.get("moves", ()):
            step = self.new(f"mul i64 {self.loops[loop]}, {int(count)}")
            value = self.new(f"add i64 {value}, {step}")
        return value

    def _emit_steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        for step in steps:
            if "run" in step:
                for number in range(*step["run"]):
                    self._emit_launch(self.program.plan["launches"][number])
            elif "loop" in step:
                self._emit_loop(step)
            elif "while" in step:
                self._emit_while(step)
            else:
                self._emit_if(step)

    def _emit_launch(self, entry: Mapping[str, Any]) -> None:
        values = [self._slot(a) for a in entry["args"]] + [str(int(n)) for n in entry["grid"]]
        for i, value in enumerate(values):
            at = self.new(f"getelementptr i64, ptr @tessera_slots, i64 {i}")
            self.body.append(f"store i64 {value}, ptr {at}")
        scratch = self.new(f"inttoptr i64 {self._add('%base', self.layout.scratch)} to ptr")
        total = math.prod(int(n) for n in entry["grid"])
        self.body.append(f"call void @{entry['kernel']}.task(ptr @tessera_slots, i64 0, i64 {total}, ptr {scratch})")
        failed = self.new("load i64, ptr @tessera_failed")
        fine = self.new(f"icmp eq i64 {failed}, {2**63 - 1}")
        bad, on = self.label(), self.label()
        self.body += [f"br i1 {fine}, label %{on}, label %{bad}", f"{bad}:"]
        site = self.new(f"and i64 {failed}, {(1 << protocol.FAILURE_PROGRAM_BIT) - 1}")
        code = self.new(f"add i64 {site}, {FIRST_SITE}")
        self.body += [f"ret i32 {self.new(f'trunc i64 {code} to i32')}", f"{on}:"]

    def _slot(self, argument: Mapping[str, Any]) -> str:
        if "value" in argument:
            return str(int(argument["value"]))
        parameter = self.program.parameters[argument["param"]] if "param" in argument else None
        address = self.address(argument)
        if parameter is None or not parameter.scalar:
            return address
        bits = 8 * count_bytes(parameter)
        word = self.new(f"load i{bits}, ptr {self.new(f'inttoptr i64 {address} to ptr')}")
        return self.new(f"zext i{bits} {word} to i64") if bits < 64 else word

    def _emit_loop(self, step: Mapping[str, Any]) -> None:
        head, body, done = self.label(), self.label(), self.label()
        before = self.label()
        self.body += [f"br label %{before}", f"{before}:", f"br label %{head}", f"{head}:"]
        following = f"%n{head}"
        number = self.new(f"phi i64 [ 0, %{before} ], [ {following}, %{body}.end ]")
        more = self.new(f"icmp slt i64 {number}, {int(step['count'])}")
        self.body += [f"br i1 {more}, label %{body}, label %{done}", f"{body}:"]
        scaled = self.new(f"mul i64 {number}, {int(step['step'])}")
        self.loops[step["loop"]] = self.new(f"add i64 {scaled}, {int(step['first'])}")
        self._emit_steps(step["body"])
        self.body += [f"br label %{body}.end", f"{body}.end:", f"{following} = add i64 {number}, 1"]
        self.body += [f"br label %{head}", f"{done}:"]

    def _emit_while(self, step: Mapping[str, Any]) -> None:
        head, body, done = self.label(), self.label(), self.label()
        self.body += [f"br label %{head}", f"{head}:"]
        self._emit_steps(step["test"])
        self.body += [f"br i1 {self._flag(step['while'])}, label %{body}, label %{done}", f"{body}:"]
        self._emit_steps(step["body"])
        self.body += [f"br label %{head}", f"{done}:"]

    def _emit_if(self, step: Mapping[str, Any]) -> None:
        then, other, done = self.label(), self.label(), self.label()
        self.body += [f"br i1 {self._flag(step['if'])}, label %{then}, label %{other}"]
        for label, part in ((then, "then"), (other, "else")):
            self.body.append(f"{label}:")
            self._emit_steps(step[part])
            self.body.append(f"br label %{done}")
        self.body.append(f"{done}:")

    def _flag(self, number: int) -> str:
        at = self.new(f"inttoptr i64 {self.address(self.program.plan['flags'][number])} to ptr")
        return self.new(f"icmp ne i8 {self.new(f'load i8, ptr {at}')}, 0")

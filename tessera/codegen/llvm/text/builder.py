"""IR builder: instructions, loops and debug locations of one function, the vector values of a loop body, and element
types in registers, in memory and as literals.

A lane value is the content of one vector register: uniform, a ramp (consecutive integers), or varying. What is
invariant in the innermost loop is hoisted out of it (LICM).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.errors import UNKNOWN, Location, UnsupportedOpError
from tessera.core.types import (  # fmt: skip
    DType,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    fp4,
    fp6,
    fp6_e2m3,
    fp8_e4m3,
    fp8_e5m2,
    int4,
    int8,
    int16,
    int32,
    int64,
    tf32,
    uint8,
    uint16,
    uint32,
    uint64,
)

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


SMALL_FLOATS = (fp8_e4m3, fp8_e5m2, fp6, fp6_e2m3, fp4)
# In registers a narrow float is a `float` that holds one of its values exactly: each op computes in f32 anyway, and
# rounding to the narrow format in place saves a conversion back.
REGISTER_ELEMENTS: dict[DType, str] = {
    f64: "double", f32: "float", tf32: "float", f16: "float", bf16: "float",
    int64: "i64", int32: "i32", int16: "i16", int8: "i8", bool_: "i1",
    uint64: "i64", uint32: "i32", uint16: "i16", uint8: "i8", int4: "i16", **dict.fromkeys(SMALL_FLOATS, "float"),
}  # fmt: skip
MEMORY_ELEMENTS: dict[DType, str] = {
    **REGISTER_ELEMENTS,
    f16: "half",
    bf16: "i16",
    bool_: "i8",
    int4: "i8",
    **dict.fromkeys(SMALL_FLOATS, "i8"),
}
ELEMENT_BYTES = {"double": 8, "float": 4, "half": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "i1": 1, "ptr": 8}
NARROW_FLOATS = (tf32, f16, bf16, *SMALL_FLOATS)
_SUFFIX = {"double": "f64", "float": "f32", "half": "f16", "ptr": "p0"}


@dataclass(frozen=True)
class RegisterType:
    """A register type: a scalar, or a vector of `width` elements."""

    element: str
    width: int = 1

    def __str__(self) -> str:
        return self.element if self.width == 1 else f"<{self.width} x {self.element}>"

    @property
    def suffix(self) -> str:
        """The suffix in intrinsic names: f32, v16f32."""
        short = _SUFFIX.get(self.element, self.element)
        return short if self.width == 1 else f"v{self.width}{short}"

    @property
    def is_float(self) -> bool:
        """Whether the elements are floats."""
        return self.element in ("double", "float", "half")

    @property
    def bits(self) -> int:
        """The width of an element in bits."""
        return 1 if self.element == "i1" else ELEMENT_BYTES[self.element] * 8

    def of(self, element: str) -> RegisterType:
        """The type with another element type and the same width."""
        return RegisterType(element, self.width)

    @property
    def integer(self) -> RegisterType:
        """The integer type with elements of the same size."""
        return self.of(f"i{self.bits}")

    @property
    def truth(self) -> RegisterType:
        """The type of a comparison's result."""
        return self.of("i1")

    def const(self, value: Any) -> str:
        """A constant, splat over the lanes."""
        text = format_literal(self.element, value)
        return text if self.width == 1 else f"splat ({self.element} {text})"


def format_literal(element: str, value: Any) -> str:
    """A scalar constant."""
    if element == "i1":
        return "true" if value else "false"
    if not ELEMENT_BYTES[element] or element[0] == "i":
        return str(int(value))
    number = float(np.float32(value)) if element == "float" else float(value)
    if math.isnan(number):
        return "0x7FF8000000000000"
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def get_register_type(dtype: DType, width: int = 1) -> RegisterType:
    """The register type of elements.

    Raises:
        UnsupportedOpError: the target has no registers for this element type.
    """
    if dtype not in REGISTER_ELEMENTS:
        raise UnsupportedOpError(
            f"the target llvm has no element type {dtype}", expected=", ".join(map(str, REGISTER_ELEMENTS)),
            suggestion="cast to ts.f32 or ts.bf16 first",
        )  # fmt: skip
    return RegisterType(REGISTER_ELEMENTS[dtype], width)


def get_memory_type(dtype: DType, width: int = 1) -> RegisterType:
    """The type of elements in memory."""
    get_register_type(dtype)
    return RegisterType(MEMORY_ELEMENTS[dtype], width)


def copy_register(t: RegisterType, d: str, x: str) -> str:
    """The instruction that gives a value another name."""
    return f"{d} = bitcast {t} {x} to {t}"


def get_element_bytes(dtype: DType) -> int:
    """The size of an element in memory, in bytes."""
    return ELEMENT_BYTES[get_memory_type(dtype).element]


LineSection = list[Any]  # lines, and sections that are filled in later


class DebugMetadata:
    """Debug metadata, which maps lines of LLVM IR to source locations."""

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self._known: dict[str, int] = {}

    def node(self, text: str) -> int:
        """The number of a metadata node; equal nodes are one."""
        if text not in self._known:
            self._known[text] = len(self.nodes)
            self.nodes.append(text)
        return self._known[text]

    def subprogram(self, name: str, loc: Location) -> int:
        """The node of a function."""
        file = self.file(loc.file)
        unit = self.node(
            f'distinct !DICompileUnit(language: DW_LANG_Python, file: !{file}, producer: "tessera", '
            "isOptimized: true, emissionKind: LineTablesOnly)"
        )
        kind = self.node("!DISubroutineType(types: !{})")
        return self.node(
            f'distinct !DISubprogram(name: "{_escape(name)}", file: !{file}, line: {loc.line}, type: !{kind}, '
            f"spFlags: DISPFlagDefinition, unit: !{unit})"
        )

    def file(self, path: str) -> int:
        """The node of a file."""
        folder, _, name = path.rpartition("/")
        return self.node(f'!DIFile(filename: "{_escape(name)}", directory: "{_escape(folder)}")')

    def location(self, loc: Location, scope: int) -> int:
        """The node of a location in a function; the lines of a function may come from several files."""
        file = self.file(loc.file)
        if f"file: !{file}," not in self.nodes[scope]:
            scope = self.node(f"!DILexicalBlockFile(scope: !{scope}, file: !{file}, discriminator: 0)")
        return self.node(f"!DILocation(line: {loc.line}, column: {loc.column}, scope: !{scope})")

    def text(self) -> Iterator[str]:
        """The metadata at the end of a module."""
        if not self.nodes:
            return
        units = ", ".join(f"!{i}" for i, n in enumerate(self.nodes) if "DICompileUnit" in n)
        yield f"!llvm.dbg.cu = !{{{units}}}"
        yield f"!llvm.module.flags = !{{!{len(self.nodes)}}}"
        yield from (f"!{i} = {n}" for i, n in enumerate(self.nodes))
        yield f'!{len(self.nodes)} = !{{i32 2, !"Debug Info Version", i32 3}}'


@lru_cache(maxsize=1024)
def _escape(text: str) -> str:
    """A string as an LLVM literal: bytes that are not printable ASCII in hexadecimal."""
    plain = range(0x20, 0x7F)
    return "".join(chr(b) if b in plain and chr(b) not in '"\\' else f"\\{b:02X}" for b in text.encode())


class LlvmBuilder:
    """Builds the body of one function; `clock` counts its instructions."""

    def __init__(self, debug: DebugMetadata | None = None, scope: int = 0) -> None:
        self.root: LineSection = []
        self.label = "entry"
        self.clock = 0
        self.loops: list[tuple[int, int]] = []  # the first and last clock of each loop, inner loops first
        self._lines = self.root
        self._names = 0
        self._known: dict[str, str] = {}  # the registers of sums and products of this basic block, by expression
        self._debug, self._scope, self._suffix = debug, scope, ""

    def set_location(self, loc: Location) -> None:
        """Attach a source location to the lines that follow."""
        if self._debug is not None and loc != UNKNOWN:
            self._suffix = f", !dbg !{self._debug.location(loc, self._scope)}"

    def new_name(self, hint: str = "v") -> str:
        """A new register name."""
        self._names += 1
        return f"%{hint}{self._names}"

    def line(self, text: str) -> None:
        """Append an instruction."""
        self.clock += 1
        self._lines.append(f"  {text}{self._suffix}")

    def lines(self, texts: Iterator[str] | Sequence[str]) -> None:
        """Append instructions."""
        for text in texts:
            self.line(text)

    def let(self, expression: str, hint: str = "v") -> str:
        """Append an instruction that defines a register; its name."""
        name = self.new_name(hint)
        self.line(f"{name} = {expression}")
        return name

    def begin_block(self, label: str) -> None:
        """Begin a basic block."""
        self.label = label
        self._known = {}
        self._lines.append(f"{label}:")

    def new_label(self, hint: str) -> str:
        """A new label."""
        return self.new_name(hint)[1:]

    def branch_to(self, label: str) -> None:
        """End the basic block with a branch to a new one, and begin that."""
        self.line(f"br label %{label}")
        self.begin_block(label)

    def new_section(self) -> LineSection:
        """A section here, into which lines can be inserted later."""
        lines: LineSection = []
        self._lines.append(lines)
        return lines

    @contextmanager
    def insert_into(self, section: LineSection) -> Iterator[None]:
        """Append the lines of the `with` block to a section."""
        before, self._lines, self._known = (self._lines, self._known), section, {}
        try:
            yield
        finally:
            self._lines, self._known = before

    def flatten(self) -> Iterator[str]:
        """Every line in order."""
        yield from _flatten(self.root)

    # Arithmetic on i64 with constant folding; a basic block computes each value once.

    def _let_once(self, expression: str) -> str:
        if expression not in self._known:
            self._known[expression] = self.let(expression, "i")
        return self._known[expression]

    def add(self, x: str, y: str) -> str:
        """The sum of two i64 operands."""
        if x == "0" or y == "0":
            return y if x == "0" else x
        if is_number(x) and is_number(y):
            return str(int(x) + int(y))
        return self._let_once(f"add i64 {x}, {y}")

    def mul(self, x: str, factor: int) -> str:
        """An i64 operand times a constant."""
        if is_number(x):
            return str(int(x) * factor)
        return "0" if factor == 0 else x if factor == 1 else self._let_once(f"mul i64 {x}, {factor}")

    def multiply(self, x: str, y: str) -> str:
        """The product of two i64 operands."""
        if is_number(y):
            return self.mul(x, int(y))
        return self.mul(y, int(x)) if is_number(x) else self._let_once(f"mul i64 {x}, {y}")


def is_number(text: str) -> bool:
    """Whether an operand is an integer literal."""
    return text.lstrip("-").isdigit()


def _flatten(lines: LineSection) -> Iterator[str]:
    for each in lines:
        if isinstance(each, str):
            yield each
        else:
            yield from _flatten(each)


class LoopBuilder:
    """A loop with at least one iteration and loop-carried values; the body is emitted in its `with` block.

    `index` counts from `start` to before `stop`; a loop of one iteration is emitted without a branch.
    """

    def __init__(
        self, text: LlvmBuilder, start: str, stop: str, step: int = 1, carried: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.text, self.start, self.stop, self.step = text, start, stop, step
        self.types = [t for t, _ in carried]
        self.values = [v for _, v in carried]
        self.once = is_number(start) and is_number(stop) and int(start) + step >= int(stop)
        self.index = start

    def __enter__(self) -> LoopBuilder:
        if self.once:
            return self
        text, self.head = self.text, self.text.new_label("loop")
        self.before, self.initial = text.label, self.values
        text.branch_to(self.head)
        self.first_clock = text.clock
        self.phis = text.new_section()
        self.index = text.new_name("i")
        self.values = [text.new_name("c") for _ in self.values]
        self.entering = self.values
        return self

    def __exit__(self, *error: Any) -> None:
        if self.once or error[0] is not None:
            return
        text, tail = self.text, self.text.label
        more = text.let(f"add i64 {self.index}, {self.step}", "i")
        again = text.let(f"icmp slt i64 {more}, {self.stop}", "b")
        leave = text.new_label("done")
        text.line(f"br i1 {again}, label %{self.head}, label %{leave}")
        with text.insert_into(self.phis):
            text.line(f"{self.index} = phi i64 [ {self.start}, %{self.before} ], [ {more}, %{tail} ]")
            for name, kind, first, last in zip(self.entering, self.types, self.initial, self.values, strict=True):
                text.line(f"{name} = phi {kind} [ {first}, %{self.before} ], [ {last}, %{tail} ]")
        text.loops.append((self.first_clock, text.clock))
        text.begin_block(leave)


# Lane values: the elements of a block in one vector register.


class LaneKind(Enum):
    """How a value varies over the lanes of a register."""

    INVARIANT = "the same scalar in each lane and each iteration of the innermost loop"
    UNIFORM = "the same scalar in each lane"
    RAMP = "an i64 scalar plus a step times the number of the lane"
    VARYING = "a vector"


@dataclass(frozen=True)
class LaneValue:
    """The register of a value, and how it varies; `multiple` is a known divisor of an index's scalar.

    `step` is the difference between the lanes of a ramp. The lanes of a vector with `repeat` count up from the scalar
    `base`, each number `repeat` times; those of one with `cycle` are 0, 1, … to before `cycle`, again and again. `span`
    is the least and the greatest number of an index, over all iterations of its loop, if they are known.
    """

    name: str
    kind: LaneKind = LaneKind.INVARIANT
    multiple: int = 1
    step: int = 1
    repeat: int = 0
    base: str = ""
    cycle: int = 0
    span: tuple[int, int] | None = None

    @property
    def uniform(self) -> bool:
        """Whether all lanes are equal."""
        return self.kind in (LaneKind.INVARIANT, LaneKind.UNIFORM)

    @property
    def interval(self) -> tuple[int, int] | None:
        """The least and the greatest number of an index, where they are known."""
        return (int(self.name), int(self.name)) if self.uniform and is_number(self.name) else self.span

    @property
    def divisor(self) -> int:
        """The largest known divisor of the scalar; 0 for the scalar 0, which every number divides."""
        return abs(int(self.name)) if is_number(self.name) else self.multiple


ZERO_LANE = LaneValue("0")
LaneIndex = tuple[LaneValue, ...]
LaneMemo = dict[Any, LaneValue]


@dataclass(frozen=True)
class ElementHints:
    """What the elements of some values allow: sums that are `contractible` may be rounded together with a product that
    they add, and loads that are `streamed` are prefetched.
    """

    contractible: frozenset[Any] = frozenset()
    streamed: frozenset[Any] = frozenset()


NO_HINTS = ElementHints()


class LoopBody:
    """Straight-line code that computes the elements of blocks, `width` at a time.

    `mask` is the constant mask of a partial vector at the end of an axis. Loop-invariant values are computed once, in
    `before`, the section ahead of the innermost loop.
    """

    def __init__(
        self,
        kernel: LlvmKernelContext,
        width: int = 1,
        mask: str | None = None,
        before: LineSection | None = None,
        outer: LaneMemo | None = None,
        hints: ElementHints = NO_HINTS,
    ) -> None:
        self.kernel, self.width, self.mask, self.hints = kernel, width, mask, hints
        self.text: LlvmBuilder = kernel.text
        self._before = before
        self._inner: LaneMemo = {}
        self._outer = self._inner if before is None or outer is None else outer

    def find_memo(self, *lanes: LaneValue) -> LaneMemo:
        """The memo of values with these operands: of the loop nest for invariant ones, else of this body."""
        return self._outer if self.kind_of(*lanes) is LaneKind.INVARIANT else self._inner

    def kind_of(self, *lanes: LaneValue) -> LaneKind:
        """How a result of these operands varies."""
        if self.width_of(*lanes) > 1:
            return LaneKind.VARYING
        return LaneKind.UNIFORM if any(x.kind is not LaneKind.INVARIANT for x in lanes) else LaneKind.INVARIANT

    @contextmanager
    def hoist(self, *lanes: LaneValue) -> Iterator[None]:
        """Emit the `with` block ahead of the innermost loop if these operands are invariant in it."""
        if self._before is None or self.kind_of(*lanes) is not LaneKind.INVARIANT:
            yield
            return
        with self.text.insert_into(self._before):
            yield

    def type(self, dtype: DType, *lanes: LaneValue) -> RegisterType:
        """The register type of elements; a scalar if all operands are uniform."""
        return get_register_type(dtype, self.width_of(*lanes))

    def width_of(self, *lanes: LaneValue) -> int:
        """The number of lanes of a result of these operands."""
        return 1 if all(x.uniform for x in lanes) else self.width

    def broadcast_lane(self, lane: LaneValue, t: RegisterType) -> str:
        """A lane value as a register of a type: uniform values are splat, ramps are expanded."""
        if t.width == 1 or lane.kind is LaneKind.VARYING:
            return lane.name
        with self.hoist(lane):
            whole = emit_splat(self.text, t, lane.name)
        if lane.uniform:
            return whole
        return self.text.let(f"add {t} {whole}, {format_step_vector(t, lane.step)}", "r")


def emit_splat(text: LlvmBuilder, t: RegisterType, name: str) -> str:
    """A scalar broadcast to every lane."""
    if not name.startswith("%"):
        return f"splat ({t.element} {name})"
    one = text.let(f"insertelement {t} poison, {t.element} {name}, i64 0", "s")
    return text.let(f"shufflevector {t} {one}, {t} poison, <{t.width} x i32> zeroinitializer", "s")


def format_step_vector(t: RegisterType, by: int = 1) -> str:
    """The constant vector 0, by, 2 by, …"""
    return "<" + ", ".join(f"{t.element} {i * by}" for i in range(t.width)) + ">"


def format_prefix_mask(width: int, count: int) -> str:
    """The mask that is true in the first `count` lanes."""
    return "<" + ", ".join(f"i1 {'true' if i < count else 'false'}" for i in range(width)) + ">"

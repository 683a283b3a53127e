"""The types of CSL: numbers, ids, descriptors, pointers, arrays, structs, functions."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Type:
    """Any type; `str` spells it as CSL does."""

    name: str = ""

    @property
    def size(self) -> int:
        """Bytes of one value in the memory of a PE (0 where it has none)."""
        return 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """How NumPy holds values of this type."""
        return np.dtype(object)

    @property
    def comptime_only(self) -> bool:
        """Whether values exist at compile time only."""
        return False

    @property
    def aggregate(self) -> bool:
        """Whether a value is a block of memory (array, struct) and not one cell."""
        return False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Int(Type):
    """`iN` and `uN`."""

    bits: int = 16
    signed: bool = True

    @property
    def size(self) -> int:
        return max(2, self.dtype.itemsize)

    @property
    def dtype(self) -> np.dtype[Any]:
        width = next((w for w in (8, 16, 32, 64) if self.bits <= w), 64)
        return np.dtype(f"{'i' if self.signed else 'u'}{width // 8}")

    @property
    def low(self) -> int:
        """The least value."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def high(self) -> int:
        """The greatest value."""
        return (1 << (self.bits - self.signed)) - 1

    def wrap(self, value: int) -> int:
        """The value modulo 2 to the width."""
        value &= (1 << self.bits) - 1
        return value - (1 << self.bits) if self.signed and value > self.high else value


_FLOATS: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Float(Type):
    """`f16`, `f32`, `bf16`."""

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(_FLOATS[self.name])


@dataclass(frozen=True)
class Cell(Type):
    """A type whose values are small integers: bool, color, queues, task ids."""

    @property
    def size(self) -> int:
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(bool) if self.name == "bool" else np.dtype(np.int32)


@dataclass(frozen=True)
class Register(Type):
    """A descriptor held in memory or a register: DSDs, DSRs, FIFOs."""

    @property
    def size(self) -> int:
        return {"mem4d_dsd": 24}.get(self.name, 8)


@dataclass(frozen=True)
class Comptime(Type):
    """`comptime_int`, `comptime_float`, `comptime_string`, `type`, `comptime_struct`, a module, `void`."""

    @property
    def comptime_only(self) -> bool:
        return self.name != "void"


@dataclass(frozen=True)
class Array(Type):
    """`[d1, d2]T`."""

    dims: tuple[int, ...] = ()
    element: Type = Type()

    @property
    def size(self) -> int:
        return self.count * self.element.size

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.dims)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.element.dtype

    @property
    def comptime_only(self) -> bool:
        return self.element.comptime_only

    @property
    def aggregate(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.dims))}]{self.element}"


@dataclass(frozen=True)
class Pointee(Type):
    """`*T`, `*const T`, `[*]T`, `[*]const T`."""

    element: Type = Type()
    const: bool = False
    many: bool = False

    @property
    def size(self) -> int:
        return 2

    def __str__(self) -> str:
        return f"{'[*]' if self.many else '*'}{'const ' if self.const else ''}{self.element}"


@dataclass(frozen=True)
class Fn(Type):
    """`fn (T, U) R`; a parameter of None accepts anything."""

    params: tuple[Type | None, ...] = ()
    result: Type = Type()
    task: bool = False

    @property
    def size(self) -> int:
        return 2

    def __str__(self) -> str:
        params = ", ".join(str(p) if p else "anytype" for p in self.params)
        return f"{'task' if self.task else 'fn'}({params}) {self.result}"


@dataclass(frozen=True)
class Struct(Type):
    """A named struct or union; fields are (name, type)."""

    fields: tuple[tuple[str, Type], ...] = ()
    packed: bool = False
    union: bool = False
    identity: Any = None  # where it is written: the same place with the same fields is the same type

    @property
    def size(self) -> int:
        sizes = [t.size for _, t in self.fields]
        return (max(sizes, default=0)) if self.union else sum(sizes)

    @property
    def dtype(self) -> np.dtype[Any]:
        rows = [(n, t.dtype, t.dims) if isinstance(t, Array) else (n, t.dtype) for n, t in self.fields]
        if not self.union:
            return np.dtype(rows)
        names = [n for n, _ in self.fields]
        formats = [np.dtype((row[1], row[2])) if len(row) == 3 else row[1] for row in rows]
        return np.dtype({"names": names, "formats": formats, "offsets": [0] * len(names)})

    @property
    def aggregate(self) -> bool:
        return True

    def field(self, name: str) -> Type | None:
        """The type of one field."""
        return dict(self.fields).get(name)


@dataclass(frozen=True)
class Enum(Type):
    """`enum(T) { A, B = 3 }`; members are (name, value)."""

    tag: Int = Int("u16", 16, False)
    members: tuple[tuple[str, int], ...] = ()
    identity: Any = None

    @property
    def size(self) -> int:
        return self.tag.size

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tag.dtype


def integer(name: str) -> Int | None:
    """The type `iN` or `uN` of that name."""
    if name[:1] in ("i", "u") and name[1:].isdigit() and (name[1] != "0" or name[1:] == "0"):
        return Int(name, int(name[1:]), name[0] == "i")
    return None


I16, U16, I32, U32 = Int("i16", 16), Int("u16", 16, False), Int("i32", 32), Int("u32", 32, False)
I8, U8, I64, U64 = Int("i8", 8), Int("u8", 8, False), Int("i64", 64), Int("u64", 64, False)
F16, F32, BF16 = Float("f16"), Float("f32"), Float("bf16")
BOOL, COLOR, DIRECTION, UT_ID = Cell("bool"), Cell("color"), Cell("direction"), Cell("ut_id")
INPUT_QUEUE, OUTPUT_QUEUE = Cell("input_queue"), Cell("output_queue")
LOCAL_TASK, DATA_TASK, CONTROL_TASK = Cell("local_task_id"), Cell("data_task_id"), Cell("control_task_id")
MEM1D, MEM4D, CIRCBUF = Register("mem1d_dsd"), Register("mem4d_dsd"), Register("circbuf_dsd")
FABIN, FABOUT, FIFO = Register("fabin_dsd"), Register("fabout_dsd"), Register("fifo_dsd")
DSR_DEST, DSR_SRC0, DSR_SRC1 = Register("dsr_dest"), Register("dsr_src0"), Register("dsr_src1")
DSR_FIFO_DEST, DSR_FIFO_SRC1 = Register("dsr_fifo_dest"), Register("dsr_fifo_src1")
XDSR = Cell("xdsr")
VOID, TYPE, ANON = Comptime("void"), Comptime("type"), Comptime("comptime_struct")
COMPTIME_INT, COMPTIME_FLOAT = Comptime("comptime_int"), Comptime("comptime_float")
STRING, MODULE, ANYTYPE = Comptime("comptime_string"), Comptime("imported_module"), Comptime("anytype")
ENUM_LITERAL, UNDEFINED, RANGE = Comptime("enum literal"), Comptime("undefined"), Comptime("range")

DSDS = frozenset({MEM1D, MEM4D, CIRCBUF, FABIN, FABOUT, FIFO})
# The registers that are known to hold a FIFO, and the files they belong to.
FIFO_DSRS = {DSR_FIFO_DEST: DSR_DEST, DSR_FIFO_SRC1: DSR_SRC1}
DSRS = frozenset({DSR_DEST, DSR_SRC0, DSR_SRC1, *FIFO_DSRS})
TASK_IDS = frozenset({LOCAL_TASK, DATA_TASK, CONTROL_TASK})
NAMED: dict[str, Type] = {
    t.name: t
    for t in (
        *(I8, U8, I16, U16, I32, U32, I64, U64, F16, F32, BF16, BOOL, COLOR, DIRECTION, UT_ID),
        *(INPUT_QUEUE, OUTPUT_QUEUE, LOCAL_TASK, DATA_TASK, CONTROL_TASK),
        *(MEM1D, MEM4D, CIRCBUF, FABIN, FABOUT, DSR_DEST, DSR_SRC0, DSR_SRC1),
        *(DSR_FIFO_DEST, DSR_FIFO_SRC1, XDSR),
        *(VOID, TYPE, ANON, COMPTIME_INT, COMPTIME_FLOAT, STRING, MODULE, ANYTYPE),
    )
}


def is_number(t: Type) -> bool:
    """Whether arithmetic is defined on a type."""
    return isinstance(t, (Int, Float)) or t in (COMPTIME_INT, COMPTIME_FLOAT)


def is_integer(t: Type) -> bool:
    """Whether a type is an integer type."""
    return isinstance(t, Int) or t is COMPTIME_INT

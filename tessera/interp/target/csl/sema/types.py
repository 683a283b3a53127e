"""Type system of CSL: numbers, handles, descriptors, pointers, arrays, structs, functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class CslType:
    """Any type; `str` returns its CSL spelling."""

    name: str = ""

    @property
    def size(self) -> int:
        """The size of one value in PE memory in bytes; 0 if it has none."""
        return 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of stored values."""
        return np.dtype(object)

    @property
    def comptime_only(self) -> bool:
        """Whether values exist only at comptime."""
        return False

    @property
    def aggregate(self) -> bool:
        """Whether a value is a block of memory (array, struct) instead of one cell."""
        return False

    @cached_property
    def unpack(self) -> Callable[[int], Any]:
        """A function that takes a value from the low bits of a wavelet."""
        dtype, mask = self.dtype, 0xFFFFFFFF if self.size == 4 else 0xFFFF
        if isinstance(self, CslInt) and not self.signed and dtype.itemsize in (2, 4):
            return lambda word: word & mask
        bits = np.dtype(np.uint32 if self.size == 4 else np.uint16)

        def unpack(word: int) -> Any:
            cell = np.array([word & mask], bits)
            cell = cell.view(dtype) if dtype.itemsize > 1 else cell
            return cell[0] if dtype.kind in "fV" else cell.item(0)

        return unpack

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class CslInt(CslType):
    """`iN` and `uN`."""

    bits: int = 16
    signed: bool = True

    @property
    def size(self) -> int:
        return max(2, self.dtype.itemsize)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        width = next((w for w in (8, 16, 32, 64) if self.bits <= w), 64)
        return np.dtype(f"{'i' if self.signed else 'u'}{width // 8}")

    @property
    def low(self) -> int:
        """The smallest value."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def high(self) -> int:
        """The largest value."""
        return (1 << (self.bits - self.signed)) - 1

    def wrap(self, value: int) -> int:
        """The value modulo 2 to the width."""
        value &= (1 << self.bits) - 1
        return value - (1 << self.bits) if self.signed and value > self.high else value


_FLOATS: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class CslFloat(CslType):
    """`f16`, `f32`, `bf16`."""

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(_FLOATS[self.name])


@dataclass(frozen=True)
class CslHandle(CslType):
    """A type whose values are small integers: bool, color, queues, task ids."""

    @property
    def size(self) -> int:
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(bool) if self.name == "bool" else np.dtype(np.int32)


@dataclass(frozen=True)
class CslDescriptor(CslType):
    """A descriptor in memory or in a register: DSDs, DSRs, FIFOs."""

    @property
    def size(self) -> int:
        return {"mem4d_dsd": 24}.get(self.name, 8)


@dataclass(frozen=True)
class CslComptime(CslType):
    """`comptime_int`, `comptime_float`, `comptime_string`, `type`, `comptime_struct`, a module, `void`."""

    @property
    def comptime_only(self) -> bool:
        return self.name != "void"


@dataclass(frozen=True)
class CslArray(CslType):
    """`[d1, d2]T`."""

    dims: tuple[int, ...] = ()
    element: CslType = CslType()

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
class CslPointer(CslType):
    """`*T`, `*const T`, `[*]T`, `[*]const T`."""

    element: CslType = CslType()
    const: bool = False
    many: bool = False

    @property
    def size(self) -> int:
        return 2

    def __str__(self) -> str:
        return f"{'[*]' if self.many else '*'}{'const ' if self.const else ''}{self.element}"


@dataclass(frozen=True)
class CslFunctionType(CslType):
    """`fn (T, U) R`; a parameter of None accepts any type."""

    params: tuple[CslType | None, ...] = ()
    result: CslType = CslType()
    task: bool = False

    @property
    def size(self) -> int:
        return 2

    def __str__(self) -> str:
        params = ", ".join(str(p) if p else "anytype" for p in self.params)
        return f"{'task' if self.task else 'fn'}({params}) {self.result}"


@dataclass(frozen=True)
class CslStruct(CslType):
    """A named struct or union; fields are (name, type)."""

    fields: tuple[tuple[str, CslType], ...] = ()
    packed: bool = False
    union: bool = False
    identity: Any = None  # the source location: structs at one location with equal fields are one type

    @property
    def size(self) -> int:
        sizes = [t.size for _, t in self.fields]
        return (max(sizes, default=0)) if self.union else sum(sizes)

    @property
    def dtype(self) -> np.dtype[Any]:
        rows = [(n, t.dtype, t.dims) if isinstance(t, CslArray) else (n, t.dtype) for n, t in self.fields]
        if not self.union:
            return np.dtype(rows)
        names = [n for n, _ in self.fields]
        formats = [np.dtype((row[1], row[2])) if len(row) == 3 else row[1] for row in rows]
        return np.dtype({"names": names, "formats": formats, "offsets": [0] * len(names)})

    @property
    def aggregate(self) -> bool:
        return True

    def field(self, name: str) -> CslType | None:
        """The type of one field."""
        return dict(self.fields).get(name)


@dataclass(frozen=True)
class CslEnum(CslType):
    """`enum(T) { A, B = 3 }`; members are (name, value)."""

    tag: CslInt = CslInt("u16", 16, False)
    members: tuple[tuple[str, int], ...] = ()
    identity: Any = None

    @property
    def size(self) -> int:
        return self.tag.size

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tag.dtype


def parse_integer_type(name: str) -> CslInt | None:
    """The integer type of a name `iN` or `uN`."""
    if name[:1] in ("i", "u") and name[1:].isdigit() and (name[1] != "0" or name[1:] == "0"):
        return CslInt(name, int(name[1:]), name[0] == "i")
    return None


I16, U16, I32, U32 = CslInt("i16", 16), CslInt("u16", 16, False), CslInt("i32", 32), CslInt("u32", 32, False)
I8, U8, I64, U64 = CslInt("i8", 8), CslInt("u8", 8, False), CslInt("i64", 64), CslInt("u64", 64, False)
F16, F32, BF16 = CslFloat("f16"), CslFloat("f32"), CslFloat("bf16")
BOOL, COLOR, DIRECTION, UT_ID = CslHandle("bool"), CslHandle("color"), CslHandle("direction"), CslHandle("ut_id")
INPUT_QUEUE, OUTPUT_QUEUE = CslHandle("input_queue"), CslHandle("output_queue")
LOCAL_TASK, DATA_TASK, CONTROL_TASK = (
    CslHandle("local_task_id"),
    CslHandle("data_task_id"),
    CslHandle("control_task_id"),
)
MEM1D, MEM4D, CIRCBUF = CslDescriptor("mem1d_dsd"), CslDescriptor("mem4d_dsd"), CslDescriptor("circbuf_dsd")
FABIN, FABOUT, FIFO = CslDescriptor("fabin_dsd"), CslDescriptor("fabout_dsd"), CslDescriptor("fifo_dsd")
DSR_DEST, DSR_SRC0, DSR_SRC1 = CslDescriptor("dsr_dest"), CslDescriptor("dsr_src0"), CslDescriptor("dsr_src1")
DSR_FIFO_DEST, DSR_FIFO_SRC1 = CslDescriptor("dsr_fifo_dest"), CslDescriptor("dsr_fifo_src1")
XDSR = CslHandle("xdsr")
VOID, TYPE, ANON = CslComptime("void"), CslComptime("type"), CslComptime("comptime_struct")
COMPTIME_INT, COMPTIME_FLOAT = CslComptime("comptime_int"), CslComptime("comptime_float")
STRING, MODULE, ANYTYPE = CslComptime("comptime_string"), CslComptime("imported_module"), CslComptime("anytype")
ENUM_LITERAL, UNDEFINED, RANGE = CslComptime("enum literal"), CslComptime("undefined"), CslComptime("range")

DSDS = frozenset({MEM1D, MEM4D, CIRCBUF, FABIN, FABOUT, FIFO})
# DSR types for FIFOs, with their DSR files.
FIFO_DSRS = {DSR_FIFO_DEST: DSR_DEST, DSR_FIFO_SRC1: DSR_SRC1}
DSRS = frozenset({DSR_DEST, DSR_SRC0, DSR_SRC1, *FIFO_DSRS})
TASK_IDS = frozenset({LOCAL_TASK, DATA_TASK, CONTROL_TASK})
NAMED: dict[str, CslType] = {
    t.name: t
    for t in (
        *(I8, U8, I16, U16, I32, U32, I64, U64, F16, F32, BF16, BOOL, COLOR, DIRECTION, UT_ID),
        *(INPUT_QUEUE, OUTPUT_QUEUE, LOCAL_TASK, DATA_TASK, CONTROL_TASK),
        *(MEM1D, MEM4D, CIRCBUF, FABIN, FABOUT, DSR_DEST, DSR_SRC0, DSR_SRC1),
        *(DSR_FIFO_DEST, DSR_FIFO_SRC1, XDSR),
        *(VOID, TYPE, ANON, COMPTIME_INT, COMPTIME_FLOAT, STRING, MODULE, ANYTYPE),
    )
}


def is_number(t: CslType) -> bool:
    """Whether a type has arithmetic."""
    return isinstance(t, (CslInt, CslFloat)) or t in (COMPTIME_INT, COMPTIME_FLOAT)


def is_integer(t: CslType) -> bool:
    """Whether a type is an integer type."""
    return isinstance(t, CslInt) or t is COMPTIME_INT

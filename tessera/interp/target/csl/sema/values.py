"""Comptime values of CSL: pointers, DSDs, DSRs, FIFOs, color configurations, and the updates of descriptors.

An update (`@set_dsd_length` and the like) is one function for comptime and run time; generated code calls it by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import UNKNOWN, Location
from tessera.interp.target.csl.sema import types as t

# Comptime values, pointers, descriptors and color configurations.


DIRECTIONS = ("WEST", "EAST", "SOUTH", "NORTH", "RAMP")


class ComptimeValue(NamedTuple):
    """A comptime-known value.

    `data` is an int, a NumPy scalar, a str, a CslType, a NumPy array (arrays and structs), a dict of names to values
    (anonymous structs; "0", "1", … for tuples), a `Pointer`, a descriptor, a function or a module.
    """

    type: t.CslType
    data: Any


class Pointer(NamedTuple):
    """An address: a flat array and an index. At comptime the array may be a `GlobalVariable` without memory."""

    array: Any
    index: int  # type: ignore[assignment]


class RegisterFile:
    """The array of a comptime pointer to a router register, which each PE replaces by its registers."""


REGISTERS = RegisterFile()


def make_hashable(value: Any) -> Any:
    """A hashable form of a comptime value, equal for equal values."""
    if isinstance(value, ComptimeValue):
        return (value.type, make_hashable(value.data))
    if isinstance(value, dict):
        return tuple((n, make_hashable(v)) for n, v in value.items())
    if isinstance(value, np.ndarray):
        return tuple(make_hashable(v) for v in value) if value.dtype == object else (value.dtype.str, value.tobytes())
    return value


@dataclass(frozen=True)
class GlobalCast:
    """A `GlobalVariable` reinterpreted as cells of another type; `name` is that of the cells in generated code."""

    array: Any
    dtype: Any
    name: str = field(default="", compare=False)


class Mem1d(NamedTuple):
    """A memory vector DSD: `byte` offset into `array`; `stride` in elements; `indexed`: the wavelet index is added."""

    array: Any
    byte: int
    stride: int
    extent: int
    indexed: bool = False


class Mem4d(NamedTuple):
    """A memory tensor DSD: extents and strides in elements, outermost first."""

    array: Any
    byte: int
    strides: tuple[int, ...]
    extents: tuple[int, ...]
    indexed: bool = False

    @property
    def extent(self) -> int:
        """The number of elements."""
        return int(np.prod(self.extents))


class Circular(NamedTuple):
    """A circular buffer DSD, which wraps at the end of its array."""

    array: Any
    byte: int
    extent: int
    start: int = 0


class Fabin(NamedTuple):
    """A fabric input DSD: wavelets of a color.

    A wavelet holds `lanes` elements of 16 bits. With `transform`, control wavelets arrive as data with their upper two
    bits marked. With `in_pairs`, wavelets are read two at a time.
    """

    color: int
    extent: int
    queue: int
    control: bool = False
    lanes: int = 1
    transform: bool = False
    in_pairs: bool = False


class Fabout(NamedTuple):
    """A fabric output DSD: wavelets sent on a color; `lanes` and `transform` as in `Fabin`.

    `advance`: the last wavelet advances the switch of the color. `cleared`: the source (0 or 1) whose memory is set to
    zero.
    """

    color: int
    extent: int
    queue: int
    control: bool = False
    indexed: bool = False
    lanes: int = 1
    transform: bool = False
    advance: bool = False
    cleared: int = -1


class FifoRef(NamedTuple):
    """A FIFO of the program; each PE has its own `Fifo`."""

    number: int


class Dsr(NamedTuple):
    """One DSR: file ("dsr_dest", "dsr_src0", "dsr_src1") and number."""

    file: str
    number: int


class DsrContents:
    """The contents of a DSR: a descriptor with the options of its load."""

    __slots__ = ("dsd", "options", "save")

    def __init__(self, dsd: Any, options: dict[str, Any], save: bool) -> None:
        self.dsd, self.options, self.save = dsd, options, save


class Fifo:
    """A FIFO in PE memory.

    `on_push` and `on_pop` are ids of tasks to activate: `on_push` at a push after a read of the empty FIFO (`starved`),
    `on_pop` at a pop after a write to the full FIFO (`choked`). The lengths apply to operations without another length.
    """

    def __init__(self, capacity: int, on_push: int | None, on_pop: int | None) -> None:
        self.words: deque[Any] = deque()
        self.capacity, self.on_push, self.on_pop = capacity, on_push, on_pop
        self.starved = self.choked = False
        self.read_length = self.write_length = 0


@dataclass(eq=False)
class GlobalVariable:
    """A global variable of a program; each PE has its own array of it."""

    number: int
    name: str
    type: t.CslType
    initial: Any
    mutable: bool
    loc: Location
    addressed: bool = False

    @property
    def count(self) -> int:
        """The number of cells."""
        return self.type.count if isinstance(self.type, t.CslArray) else 1


@dataclass(frozen=True, eq=False)
class NativeFunction:
    """A library function written in Python: `run(pe, *args)`.

    `waits`: `run` is a generator function. `comptime`: it is `run(unit, *values) -> ComptimeValue` at comptime.
    `cycles`: the cost of a call. `whole`: the same function on arrays, for a function of numbers only. `deferrable`: it
    returns nothing and does not access memory until the task ends. `live`: it reads or changes the PE, so that it
    cannot be called at comptime. `preloadable`: a comptime call is executed before the program starts. `typed`: it
    receives the types as a tuple before the other arguments. `shorter`: the numbers of arguments it accepts
    besides that of its type's parameters.
    """

    name: str
    run: Callable[..., Any]
    waits: bool = False
    comptime: bool = False
    cycles: int = 2
    result: Callable[..., t.CslType] | None = None
    whole: Callable[..., Any] | None = None
    deferrable: bool = False
    live: bool = False
    typed: bool = False
    preloadable: bool = False
    shorter: tuple[int, ...] = ()


@dataclass(frozen=True)
class SwitchPosition:
    """The changes of a switch position to the route."""

    rx: str | None = None
    tx: str | None = None
    invalid: bool = False


@dataclass(frozen=True)
class FilterConfig:
    """A wavelet filter of a PE's ramp: `kind` is "counter", "sparse_counter" or "range"."""

    kind: str
    limits: dict[str, int] = field(default_factory=dict)
    init_counter: int = 0


@dataclass(frozen=True)
class ColorConfig:
    """The routing of one color at one PE."""

    rx: tuple[str, ...]
    tx: tuple[str, ...]
    switches: tuple[SwitchPosition, ...] = ()
    current: int = 0
    ring: bool = False
    pop_mode: str = "no_pop"
    filter: FilterConfig | None = None
    teardown: bool = False
    swap_x: bool = False
    swap_y: bool = False
    loc: Location = UNKNOWN


# Descriptor updates: the same at comptime and at run time.


def increment_dsd_offset(d: Any, count: int) -> Any:
    """`@increment_dsd_offset`, in bytes."""
    if type(d) is Mem1d:
        array, byte, stride, extent, indexed = d
        return tuple.__new__(Mem1d, (array, byte + count, stride, extent, indexed))
    return d._replace(byte=d.byte + count)


def set_dsd_length(d: Any, extent: int) -> Any:
    """`@set_dsd_length`."""
    if type(d) is Mem1d:
        array, byte, stride, _, indexed = d
        return tuple.__new__(Mem1d, (array, byte, stride, extent, indexed))
    return d._replace(extent=extent)


def set_dsd_stride(d: Mem1d, stride: int) -> Mem1d:
    """`@set_dsd_stride`."""
    return d._replace(stride=stride)


def set_dsd_base_addr(d: Any, base: Any) -> Any:
    """`@set_dsd_base_addr`; it also resets the offset of the descriptor."""
    array, index = base
    byte = index * element_size(array)
    if type(d) is Mem1d:
        return tuple.__new__(Mem1d, (array, byte, *d[2:]))
    return d._replace(array=array, byte=byte)


def element_size(array: Any) -> int:
    """The size in bytes of one cell of an array or of a `GlobalVariable`."""
    if isinstance(array, GlobalVariable):
        return array.type.dtype.itemsize
    return array.dtype.itemsize


DSD_UPDATES = {f.__name__: f for f in (increment_dsd_offset, set_dsd_length, set_dsd_stride, set_dsd_base_addr)}

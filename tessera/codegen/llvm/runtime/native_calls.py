"""Native calls: machine code that checks the arrays of a call, stores their addresses, and runs its launches.

A small program takes less time than Python needs to look at its arguments one by one. Machine code reads what an array
is in the fields of NumPy's arrays (PyArrayObject_fields of its C interface, the same in every release) and of CPython's
lists. It calls nothing of Python, and what is not as described is left to the general way: arrays of another type,
shape or layout, which may need a copy or an error.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tessera.codegen.llvm.runtime import interrupts, thread_pool
from tessera.codegen.llvm.runtime.jit import MachineCode
from tessera.codegen.llvm.text.protocol import NO_FAILURE
from tessera.codegen.plan_execution import ArgumentBinder, PlanParameter
from tessera.core.device import array_address

HEADER = object.__basicsize__  # of every object: its count of references and its type
TYPE = HEADER - 8
ITEMS = HEADER + 8  # of a list, behind its length
DATA, RANK, SIZES, ELEMENT, FLAGS = HEADER, HEADER + 8, HEADER + 16, HEADER + 40, HEADER + 48  # of an array
PLAIN = 0x0101  # NPY_ARRAY_C_CONTIGUOUS and NPY_ARRAY_ALIGNED
DONE, FAILED, OTHER_ARRAYS = 0, 1, 2

# A call has the numbers of arrays and of uses, the launches (six arguments of `tessera_launch`), and addresses: of
# the descriptions of the arrays (rank, element type, address of the sizes), of the uses (array, slot), of the slots.
CALL_TEXT = f"""
%call = type {{ i64, i64, ptr, ptr, i64, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr }}
%array = type {{ i64, ptr, ptr }}
%use = type {{ i64, i64 }}

define i64 @call(ptr %call, ptr %list) {{
entry:
  %items.p = getelementptr i8, ptr %list, i64 {ITEMS}
  %items = load ptr, ptr %items.p
  %count = load i64, ptr %call
  %class.p = getelementptr %call, ptr %call, i64 0, i32 12
  %class = load ptr, ptr %class.p
  %arrays.p = getelementptr %call, ptr %call, i64 0, i32 9
  %arrays = load ptr, ptr %arrays.p
  br label %array
array:
  %i = phi i64 [ 0, %entry ], [ %i.next, %checked ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %check, label %uses
check:
  %item.p = getelementptr ptr, ptr %items, i64 %i
  %item = load ptr, ptr %item.p
  %own.class.p = getelementptr i8, ptr %item, i64 {TYPE}
  %own.class = load ptr, ptr %own.class.p
  %is.array = icmp eq ptr %own.class, %class
  br i1 %is.array, label %fields, label %other
fields:
  %known = getelementptr %array, ptr %arrays, i64 %i
  %rank = load i64, ptr %known
  %element.p = getelementptr %array, ptr %known, i64 0, i32 1
  %element = load ptr, ptr %element.p
  %sizes.p = getelementptr %array, ptr %known, i64 0, i32 2
  %sizes = load ptr, ptr %sizes.p
  %own.rank.p = getelementptr i8, ptr %item, i64 {RANK}
  %own.rank.i = load i32, ptr %own.rank.p
  %own.rank = sext i32 %own.rank.i to i64
  %own.element.p = getelementptr i8, ptr %item, i64 {ELEMENT}
  %own.element = load ptr, ptr %own.element.p
  %own.sizes.p = getelementptr i8, ptr %item, i64 {SIZES}
  %own.sizes = load ptr, ptr %own.sizes.p
  %flags.p = getelementptr i8, ptr %item, i64 {FLAGS}
  %flags = load i32, ptr %flags.p
  %plain.flags = and i32 %flags, {PLAIN}
  %same.rank = icmp eq i64 %rank, %own.rank
  %same.element = icmp eq ptr %element, %own.element
  %plain = icmp eq i32 %plain.flags, {PLAIN}
  %a = and i1 %same.rank, %same.element
  %b = and i1 %a, %plain
  br i1 %b, label %size, label %other
size:
  %j = phi i64 [ 0, %fields ], [ %j.next, %same ]
  %rest = icmp slt i64 %j, %rank
  br i1 %rest, label %compare, label %checked
compare:
  %x.p = getelementptr i64, ptr %sizes, i64 %j
  %x = load i64, ptr %x.p
  %y.p = getelementptr i64, ptr %own.sizes, i64 %j
  %y = load i64, ptr %y.p
  %equal = icmp eq i64 %x, %y
  br i1 %equal, label %same, label %other
same:
  %j.next = add i64 %j, 1
  br label %size
checked:
  %i.next = add i64 %i, 1
  br label %array
uses:
  %use.count.p = getelementptr %call, ptr %call, i64 0, i32 1
  %use.count = load i64, ptr %use.count.p
  %table.p = getelementptr %call, ptr %call, i64 0, i32 10
  %table = load ptr, ptr %table.p
  %slots.p = getelementptr %call, ptr %call, i64 0, i32 11
  %slots = load ptr, ptr %slots.p
  br label %use
use:
  %u = phi i64 [ 0, %uses ], [ %u.next, %fill ]
  %unfilled = icmp slt i64 %u, %use.count
  br i1 %unfilled, label %fill, label %launch
fill:
  %use.p = getelementptr %use, ptr %table, i64 %u
  %of = load i64, ptr %use.p
  %slot.p = getelementptr %use, ptr %use.p, i64 0, i32 1
  %slot = load i64, ptr %slot.p
  %used.p = getelementptr ptr, ptr %items, i64 %of
  %used = load ptr, ptr %used.p
  %data.p = getelementptr i8, ptr %used, i64 {DATA}
  %data = load i64, ptr %data.p
  %to = getelementptr i64, ptr %slots, i64 %slot
  store i64 %data, ptr %to
  %u.next = add i64 %u, 1
  br label %use
launch:
  %f.p = getelementptr %call, ptr %call, i64 0, i32 2
  %f = load ptr, ptr %f.p
  %run.p = getelementptr %call, ptr %call, i64 0, i32 3
  %run = load ptr, ptr %run.p
  %tasks.n.p = getelementptr %call, ptr %call, i64 0, i32 4
  %tasks.n = load i64, ptr %tasks.n.p
  %tasks.p = getelementptr %call, ptr %call, i64 0, i32 5
  %tasks = load ptr, ptr %tasks.p
  %states.p = getelementptr %call, ptr %call, i64 0, i32 6
  %states = load ptr, ptr %states.p
  %scratch.p = getelementptr %call, ptr %call, i64 0, i32 7
  %scratch = load ptr, ptr %scratch.p
  %word.p = getelementptr %call, ptr %call, i64 0, i32 8
  %word = load ptr, ptr %word.p
  store i64 {NO_FAILURE}, ptr %word
  call void %f(ptr %run, ptr %tasks, i64 %tasks.n, ptr %states, ptr %scratch, ptr %word)
  %result = load atomic i64, ptr %word acquire, align 8
  %fine = icmp eq i64 %result, {NO_FAILURE}
  %code = select i1 %fine, i64 {DONE}, i64 {FAILED}
  ret i64 %code
other:
  ret i64 {OTHER_ARRAYS}
}}
"""


def _read(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


@cache
def _has_known_layout() -> bool:
    """Whether the fields of lists and arrays are where machine code reads them."""
    if sys.implementation.name != "cpython" or HEADER != 16 or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    whole = np.arange(24.0).reshape(2, 3, 4)
    listed = [whole, whole[:, 1:], whole.T, np.zeros((), np.int32)]
    items = _read(id(listed) + ITEMS)
    return all(_read(items + 8 * i) == id(a) and _has_known_fields(a) for i, a in enumerate(listed))


def _has_known_fields(a: np.ndarray) -> bool:
    sizes = [_read(_read(id(a) + SIZES) + 8 * i) for i in range(a.ndim)]
    flags = ctypes.c_int32.from_address(id(a) + FLAGS).value
    return (
        _read(id(a) + TYPE) == id(np.ndarray)
        and _read(id(a) + DATA) == array_address(a)
        and ctypes.c_int32.from_address(id(a) + RANK).value == a.ndim
        and tuple(sizes) == a.shape
        and _read(id(a) + ELEMENT) == id(a.dtype)
        and flags & PLAIN == (a.flags.c_contiguous | a.flags.aligned << 8)
    )


@cache
def _get_entry() -> Any:
    code = MachineCode(CALL_TEXT)
    entry = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(code.address("call"))
    entry.code = code  # type: ignore[attr-defined]  # the memory lives as long as the function
    return entry


class NativeCall:
    """The launches of one program for arrays of known types: `param_slots` are the slots that each array fills."""

    def __init__(
        self,
        params: Sequence[PlanParameter],
        param_slots: Sequence[Any],
        tasks: np.ndarray,
        slots: np.ndarray,
        scratch: int,
        word: int,
        short: bool,
    ) -> None:
        self._outputs = [p for p in params if p.output]
        self._sizes = [np.array(p.shape, np.int64) for p in params]
        self._elements = [p.dtype.numpy for p in params]
        described = [
            (len(p.shape), id(e), array_address(s)) for p, e, s in zip(params, self._elements, self._sizes, strict=True)
        ]
        self._arrays = np.array(described, np.int64)
        uses = [(i, int(slot)) for i, found in enumerate(param_slots) for slot in np.atleast_1d(found)]
        self._uses = np.array(uses, np.int64).reshape(-1, 2)
        launch = interrupts.get_direct_address() if short else interrupts.get_interruptible_address()
        run = thread_pool.get_serial_address()
        self._kept = (tasks, slots)
        self._call = np.array(
            [
                len(params), len(uses), launch, run, len(tasks), array_address(tasks), 0, scratch, word,
                array_address(self._arrays), array_address(self._uses), array_address(slots), id(np.ndarray),
            ],
            np.int64,
        )  # fmt: skip
        self._address, self._entry = array_address(self._call), _get_entry()
        self.inputs = len(params) - len(self._outputs)

    def run(self, arrays: Sequence[Any]) -> tuple[int, list[Any]]:
        """What came of the call (DONE, FAILED, OTHER_ARRAYS), and its results; by one thread at a time."""
        made = [p.allocate() for p in self._outputs]
        given = [*arrays, *made]
        return self._entry(self._address, id(given)), made


def make_native_call(
    arguments: ArgumentBinder,
    param_slots: Sequence[Any],
    tasks: np.ndarray,
    slots: np.ndarray,
    scratch: int,
    word: int,
    short: bool,
) -> NativeCall | None:
    """The native call of a program whose arrays are only read, or made; None where the general way is needed.

    `short`: it ends so soon that Ctrl-C may take effect after it.
    """
    params = arguments.params
    first = next((i for i, p in enumerate(params) if p.output), len(params))
    plain = not any(p.scalar for p in params) and all(p.output for p in params[first:])
    written = any(i in arguments.written for i in arguments.inputs) or arguments.reused or arguments.zeroed
    if not plain or written or not len(tasks) or not _has_known_layout():
        return None
    return NativeCall(params, param_slots, tasks, slots, scratch, word, short)

"""Native calls: machine code that checks the arrays of a call and stores their addresses (a native binding), and that
runs the launches of a small program in the same call.

Python needs longer to look at the arguments of a small program one by one than the program takes, and up to a
millisecond for the weights of a large model. Machine code reads what an array is in the fields of NumPy's arrays
(PyArrayObject_fields of its C interface, the same in every release) and of CPython's lists. It calls nothing of Python,
and what is not as described is left to the general way: arrays of another type, shape or layout, which may need a copy
or an error.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from tessera.codegen.llvm.runtime import interrupts, thread_pool
from tessera.codegen.llvm.runtime.jit import MachineCode, compile_once
from tessera.codegen.llvm.text.protocol import NO_FAILURE
from tessera.codegen.plan_execution import ArgumentBinder
from tessera.core.device import array_address
from tessera.core.kept_memory import LEAST_BYTES

HEADER = object.__basicsize__  # of every object: its count of references and its type
TYPE = HEADER - 8
ITEMS = HEADER + 8  # of a list, behind its length
DATA, RANK, SIZES, ELEMENT, FLAGS = HEADER, HEADER + 8, HEADER + 16, HEADER + 40, HEADER + 48  # of an array
KIND = HEADER + 8  # of an element type: kind, letter, byte order, flags, and its number in 4 bytes (PyArray_Descr)
PLAIN = 0x0101  # NPY_ARRAY_C_CONTIGUOUS and NPY_ARRAY_ALIGNED
DONE, FAILED, OTHER_ARRAYS = 0, 1, 2

# A binding has the numbers of arrays and of uses, and addresses: of the descriptions of the arrays (rank, kind of
# element, address of the sizes), of the uses (array, slot), of the slots, of the class of arrays. A call has the
# address of its binding, and a function that launches with its arguments.
CHECK_TEXT = f"""
%binding = type {{ i64, i64, ptr, ptr, ptr, ptr }}
%call = type {{ ptr, ptr, ptr, i64, ptr, ptr, ptr, ptr }}
%array = type {{ i64, i64, ptr }}
%use = type {{ i64, i64 }}

define internal i1 @is_plain(ptr %item, ptr %known, ptr %class) {{
entry:
  %own.class.p = getelementptr i8, ptr %item, i64 {TYPE}
  %own.class = load ptr, ptr %own.class.p
  %is.array = icmp eq ptr %own.class, %class
  br i1 %is.array, label %fields, label %no
fields:
  %rank = load i64, ptr %known
  %kind.p = getelementptr %array, ptr %known, i64 0, i32 1
  %kind = load i64, ptr %kind.p
  %sizes.p = getelementptr %array, ptr %known, i64 0, i32 2
  %sizes = load ptr, ptr %sizes.p
  %own.rank.p = getelementptr i8, ptr %item, i64 {RANK}
  %own.rank.i = load i32, ptr %own.rank.p
  %own.rank = sext i32 %own.rank.i to i64
  %own.element.p = getelementptr i8, ptr %item, i64 {ELEMENT}
  %own.element = load ptr, ptr %own.element.p
  %own.kind.p = getelementptr i8, ptr %own.element, i64 {KIND}
  %own.kind = load i64, ptr %own.kind.p
  %own.sizes.p = getelementptr i8, ptr %item, i64 {SIZES}
  %own.sizes = load ptr, ptr %own.sizes.p
  %flags.p = getelementptr i8, ptr %item, i64 {FLAGS}
  %flags = load i32, ptr %flags.p
  %plain.flags = and i32 %flags, {PLAIN}
  %same.rank = icmp eq i64 %rank, %own.rank
  %same.element = icmp eq i64 %kind, %own.kind
  %plain = icmp eq i32 %plain.flags, {PLAIN}
  %a = and i1 %same.rank, %same.element
  %b = and i1 %a, %plain
  br i1 %b, label %size, label %no
size:
  %j = phi i64 [ 0, %fields ], [ %j.next, %same ]
  %rest = icmp slt i64 %j, %rank
  br i1 %rest, label %compare, label %yes
compare:
  %x.p = getelementptr i64, ptr %sizes, i64 %j
  %x = load i64, ptr %x.p
  %y.p = getelementptr i64, ptr %own.sizes, i64 %j
  %y = load i64, ptr %y.p
  %equal = icmp eq i64 %x, %y
  br i1 %equal, label %same, label %no
same:
  %j.next = add i64 %j, 1
  br label %size
yes:
  ret i1 true
no:
  ret i1 false
}}

define internal void @fill(ptr %binding, ptr %items) {{
entry:
  %use.count.p = getelementptr %binding, ptr %binding, i64 0, i32 1
  %use.count = load i64, ptr %use.count.p
  %table.p = getelementptr %binding, ptr %binding, i64 0, i32 3
  %table = load ptr, ptr %table.p
  %slots.p = getelementptr %binding, ptr %binding, i64 0, i32 4
  %slots = load ptr, ptr %slots.p
  br label %use
use:
  %u = phi i64 [ 0, %entry ], [ %u.next, %store ]
  %unfilled = icmp slt i64 %u, %use.count
  br i1 %unfilled, label %store, label %done
store:
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
done:
  ret void
}}

define internal i64 @launch(ptr %call) {{
entry:
  %f.p = getelementptr %call, ptr %call, i64 0, i32 1
  %f = load ptr, ptr %f.p
  %run.p = getelementptr %call, ptr %call, i64 0, i32 2
  %run = load ptr, ptr %run.p
  %tasks.n.p = getelementptr %call, ptr %call, i64 0, i32 3
  %tasks.n = load i64, ptr %tasks.n.p
  %tasks.p = getelementptr %call, ptr %call, i64 0, i32 4
  %tasks = load ptr, ptr %tasks.p
  %job.p = getelementptr %call, ptr %call, i64 0, i32 5
  %job = load ptr, ptr %job.p
  %scratch.p = getelementptr %call, ptr %call, i64 0, i32 6
  %scratch = load ptr, ptr %scratch.p
  %word.p = getelementptr %call, ptr %call, i64 0, i32 7
  %word = load ptr, ptr %word.p
  store i64 {NO_FAILURE}, ptr %word
  call void %f(ptr %run, ptr %tasks, i64 %tasks.n, ptr %job, ptr %scratch, ptr %word)
  %result = load atomic i64, ptr %word acquire, align 8
  %fine = icmp eq i64 %result, {NO_FAILURE}
  %code = select i1 %fine, i64 {DONE}, i64 {FAILED}
  ret i64 %code
}}
"""
CALL_TEXT = f"""{CHECK_TEXT}
define i64 @bind(ptr %binding, ptr %list) {{
entry:
  %items.p = getelementptr i8, ptr %list, i64 {ITEMS}
  %items = load ptr, ptr %items.p
  %count = load i64, ptr %binding
  %class.p = getelementptr %binding, ptr %binding, i64 0, i32 5
  %class = load ptr, ptr %class.p
  %arrays.p = getelementptr %binding, ptr %binding, i64 0, i32 2
  %arrays = load ptr, ptr %arrays.p
  br label %array
array:
  %i = phi i64 [ 0, %entry ], [ %i.next, %checked ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %check, label %uses
check:
  %item.p = getelementptr ptr, ptr %items, i64 %i
  %item = load ptr, ptr %item.p
  %known = getelementptr %array, ptr %arrays, i64 %i
  %plain = call i1 @is_plain(ptr %item, ptr %known, ptr %class)
  br i1 %plain, label %checked, label %other
checked:
  %i.next = add i64 %i, 1
  br label %array
uses:
  call void @fill(ptr %binding, ptr %items)
  ret i64 {DONE}
other:
  ret i64 {OTHER_ARRAYS}
}}

define i64 @call(ptr %call, ptr %list) {{
entry:
  %binding = load ptr, ptr %call
  %bound = call i64 @bind(ptr %binding, ptr %list)
  %plain = icmp eq i64 %bound, {DONE}
  br i1 %plain, label %launch, label %other
launch:
  %code = call i64 @launch(ptr %call)
  ret i64 %code
other:
  ret i64 {OTHER_ARRAYS}
}}
"""


def read_word(address: int) -> int:
    """The word of 8 bytes at an address."""
    return ctypes.c_int64.from_address(address).value


@cache
def has_known_layout() -> bool:
    """Whether the fields of lists, arrays and element types are where machine code reads them."""
    if sys.implementation.name != "cpython" or HEADER != 16 or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    whole = np.arange(24.0).reshape(2, 3, 4)
    listed = [whole, whole[:, 1:], whole.T, np.zeros((), np.int32)]
    items = read_word(id(listed) + ITEMS)
    known = all(read_word(items + 8 * i) == id(a) and _has_known_fields(a) for i, a in enumerate(listed))
    return known and all(_has_known_kind(np.dtype(name)) for name in ("?", "f2", "<f4", ">f4", "u1", "i8"))


def _has_known_fields(a: np.ndarray) -> bool:
    sizes = [read_word(read_word(id(a) + SIZES) + 8 * i) for i in range(a.ndim)]
    flags = ctypes.c_int32.from_address(id(a) + FLAGS).value
    return (
        read_word(id(a) + TYPE) == id(np.ndarray)
        and read_word(id(a) + DATA) == array_address(a)
        and ctypes.c_int32.from_address(id(a) + RANK).value == a.ndim
        and tuple(sizes) == a.shape
        and read_word(id(a) + ELEMENT) == id(a.dtype)
        and flags & PLAIN == (a.flags.c_contiguous | a.flags.aligned << 8)
    )


def _has_known_kind(element: np.dtype) -> bool:
    kind, letter, order, _, *number = read_word(id(element) + KIND).to_bytes(8, "little", signed=True)
    found = chr(kind), chr(letter), chr(order), int.from_bytes(number, "little")
    return found == (element.kind, element.char, element.byteorder, element.num)


@compile_once
def _compile() -> MachineCode:
    return MachineCode(CALL_TEXT)


@cache
def _get_call_entry() -> Any:
    """The machine code of a call; the interpreter lock is released while it runs."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(_compile().address("call"))


@cache
def _get_binding_entry() -> Any:
    """The machine code of a binding; it ends so soon that the interpreter lock is kept."""
    return ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(_compile().address("bind"))


def list_uses(param_slots: Sequence[Any]) -> np.ndarray:
    """The pairs (parameter, slot) of a program."""
    uses = [(i, int(slot)) for i, found in enumerate(param_slots) for slot in np.atleast_1d(found)]
    return np.array(uses, np.int64).reshape(-1, 2)


class NativeBinding:
    """Checks the arrays of a call of a program, and stores their addresses in its slots.

    `param_slots` are the slots that each parameter fills.
    """

    def __init__(self, arguments: ArgumentBinder, param_slots: Sequence[Any], slots: np.ndarray) -> None:
        params = arguments.params
        self.inputs = len(arguments.inputs)
        self.makers = [self._find_maker(arguments, i) for i, p in enumerate(params) if p.output]
        self._sizes = [np.array(p.shape, np.int64) for p in params]
        described = [
            (len(p.shape), read_word(id(p.dtype.numpy) + KIND), array_address(s))
            for p, s in zip(params, self._sizes, strict=True)
        ]
        self._arrays = np.array(described, np.int64)
        self._uses, self._slots = list_uses(param_slots), slots
        addresses = [array_address(a) for a in (self._arrays, self._uses, slots)]
        self._binding = np.array([len(params), len(self._uses), *addresses, id(np.ndarray)], np.int64)
        self.address, self._entry = array_address(self._binding), _get_binding_entry()

    @staticmethod
    def _find_maker(arguments: ArgumentBinder, place: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What makes the array of a result with its arguments; without arguments, it takes the arrays of the call."""
        if place in arguments.reused:
            return itemgetter(arguments.reused[place]), ()
        param = arguments.params[place]
        if place in arguments.zeroed or param.bytes >= LEAST_BYTES:
            return param.allocate, (place in arguments.zeroed,)
        return np.empty, (param.shape, param.dtype.numpy)

    def complete(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays of a call with those of its results."""
        given = [*arrays]
        for make, details in self.makers:
            given.append(make(*details) if details else make(arrays))
        return given

    def fill(self, given: list[Any]) -> bool:
        """Store the addresses of completed arrays; False where some must be converted or refused.

        By one thread at a time, which has the lock of the program.
        """
        return self._entry(self.address, id(given)) == DONE  # type: ignore[no-any-return]


class NativeLaunch:
    """The launches of one program; `job`: None on one thread, `short`: Ctrl-C takes effect after them.

    `address` is that of a call for machine code, which begins with the address of a binding, or 0.
    """

    def __init__(
        self, tasks: np.ndarray, job: np.ndarray | None, scratch: int, word: int, short: bool, binding: int = 0
    ) -> None:
        launch = interrupts.get_direct_address() if short else interrupts.get_interruptible_address()
        run = thread_pool.get_worker_address(job is None)
        place = 0 if job is None else array_address(job)
        self._kept = (tasks, job)
        self._call = np.array((binding, launch, run, len(tasks), array_address(tasks), place, scratch, word), np.int64)
        self.address = array_address(self._call)


class NativeCall(NativeLaunch):
    """The launches of one program for arrays of known types, with the binding of these."""

    def __init__(
        self, binding: NativeBinding, tasks: np.ndarray, job: np.ndarray | None, scratch: int, word: int, short: bool
    ) -> None:
        super().__init__(tasks, job, scratch, word, short, binding.address)
        self.binding, self._entry = binding, _get_call_entry()

    def run(self, given: list[Any]) -> int:
        """What came of a call with completed arrays: DONE, FAILED or OTHER_ARRAYS; by one thread at a time."""
        return self._entry(self.address, id(given))  # type: ignore[no-any-return]


def make_native_binding(
    arguments: ArgumentBinder, param_slots: Sequence[Any], slots: np.ndarray
) -> NativeBinding | None:
    """The native binding of a program; None where the general way is needed: for scalars, and arrays of the caller that
    are written, which may share memory with others."""
    params = arguments.params
    first = next((i for i, p in enumerate(params) if p.output), len(params))
    plain = not any(p.scalar for p in params) and all(p.output for p in params[first:])
    if not plain or arguments.aliasable or not has_known_layout():
        return None
    return NativeBinding(arguments, param_slots, slots)

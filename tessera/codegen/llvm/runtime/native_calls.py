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

import llvmlite.binding as llvm
import numpy as np

from tessera.codegen.llvm.runtime import interrupts, thread_pool
from tessera.codegen.llvm.runtime.jit import MachineCode, compile_once
from tessera.codegen.llvm.text.protocol import NO_FAILURE
from tessera.codegen.plan_execution import ArgumentBinder
from tessera.core.device import array_address
from tessera.core.kept_memory import LEAST_BYTES
from tessera.ir.tensor import Tensor

HEADER = object.__basicsize__  # of every object: its count of references and its type
TYPE = HEADER - 8
ITEMS = HEADER + 8  # of a list, behind its length
DATA, RANK, SIZES, ELEMENT, FLAGS = HEADER, HEADER + 8, HEADER + 16, HEADER + 40, HEADER + 48  # of an array
KIND = HEADER + 8  # of an element type: kind, letter, byte order, flags, and its number in 4 bytes (PyArray_Descr)
PLAIN = 0x0101  # NPY_ARRAY_C_CONTIGUOUS and NPY_ARRAY_ALIGNED
DONE, FAILED, OTHER_ARRAYS = 0, 1, 2

# A binding has the numbers of arrays and of uses, and addresses: of the descriptions of the arrays (rank, kind of
# element, address of the sizes), of the uses (array, slot), of the slots, of the class of arrays. A call has the
# address of its binding, and a function that launches with its arguments: no states, as one thread needs none.
CALL_TEXT = f"""
%binding = type {{ i64, i64, ptr, ptr, ptr, ptr }}
%call = type {{ ptr, ptr, ptr, i64, ptr, ptr, ptr }}
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
  %scratch.p = getelementptr %call, ptr %call, i64 0, i32 5
  %scratch = load ptr, ptr %scratch.p
  %word.p = getelementptr %call, ptr %call, i64 0, i32 6
  %word = load ptr, ptr %word.p
  store i64 {NO_FAILURE}, ptr %word
  call void %f(ptr %run, ptr %tasks, i64 %tasks.n, ptr null, ptr %scratch, ptr %word)
  %result = load atomic i64, ptr %word acquire, align 8
  %fine = icmp eq i64 %result, {NO_FAILURE}
  %code = select i1 %fine, i64 {DONE}, i64 {FAILED}
  ret i64 %code
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

# A call with tensors is a function of Python in machine code: it checks and unwraps its arguments, makes the arrays of
# the results, launches without the interpreter lock, and wraps the results. Its first argument is an array of words.
TENSOR_WORDS = (
    "call", "inputs", "results", "types", "makers", "tensor", "acquire", "release", "failed", "other", "none", "false",
    "true", "thread", "data.at", "type.at", "gradient.at", "required.at",
)  # fmt: skip
PYTHON_FUNCTIONS = (
    "Py_IncRef", "Py_DecRef", "PyObject_Vectorcall", "PyType_GenericAlloc", "PyList_New", "PyList_SetItem",
    "PyEval_SaveThread", "PyEval_RestoreThread", "PyThread_get_thread_ident",
)  # fmt: skip
_KINDS = {name: "i64" for name in ("inputs", "results", "thread", *(n for n in TENSOR_WORDS if n.endswith(".at")))}
_LOADS = "\n".join(
    f"  %{name}.p = getelementptr i64, ptr %words, i64 {i}\n  %{name} = load {_KINDS.get(name, 'ptr')}, ptr %{name}.p"
    for i, name in enumerate(TENSOR_WORDS)
)
TENSOR_TEXT = f"""
%maker = type {{ ptr, i64, [2 x ptr] }}
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr)
declare ptr @PyType_GenericAlloc(ptr, i64)
declare ptr @PyList_New(i64)
declare i32 @PyList_SetItem(ptr, i64, ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare i64 @PyThread_get_thread_ident()

define internal ptr @find_data(ptr %item, ptr %type, ptr %words) {{
entry:
{_LOADS}
  %class.p = getelementptr i8, ptr %item, i64 {TYPE}
  %class = load ptr, ptr %class.p
  %is.tensor = icmp eq ptr %class, %tensor
  br i1 %is.tensor, label %fields, label %no
fields:
  %own.type.p = getelementptr i8, ptr %item, i64 %type.at
  %own.type = load ptr, ptr %own.type.p
  %own.required.p = getelementptr i8, ptr %item, i64 %required.at
  %own.required = load ptr, ptr %own.required.p
  %own.data.p = getelementptr i8, ptr %item, i64 %data.at
  %own.data = load ptr, ptr %own.data.p
  %same.type = icmp eq ptr %own.type, %type
  %plain = icmp eq ptr %own.required, %false
  %fits = and i1 %same.type, %plain
  %found = select i1 %fits, ptr %own.data, ptr null
  ret ptr %found
no:
  ret ptr null
}}

define internal i1 @unwrap(ptr %words, ptr %args, ptr %kept) {{
entry:
{_LOADS}
  %binding = load ptr, ptr %call
  %class.p = getelementptr %binding, ptr %binding, i64 0, i32 5
  %class = load ptr, ptr %class.p
  %arrays.p = getelementptr %binding, ptr %binding, i64 0, i32 2
  %arrays = load ptr, ptr %arrays.p
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %keep ]
  %more = icmp slt i64 %i, %inputs
  br i1 %more, label %find, label %hold
find:
  %item.p = getelementptr ptr, ptr %args, i64 %i
  %item = load ptr, ptr %item.p
  %wanted.p = getelementptr ptr, ptr %types, i64 %i
  %wanted = load ptr, ptr %wanted.p
  %data = call ptr @find_data(ptr %item, ptr %wanted, ptr %words)
  %is.tensor = icmp ne ptr %data, null
  br i1 %is.tensor, label %check, label %no
check:
  %known = getelementptr %array, ptr %arrays, i64 %i
  %plain = call i1 @is_plain(ptr %data, ptr %known, ptr %class)
  br i1 %plain, label %keep, label %no
keep:
  %kept.p = getelementptr ptr, ptr %kept, i64 %i
  store ptr %data, ptr %kept.p
  %i.next = add i64 %i, 1
  br label %next
hold:
  %j = phi i64 [ 0, %next ], [ %j.next, %count ]
  %unheld = icmp slt i64 %j, %inputs
  br i1 %unheld, label %count, label %yes
count:
  %held.p = getelementptr ptr, ptr %kept, i64 %j
  %held = load ptr, ptr %held.p
  call void @Py_IncRef(ptr %held)
  %j.next = add i64 %j, 1
  br label %hold
yes:
  ret i1 true
no:
  ret i1 false
}}

define internal void @drop(ptr %kept, i64 %first, i64 %last) {{
entry:
  br label %next
next:
  %i = phi i64 [ %first, %entry ], [ %i.next, %count ]
  %more = icmp slt i64 %i, %last
  br i1 %more, label %count, label %done
count:
  %held.p = getelementptr ptr, ptr %kept, i64 %i
  %held = load ptr, ptr %held.p
  call void @Py_DecRef(ptr %held)
  %i.next = add i64 %i, 1
  br label %next
done:
  ret void
}}

define internal i64 @make(ptr %words, ptr %kept) {{
entry:
{_LOADS}
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %keep ]
  %at = add i64 %inputs, %i
  %more = icmp slt i64 %i, %results
  br i1 %more, label %new, label %done
new:
  %maker = getelementptr %maker, ptr %makers, i64 %i
  %function = load ptr, ptr %maker
  %given.p = getelementptr %maker, ptr %maker, i64 0, i32 1
  %given = load i64, ptr %given.p
  %args = getelementptr %maker, ptr %maker, i64 0, i32 2
  %made = call ptr @PyObject_Vectorcall(ptr %function, ptr %args, i64 %given, ptr null)
  %fine = icmp ne ptr %made, null
  br i1 %fine, label %keep, label %done
keep:
  %kept.p = getelementptr ptr, ptr %kept, i64 %at
  store ptr %made, ptr %kept.p
  %i.next = add i64 %i, 1
  br label %next
done:
  ret i64 %at
}}

define internal i64 @wrap(ptr %words, ptr %kept) {{
entry:
{_LOADS}
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %keep ]
  %more = icmp slt i64 %i, %results
  br i1 %more, label %new, label %done
new:
  %made = call ptr @PyType_GenericAlloc(ptr %tensor, i64 0)
  %fine = icmp ne ptr %made, null
  br i1 %fine, label %keep, label %done
keep:
  %at = add i64 %inputs, %i
  %kept.p = getelementptr ptr, ptr %kept, i64 %at
  %data = load ptr, ptr %kept.p
  %own.type.p = getelementptr ptr, ptr %types, i64 %at
  %own.type = load ptr, ptr %own.type.p
  call void @Py_IncRef(ptr %own.type)
  call void @Py_IncRef(ptr %none)
  call void @Py_IncRef(ptr %false)
  %data.p = getelementptr i8, ptr %made, i64 %data.at
  store ptr %data, ptr %data.p
  %type.p = getelementptr i8, ptr %made, i64 %type.at
  store ptr %own.type, ptr %type.p
  %gradient.p = getelementptr i8, ptr %made, i64 %gradient.at
  store ptr %none, ptr %gradient.p
  %required.p = getelementptr i8, ptr %made, i64 %required.at
  store ptr %false, ptr %required.p
  store ptr %made, ptr %kept.p
  %i.next = add i64 %i, 1
  br label %next
done:
  ret i64 %i
}}

define internal ptr @gather(ptr %words, ptr %kept) {{
entry:
{_LOADS}
  %single = icmp eq i64 %results, 1
  %first.p = getelementptr ptr, ptr %kept, i64 %inputs
  br i1 %single, label %one, label %many
one:
  %first = load ptr, ptr %first.p
  ret ptr %first
many:
  %list = call ptr @PyList_New(i64 %results)
  %fine = icmp ne ptr %list, null
  br i1 %fine, label %next, label %none.left
next:
  %i = phi i64 [ 0, %many ], [ %i.next, %put ]
  %more = icmp slt i64 %i, %results
  br i1 %more, label %put, label %done
put:
  %item.p = getelementptr ptr, ptr %first.p, i64 %i
  %item = load ptr, ptr %item.p
  %ignored = call i32 @PyList_SetItem(ptr %list, i64 %i, ptr %item)
  %i.next = add i64 %i, 1
  br label %next
none.left:
  %total = add i64 %inputs, %results
  call void @drop(ptr %kept, i64 %inputs, i64 %total)
  br label %done
done:
  ret ptr %list
}}

define ptr @call.tensors(ptr %self, ptr %args, i64 %given) {{
entry:
  %words.p = getelementptr i8, ptr %self, i64 {DATA}
  %words = load ptr, ptr %words.p
{_LOADS}
  %total = add i64 %inputs, %results
  %kept = alloca ptr, i64 %total
  %own.thread = call i64 @PyThread_get_thread_ident()
  %main = icmp eq i64 %own.thread, %thread
  %right.count = icmp eq i64 %given, %inputs
  %alike = and i1 %main, %right.count
  br i1 %alike, label %take, label %leave
take:
  %plain = call i1 @unwrap(ptr %words, ptr %args, ptr %kept)
  br i1 %plain, label %make, label %leave
make:
  %made = call i64 @make(ptr %words, ptr %kept)
  %complete = icmp eq i64 %made, %total
  br i1 %complete, label %lock, label %fail
lock:
  %locked = call ptr @PyObject_Vectorcall(ptr %acquire, ptr %false.p, i64 1, ptr null)
  %asked = icmp ne ptr %locked, null
  br i1 %asked, label %held, label %fail
held:
  call void @Py_DecRef(ptr %locked)
  %own = icmp eq ptr %locked, %true
  br i1 %own, label %run, label %busy
busy:
  call void @drop(ptr %kept, i64 0, i64 %total)
  br label %leave
run:
  %binding = load ptr, ptr %call
  call void @fill(ptr %binding, ptr %kept)
  %state = call ptr @PyEval_SaveThread()
  %code = call i64 @launch(ptr %call)
  call void @PyEval_RestoreThread(ptr %state)
  %fine = icmp eq i64 %code, {DONE}
  %end = select i1 %fine, ptr %release, ptr %failed
  %ended = call ptr @PyObject_Vectorcall(ptr %end, ptr null, i64 0, ptr null)
  %no.error = icmp ne ptr %ended, null
  br i1 %no.error, label %finish, label %fail
finish:
  call void @Py_DecRef(ptr %ended)
  %wrapped = call i64 @wrap(ptr %words, ptr %kept)
  %all = icmp eq i64 %wrapped, %results
  br i1 %all, label %give, label %fail
give:
  call void @drop(ptr %kept, i64 0, i64 %inputs)
  %result = call ptr @gather(ptr %words, ptr %kept)
  ret ptr %result
fail:
  %last = phi i64 [ %made, %make ], [ %total, %lock ], [ %total, %run ], [ %total, %finish ]
  call void @drop(ptr %kept, i64 0, i64 %last)
  ret ptr null
leave:
  call void @Py_IncRef(ptr %other)
  ret ptr %other
}}
"""


def _read(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


@cache
def _has_known_layout() -> bool:
    """Whether the fields of lists, arrays and element types are where machine code reads them."""
    if sys.implementation.name != "cpython" or HEADER != 16 or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    whole = np.arange(24.0).reshape(2, 3, 4)
    listed = [whole, whole[:, 1:], whole.T, np.zeros((), np.int32)]
    items = _read(id(listed) + ITEMS)
    known = all(_read(items + 8 * i) == id(a) and _has_known_fields(a) for i, a in enumerate(listed))
    return known and all(_has_known_kind(np.dtype(name)) for name in ("?", "f2", "<f4", ">f4", "u1", "i8"))


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


def _has_known_kind(element: np.dtype) -> bool:
    kind, letter, order, _, *number = _read(id(element) + KIND).to_bytes(8, "little", signed=True)
    found = chr(kind), chr(letter), chr(order), int.from_bytes(number, "little")
    return found == (element.kind, element.char, element.byteorder, element.num)


@compile_once
def _compile() -> MachineCode:
    for name in PYTHON_FUNCTIONS:
        llvm.add_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value)
    return MachineCode(CALL_TEXT + TENSOR_TEXT)


@cache
def _get_call_entry() -> Any:
    """The machine code of a call; the interpreter lock is released while it runs."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(_compile().address("call"))


@cache
def _get_binding_entry() -> Any:
    """The machine code of a binding; it ends so soon that the interpreter lock is kept."""
    return ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(_compile().address("bind"))


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
            (len(p.shape), _read(id(p.dtype.numpy) + KIND), array_address(s))
            for p, s in zip(params, self._sizes, strict=True)
        ]
        self._arrays = np.array(described, np.int64)
        uses = [(i, int(slot)) for i, found in enumerate(param_slots) for slot in np.atleast_1d(found)]
        self._uses, self._slots = np.array(uses, np.int64).reshape(-1, 2), slots
        addresses = [array_address(a) for a in (self._arrays, self._uses, slots)]
        self._binding = np.array([len(params), len(uses), *addresses, id(np.ndarray)], np.int64)
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


class NativeCall:
    """The launches of one program on one thread for arrays of known types, with the binding of these."""

    def __init__(self, binding: NativeBinding, tasks: np.ndarray, scratch: int, word: int, short: bool) -> None:
        launch = interrupts.get_direct_address() if short else interrupts.get_interruptible_address()
        run = thread_pool.get_serial_address()
        self.binding, self._tasks = binding, tasks
        self._call = np.array([binding.address, launch, run, len(tasks), array_address(tasks), scratch, word], np.int64)
        self.address, self._entry = array_address(self._call), _get_call_entry()

    def run(self, given: list[Any]) -> int:
        """What came of a call with completed arrays: DONE, FAILED or OTHER_ARRAYS; by one thread at a time."""
        return self._entry(self.address, id(given))  # type: ignore[no-any-return]


class PythonMethod(ctypes.Structure):
    """PyMethodDef of CPython: what a function of Python in machine code is made of."""

    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


FAST_CALL = 0x0080  # METH_FASTCALL: arguments by place, as an array


@cache
def _get_tensor_method() -> PythonMethod:
    return PythonMethod(b"call_tensors", _compile().address("call.tensors"), FAST_CALL, None)


@cache
def _find_tensor_fields() -> tuple[int, ...] | None:
    """Where a tensor holds its elements, its type, its gradient and whether it has one; None where that is not known."""
    marks = [object() for _ in range(4)]
    tensor = object.__new__(Tensor)
    tensor.data, tensor.type, tensor.grad, tensor.requires_grad = marks  # type: ignore[assignment]
    words = [_read(id(tensor) + place) for place in range(0, Tensor.__basicsize__, 8)]
    found = tuple(8 * words.index(id(mark)) if id(mark) in words else 0 for mark in marks)
    return found if all(place >= HEADER for place in found) else None


class TensorCall:
    """A native call as a function of Python, `run`: it takes tensors, and gives the one result or a list of them.

    What is no tensor with one of `types` as its type, or has no plain array, is left to others: it gives `other` then.
    The call holds `lock` while it runs; `failed` is called in place of its release where the launch has failed.
    """

    def __init__(
        self, native: NativeCall, types: Sequence[Any], fields: Sequence[int], lock: Any, failed: Callable[[], None],
        other: object,
    ) -> None:  # fmt: skip
        makers, acquire, release = native.binding.makers, lock.acquire, lock.release
        self.single = len(makers) == 1
        self._types = np.array([*map(id, types)], np.int64)
        described = [(id(make), len(given), *map(id, given), *[0] * (2 - len(given))) for make, given in makers]
        self._makers = np.array(described, np.int64).reshape(-1, 4)
        words = (
            native.address, native.binding.inputs, len(makers), array_address(self._types), array_address(self._makers),
            id(Tensor), id(acquire), id(release), id(failed), id(other), id(None), id(False), id(True),
            interrupts.MainThread.number, *fields,
        )  # fmt: skip
        self._kept = (native, types, makers, acquire, release, failed, other)
        make = ctypes.pythonapi.PyCFunction_NewEx
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
        self.run: Callable[..., Any] = make(ctypes.addressof(_get_tensor_method()), np.array(words, np.int64), None)


def make_tensor_call(
    native: NativeCall | None, types: Sequence[Any], lock: Any, failed: Callable[[], None], other: object
) -> TensorCall | None:
    """The tensor call of a native one; None where there is none: a result takes the memory of an argument."""
    fields = _find_tensor_fields() if _has_known_layout() else None
    if native is None or fields is None or not all(given for _, given in native.binding.makers):
        return None
    return TensorCall(native, types, fields, lock, failed, other)


def make_native_binding(
    arguments: ArgumentBinder, param_slots: Sequence[Any], slots: np.ndarray
) -> NativeBinding | None:
    """The native binding of a program; None where the general way is needed: for scalars, and arrays of the caller that
    are written, which may share memory with others."""
    params = arguments.params
    first = next((i for i, p in enumerate(params) if p.output), len(params))
    plain = not any(p.scalar for p in params) and all(p.output for p in params[first:])
    if not plain or arguments.aliasable or not _has_known_layout():
        return None
    return NativeBinding(arguments, param_slots, slots)

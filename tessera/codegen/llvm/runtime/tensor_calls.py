"""Tensor calls: programs as functions of Python in machine code, which take tensors and give tensors.

A call of a small program from Python takes longer for its arguments and results than for its arithmetic. Here machine
code does what Python would: it checks and unwraps the tensors, makes the arrays of the results, launches without the
interpreter lock, and wraps the results. An address call takes the addresses of memory instead. Both call functions of
CPython's C interface, and read fields whose places are looked for once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from tessera.codegen.llvm.runtime import interrupts
from tessera.codegen.llvm.runtime.jit import MachineCode, compile_once
from tessera.codegen.llvm.runtime.native_calls import (
    CHECK_TEXT,
    DATA,
    DONE,
    HEADER,
    TYPE,
    NativeCall,
    NativeLaunch,
    has_known_layout,
    list_uses,
    read_word,
)
from tessera.core.device import array_address
from tessera.ir.tensor import Tensor

# The words of a call, in the array that is the first argument of its function.
TENSOR_WORDS = (
    "call", "inputs", "results", "types", "makers", "tensor", "acquire", "release", "failed", "other", "none", "false",
    "true", "thread", "data.at", "type.at", "gradient.at", "required.at",
)  # fmt: skip
PYTHON_FUNCTIONS = (
    "Py_IncRef", "Py_DecRef", "PyObject_VectorcallDict", "PyType_GenericAlloc", "PyList_New", "PyList_SetItem",
    "PyEval_SaveThread", "PyEval_RestoreThread", "PyThread_get_thread_ident", "PyLong_AsLongLong",
)  # fmt: skip
# The words of a call by addresses.
ADDRESS_WORDS = (
    "call", "params", "count", "uses", "slots", "acquire", "release", "failed", "other", "none", "false", "true",
    "thread",
)  # fmt: skip
NUMBERS = {"inputs", "results", "thread", "params", "count", *(n for n in TENSOR_WORDS if n.endswith(".at"))}


def _load_words(names: Sequence[str]) -> str:
    return "\n".join(
        f"  %{n}.p = getelementptr i64, ptr %words, i64 {i}\n"
        f"  %{n} = load {'i64' if n in NUMBERS else 'ptr'}, ptr %{n}.p"
        for i, n in enumerate(names)
    )


_LOADS, _ADDRESS_LOADS = _load_words(TENSOR_WORDS), _load_words(ADDRESS_WORDS)
OWN, BUSY, ERROR = 0, 1, 2  # what came of asking for the lock of a program
TENSOR_TEXT = f"""{CHECK_TEXT}
%maker = type {{ ptr, i64, [2 x ptr] }}
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyObject_VectorcallDict(ptr, ptr, i64, ptr)
declare ptr @PyType_GenericAlloc(ptr, i64)
declare ptr @PyList_New(i64)
declare i32 @PyList_SetItem(ptr, i64, ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare i64 @PyThread_get_thread_ident()
declare i64 @PyLong_AsLongLong(ptr)

define internal i64 @lock(ptr %acquire, ptr %false.p, ptr %true) {{
entry:
  %locked = call ptr @PyObject_VectorcallDict(ptr %acquire, ptr %false.p, i64 1, ptr null)
  %asked = icmp ne ptr %locked, null
  br i1 %asked, label %held, label %failed
held:
  call void @Py_DecRef(ptr %locked)
  %own = icmp eq ptr %locked, %true
  %found = select i1 %own, i64 {OWN}, i64 {BUSY}
  ret i64 %found
failed:
  ret i64 {ERROR}
}}

define internal i1 @run.locked(ptr %call, ptr %release, ptr %failed) {{
entry:
  %state = call ptr @PyEval_SaveThread()
  %code = call i64 @launch(ptr %call)
  call void @PyEval_RestoreThread(ptr %state)
  %fine = icmp eq i64 %code, {DONE}
  %end = select i1 %fine, ptr %release, ptr %failed
  %ended = call ptr @PyObject_VectorcallDict(ptr %end, ptr null, i64 0, ptr null)
  %no.error = icmp ne ptr %ended, null
  br i1 %no.error, label %finish, label %fail
finish:
  call void @Py_DecRef(ptr %ended)
  ret i1 true
fail:
  ret i1 false
}}

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
  %made = call ptr @PyObject_VectorcallDict(ptr %function, ptr %args, i64 %given, ptr null)
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
  %locked = call i64 @lock(ptr %acquire, ptr %false.p, ptr %true)
  switch i64 %locked, label %fail [ i64 {OWN}, label %run
                                    i64 {BUSY}, label %busy ]
busy:
  call void @drop(ptr %kept, i64 0, i64 %total)
  br label %leave
run:
  %binding = load ptr, ptr %call
  call void @fill(ptr %binding, ptr %kept)
  %no.error = call i1 @run.locked(ptr %call, ptr %release, ptr %failed)
  br i1 %no.error, label %finish, label %fail
finish:
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

define ptr @call.addresses(ptr %self, ptr %args, i64 %given) {{
entry:
  %words.p = getelementptr i8, ptr %self, i64 {DATA}
  %words = load ptr, ptr %words.p
{_ADDRESS_LOADS}
  %kept = alloca i64, i64 %params
  %own.thread = call i64 @PyThread_get_thread_ident()
  %main = icmp eq i64 %own.thread, %thread
  %right.count = icmp eq i64 %given, %params
  %alike = and i1 %main, %right.count
  br i1 %alike, label %next, label %leave
next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %keep ]
  %more = icmp slt i64 %i, %params
  br i1 %more, label %read, label %lock
read:
  %number.p = getelementptr ptr, ptr %args, i64 %i
  %number = load ptr, ptr %number.p
  %address = call i64 @PyLong_AsLongLong(ptr %number)
  %none.there = icmp eq i64 %address, -1
  br i1 %none.there, label %fail, label %keep
keep:
  %kept.p = getelementptr i64, ptr %kept, i64 %i
  store i64 %address, ptr %kept.p
  %i.next = add i64 %i, 1
  br label %next
lock:
  %locked = call i64 @lock(ptr %acquire, ptr %false.p, ptr %true)
  switch i64 %locked, label %fail [ i64 {OWN}, label %use
                                    i64 {BUSY}, label %leave ]
use:
  %u = phi i64 [ 0, %lock ], [ %u.next, %store ]
  %unfilled = icmp slt i64 %u, %count
  br i1 %unfilled, label %store, label %run
store:
  %use.p = getelementptr %use, ptr %uses, i64 %u
  %of = load i64, ptr %use.p
  %slot.p = getelementptr %use, ptr %use.p, i64 0, i32 1
  %slot = load i64, ptr %slot.p
  %from = getelementptr i64, ptr %kept, i64 %of
  %word = load i64, ptr %from
  %to = getelementptr i64, ptr %slots, i64 %slot
  store i64 %word, ptr %to
  %u.next = add i64 %u, 1
  br label %use
run:
  %no.error = call i1 @run.locked(ptr %call, ptr %release, ptr %failed)
  br i1 %no.error, label %give, label %fail
give:
  call void @Py_IncRef(ptr %none)
  ret ptr %none
fail:
  ret ptr null
leave:
  call void @Py_IncRef(ptr %other)
  ret ptr %other
}}
"""


@compile_once
def _compile() -> MachineCode:
    for name in PYTHON_FUNCTIONS:
        llvm.add_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value)
    return MachineCode(TENSOR_TEXT)


class PythonMethod(ctypes.Structure):
    """PyMethodDef of CPython: what a function of Python in machine code is made of."""

    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


FAST_CALL = 0x0080  # METH_FASTCALL: arguments by place, as an array


@cache
def _get_method(kind: str) -> PythonMethod:
    return PythonMethod(f"call_{kind}".encode(), _compile().address(f"call.{kind}"), FAST_CALL, None)


def _make_function(kind: str, words: Sequence[int | None]) -> Callable[..., Any]:
    """A function of Python in machine code, on its words."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return make(ctypes.addressof(_get_method(kind)), np.array(words, np.int64), None)  # type: ignore[no-any-return]


@cache
def _find_tensor_fields() -> tuple[int, ...] | None:
    """Where a tensor holds its elements, type, gradient, and whether it has one; None where that is not known."""
    marks = [object() for _ in range(4)]
    tensor = object.__new__(Tensor)
    tensor.data, tensor.type, tensor.grad, tensor.requires_grad = marks  # type: ignore[assignment]
    words = [read_word(id(tensor) + place) for place in range(0, Tensor.__basicsize__, 8)]
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
        self.run = _make_function("tensors", words)


def make_tensor_call(
    native: NativeCall | None, types: Sequence[Any], lock: Any, failed: Callable[[], None], other: object
) -> TensorCall | None:
    """The tensor call of a native one; None where there is none: a result takes the memory of an argument."""
    fields = _find_tensor_fields() if has_known_layout() else None
    if native is None or fields is None or not all(given for _, given in native.binding.makers):
        return None
    return TensorCall(native, types, fields, lock, failed, other)


class AddressCall:
    """The launches of a program as a function of Python, `run`: it takes the address of each parameter's memory.

    It gives None, or `other` where another thread than the main one calls it or has the program's `lock`; `failed` is
    as in a tensor call.
    """

    def __init__(
        self, launch: NativeLaunch, param_slots: Sequence[Any], slots: np.ndarray, lock: Any,
        failed: Callable[[], None], other: object,
    ) -> None:  # fmt: skip
        uses, acquire, release = list_uses(param_slots), lock.acquire, lock.release
        words = (
            launch.address, len(param_slots), len(uses), array_address(uses), array_address(slots), id(acquire),
            id(release), id(failed), id(other), id(None), id(False), id(True), interrupts.MainThread.number,
        )  # fmt: skip
        self._kept = (launch, uses, slots, acquire, release, failed, other)
        self.run = _make_function("addresses", words)

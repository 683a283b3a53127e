"""Interrupts: Ctrl-C stops machine code that the main thread runs, as it stops Python code.

Python runs its signal handlers between two steps of Python code on the main thread, so machine code would end first.
While the main thread is in a launch, the handler of SIGINT is machine code that marks the launch's stop word and then
calls the handler of Python. Programs read the word once in each iteration of a loop. On the main thread
`tessera_poll` then runs the Python handlers. If one raises an exception, every program of the launch ends, and the
exception is raised when all threads have left; else the launch continues.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from functools import cache
from threading import main_thread
from typing import Any

import llvmlite.binding as llvm

from tessera.codegen.llvm.runtime.jit import MachineCode, compile_once
from tessera.codegen.llvm.text.protocol import INTERRUPTED, NO_FAILURE, PENDING, POLL_FUNCTION


class MainThread:
    """The number of the main thread, which takes longer to ask for than a small program takes."""

    number = main_thread().ident

    @classmethod
    def find(cls) -> None:
        """Note the number: in a child, the thread that forked is the main one."""
        cls.number = main_thread().ident


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=MainThread.find)

LAUNCH_FUNCTION, DIRECT_FUNCTION = "tessera_launch", "tessera_direct_launch"
PYTHON_FUNCTIONS = ("PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals", "PyErr_Fetch")
SIGNAL_ACTION_BYTES = 256  # more than any system's `struct sigaction`, which begins with the handler

DIRECT_TEXT = f"""
define void @{DIRECT_FUNCTION}(ptr %run, ptr %tasks, i64 %count, ptr %states, ptr %scratch, ptr %word) {{
  call void %run(ptr %tasks, i64 %count, ptr %states, ptr %scratch, ptr %word)
  ret void
}}
"""
POLL_TEXT = f"""{DIRECT_TEXT}
@interrupt.pending = global i64 0
@interrupt.word = global ptr null
@interrupt.thread = global ptr null
@interrupt.previous = global ptr null
@interrupt.error = global [3 x ptr] zeroinitializer

declare ptr @pthread_self()
declare i32 @sigaction(i32, ptr, ptr)
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare i32 @PyErr_CheckSignals()
declare void @PyErr_Fetch(ptr, ptr, ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define void @interrupt.handle(i32 %signal, ptr %info, ptr %context) {{
  %word = load volatile ptr, ptr @interrupt.word
  store volatile i64 1, ptr @interrupt.pending
  %ignored = cmpxchg ptr %word, i64 {NO_FAILURE}, i64 {PENDING} seq_cst seq_cst
  %previous = load volatile ptr, ptr @interrupt.previous
  call void %previous(i32 %signal, ptr %info, ptr %context)
  ret void
}}

define void @{POLL_FUNCTION}(ptr %word) {{
  %pending = load volatile i64, ptr @interrupt.pending
  %none = icmp eq i64 %pending, 0
  br i1 %none, label %leave, label %who
who:
  %self = call ptr @pthread_self()
  %main = load volatile ptr, ptr @interrupt.thread
  %mine = icmp eq ptr %self, %main
  br i1 %mine, label %ask, label %leave
ask:
  store volatile i64 0, ptr @interrupt.pending
  %ignored = cmpxchg ptr %word, i64 {PENDING}, i64 {NO_FAILURE} seq_cst seq_cst
  %state = call i32 @PyGILState_Ensure()
  %result = call i32 @PyErr_CheckSignals()
  %raised = icmp ne i32 %result, 0
  br i1 %raised, label %stop, label %go
stop:
  %value.p = getelementptr ptr, ptr @interrupt.error, i64 1
  %trace.p = getelementptr ptr, ptr @interrupt.error, i64 2
  call void @PyErr_Fetch(ptr @interrupt.error, ptr %value.p, ptr %trace.p)
  store atomic i64 {INTERRUPTED}, ptr %word release, align 8
  br label %go
go:
  call void @PyGILState_Release(i32 %state)
  br label %leave
leave:
  ret void
}}

define void @{LAUNCH_FUNCTION}(ptr %run, ptr %tasks, i64 %count, ptr %states, ptr %scratch, ptr %word) {{
  %old = alloca [{SIGNAL_ACTION_BYTES} x i8], align 16
  %new = alloca [{SIGNAL_ACTION_BYTES} x i8], align 16
  store i64 0, ptr %old
  %asked = call i32 @sigaction(i32 {int(signal.SIGINT)}, ptr null, ptr %old)
  %handler = load i64, ptr %old
  %plain = icmp ult i64 %handler, 2
  %own = ptrtoint ptr @interrupt.handle to i64
  %nested = icmp eq i64 %handler, %own
  %unhandled = or i1 %plain, %nested
  br i1 %unhandled, label %direct, label %install
direct:
  call void %run(ptr %tasks, i64 %count, ptr %states, ptr %scratch, ptr %word)
  ret void
install:
  call void @llvm.memcpy.p0.p0.i64(ptr %new, ptr %old, i64 {SIGNAL_ACTION_BYTES}, i1 false)
  store i64 %own, ptr %new
  %previous = inttoptr i64 %handler to ptr
  store volatile ptr %previous, ptr @interrupt.previous
  store volatile ptr %word, ptr @interrupt.word
  %self = call ptr @pthread_self()
  store volatile ptr %self, ptr @interrupt.thread
  store volatile i64 0, ptr @interrupt.pending
  %installed = call i32 @sigaction(i32 {int(signal.SIGINT)}, ptr %new, ptr null)
  call void %run(ptr %tasks, i64 %count, ptr %states, ptr %scratch, ptr %word)
  %restored = call i32 @sigaction(i32 {int(signal.SIGINT)}, ptr %old, ptr null)
  %ignored = cmpxchg ptr %word, i64 {PENDING}, i64 {NO_FAILURE} seq_cst seq_cst
  ret void
}}
"""
# Where there are no POSIX signals, machine code cannot be interrupted.
PLAIN_TEXT = f"""{DIRECT_TEXT}
@interrupt.error = global [3 x ptr] zeroinitializer

define void @{POLL_FUNCTION}(ptr %word) {{
  ret void
}}

define void @{LAUNCH_FUNCTION}(ptr %run, ptr %tasks, i64 %count, ptr %states, ptr %scratch, ptr %word) {{
  call void %run(ptr %tasks, i64 %count, ptr %states, ptr %scratch, ptr %word)
  ret void
}}
"""


@compile_once
def _compile_poll() -> MachineCode:
    if os.name != "posix":
        return MachineCode(PLAIN_TEXT)
    for name in PYTHON_FUNCTIONS:
        llvm.add_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value)
    return MachineCode(POLL_TEXT)


@cache
def register_poll_symbol() -> None:
    """Give machine code the address of the function that a program calls when its stop word is marked."""
    llvm.add_symbol(POLL_FUNCTION, _compile_poll().address(POLL_FUNCTION))


@cache
def get_interruptible_entry() -> Callable[..., None]:
    """A function that calls machine code (the address, then its arguments), and lets Ctrl-C mark the stop word."""
    pointer = ctypes.c_void_p
    kinds = (pointer, pointer, ctypes.c_int64, pointer, pointer, pointer)
    return ctypes.CFUNCTYPE(None, *kinds)(get_interruptible_address())


def get_interruptible_address() -> int:
    """The address of that function."""
    return _compile_poll().address(LAUNCH_FUNCTION)


def get_direct_address() -> int:
    """The address of a function of the same arguments for launches that end soon: Ctrl-C takes effect after them.

    It makes none of the three system calls that set and restore the handler of a signal.
    """
    return _compile_poll().address(DIRECT_FUNCTION)


def raise_interrupt() -> None:
    """Raise what a signal handler raised during the last launch.

    Raises:
        KeyboardInterrupt: or whatever the handler raised.
    """
    error: Any = (ctypes.c_void_p * 3).from_address(_compile_poll().variable("interrupt.error"))
    kind, value, trace = error
    error[:] = (None, None, None)
    if kind is None:
        raise KeyboardInterrupt
    restore = ctypes.pythonapi.PyErr_Restore
    restore.argtypes, restore.restype = (ctypes.c_void_p,) * 3, None
    restore(kind, value, trace)  # which makes this call raise the error

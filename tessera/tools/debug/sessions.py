"""Debugger sessions: sanitizer runs (`check`, `checked`), stepping (`session`, `interactive`, `break_here`).

The decorators of ts.debug share one form: a callable of which each call runs in a context manager.
"""

from __future__ import annotations

import code
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tessera.frontend.jit import line_marks
from tessera.frontend.jit.tracing import Jit
from tessera.frontend.kernel.kernel_function import Kernel, KernelLaunch
from tessera.frontend.kernel.python_ast import scope as python_ast_line_marks
from tessera.frontend.kernel.trace import CURRENT_TRACE
from tessera.interp.observers import OBSERVERS, PAUSE_OBSERVERS
from tessera.interp.sanitizer import report as debug_report
from tessera.interp.sanitizer.report import Checks, Report
from tessera.interp.sanitizer.value_checks import check_eager_values
from tessera.ir.builder import CURRENT_NUMERICS
from tessera.ir.rules import EAGER_CALL_HOOK
from tessera.ir.tensor import RESULT_OBSERVERS
from tessera.runtime.launch import streams
from tessera.tools.debug import breakpoints
from tessera.tools.debug.console import Console, DebuggerQuit, normalise_commands

# What the debugger's decorators make: a function, kernel or launch of which each call runs in a context.


class ContextDecorator:
    """Something callable, each call of which runs in `context(it)`; else it is as it was, grids and methods too.

    >>> from contextlib import nullcontext
    >>> ContextDecorator(abs, lambda function: nullcontext())(-2)
    2
    """

    def __init__(self, function: Any, context: Callable[[Any], AbstractContextManager[Any]]) -> None:
        if hasattr(function, "__name__"):
            functools.update_wrapper(self, function, updated=())
        self.function, self.context = function, context

    def __call__(self, *args: Any, **named: Any) -> Any:
        with self.context(self.function):
            return self.function(*args, **named)

    def __getitem__(self, item: Any) -> ContextDecorator:
        """A kernel with its grid."""
        return ContextDecorator(self.function[item], self.context)

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # not made yet
            raise AttributeError(name)
        return getattr(self.function, name)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """A method, in a class."""
        return self if owner is None else functools.partial(self, owner)


@contextmanager
def checked(collect: bool = False, nan: bool = False, lint: bool = False) -> Iterator[Report]:
    """Run every kernel interpreted in this block in debug mode; gives the report that fills meanwhile.

    By default the first finding is raised as an error; with `collect` all are recorded instead, one for each
    pair of lines. A run stops at a finding after which values mean nothing (an access outside, a parted barrier).
    `nan` also reports ops that make a NaN or an infinity of finite operands; `lint` adds advice, which is never raised:
    bank conflicts, accesses that do not coalesce, elements used that the mask of a load had left out. Threads do not
    see each other's. With `nan` the results of ops that execute at once are checked too.

    Raises:
        RaceError, UninitializedError, AsyncCopyError, BarrierError, DeadlockError, OutOfBoundsError, AlignmentError,
            IndexOverflowError, NonFiniteError: a finding.

    >>> import numpy as np, tessera as ts
    >>> @ts.kernel
    ... def total(x, out):
    ...     out[0] += x[ts.tile.program_id(0)]
    >>> with ts.debug.checked(collect=True) as report:
    ...     total[(4,)](np.ones(4, np.float32), np.zeros(1, np.float32))
    >>> report.kinds
    ['program race']
    """
    checks = Checks(collect, nan, lint)
    token = debug_report.ACTIVE_CHECKS.set(checks)
    try:
        with _check_eager_calls() if nan else nullcontext():
            yield checks.report
    finally:
        debug_report.ACTIVE_CHECKS.reset(token)


mode = checked  # another public name: `with ts.debug.mode(nan=True):`
_DISPATCH = EAGER_CALL_HOOK[0]
_CHECKING_LOCK = threading.Lock()
_checking = 0  # the blocks, of all threads, that check op calls


@contextmanager
def _check_eager_calls() -> Iterator[None]:
    """Check the results of ops that execute at once in this block; other threads compute as ever."""
    _count_checking(1)
    try:
        yield
    finally:
        _count_checking(-1)


def _count_checking(by: int) -> None:
    global _checking
    with _CHECKING_LOCK:
        _checking += by
        EAGER_CALL_HOOK[0] = _call_without_plan if _checking else _DISPATCH
        RESULT_OBSERVERS[:] = [*(o for o in RESULT_OBSERVERS if o is not _check_results), *[_check_results][:_checking]]


def _finds_non_finite() -> Checks | None:
    checks = debug_report.ACTIVE_CHECKS.get()
    return checks if checks is not None and checks.nan else None


def _call_without_plan(op: Any, args: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
    """A call whose result is observed: plans of earlier calls (tessera/ops/api/methods.py) are not."""
    if _finds_non_finite() is None or CURRENT_NUMERICS.get() is not None:
        return _DISPATCH(op, args, attrs)
    return op.coerce(op, *op.split(args, attrs))


def _check_results(op: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
    if (checks := _finds_non_finite()) is not None:
        check_eager_values(op, operands, results, checks)


def nan_check(function: Any = None) -> Any:
    """Raise an error at the first op that makes a NaN or an infinity of finite operands: a block, or a decorator.

    It covers ops that execute at once, and the functions and kernels that the interpreter runs: `checked(nan=True)`. A
    program that is compiled for a target is not checked; call it with `target="interp"`.

    Raises:
        NonFiniteError: with the op, the element and the source line.

    >>> import tessera as ts
    >>> try:
    ...     with ts.debug.nan_check():
    ...         ts.log(ts.Tensor([1.0, 0.0]))
    ... except ts.errors.NonFiniteError as error:
    ...     print(error.message)
    ts.log makes -inf of finite operands: element (1,) of its result
    >>> @ts.debug.nan_check
    ... def root(x):
    ...     return ts.sqrt(x)
    >>> root(4.0)
    Tensor(2., f32)
    """
    return checked(nan=True) if function is None else ContextDecorator(function, lambda called: checked(nan=True))


def check(kernel: Kernel | KernelLaunch, *args: Any, nan: bool = False, lint: bool = False, **named: Any) -> Report:
    """Run a kernel, or one with its grid (`kernel[grid]`), on arguments in debug mode; all findings.

    Arrays are written as by a launch. The interpreter runs it, whatever the kernel's target.

    >>> import numpy as np, tessera as ts
    >>> @ts.kernel
    ... def shift(x):
    ...     i = ts.tile.program_id(0)
    ...     x[i] = x[i + 1]
    >>> report = ts.debug.check(shift[(3,)], np.zeros(4, np.float32))
    >>> print(report.findings[0].message)
    a data race on x[1]: program (1,) writes it, program (0,) reads it, and programs of a grid have no order
    """
    chosen = kernel if isinstance(kernel, KernelLaunch) else KernelLaunch(kernel)
    found = chosen.kernel.bind(args, named)
    with checked(collect=True, nan=nan, lint=lint) as report:
        streams.run_module(chosen._module(found), found.arrays, "interp")
    return report


Commands = str | Sequence[str] | None


@contextmanager
def session(
    commands: Commands = None, at_start: bool = True, write: Callable[[str], Any] | None = None
) -> Iterator[Console]:
    """Step through every kernel and `ts.jit` function interpreted in this block.

    `commands` is a script, or a list of commands; without them they come from the terminal (docs/debugging.md lists
    them). The run stops before its first line, or with `at_start=False` only at an error, at `breakpoint()` or
    `ts.debug.break_here()`. What is shown goes to `write`. `quit` ends the block, not the program around it.

    Raises:
        TesseraError: what the program raises, once it has been looked at.

    >>> import numpy as np, tessera as ts
    >>> from tessera.stdlib import stable_softmax
    >>> with ts.debug.session("quit", write=lambda text: None):
    ...     pass
    """
    console = Console(normalise_commands(commands), write)
    if not at_start:
        console.stepper.goal = breakpoints.until_stopped()
    token = OBSERVERS.set((*OBSERVERS.get(), console.stepper))
    try:
        with python_ast_line_marks.compile_with_marks():
            yield console
            console.stepper.finish()
    except DebuggerQuit:
        console.stepper.detached = True
    finally:
        OBSERVERS.reset(token)


def interactive(function: Any = None, *, commands: Commands = None, at_start: bool | None = None) -> Any:
    """A function, kernel or launch whose calls are stepped through.

    A kernel (or `kernel[grid]`) and a `ts.jit` function stop before their first line; any other function where a kernel
    that it calls fails, or breaks. `at_start` says otherwise; `commands` are as for `session`. A call that the user
    quits gives None.

    >>> import numpy as np, tessera as ts
    >>> @ts.debug.interactive(commands="continue")
    ... def model(x):
    ...     return x + 1
    >>> model(1)
    2
    """
    if function is None:
        return lambda f: interactive(f, commands=commands, at_start=at_start)

    def stepped(called: Any) -> Any:
        first = isinstance(called, (Kernel, KernelLaunch, Jit)) if at_start is None else at_start
        return session(commands, first)

    return ContextDecorator(function, stepped)


def break_here(condition: Any = True) -> None:
    """Stop here in the debugger; in a kernel in the programs where `condition` (a bool or bool scalar) holds.

    The interpreter stops whether or not a session is open. Python's `breakpoint()` does the same in a kernel.
    Outside kernels it opens a Python prompt on the caller's variables, or on `condition` where that is a dict of them.

    >>> import tessera as ts
    >>> ts.debug.break_here(False)
    """
    if CURRENT_TRACE.get() is not None:
        python_ast_line_marks.pause(condition)
        return
    if line_marks.add_breakpoint(condition, sys._getframe(1)):
        return
    if isinstance(condition, Mapping):
        names = dict(condition)
    elif condition:
        names = {**sys._getframe(1).f_globals, **sys._getframe(1).f_locals}
    else:
        return
    code.interact(banner="Tessera: the variables here are at hand; end with Ctrl-D", local=names, exitmsg="")


def _console_for_pauses() -> Any:
    """What stops in a kernel that says `breakpoint()` while nobody steps through it."""
    console = Console(normalise_commands(None))
    console.stepper.goal = breakpoints.until_stopped()
    return console.stepper


PAUSE_OBSERVERS.append(_console_for_pauses)

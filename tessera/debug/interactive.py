"""Stepping through programs: sessions, the decorator that opens one, and `break_here`."""

from __future__ import annotations

import code
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tessera import marks
from tessera.debug import stops
from tessera.debug.around import Around
from tessera.debug.console import Console, Quit, commands_of
from tessera.interp.checked.observe import FOR_PAUSES, OBSERVERS
from tessera.kernel import lines
from tessera.kernel.kernel import Kernel, Launch
from tessera.kernel.trace import TRACE
from tessera.tracing import Jit

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
    console = Console(commands_of(commands), write)
    if not at_start:
        console.stepper.goal = stops.never()
    token = OBSERVERS.set((*OBSERVERS.get(), console.stepper))
    try:
        with lines.marked():
            yield console
            console.stepper.finish()
    except Quit:
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
        first = isinstance(called, (Kernel, Launch, Jit)) if at_start is None else at_start
        return session(commands, first)

    return Around(function, stepped)


def break_here(condition: Any = True) -> None:
    """Stop here in the debugger; in a kernel in the programs where `condition` (a bool or bool scalar) holds.

    The interpreter stops whether or not a session is open. Python's `breakpoint()` does the same in a kernel.
    Outside kernels it opens a Python prompt on the caller's variables, or on `condition` where that is a dict of them.

    >>> import tessera as ts
    >>> ts.debug.break_here(False)
    """
    if TRACE.get() is not None:
        lines.pause(condition)
        return
    if marks.pause(condition, sys._getframe(1)):
        return
    if isinstance(condition, Mapping):
        names = dict(condition)
    elif condition:
        names = {**sys._getframe(1).f_globals, **sys._getframe(1).f_locals}
    else:
        return
    code.interact(banner="Tessera: the variables here are at hand; end with Ctrl-D", local=names, exitmsg="")


def _for_pauses() -> Any:
    """What stops in a kernel that says `breakpoint()` while nobody steps through it."""
    console = Console(commands_of(None))
    console.stepper.goal = stops.never()
    return console.stepper


FOR_PAUSES.append(_for_pauses)

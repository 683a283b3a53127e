"""Kernels run in debug mode: by a call, or for all that runs in a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tessera.interp.checked import report as debug_report
from tessera.interp.checked.report import Checks, Report
from tessera.kernel import launch
from tessera.kernel.kernel import Kernel, Launch


@contextmanager
def checked(collect: bool = False, nan: bool = False, lint: bool = False) -> Iterator[Report]:
    """Run every kernel interpreted in this block in debug mode; gives the report that fills meanwhile.

    By default the first finding is raised as an error; with `collect` all are recorded instead, one for each
    pair of lines. A run stops at a finding after which values mean nothing (an access outside, a parted barrier).
    `nan` also reports ops that make a NaN or an infinity of finite operands; `lint` adds advice, which is never raised:
    bank conflicts, accesses that do not coalesce, elements used that the mask of a load had left out. Threads do not
    see each other's.

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
    token = debug_report.ACTIVE.set(checks)
    try:
        yield checks.report
    finally:
        debug_report.ACTIVE.reset(token)


def check(kernel: Kernel | Launch, *args: Any, nan: bool = False, lint: bool = False, **named: Any) -> Report:
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
    chosen = kernel if isinstance(kernel, Launch) else Launch(kernel)
    found = chosen.kernel.bind(args, named)
    with checked(collect=True, nan=nan, lint=lint) as report:
        launch.run(chosen._module(found), found.arrays, "interp")
    return report

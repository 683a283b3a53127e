"""Structured control flow of whole tensors: ops whose regions take all they use as parameters.

Below Graph they are loops and branches of the entry function (`ops/host.py`): the host takes them,
and what is inside runs on the target.
"""

from __future__ import annotations

from typing import Any

from tessera.op import STORAGE, op
from tessera.ops.control import _given, direct


@op(infer=_given, coerce=direct, numerics=STORAGE)
def scan(*operands: Any, carry: int, xs: int, length: Any, reverse: bool) -> Any:
    """The last carried values, and what each of `length` steps gives, stacked.

    The operands are `carry` first values, `xs` stacks of inputs, and constants. The region takes the
    carried values, one slice of each stack, and the constants; it gives the next carried values and
    slices of the results. With `reverse` the last slice comes first, and results lie where inputs do.
    """


@op(infer=_given, coerce=direct, numerics=STORAGE)
def cond(condition: Any, *operands: Any) -> Any:
    """The results of the first region where the bool scalar holds, else of the second; both take the operands."""


@op(infer=_given, coerce=direct, numerics=STORAGE)
def while_loop(*operands: Any, carry: int, test: int) -> Any:
    """The carried values after as many runs of the second region as the first, given them, says yes.

    The operands are `carry` first values, `test` constants of the first region, and those of the second.
    """


OPS = (scan, cond, while_loop)

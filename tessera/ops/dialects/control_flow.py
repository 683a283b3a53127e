"""Control flow ops: for, while and if with captured values; scan, cond, while_loop and launch with closed regions.

Below Graph, scan, cond and while_loop become loops and branches of the entry function (`ops/dialects/host.py`): the
host executes them, and their bodies run on the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.ir.analysis import divisor_rules, find_divisor
from tessera.ir.rules import STORAGE, Op, op

# Structured control flow: nodes with regions. Each interpreter's table defines their semantics.


def refuse_direct_call(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """The coercion of ops that only a builder creates: a call on tensors is an error."""
    raise AssertionError(f"{op.name} cannot be called on tensors")


def _refuse_inference(*types: Any) -> None:
    raise AssertionError("the builder determines the types of nodes with regions")


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE, name="for")
def for_(lower, upper, step, *carried):
    """Repeat the region for i from `lower` to before `upper` by `step` (int64 scalars, step not 0).

    The region takes (i, *carried) and returns the next carried values; the last ones are the results.
    """


@divisor_rules(for_)
def _(producers, node):
    """A divisor of the index: it starts at the lower bound and advances by the step."""
    return math.gcd(find_divisor(producers, node.args[0]), find_divisor(producers, node.args[2]))


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE, name="while")
def while_(*carried):
    """Repeat the second region, carried to carried, while the first, carried to a bool scalar, holds."""


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE, name="if")
def if_(condition, *, apart: bool = False):
    """The results of the first region where the bool scalar holds, else of the second.

    `apart`: the tiles of a group execute it independently, even where they wait inside.
    """


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE, dialect="transform")
def called(*operands: Any) -> Any:
    """The results of the region: a traced function that was called."""


# Structured control flow of whole tensors: ops with closed regions, which take everything they use as parameters.


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE)
def scan(*operands: Any, carry: int, xs: int, length: Any, reverse: bool) -> Any:
    """The last carried values, and the stacked results of `length` steps.

    The operands are `carry` first values, `xs` stacks of inputs, and constants. The region takes the
    carried values, one slice of each stack, and the constants; it returns the next carried values and
    slices of the results. With `reverse` the last slice is first, and results have the indices of their inputs.
    """


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE)
def cond(condition: Any, *operands: Any) -> Any:
    """The results of the first region where the bool scalar holds, else of the second; both take the operands."""


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE)
def while_loop(*operands: Any, carry: int, test: int) -> Any:
    """The carried values after running the second region while the first, applied to them, gives true.

    The operands are `carry` first values, `test` constants of the first region, and those of the second.
    """


FUNCTIONAL_FLOW_OPS = (scan, cond, while_loop)


# Kernel launches: Tile IR inside a Graph function, as a function of the memories that it reads.


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE)
def launch(*operands: Any, kernel: str, grid: tuple, written: tuple, attrs: Any) -> Any:
    """The memories with the numbers `written` after a tile function ran once for each point of `grid`.

    The region is the tile function's body. Its parameters are refs: memories that hold the operands, and then memories
    with unspecified elements. The operands themselves do not change. `attrs` are those of the tile function.
    """

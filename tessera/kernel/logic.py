"""Truth and choice on traced values: `and`, `or`, `not`, `a if c else b`, evaluated no further than Python would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.errors import ShapeError
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Node
from tessera.kernel.join import as_type, join_types
from tessera.kernel.place import value
from tessera.kernel.trace import Trace, is_traced
from tessera.ops import control, elementwise
from tessera.ops.basic import full
from tessera.tensor import Tensor
from tessera.types import bool_

Thunk = Callable[[], Any]


def truth(found: Any) -> Any:
    """A condition: a Python bool, or a traced bool scalar.

    Raises:
        ShapeError: the condition is a block, which is not one truth.
    """
    if not is_traced(found):
        return bool(found)
    if found.ndim:
        raise ShapeError(
            "a block is not one truth value", expected="a bool scalar", received=str(found.type),
            suggestion="choose elements with tile.where(condition, a, b), or mask the access",
        )  # fmt: skip
    return as_bool(found)


def as_bool(found: Any) -> Any:
    """Whether each element is not 0."""
    return found if not isinstance(found, Tensor) or found.dtype == bool_ else found != 0


def negation(found: Any) -> Any:
    """`not x`."""
    return elementwise.bitwise_not(as_bool(found)) if is_traced(found) else not found


def both(a: Any, b: Any) -> Any:
    """Both comparisons of a chain."""
    if not is_traced(a) and not is_traced(b):
        return a and b
    return elementwise.bitwise_and(as_bool(a), as_bool(b))


def among(a: Any, values: Any) -> Any:
    """`a in values`: whether `a` equals one of a tuple or list, known now or when the kernel runs.

    Raises:
        ShapeError: `values` is a block, whose elements are not looked through.
    """
    if is_traced(values):
        raise ShapeError(
            "`in` does not look through a block", received=str(values.type),
            suggestion="compare the block and reduce: tile.max(block == value)",
        )  # fmt: skip
    values = [value(v) for v in values] if isinstance(values, (tuple, list)) else values
    if not is_traced(a) and not (isinstance(values, list) and any(is_traced(v) for v in values)):
        return a in values
    found: Any = False
    for each in values:
        same = a == each
        found = same if found is False else elementwise.bitwise_or(as_bool(found), as_bool(constant(same)))
    return found


def conjunction(trace: Trace, left: Any, right: Thunk) -> Any:
    """`left and right`: what `right` reads is read only where `left` holds."""
    if not is_traced(left):
        return right() if left else left
    return _lazy(trace, as_bool(left), right, stop=False)


def disjunction(trace: Trace, left: Any, right: Thunk) -> Any:
    """`left or right`: what `right` reads is read only where `left` does not hold."""
    if not is_traced(left):
        return left if left else right()
    return _lazy(trace, as_bool(left), right, stop=True)


def _lazy(trace: Trace, left: Tensor, right: Thunk, stop: bool) -> Any:
    nodes, found = _aside(trace.builder, lambda: constant(as_bool(right())))
    if left.ndim or found.ndim or not _acts(nodes):
        _insert(trace.builder, nodes)
        return (elementwise.bitwise_or if stop else elementwise.bitwise_and)(left, found)
    settled = constant(stop)
    regions = [((), settled), (nodes, found)] if stop else [(nodes, found), ((), settled)]
    return _branch(trace.builder, left, regions)


def constant(found: Any) -> Tensor:
    """A truth as a tensor."""
    return found if isinstance(found, Tensor) else full(shape=(), value=bool(found), dtype=bool_)


def choice(trace: Trace, test: Tensor, yes: Thunk, no: Thunk) -> Any:
    """`a if test else b`: a branch that reads memory runs only where it is chosen."""
    (one, a), (other, b) = _aside(trace.builder, yes), _aside(trace.builder, no)
    type = join_types("the conditional expression", a, b)
    if type is None:
        return a
    a, b = as_type(a, type), as_type(b, type)
    if _acts([*one, *other]):
        return _branch(trace.builder, test, [(one, a), (other, b)])
    _insert(trace.builder, [*one, *other])
    return elementwise.where(test, a, b)


def _aside(builder: Builder, thunk: Thunk) -> tuple[list[Node], Any]:
    with builder.region() as nodes:
        found = thunk()
    return nodes, found


def _acts(nodes: Sequence[Node]) -> bool:
    return any(n.op.effects for node in nodes for n in (node, *(i for r in node.regions for i in r.walk())))


def _insert(builder: Builder, nodes: Sequence[Node]) -> None:
    for node in nodes:
        builder.append(node)


def _branch(builder: Builder, test: Tensor, regions: Sequence[tuple[Sequence[Node], Tensor]]) -> Tensor:
    blocks = tuple(Block((), tuple(nodes), (found.data,)) for nodes, found in regions)
    node = builder.add(control.if_, [test.data], types=(regions[0][1].type,), regions=blocks)
    return Tensor(node.out)

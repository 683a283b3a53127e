"""What a body says about its values: the dims each depends on, and index arithmetic read back as sums of digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.ir.core import Block, Node, Value
from tessera.lower.affine import Digit, Expr, Opaque, add, atom, const, divide, index, scale
from tessera.op import Rules
from tessera.ops import basic, schedule
from tessera.ops import elementwise as e
from tessera.types import int64

Dims = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Forms:
    """For each value of a body: the dims it depends on, and its index expression where it is an index."""

    dims: Dims
    depends: Mapping[Value, frozenset[int]]
    exprs: Mapping[Value, Expr]

    def expr(self, value: Value) -> Expr:
        """An index as an expression; what is none is opaque."""
        found = self.exprs.get(value)
        return atom(Opaque(value, self.depends[value])) if found is None else found

    def indices(self, node: Node) -> list[Expr]:
        """The indices of a load or store."""
        skip = 1 if node.op is schedule.load else 2
        return [self.expr(v) for v in node.args[skip : skip + node.args[0].type.rank]]


_form = Rules("index form")


def forms(block: Block, dims: Sequence[tuple[str, int, str]]) -> Forms:
    """Read a body."""
    depends: dict[Value, frozenset[int]] = dict.fromkeys(block.params, frozenset())
    exprs: dict[Value, Expr] = {}
    found = Forms(tuple(dims), depends, exprs)
    for node in block.nodes:
        if not node.results:
            continue
        below = frozenset().union(*(depends[v] for v in node.args))
        taken = {node.attrs["dim"]} if node.op in (schedule.reduce, schedule.contract) else set()
        depends[node.out] = below - taken
        if node.op is schedule.index:
            depends[node.out] = frozenset((node.attrs["dim"],))
        rule = _form.get(node.op)
        expr = rule(found, node) if rule and node.out.type.dtype == int64 else None
        if expr is not None:
            exprs[node.out] = expr
    return found


@_form(schedule.index)
def _(found, node):
    dim = node.attrs["dim"]
    return index(dim, found.dims[dim][1])


@_form(basic.full)
def _(found, node):
    return const(node.attrs["value"])


@_form(e.add)
def _(found, node):
    return add(*(found.expr(v) for v in node.args))


@_form(e.sub)
def _(found, node):
    x, y = (found.expr(v) for v in node.args)
    return add(x, scale(y, -1))


@_form(e.mul)
def _(found, node):
    x, y = (found.expr(v) for v in node.args)
    x, y = (y, x) if not x.terms else (x, y)
    return None if y.terms else scale(x, y.constant)


def _divided(found: Forms, node: Node, part: int) -> Expr | None:
    x, y = (found.expr(v) for v in node.args)
    if y.terms or y.constant < 1:
        return None
    out = divide(x, y.constant)[part]
    # A division that does not come out is opaque under the name of its own value.
    return out if all(isinstance(a, Digit) or isinstance(a.key, Value) for a, _ in out.terms) else None


@_form(e.floor_divide)
def _(found, node):
    return _divided(found, node, 0)


@_form(e.remainder)
def _(found, node):
    return _divided(found, node, 1)

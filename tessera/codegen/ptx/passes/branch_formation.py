"""Branch formation: a select whose condition is the same in all threads of a program becomes a branch (LLVM's
select-to-branch conversion).

A concatenation along an axis of which a program has one element selects among its parts by the program's number:
without a branch each program computes the elements of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.core.types import TensorType
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape

COMBINING = (contractions.dot, reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)
CHANGING = {"write", "memory", "async"}  # effects past which loads do not move


def form_branches(function: Function) -> Function:
    """The function with branches for selects between loaded blocks by uniform conditions, if it has ops of elements
    alone.
    """
    if any(n.op in COMBINING or (n.regions and n.op is not control_flow.if_) for n in function.body.walk()):
        return function
    nodes = _rewrite_nodes(UseDef(function), function.body.nodes)
    if nodes == function.body.nodes:
        return function
    return Function(function.name, Block(function.body.params, nodes, ()), function.attrs, function.loc)


def _rewrite_nodes(uses: UseDef, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes of a block with the last such select as a branch, in which the others are; likewise in its regions."""
    for place in range(len(nodes) - 1, -1, -1):
        node = nodes[place]
        if node.op is elementwise.where and (found := _form_branch(uses, nodes[:place], node)) is not None:
            before, branch = found
            return (*_rewrite_nodes(uses, before), branch, *nodes[place + 1 :])
    return tuple(_rewrite_regions(uses, n) if n.op is control_flow.if_ else n for n in nodes)


def _rewrite_regions(uses: UseDef, node: Node) -> Node:
    blocks = [Block(r.params, _rewrite_nodes(uses, r.nodes), r.results) for r in node.regions]
    return Node(node.op, node.args, node.attrs, node.results, tuple(blocks), node.loc)


def _form_branch(uses: UseDef, before: Sequence[Node], node: Node) -> tuple[list[Node], Node] | None:
    """The nodes before a select without those of its branches, and the branch; None where nothing is gained."""
    condition = _find_scalar(uses, node.args[0])
    if condition is None or node.args[1] is node.args[2] or any(n.regions or n.op.effects & CHANGING for n in before):
        return None
    sides = [_find_own_nodes(uses, before, node, place) for place in (1, 2)]
    if not all(any(n.op is tile.load for n in side) for side in sides):
        return None
    inside = {*sides[0], *sides[1]}
    blocks = [_make_region(uses, side, node, place) for side, place in zip(sides, (1, 2), strict=True)]
    branch = Node(control_flow.if_, (condition,), Attrs({"apart": False}), node.results, tuple(blocks), node.loc)
    return [n for n in before if n not in inside], branch


def _find_scalar(uses: UseDef, v: Value) -> Value | None:
    """The scalar that a condition has in all elements, or None."""
    while isinstance(v.type, TensorType) and v.type.rank:
        made = uses.get(v)
        if made is None or made.op not in (shape.reshape, basic.broadcast_to):
            return None
        v = made.args[0]
    return v


def _find_own_nodes(uses: UseDef, before: Sequence[Node], node: Node, place: int) -> list[Node]:
    """The nodes that compute one operand of a select and nothing else, in order."""
    own: set[Node] = set()
    for each in reversed(before):
        if each.results and all(_is_used_by(uses, v, own, node, place) for v in each.results):
            own.add(each)
    return [each for each in before if each in own]


def _is_used_by(uses: UseDef, v: Value, own: set[Node], node: Node, place: int) -> bool:
    """Whether only nodes of a branch, and the select as the operand at a place, use a value."""
    users = uses.users(v)
    if uses.count_uses(v) != sum(user.args.count(v) for user in users):  # a result of a region, too
        return False
    return all(user in own or (user is node and user.args.count(v) == 1 and user.args[place] is v) for user in users)


def _make_region(uses: UseDef, own: Sequence[Node], node: Node, place: int) -> Block:
    """A branch that computes one operand of a select."""
    return Block((), _rewrite_nodes(uses, own), (node.args[place],))

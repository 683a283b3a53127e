"""Pointwise fusion (analysis): finds pointwise ops that are computed inside the loop of their only user.

A liveness analysis follows: the last use of a value depends on where each node is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tessera.ir.core import Block, Node, Value
from tessera.ir.rules import Op


def find_deferred_nodes(
    block: Block, looped: Callable[[Node], bool], pointwise: Callable[[Op], bool]
) -> dict[Value, Node]:
    """The nodes to fuse into their user, by result: the user is the only one, is pointwise, and one of the two is a
    loop.

    A DSD operation is fast, but not faster than its share of a loop that exists anyway.
    """
    alone = _find_single_uses(block, pointwise)
    looping = {node for node in block.nodes if pointwise(node.op) and looped(node)}
    for node in block.nodes:  # the user of a fused loop is a loop
        if any(v in alone and alone[v][0] in looping for v in node.args) and pointwise(node.op):
            looping.add(node)
    return {value: node for value, (node, user) in alone.items() if node in looping or user in looping}


def _find_single_uses(block: Block, pointwise: Callable[[Op], bool]) -> dict[Value, tuple[Node, Node]]:
    """The results of pointwise nodes whose only user is a pointwise node of the same shape: producer and user."""
    users, single_uses = _find_users(block), {}
    for node in block.nodes:
        user = users.get(node.out, (None,)) if pointwise(node.op) and node.out.type.shape else (None,)
        if len(user) == 1 and user[0] is not None and pointwise(user[0].op):
            if user[0].out.type.shape == node.out.type.shape:
                single_uses[node.out] = (node, user[0])
    return single_uses


def _find_users(block: Block) -> dict[Value, list[Node | None]]:
    """The users of each value; None stands for a use in a region or as a result."""
    users: dict[Value, list[Node | None]] = {v: [None] for v in block.results}
    for node in block.nodes:
        for value in dict.fromkeys(node.args):
            users.setdefault(value, []).append(node)
        for region in node.regions:
            for value in region.free:
                users.setdefault(value, []).append(None)
    return users


def find_emission_points(block: Block, later: Mapping[Value, Node]) -> dict[Node, int]:
    """The position at which each node of a block is emitted: a deferred node at the position of its user."""
    points: dict[Node, int] = {}
    users = _find_users(block)
    for position, node in reversed(list(enumerate(block.nodes))):
        user = next((users[v][0] for v in node.results if v in later), None)
        points[node] = position if user is None else points[user]
    return points


def find_last_uses(block: Block, places: Mapping[Node, int]) -> Mapping[int, list[Value]]:
    """The values of a block whose last use is at each position."""
    last: dict[Value, int] = {}
    for node in block.nodes:
        position = places[node]
        inside = (v for region in node.regions for v in region.free)
        for value in (*node.args, *inside, *node.results):
            last[value] = max(position, last.get(value, 0))
    own = {*block.params, *(v for n in block.nodes for v in n.results)}
    by_position: dict[int, list[Value]] = {}
    for value, position in last.items():
        if value in own and value not in block.results:
            by_position.setdefault(position, []).append(value)
    return by_position

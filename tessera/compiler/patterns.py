"""Graph patterns: chains of ops by name, or small functions that are traced, matched in a Graph function.

A traced pattern is matched in two steps. Its skeleton (the ops alone) finds the operands; the pattern is then traced
again for the types of these operands, and must be equal to the program, attributes included.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tessera.core.errors import ArgumentError, TesseraError, user_location
from tessera.core.types import DType, TensorType
from tessera.frontend.jit.tracing import Jit
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.lower.op_chains import VIEW_OPS, check_names, match_chain, strip_views
from tessera.ops.tensor import basic
from tessera.ops.tensor import elementwise as e

COMMUTATIVE = (e.add, e.mul, e.maximum, e.minimum, e.equal, e.not_equal)
MOST_PARAMETERS = 5
SKELETON_SIZE = 4  # of every axis, while the operands of a pattern are not known
SKELETON_RANKS = (2, 1, 3, 4, 0)


@dataclass(frozen=True)
class PatternMatch:
    """A match: the nodes, from the first to the root, and the operands that the replacement takes."""

    nodes: tuple[Node, ...]
    operands: tuple[Value, ...]

    @property
    def root(self) -> Node:
        """The node whose results are replaced."""
        return self.nodes[-1]


Matcher = Callable[[Node, UseDef], "PatternMatch | None"]


def make_matcher(pattern: Any) -> Matcher:
    """A function that matches a pattern at a node: its first one for a chain, its last one for a function.

    Raises:
        ArgumentError: it is neither a list of names nor a function.
        UnknownNameError: no op has one of the names.
    """
    if isinstance(pattern, (list, tuple)):
        names = check_names(pattern)
        return lambda node, uses: match_names(names, node, uses)
    function = getattr(pattern, "function", pattern)
    if not callable(function):
        raise ArgumentError(
            "a pattern is a list of op names or a function", location=user_location(),
            expected='["matmul", "add"], or lambda x, w, b: ts.relu(x @ w + b)', received=repr(pattern)[:80],
        )  # fmt: skip
    return lambda node, uses: match_function(function, node, uses)


# Chains of names.


def match_names(names: tuple[str, ...], first: Node, uses: UseDef) -> PatternMatch | None:
    """A chain whose values nothing else uses; its operands in order, each without the views above it."""
    nodes = match_chain(names, first, uses)
    if nodes is None or not _is_private(nodes, uses):
        return None
    inner = {v for n in nodes[:-1] for v in n.results}
    taken = [strip_broadcast(v, uses) for n in nodes for v in n.args if strip_views(v, uses) not in inner]
    return PatternMatch(tuple(nodes), tuple(taken))


def strip_broadcast(value: Value, uses: UseDef) -> Value:
    """What a chain of broadcasts takes: a bias of one row, not its copies."""
    while (node := uses.find(value, basic.broadcast_to)) is not None:
        value = node.args[0]
    return value


def _is_private(nodes: Sequence[Node], uses: UseDef) -> bool:
    """Whether only the match uses the values inside of it."""
    inside = set(nodes)

    def used_inside(value: Value) -> bool:
        users = uses.users(value)
        if uses.count_uses(value) != sum(n.args.count(value) for n in users):
            return False  # a block yields it
        return all(n in inside or (n.op in VIEW_OPS and used_inside(n.out)) for n in users)

    return all(used_inside(v) for n in nodes[:-1] for v in n.results)


# Traced functions.


def match_function(pattern: Callable[..., Any], root: Node, uses: UseDef) -> PatternMatch | None:
    """A traced pattern whose last node is `root`."""
    if len(root.results) != 1 or root.regions:
        return None
    for skeleton in trace_skeletons(pattern, root.out.type.dtype):  # type: ignore[union-attr]
        producer = UseDef(skeleton)[skeleton.results[0]]
        if producer.op is not root.op:
            continue
        found = _Unification(skeleton, uses, exact=False)
        if not found.unify(skeleton.results[0], root.out) or len(found.operands) < len(skeleton.params):
            continue
        exact = _match_exactly(pattern, skeleton, found, root, uses)
        if exact is not None:
            return exact
    return None


def _match_exactly(
    pattern: Callable[..., Any], skeleton: Function, found: _Unification, root: Node, uses: UseDef
) -> PatternMatch | None:
    operands = [found.operands[p] for p in skeleton.params]
    function = _trace(pattern, tuple(v.type for v in operands))  # type: ignore[misc, arg-type]
    if function is None:
        return None
    exact = _Unification(function, uses, exact=True)
    if not exact.unify(function.results[0], root.out) or [exact.operands.get(p) for p in function.params] != operands:
        return None
    nodes = [n for n in uses.backward_slice([root.out]) if n in exact.nodes]
    return PatternMatch(tuple(nodes), tuple(operands)) if _is_private(nodes, uses) else None


class _Unification:
    """A match of a traced pattern with a program, node by node from the result."""

    def __init__(self, pattern: Function, uses: UseDef, exact: bool) -> None:
        self.made = UseDef(pattern)
        self.params = set(pattern.params)
        self.uses, self.exact = uses, exact
        self.operands: dict[Value, Value] = {}
        self.nodes: set[Node] = set()

    def unify(self, wanted: Value, value: Value) -> bool:
        """Whether a value of the pattern can be one of the program."""
        if wanted in self.params:
            value = value if self.exact else strip_broadcast(value, self.uses)
            return self.operands.setdefault(wanted, value) is value
        if not self.exact:
            wanted, value = self._strip(wanted, self.made), self._strip(value, self.uses)
            if wanted in self.params:
                return self.operands.setdefault(wanted, value) is value
        pattern, node = self.made[wanted], self.uses.get(value)
        if node is None or node.op is not pattern.op or node.regions or len(node.args) != len(pattern.args):
            return False
        if self.exact and (pattern.attrs != node.attrs or wanted.type != value.type):
            return False
        return self._unify_operands(pattern, node)

    def _unify_operands(self, pattern: Node, node: Node) -> bool:
        orders = [node.args, node.args[::-1]] if node.op in COMMUTATIVE else [node.args]
        for order in orders:
            held = dict(self.operands), set(self.nodes)
            if all(self.unify(w, v) for w, v in zip(pattern.args, order, strict=True)):
                self.nodes.add(node)
                return True
            self.operands, self.nodes = held
        return False

    def _strip(self, value: Value, uses: UseDef) -> Value:
        while (node := uses.find(value, *VIEW_OPS)) is not None:
            value = node.args[0]
        return value


@cache
def trace_skeletons(pattern: Callable[..., Any], dtype: DType) -> tuple[Function, ...]:
    """The pattern traced for operands of some ranks: one function for each sequence of ops that it may have.

    Raises:
        ArgumentError: it takes too many arguments, has several results, or cannot be traced at all.
    """
    count = len(inspect.signature(pattern).parameters)
    if not 0 < count <= MOST_PARAMETERS:
        raise ArgumentError(
            f"a pattern takes 1 to {MOST_PARAMETERS} tensors", location=user_location(), received=str(count)
        )
    found: dict[tuple[str, ...], Function] = {}
    for ranks in itertools.product(SKELETON_RANKS, repeat=count):
        if any(max(ranks) - r > 2 for r in ranks if r):
            continue
        function = _trace(pattern, tuple(TensorType((SKELETON_SIZE,) * r, dtype) for r in ranks))
        if function is not None and len(function.results) == 1 and function.body.nodes:
            found.setdefault(tuple(n.op.name for n in function.body.nodes if n.op not in VIEW_OPS), function)
    if not found:
        raise ArgumentError(
            f"the pattern {getattr(pattern, '__name__', pattern)} gives no program with one result for tensors of rank "
            "0 to 4", location=user_location(), expected="a function of tensors that returns one tensor",
        )  # fmt: skip
    return tuple(found.values())


def _trace(pattern: Callable[..., Any], types: tuple[TensorType, ...]) -> Function | None:
    """The pattern for operands of these types; None where it refuses them."""
    try:
        traced = Jit(pattern).trace(*types)
    except (TesseraError, IndexError, ValueError, TypeError):
        return None
    return None if traced.captures or traced.random is not None else traced.function

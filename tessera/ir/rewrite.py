"""Pattern rewriting: use-def chains, tables of rewrite patterns, and one driver (after MLIR's pattern rewriter).

A pattern is a function `pattern(rewriter, node, args)`. `node` is the node as it was, `args` are its operands after
rewriting. The pattern returns the values that replace the results of the node, or None where it does not match.
`rewrite_function` applies a table in one walk from the first node to the last, `rewrite_to_fixed_point` repeats that
walk until nothing changes. Dead code elimination, common subexpression elimination and the expansion of composites
follow.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

from tessera.core.types import DType, Policy
from tessera.ir.builder import (
    CURRENT_BUILDER,
    Builder,
    Evaluation,
    NodeSemantics,
    copy_region,
    evaluate_block,
    make_copier,
    make_keeper,
    override_numerics,
)
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.levels import FLOW_OPS, GRAPH_LAUNCH_OP
from tessera.ir.rules import COMPUTE, REGISTRY, STORAGE, Op, Rules, lower
from tessera.ir.tensor import Tensor
from tessera.ir.verify import verify_function

# Use-def chains.


class UseDef(Mapping[Value, Node]):
    """Use-def chains of a function or block: the defining node and the users of each value, the block of each node.

    As a mapping it holds the defining node of each value; block parameters and values from outside have none. Without
    `nested`, the nodes of inner regions are left out. It does not follow later changes.
    """

    def __init__(self, scope: Function | Block, nested: bool = True) -> None:
        self.scope = scope.body if isinstance(scope, Function) else scope
        self._nested = nested
        self._nodes = self.scope.all_nodes if nested else self.scope.nodes
        self._definitions: dict[Value, Node] = {v: n for n in self._nodes for v in n.results}
        self.get = self._definitions.get  # type: ignore[method-assign]  # a mapping's own is several times slower

    # Most chains are asked for definitions alone: the rest is found on first use.

    @cached_property
    def _users(self) -> dict[Value, list[Node]]:
        users: dict[Value, list[Node]] = {}
        for node in self._nodes:
            for value in node.args:
                known = users.get(value)
                if known is None:
                    users[value] = [node]
                elif known[-1] is not node:  # an operand twice is one user
                    known.append(node)
        return users

    @cached_property
    def _use_counts(self) -> dict[Value, int]:
        regions = [r for n in self._nodes for r in n.regions] if self._nested else []
        return Counter(chain(self.scope.results, *[n.args for n in self._nodes], *[r.results for r in regions]))

    @cached_property
    def _blocks(self) -> dict[Node, Block]:
        blocks = dict.fromkeys(self.scope.nodes, self.scope)
        for node in self._nodes if self._nested else ():
            for region in node.regions:
                blocks |= dict.fromkeys(region.nodes, region)
        return blocks

    def __getitem__(self, value: Value) -> Node:
        return self._definitions[value]

    def __iter__(self) -> Iterator[Value]:
        return iter(self._definitions)

    def __len__(self) -> int:
        return len(self._definitions)

    @cached_property
    def order(self) -> dict[Value, int]:
        """The number of each value that a node defines, in program order."""
        return {value: number for number, value in enumerate(self._definitions)}

    def find(self, value: Value, *ops: Op) -> Node | None:
        """The defining node of a value, if it is of one of these ops."""
        node = self._definitions.get(value)
        return node if node is not None and node.op in ops else None

    def users(self, value: Value) -> tuple[Node, ...]:
        """The nodes that take a value as an operand, in program order."""
        return tuple(self._users.get(value, ()))

    def count_uses(self, value: Value) -> int:
        """How often a value is an operand or a result of a block."""
        return self._use_counts.get(value, 0)

    def block_of(self, node: Node) -> Block:
        """The block that holds a node."""
        return self._blocks[node]

    def backward_slice(self, values: Sequence[Value]) -> tuple[Node, ...]:
        """The nodes that compute some values, in program order."""
        wanted, found = list(values), set[Node]()
        while wanted:
            node = self._definitions.get(wanted.pop())
            if node is not None and node not in found:
                found.add(node)
                wanted += node.args
        return tuple(n for n in self._nodes if n in found)


# Patterns.


class Rewriter:
    """What a pattern works with: the function as it was (`uses`), and the one under construction (`builder`)."""

    def __init__(self, function: Function, builder: Builder) -> None:
        self.function = function
        self.builder = builder
        self.walk = Evaluation(make_copier(builder), {})
        self.has_matched = False

    @cached_property
    def uses(self) -> UseDef:
        """The use-def chains of the function before this rewrite."""
        return UseDef(self.function)

    def new(self, value: Value) -> Value:
        """What a value of the function before this rewrite has become."""
        return self.walk.env[value]

    def find_producer(self, value: Value, *ops: Op) -> Node | None:
        """The node under construction that defines a new value, if it is of one of these ops."""
        node = self.builder.producers.get(value)
        return node if node is not None and node.op in ops else None

    def add(self, op: Op, *args: Value, **attrs: Any) -> Value:
        """Append a node with one result, at the location of the node that is matched."""
        return self.builder.add(op, args, attrs).out

    def copy(self, node: Node, args: Sequence[Value]) -> Sequence[Value]:
        """Append a node again with other operands; inner regions are rewritten."""
        return make_copier(self.builder)(node, list(args), self.walk)

    def copy_region(self, region: Block) -> Block:
        """A region with fresh values, rewritten."""
        return copy_region(self.builder, region, self.walk)


Pattern = Callable[[Rewriter, Node, list[Value]], "Value | Sequence[Value] | None"]


class RewritePatterns:
    """A table of rewrite patterns by op, filled by decorator; those of one op are tried in the order of definition.

    With `same_types`, a replacement whose types differ from those of the node counts as no match.

    >>> # canonicalisation = RewritePatterns("canonicalisation")
    >>> # @canonicalisation(neg)
    >>> # def _(rewriter, node, args): ...
    """

    def __init__(self, name: str, same_types: bool = False) -> None:
        self.name = name
        self.same_types = same_types
        self._table: dict[Op, list[Pattern]] = {}
        self._any_op: list[Pattern] = []

    def __call__(self, *ops: Op) -> Callable[[Pattern], Pattern]:
        """Add a pattern for nodes of these ops."""

        def add(pattern: Pattern) -> Pattern:
            for op in ops:
                self._table.setdefault(op, []).append(pattern)
            return pattern

        return add

    def any_op(self, pattern: Pattern) -> Pattern:
        """Add a pattern for nodes of every op; it is tried after those for the op."""
        self._any_op.append(pattern)
        return pattern

    def __contains__(self, op: Op) -> bool:
        return bool(self._any_op) or op in self._table

    def may_match(self, block: Block) -> bool:
        """Whether there is a pattern for a node of a block."""
        return bool(self._any_op) or not self._table.keys().isdisjoint(block.ops)

    def match(self, rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        """The replacement that the first matching pattern gives, or None."""
        for pattern in (*self._table.get(node.op, ()), *self._any_op):
            found = pattern(rewriter, node, args)
            values = (found,) if isinstance(found, Value) else found
            if values is not None and (not self.same_types or tuple(v.type for v in values) == node.result_types):
                return values
        return None


# The driver.

VERIFY_VARIABLE = "TESSERA_VERIFY"  # set to verify the function after every rewrite
MAX_WALKS = 64


def rewrite_function(
    function: Function, patterns: RewritePatterns, revisit: bool = False, remove_dead: bool = False, final: bool = True
) -> Function:
    """Apply patterns in one walk, from the first node to the last, inner regions included.

    A node that no pattern matches is copied, at its own location; a function that no pattern matches is returned as it
    is. With `revisit`, the nodes that a pattern adds are matched in turn, so that none of them still matches. With
    `remove_dead`, nodes that the rewrite leaves without uses are removed. A function that is not `final` has types
    that the caller converts, and verifies with `verify_rewritten`.
    """
    if not patterns.may_match(function.body):
        return function  # without a copy that nothing would differ in
    rewriter = Rewriter(function, Builder())
    made = _rewrite_body(function, _make_driver(rewriter, patterns, revisit), rewriter.builder)
    if not rewriter.has_matched:
        return function
    made = eliminate_dead_code(made) if remove_dead else made
    return verify_rewritten(made) if final else made


def verify_rewritten(function: Function) -> Function:
    """Verify a rewritten function if the variable TESSERA_VERIFY is set."""
    return verify_function(function) if os.environ.get(VERIFY_VARIABLE) else function


def rewrite_to_fixed_point(function: Function, patterns: RewritePatterns) -> Function:
    """Apply patterns walk by walk, and drop dead code, until the function stays the same."""
    for _ in range(MAX_WALKS):
        made = rewrite_function(function, patterns, remove_dead=True)
        if made == function:
            return function
        function = made
    raise AssertionError(f"the {patterns.name} patterns reach no fixed point in {MAX_WALKS} walks over {function.name}")


def _rewrite_body(function: Function, meaning: NodeSemantics, builder: Builder) -> Function:
    """As `rebuild_function`, with the parameters of the function as they are, so that nodes can stay too."""
    with builder.active(), override_numerics(None):
        results = evaluate_block(function.body, function.params, meaning)
    assert not builder.captures, "a rewrite captured an array"
    return Function(function.name, builder.block(function.params, results), function.attrs, function.loc)


def _make_driver(rewriter: Rewriter, patterns: RewritePatterns, revisit: bool) -> NodeSemantics:
    builder = rewriter.builder
    copy = make_keeper(builder, lambda region: not patterns.may_match(region))

    def rewrite(node: Node, args: list[Value], walk: Any) -> Sequence[Value]:
        if node.op not in patterns:
            return copy(node, args, walk)
        outer, rewriter.walk = rewriter.walk, walk
        found, nodes = builder.collect(node.loc, lambda: patterns.match(rewriter, node, args))
        rewriter.walk = outer
        if found is None:  # what a failed match has added is dropped
            return copy(node, args, walk)
        rewriter.has_matched = True
        if revisit:
            added = Block((), tuple(nodes), tuple(found))
            return evaluate_block(added, (), walk.meaning, {v: v for v in added.free})
        for each in nodes:
            builder.append(each)
        return found

    return rewrite


# Dead code elimination.

SCAN = "ts.scan"


def has_effect(node: Node) -> bool:
    """Whether a node does more than compute its results; reading memory is no effect.

    The memories of a launch in a Graph function are its own: only its prints and assertions are effects.
    """
    if node.op.name == GRAPH_LAUNCH_OP:
        return any("io" in n.op.effects for r in node.regions for n in r.walk())
    return bool(node.op.effects - {"read"}) or any(has_effect(n) for r in node.regions for n in r.nodes)


def eliminate_dead_code(function: Function) -> Function:
    """Remove the nodes whose results nothing uses and that have no effect."""
    return replace(function, body=eliminate_dead_nodes(function.body))


def eliminate_dead_nodes(block: Block, must_stay: Callable[[Node], bool] = has_effect) -> Block:
    """Remove the nodes of a block, inner regions included, whose results nothing uses, unless they `must_stay`."""
    return _remove_dead_nodes(block, set(), must_stay)


def _remove_dead_nodes(block: Block, live: set[Value], must_stay: Callable[[Node], bool]) -> Block:
    live.update(block.results)
    kept: list[Node] = []
    for node in reversed(block.nodes):
        if live.isdisjoint(node.results) and not must_stay(node):
            continue
        node = _remove_dead_stacks(node, live) if node.op.name == SCAN else node
        if node.regions:
            node = replace(node, regions=tuple(_remove_dead_nodes(r, live, must_stay) for r in node.regions))
        live.update(node.args)
        kept.append(node)
    return Block(block.params, tuple(reversed(kept)), block.results)


def _remove_dead_stacks(node: Node, live: set[Value]) -> Node:
    """Remove the stacked results of a scan that nothing uses; the carried values stay."""
    carry = node.attrs["carry"]
    kept = [i for i, v in enumerate(node.results) if i < carry or v in live]
    if len(kept) == len(node.results):
        return node
    (body,) = node.regions
    body = replace(body, results=tuple(body.results[i] for i in kept))
    return replace(node, results=tuple(node.results[i] for i in kept), regions=(body,))


# Common subexpression elimination.


def eliminate_common_subexpressions(function: Function) -> Function:
    """Keep only the first of the nodes without effects that compute the same."""
    return replace(function, body=merge_equal_nodes(function.body))


def merge_equal_nodes(block: Block) -> Block:
    """Keep only the first of the nodes of a block, inner regions included, that compute the same without effects."""
    return _merge_nodes(block, {}, {})


def _merge_nodes(block: Block, known: dict[Hashable, tuple[Value, ...]], names: dict[Value, Value]) -> Block:
    kept = []
    for node in block.nodes:
        node = _rename_operands(node, known, names)
        if node.regions or node.op.effects:
            kept.append(node)
            continue
        same = known.setdefault(_make_expression_key(node), node.results)
        if same is node.results:
            kept.append(node)
        names.update(zip(node.results, same, strict=True))
    return Block(block.params, tuple(kept), tuple(names.get(v, v) for v in block.results))


def _rename_operands(node: Node, known: dict[Hashable, tuple[Value, ...]], names: dict[Value, Value]) -> Node:
    args = tuple(names.get(v, v) for v in node.args)
    # What a region adds is known only inside it; the region of a loop over tensors uses nothing from outside.
    outside = {} if node.op.name in FLOW_OPS else known
    regions = tuple(_merge_nodes(r, dict(outside), names) for r in node.regions)
    return replace(node, args=args, regions=regions) if regions or args != node.args else node


def _make_expression_key(node: Node) -> Hashable:
    # As text, since 1, 1.0 and True are equal in Python, and 0.0 and -0.0.
    return node.op, node.args, repr(node.attrs), node.result_types


# Composites: expansion into the ops of their lowering rule, and type inference through that rule.


def expand_composites(function: Function, keep: Callable[[Op], bool] = lambda op: False) -> Function:
    """Replace each op that has a lowering, and that `keep` does not hold for, by that lowering, to any depth."""
    patterns = RewritePatterns("expansion")
    ops = tuple(lower)  # `keep` may import modules with more rules
    patterns(*(op for op in ops if not keep(op)))(_expand_node)
    return rewrite_function(function, patterns, revisit=True)


def _expand_node(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value]:
    return _apply_lowering(node, lower.of(node.op), args)


def lower_node(node: Node) -> Block:
    """The lowering of a composite node as a block whose parameters are the operands."""
    builder = Builder()
    params = tuple(Value(t) for t in node.types)
    with builder.active(), builder.at(node.loc), override_numerics(None):
        results = _apply_lowering(node, lower.of(node.op), list(params))
    return builder.block(params, results)


def _apply_lowering(node: Node, rule: Callable[..., Any], args: list[Value]) -> tuple[Value, ...]:
    """A lowering applied as one op: operands widened, the result rounded once (design 4)."""
    out = rule(*(_widen_operand(Tensor(a), node.op.numerics) for a in args), **node.attrs)
    outs = out if isinstance(out, tuple) else (out,)
    return tuple(_cast_to_result(t, v.type).data for t, v in zip(outs, node.results, strict=True))


def _cast_to_result(tensor: Tensor, type: Any) -> Tensor:
    """A result as its type has it: rounded once, by its policy if it has one."""
    if type.policy is None or tensor.type.policy == type.policy:
        return _cast_tensor(tensor, type.dtype)
    return _cast_tensor(tensor, type.policy)


def _widen_operand(tensor: Tensor, numerics: str) -> Tensor:
    if numerics == STORAGE or not tensor.dtype.is_float:
        return tensor
    return _cast_tensor(tensor, tensor.type.compute if numerics == COMPUTE else tensor.type.accumulate)


def _cast_tensor(tensor: Tensor, dtype: DType | Policy) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    builder = CURRENT_BUILDER.get()
    assert builder is not None
    return Tensor(builder.add(REGISTRY["ts.cast"], [tensor.data], {"dtype": dtype}).out)


def infer_by_lowering(op: Any, table: Rules = lower) -> Callable[..., Any]:
    """The type rule of a composite: the types that its lowering gives, which is traced once for equal operands."""
    known: dict[Hashable, Any] = {}

    def rule(*types: Any, **attrs: Any) -> Any:
        key = _make_inference_key(types, attrs)
        if key is not None and key in known:
            return known[key]
        builder = Builder()
        with builder.active(), override_numerics(None):
            out = table.of(op)(*(Tensor(Value(t)) for t in types), **attrs)
        found = tuple(t.type for t in out) if isinstance(out, tuple) else out.type
        if key is not None and len(known) < MAX_INFERENCES:
            known[key] = found
        return found

    return rule


MAX_INFERENCES = 1024  # that are kept of a composite
_NUMBERS = (int, float, bool, type(None))


def _make_inference_key(types: tuple[Any, ...], attrs: Mapping[str, Any]) -> Hashable:
    """What the result types of a composite depend on; None where a lowering may do more than give types: it requires
    something of symbolic sizes, or of the mesh that an attribute names."""
    if any(size.__class__ is not int for t in types for size in t.shape):
        return None
    values = [x for v in attrs.values() for x in (v if v.__class__ is tuple else (v,))]
    # As text, since 1, 1.0 and True are equal in Python.
    return (types, repr(attrs)) if all(x.__class__ in _NUMBERS for x in values) else None

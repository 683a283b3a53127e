"""GraphIR: a Graph function as a pass of a user sees it, with the edits that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.compiler.constants import is_short, make_constant
from tessera.compiler.patterns import PatternMatch, make_matcher
from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.symbolic_dim import symbol_names
from tessera.core.types import TensorType
from tessera.frontend.jit.tracing import to_result_tensor
from tessera.interp import graph as graph_interpreter
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, eliminate_dead_code, has_effect, rewrite_function
from tessera.ir.tensor import Tensor
from tessera.lower.op_chains import CONSTANT_OPS


class GraphIR:
    """A Graph function under edit. `nodes` are its nodes in order; edits give the same object, with other nodes.

    A node has `op` (its name is `op.name`, as in "ts.add"), `args` and `results` (values, with a `type`), `attrs`,
    and `loc`, the user's line. Nodes of an earlier `nodes` stay usable in edits until they are replaced.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._constants: dict[Value, np.ndarray] = {}
        self._arrays: dict[Value, np.ndarray] = {}

    @property
    def function(self) -> Function:
        """The function with all edits."""
        if self._constants:
            constants, self._constants = self._constants, {}
            self._function = _insert_constants(self._function, constants)
            self._arrays = {}
        return self._function

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the function, in program order; those of loops and branches are in their `regions`."""
        return self.function.body.nodes

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The parameters."""
        return self._function.params

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The results."""
        return self.function.results

    def find_constant(self, value: Value) -> np.ndarray | None:
        """The elements of a value that does not depend on the parameters; None for any other."""
        if value in self._constants:
            return self._constants[value]
        if value not in self._arrays:
            node = next((n for n in self._function.body.nodes if value in n.results), None)
            if node is None or node.op not in CONSTANT_OPS or not _is_static(node):
                return None
            self._arrays[value] = _evaluate(node, [])[node.results.index(value)]
        return self._arrays[value]

    def replace_with_constant(self, node: Node, result: Any) -> GraphIR:
        """Replace a node by an array. One without a short form (many different elements) stays as it is computed.

        Raises:
            ArgumentError: the node has several results, or an effect.
            ShapeError: the array has another shape.
        """
        if len(node.results) != 1 or has_effect(node):
            raise ArgumentError(
                f"{node.op.name} cannot be a constant: it has an effect or several results", location=node.loc
            )
        type = node.out.type
        array = np.asarray(result.numpy() if isinstance(result, Tensor) else result)
        if array.shape != tuple(type.shape):
            raise ShapeError(
                f"the constant for {node.op.name} has another shape", location=node.loc, expected=str(type),
                received=str(array.shape),
            )  # fmt: skip
        array = array.astype(type.dtype.numpy)  # type: ignore[union-attr]
        if is_short(array):
            self._constants[node.out] = array
        self._arrays[node.out] = array
        return self

    def keep_only(self, nodes: Iterable[Node]) -> GraphIR:
        """Remove all other nodes.

        Raises:
            ArgumentError: a node that stays, or a result, uses one that goes; or one that goes has an effect.
        """
        function, kept = self.function, set(nodes)
        gone = [n for n in function.body.nodes if n not in kept]
        needed = {v for n in function.body.nodes if n in kept for v in (*n.args, *_free_values(n))}
        needed.update(function.results)
        for node in gone:
            if has_effect(node) or not needed.isdisjoint(node.results):
                why = "it has an effect" if has_effect(node) else "its result is used"
                raise ArgumentError(f"{node.op.name} cannot be removed: {why}", location=node.loc)
        body = Block(function.params, tuple(n for n in function.body.nodes if n in kept), function.results)
        self._function = replace(function, body=body)
        return self

    def find_matches(self, pattern: Any) -> list[PatternMatch]:
        """The places where a pattern matches, in order; no node is in two of them."""
        return _find_matches(self.function, make_matcher(pattern))

    def replace_pattern(self, pattern: Any, replacement: Callable[..., Any]) -> GraphIR:
        """Replace each match of a pattern by what `replacement` computes from its operands.

        Raises:
            ArgumentError: the replacement closes over an array, or does not take as many tensors.
            ShapeError: its result has another type than what it replaces.
        """
        function = self.function
        matches = _find_matches(function, make_matcher(pattern))
        if matches:
            self._function = _replace_matches(function, matches, replacement)
        return self

    def replace_nodes(self, nodes: Sequence[Node], kernel: Callable[..., Any]) -> GraphIR:
        """Replace the result of the last of some nodes by `kernel(values, tensors)`, of the values that they take."""
        function, made = self.function, {v for n in nodes for v in n.results}
        values = tuple(dict.fromkeys(v for n in nodes for v in n.args if v not in made))
        match = PatternMatch(tuple(nodes), values)

        def replacement(*tensors: Tensor) -> Any:
            out = kernel(values, tensors)
            return out[0] if isinstance(out, tuple) else out

        self._function = _replace_matches(function, [match], replacement)
        return self

    def __repr__(self) -> str:
        ops = [n.op.name.removeprefix("ts.") for n in self.nodes]
        return f"GraphIR({self._function.name}: {' '.join(ops)})"


def _free_values(node: Node) -> Iterator[Value]:
    return (v for region in node.regions for v in region.free)


def _is_static(node: Node) -> bool:
    return all(isinstance(t, TensorType) and not symbol_names(t.shape) for t in (*node.types, *node.result_types))


def _evaluate(node: Node, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of one node, in the Graph interpreter."""
    params = tuple(Value(v.type) for v in node.args)
    alone = replace(node, args=params)
    function = Function("node", Block(params, (alone,), alone.results))
    return [np.asarray(a) for a in graph_interpreter.run(function, list(operands))]


def evaluate_node(graph: GraphIR, node: Node) -> np.ndarray:
    """The result of a node whose operands are all constants.

    Raises:
        ArgumentError: an operand is not.
    """
    operands = [graph.find_constant(v) for v in node.args]
    if any(a is None for a in operands):
        raise ArgumentError(
            f"an operand of {node.op.name} is not a constant", location=node.loc,
            suggestion="ask all_inputs_constant(node) first",
        )  # fmt: skip
    return _evaluate(node, operands)[0]  # type: ignore[arg-type]


def has_constant_inputs(graph: GraphIR, node: Node) -> bool:
    """Whether a node has operands, and all are constants; one with an effect, regions or random bits never."""
    if not node.args or node.regions or len(node.results) != 1 or has_effect(node) or not _is_static(node):
        return False
    return all(graph.find_constant(v) is not None for v in node.args)


def _insert_constants(function: Function, constants: dict[Value, np.ndarray]) -> Function:
    patterns = RewritePatterns("constants")

    @patterns.any_op
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        if len(node.results) != 1 or node.out not in constants:
            return None
        return make_constant(constants[node.out], node.out.type.dtype).data  # type: ignore[union-attr, no-any-return]

    return rewrite_function(function, patterns, remove_dead=True)


# Patterns.


def _find_matches(function: Function, match: Callable[[Node, UseDef], PatternMatch | None]) -> list[PatternMatch]:
    uses, taken, found = UseDef(function), set[Node](), list[PatternMatch]()
    for node in function.body.walk():
        one = match(node, uses)
        if one is None or not taken.isdisjoint(one.nodes) or len({uses.block_of(n) for n in one.nodes}) > 1:
            continue
        taken.update(one.nodes)
        found.append(one)
    return found


def _replace_matches(function: Function, matches: Sequence[PatternMatch], replacement: Callable[..., Any]) -> Function:
    by_root = {m.root: m for m in matches}
    patterns = RewritePatterns("replacement")

    @patterns(*dict.fromkeys(m.root.op for m in matches))
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        match = by_root.get(node)
        if match is None:
            return None
        return [_call_replacement(rewriter, match, replacement).data]

    return eliminate_dead_code(rewrite_function(function, patterns))


def _call_replacement(rewriter: Rewriter, match: PatternMatch, replacement: Callable[..., Any]) -> Tensor:
    operands = [Tensor(rewriter.new(v)) for v in match.operands]
    name = getattr(replacement, "__name__", "the replacement")
    try:
        out = to_result_tensor(replacement(*operands))
    except TypeError as error:
        raise ArgumentError(
            f"{name} cannot be called with the {len(operands)} operands of the pattern: {error}",
            location=user_location(), received=", ".join(str(t.type) for t in operands),
        ) from error  # fmt: skip
    if not out.is_traced or rewriter.builder.captures:
        rewriter.builder.captures.clear()
        raise ArgumentError(
            f"{name} uses an array that is not an operand of the pattern", location=match.root.loc,
            suggestion="pass it to the program as an argument, or make it of ts.full",
        )  # fmt: skip
    if out.type != match.root.out.type:
        raise ShapeError(
            f"{name} gives another type than what it replaces", location=match.root.loc,
            expected=str(match.root.out.type), received=str(out.type),
        )  # fmt: skip
    return out

"""Evaluator: walks a block and applies one semantics function to each node; interprets, copies, rewrites or expands
composites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import TesseraError
from tessera.core.types import DType, Policy
from tessera.ir.builder import CURRENT_BUILDER, Builder, override_numerics
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rules import COMPUTE, REGISTRY, STORAGE, TYPE_INFERENCE_HOOK, Rules, lower
from tessera.ir.tensor import Tensor

# meaning(node, operands, walk) gives the results; walk(block, *inputs) walks an inner region.
NodeSemantics = Callable[[Node, list[Any], Any], Sequence[Any]]


class Evaluation:
    """A walk under way: the values so far, and `walk(block, *inputs)` for an inner region."""

    __slots__ = ("env", "meaning")

    def __init__(self, meaning: NodeSemantics, env: dict[Value, Any]) -> None:
        self.meaning = meaning
        self.env = env

    def __call__(self, block: Block, *inputs: Any) -> list[Any]:
        return evaluate_block(block, inputs, self.meaning, self.env)

    def with_values(self, env: dict[Value, Any]) -> Evaluation:
        """The same walk on other values."""
        return Evaluation(self.meaning, env)


def evaluate_block(
    block: Block, args: Sequence[Any], meaning: NodeSemantics, env: dict[Value, Any] | None = None
) -> list[Any]:
    """The results of a block: each node's meaning applied in order.

    With the NumPy semantics as meaning this interprets; with a builder it copies, inlines or rewrites.
    """
    env = {} if env is None else env
    env.update(zip(block.params, args, strict=True))
    walk, node = Evaluation(meaning, env), None
    try:
        for node in block.nodes:
            results = meaning(node, [env[v] for v in node.args], walk)
            env.update(zip(node.results, results, strict=True))
    except TesseraError as error:
        assert node is not None
        raise error.at(node.loc) from None
    return [env[v] for v in block.results]


def make_copier(builder: Builder) -> NodeSemantics:
    """The meaning that records each node again, at its own location, operands replaced."""

    def copy(node: Node, args: list[Value], run: Callable[..., list[Any]]) -> tuple[Value, ...]:
        regions = tuple(copy_region(builder, region, run) for region in node.regions)
        types = tuple(v.type for v in node.results)
        return builder.add(node.op, args, node.attrs, types=types, regions=regions, loc=node.loc).results

    return copy


def copy_region(builder: Builder, region: Block, run: Callable[..., list[Any]]) -> Block:
    """A region walked again with fresh parameters."""
    params = tuple(Value(p.type, p.hint) for p in region.params)
    with builder.region() as nodes:
        results = run(region, *params)
    return Block(params, tuple(nodes), tuple(results))


def rebuild_function(function: Function, meaning_of: Callable[[Builder], NodeSemantics]) -> Function:
    """A function walked once with a meaning that records into a new builder."""
    builder = Builder()
    params = tuple(Value(p.type, p.hint) for p in function.params)
    with builder.active(), override_numerics(None):  # types say already what a numeric context asked for
        results = evaluate_block(function.body, params, meaning_of(builder))
    assert not builder.captures, "a rewrite captured an array"
    return Function(function.name, builder.block(params, results), function.attrs, function.loc)


def expand_composites(function: Function, keep: Callable[[Any], bool] = lambda op: False) -> Function:
    """`function` with each op that has a lowering, and that `keep` does not want, replaced by it."""
    return rebuild_function(function, lambda builder: _make_expander(builder, keep, lower))


def _make_expander(builder: Builder, keep: Callable[[Any], bool], table: Rules) -> NodeSemantics:
    copy = make_copier(builder)

    def meaning(node: Node, args: list[Value], run: Callable[..., list[Any]]) -> Sequence[Value]:
        rule = table.get(node.op)
        if rule is None or keep(node.op):
            return copy(node, args, run)
        with builder.at(node.loc), builder.region() as nodes:
            values = _apply_lowering(node, rule, args)
        # What a lowering built may hold composites itself.
        return evaluate_block(
            Block((), tuple(nodes), values), (), meaning, {a: a for a in _find_free_values(nodes, values)}
        )

    return meaning


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


def _find_free_values(nodes: Sequence[Node], results: Sequence[Value]) -> set[Value]:
    made = {v for node in nodes for v in node.results}
    used = {v for node in nodes for v in node.args} | set(results)
    return used - made


def infer_by_lowering(op: Any, table: Rules = lower) -> Callable[..., Any]:
    """The type rule of a composite: the types that its lowering gives."""

    def rule(*types: Any, **attrs: Any) -> Any:
        builder = Builder()
        with builder.active(), override_numerics(None):
            out = table.of(op)(*(Tensor(Value(t)) for t in types), **attrs)
        return tuple(t.type for t in out) if isinstance(out, tuple) else out.type

    return rule


TYPE_INFERENCE_HOOK.append(infer_by_lowering)

"""The one evaluator: a walk over a block with a meaning for each op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.errors import TesseraError
from tessera.ir.builder import CURRENT, Builder
from tessera.ir.core import Block, Function, Node, Value
from tessera.numerics.context import suspended
from tessera.op import COMPUTE, REGISTRY, STORAGE, TYPE_BY_LOWERING, Rules, lower
from tessera.tensor import Tensor
from tessera.types import DType, Policy

# meaning(node, operands, walk) gives the results; walk(block, *inputs) walks an inner region.
Meaning = Callable[[Node, list[Any], Any], Sequence[Any]]


class Walk:
    """A walk under way: the values so far, and `walk(block, *inputs)` for an inner region."""

    __slots__ = ("env", "meaning")

    def __init__(self, meaning: Meaning, env: dict[Value, Any]) -> None:
        self.meaning = meaning
        self.env = env

    def __call__(self, block: Block, *inputs: Any) -> list[Any]:
        return evaluate(block, inputs, self.meaning, self.env)

    def beside(self, env: dict[Value, Any]) -> Walk:
        """The same walk on other values."""
        return Walk(self.meaning, env)


def evaluate(block: Block, args: Sequence[Any], meaning: Meaning, env: dict[Value, Any] | None = None) -> list[Any]:
    """The results of a block: each node's meaning applied in order.

    With the NumPy semantics as meaning this interprets; with a builder it copies, inlines or rewrites.
    """
    env = {} if env is None else env
    env.update(zip(block.params, args, strict=True))
    walk, node = Walk(meaning, env), None
    try:
        for node in block.nodes:
            results = meaning(node, [env[v] for v in node.args], walk)
            env.update(zip(node.results, results, strict=True))
    except TesseraError as error:
        assert node is not None
        raise error.at(node.loc) from None
    return [env[v] for v in block.results]


def copier(builder: Builder) -> Meaning:
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


def rebuild(function: Function, meaning_of: Callable[[Builder], Meaning]) -> Function:
    """A function walked once with a meaning that records into a new builder."""
    builder = Builder()
    params = tuple(Value(p.type, p.hint) for p in function.params)
    with builder.active(), suspended(None):  # types say already what a numeric context asked for
        results = evaluate(function.body, params, meaning_of(builder))
    assert not builder.captures, "a rewrite captured an array"
    return Function(function.name, builder.block(params, results), function.attrs, function.loc)


def expand(function: Function, keep: Callable[[Any], bool] = lambda op: False) -> Function:
    """`function` with each op that has a lowering, and that `keep` does not want, replaced by it."""
    return rebuild(function, lambda builder: _expander(builder, keep, lower))


def _expander(builder: Builder, keep: Callable[[Any], bool], table: Rules) -> Meaning:
    copy = copier(builder)

    def meaning(node: Node, args: list[Value], run: Callable[..., list[Any]]) -> Sequence[Value]:
        rule = table.get(node.op)
        if rule is None or keep(node.op):
            return copy(node, args, run)
        with builder.at(node.loc), builder.region() as nodes:
            values = _lowered(node, rule, args)
        # What a lowering built may hold composites itself.
        return evaluate(Block((), tuple(nodes), values), (), meaning, {a: a for a in _free(nodes, values)})

    return meaning


def lowering_of(node: Node) -> Block:
    """The lowering of a composite node as a block whose parameters are the operands."""
    builder = Builder()
    params = tuple(Value(t) for t in node.types)
    with builder.active(), builder.at(node.loc), suspended(None):
        results = _lowered(node, lower.of(node.op), list(params))
    return builder.block(params, results)


def _lowered(node: Node, rule: Callable[..., Any], args: list[Value]) -> tuple[Value, ...]:
    """A lowering applied as one op: operands widened, the result rounded once (design 4)."""
    out = rule(*(_wide(Tensor(a), node.op.numerics) for a in args), **node.attrs)
    outs = out if isinstance(out, tuple) else (out,)
    return tuple(_stored(t, v.type).data for t, v in zip(outs, node.results, strict=True))


def _stored(tensor: Tensor, type: Any) -> Tensor:
    """A result as its type has it: rounded once, by its policy if it has one."""
    if type.policy is None or tensor.type.policy == type.policy:
        return _as(tensor, type.dtype)
    return _as(tensor, type.policy)


def _wide(tensor: Tensor, numerics: str) -> Tensor:
    if numerics == STORAGE or not tensor.dtype.is_float:
        return tensor
    return _as(tensor, tensor.type.compute if numerics == COMPUTE else tensor.type.accumulate)


def _as(tensor: Tensor, dtype: DType | Policy) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    builder = CURRENT.get()
    assert builder is not None
    return Tensor(builder.add(REGISTRY["ts.cast"], [tensor.data], {"dtype": dtype}).out)


def _free(nodes: Sequence[Node], results: Sequence[Value]) -> set[Value]:
    made = {v for node in nodes for v in node.results}
    used = {v for node in nodes for v in node.args} | set(results)
    return used - made


def infer_by_lowering(op: Any, table: Rules = lower) -> Callable[..., Any]:
    """The type rule of a composite: the types that its lowering gives."""

    def rule(*types: Any, **attrs: Any) -> Any:
        builder = Builder()
        with builder.active(), suspended(None):
            out = table.of(op)(*(Tensor(Value(t)) for t in types), **attrs)
        return tuple(t.type for t in out) if isinstance(out, tuple) else out.type

    return rule


TYPE_BY_LOWERING.append(infer_by_lowering)

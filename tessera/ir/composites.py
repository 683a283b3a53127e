"""Composite ops: expansion into the ops of their lowering rule, and type inference through that rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.types import DType, Policy
from tessera.ir.builder import CURRENT_BUILDER, Builder, override_numerics
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, rewrite_function
from tessera.ir.rules import COMPUTE, REGISTRY, STORAGE, Op, Rules, lower
from tessera.ir.tensor import Tensor


def expand_composites(function: Function, keep: Callable[[Op], bool] = lambda op: False) -> Function:
    """Replace each op that has a lowering, and that `keep` does not hold for, by that lowering, to any depth."""
    patterns = RewritePatterns("expansion")
    patterns(*(op for op in lower if not keep(op)))(_expand_node)
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
    """The type rule of a composite: the types that its lowering gives."""

    def rule(*types: Any, **attrs: Any) -> Any:
        builder = Builder()
        with builder.active(), override_numerics(None):
            out = table.of(op)(*(Tensor(Value(t)) for t in types), **attrs)
        return tuple(t.type for t in out) if isinstance(out, tuple) else out.type

    return rule

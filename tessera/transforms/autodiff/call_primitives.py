"""Call primitives: checkpoint, custom_jvp and custom_vjp as ops with a region, and checkpoint (rematerialisation)
policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tessera.core.errors import ArgumentError, UnsupportedOpError, user_location
from tessera.core.pytree import map_leaves
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.core import Block, Value
from tessera.ir.rules import STORAGE, op, transpose
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.dialects.control_flow import _refuse_inference, called, refuse_direct_call
from tessera.ops.tensor.basic import is_undefined_primal, kept, recompute, splat
from tessera.ops.tensor.contractions import dot
from tessera.transforms.autodiff import linearisation
from tessera.transforms.autodiff.linearisation import Dual, linearise
from tessera.transforms.autodiff.tape import detach, record_on_tape
from tessera.transforms.batching import BatchValue, batch_block, broadcast_to_batch
from tessera.transforms.batching import call_batching_rules as batched
from tessera.transforms.recording import TransformBuilder, eval_block, record_block, traced_value

# Checkpoint policies: the values that a checkpoint saves besides its arguments.


# policy(name of an op without its dialect) is whether its results are saved.
CheckpointPolicy = str | Callable[[str], bool] | None


def _find_marked_values(block: Block) -> list[Value]:
    return [n.args[0] for n in block.nodes if n.op is kept]


CHECKPOINT_POLICIES: dict[str, Callable[[Block], list[Value]]] = {
    "full": lambda block: [],
    "selective": _find_marked_values,
    "dots": lambda block: [n.out for n in block.nodes if n.op is dot],
    "everything": lambda block: [v for n in block.nodes for v in n.results],
}


def check_checkpoint_policy(policy: CheckpointPolicy) -> CheckpointPolicy:
    """A policy by its name or function.

    Raises:
        ArgumentError: the policy is unknown.
    """
    if policy is None or callable(policy) or policy in CHECKPOINT_POLICIES:
        return policy
    raise ArgumentError(
        f"unknown checkpoint policy {policy!r}", location=user_location(),
        expected=f"{', '.join(CHECKPOINT_POLICIES)}, or a function of an op's name",
    )  # fmt: skip


def select_saved_values(policy: CheckpointPolicy, block: Block) -> list[Value]:
    """The values of a block that a policy saves, each once; parameters are always saved."""
    if callable(policy):
        found = [v for n in block.nodes if policy(n.op.__name__) for v in n.results]
    else:
        found = CHECKPOINT_POLICIES[policy or "full"](block)
    params = set(block.params)
    return [v for v in dict.fromkeys(found) if v not in params]


def checkpoint_here(value: Any) -> Any:
    """`value` (a tensor or a container of them), which an enclosing checkpoint with policy "selective" saves.

    Elsewhere it has no effect.

    >>> checkpoint_here(2.0)
    Tensor(2., f32)
    """
    return map_leaves(lambda x: kept(as_tensor(x)), value)


# Calls that stay nodes in the trace of a transform: functions with custom derivative rules, and checkpoints.


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE, dialect="transform")
def checkpoint(*operands: Any, policy: Any = None) -> Any:
    """The results of the region, which reverse mode recomputes instead of saving its values.

    `policy` selects values that are saved nevertheless.
    """


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE, dialect="transform")
def custom_jvp(*operands: Any, rule: Any) -> Any:
    """The results of the region, with tangents by `rule`."""


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE, dialect="transform")
def custom_vjp(*operands: Any, rule: Any) -> Any:
    """The results of the region, with cotangents by `rule`."""


@op(infer=_refuse_inference, coerce=refuse_direct_call, numerics=STORAGE, dialect="transform")
def transpose_call(*operands: Any, pull: Any, residuals: int) -> Any:
    """A linear function of the operands after the first `residuals`, defined only by its transpose `pull`."""


class DerivativeRule:
    """A user's derivative rule, which can be batched."""

    def batched(self) -> DerivativeRule:
        """The rule for a batch of examples."""
        raise NotImplementedError


def must_record_call(tensors: Sequence[Tensor]) -> bool:
    """Whether a call stays a node: a transform reads the trace, or a tape records."""
    builder = CURRENT_BUILDER.get()
    return isinstance(builder, TransformBuilder) or (builder is None and any(t.requires_grad for t in tensors))


def record_call(kind: Any, function: Callable[[list[Tensor]], Any], tensors: Sequence[Tensor], **attrs: Any) -> Any:
    """A call of a function as one node of the trace of a transform, or of the tape."""
    builder = CURRENT_BUILDER.get()
    body = record_block(function, [t.type for t in tensors])
    if builder is None:
        operands = [*tensors, *body.closed]
        outs = eval_block(body.block, [detach(t) for t in operands])
        record_on_tape(kind, operands, attrs, outs, (body.block,))
        return body.build(outs)
    assert isinstance(builder, TransformBuilder)
    if "rule" in attrs and any(t.is_traced and builder.owns(t.data) for t in body.closed):
        raise ArgumentError(
            "a function with a custom derivative rule captures a tensor of the function being transformed",
            location=user_location(), expected="everything it depends on among its arguments",
            suggestion="pass the tensor as an argument",
        )  # fmt: skip
    values = [traced_value(builder, t) for t in (*tensors, *body.closed)]
    types = tuple(v.type for v in body.block.results)
    node = builder.add(kind, values, attrs, types=types, regions=(body.block,))
    return body.build([Tensor(v) for v in node.results])


def add_transpose_call(
    pull: Any, residuals: Sequence[Tensor], duals: Sequence[Dual], outs: Sequence[Tensor]
) -> list[Dual]:
    """Results whose tangents are defined by their transpose: pull(residuals, g) for the operands with tangents."""
    builder = CURRENT_BUILDER.get()
    assert isinstance(builder, TransformBuilder)
    moving = [d.tangent for d in duals if d.tangent is not None]
    values = [traced_value(builder, t) for t in (*residuals, *moving)]
    attrs = {"pull": pull, "residuals": len(residuals)}
    floats = [o for o in outs if o.dtype.is_float]
    tangents = iter(builder.add(transpose_call, values, attrs, types=tuple(o.type for o in floats)).results)
    return [Dual(o, Tensor(next(tangents)) if o.dtype.is_float else None) for o in outs]


@transpose(transpose_call)
def _(g: Any, *operands: Any, pull: Any, residuals: int) -> Any:
    found = pull(operands[:residuals], g if isinstance(g, tuple) else (g,))
    moving = operands[residuals:]
    return (*([None] * residuals), *(c if is_undefined_primal(x) else None for c, x in zip(found, moving, strict=True)))


@linearisation.call_jvp_rules(checkpoint)
def _(node: Any, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    if not reverse:
        return walk(node.regions[0], *duals)
    primals, moves = [d.primal for d in duals], [d.tangent is not None for d in duals]
    block = node.regions[0]
    values = select_saved_values(node.attrs["policy"], block)
    found = eval_block(replace(block, results=(*block.results, *values)), primals)
    outs, held = found[: len(block.results)], found[len(block.results) :]

    def pull(residuals: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        # The recomputation equals the first computation: the mark keeps CSE from merging them.
        operands = [recompute(x) for x in residuals[: len(primals)]]
        saved = dict(zip(values, residuals[len(primals) :], strict=True))
        point, given = linearise(block, operands, moves, saved), iter(g)
        return point.pull_back([next(given) if o.dtype.is_float else None for o in outs])

    return add_transpose_call(pull, [*primals, *held], duals, outs)


@linearisation.call_jvp_rules(custom_jvp)
def _(node: Any, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    return _push_rule(node.attrs["rule"], duals)


def _push_rule(rule: Any, duals: list[Dual]) -> Sequence[Dual]:
    """The results of a call and their tangents by its rule."""
    primals = [d.primal for d in duals[: rule.count]]
    tangents = [splat(0, d.primal.type) if d.tangent is None else d.tangent for d in duals[: rule.count]]
    outs, moved = rule.push(primals, tangents)
    return [Dual(x, t) for x, t in zip(outs, moved, strict=True)]


@linearisation.call_jvp_rules(custom_vjp)
def _(node: Any, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    rule = node.attrs["rule"]
    if not reverse and rule.push is not None:
        return _push_rule(rule, duals)
    if rule.derives and (rule.backward is None or not reverse):
        return walk(node.regions[0], *duals)
    if not reverse:
        raise UnsupportedOpError(
            f"forward mode through {rule.name}, which has only a rule for reverse mode",
            suggestion="use ts.custom_jvp: its rule serves both modes",
        )
    given = duals[: rule.count]
    outs, residuals = rule.forward([d.primal for d in given])
    moves = [d.tangent is not None for d in given]

    def pull(saved: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        return [c for c, m in zip(rule.backward(saved, g), moves, strict=True) if m]

    return add_transpose_call(pull, residuals, given, outs)


@batched(checkpoint, custom_jvp, custom_vjp)
def _(node: Any, lanes: list[BatchValue], walk: Any, size: Any) -> Sequence[BatchValue]:
    if not isinstance(CURRENT_BUILDER.get(), TransformBuilder):  # this is not differentiated again
        return walk(node.regions[0], *lanes)
    many = [lane.tensor if lane.batched else broadcast_to_batch(lane.tensor, size) for lane in lanes]
    attrs = {k: rule.batched() if isinstance(rule, DerivativeRule) else rule for k, rule in node.attrs.items()}

    def body(tensors: list[Tensor]) -> list[Tensor]:
        outs = batch_block(node.regions[0], [BatchValue(t, True) for t in tensors], size)
        return [o.tensor if o.batched else broadcast_to_batch(o.tensor, size) for o in outs]

    return [BatchValue(t, True) for t in record_call(node.op, body, many, **attrs)]


@linearisation.call_jvp_rules(called)
def _(node: Any, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    return walk(node.regions[0], *duals)


@batched(called)
def _(node: Any, lanes: list[BatchValue], walk: Any, size: Any) -> Sequence[BatchValue]:
    return walk(node.regions[0], *lanes)

"""Calls that a transform sees whole: functions with derivative rules of their own, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tessera.autodiff import dual
from tessera.autodiff.dual import Dual
from tessera.autodiff.linear import linearise
from tessera.autodiff.policies import values_kept
from tessera.autodiff.record import Recorder, _value, record, replay
from tessera.autodiff.tape import plain, taped
from tessera.batching import Lane, repeated, spread_out
from tessera.batching import calls as batched
from tessera.errors import ArgumentError, UnsupportedOpError, here
from tessera.ir.builder import CURRENT
from tessera.op import STORAGE, op, transpose
from tessera.ops.basic import splat
from tessera.ops.control import _given, called, direct
from tessera.ops.derivatives import unknown
from tessera.ops.recompute import recompute
from tessera.tensor import Tensor


@op(infer=_given, coerce=direct, numerics=STORAGE, dialect="transform")
def checkpoint(*operands: Any, policy: Any = None) -> Any:
    """The results of the region, which reverse mode computes again rather than keep what is inside.

    `policy` says what it keeps nevertheless.
    """


@op(infer=_given, coerce=direct, numerics=STORAGE, dialect="transform")
def custom_jvp(*operands: Any, rule: Any) -> Any:
    """The results of the region, whose tangents `rule` gives."""


@op(infer=_given, coerce=direct, numerics=STORAGE, dialect="transform")
def custom_vjp(*operands: Any, rule: Any) -> Any:
    """The results of the region, whose cotangents `rule` takes back."""


@op(infer=_given, coerce=direct, numerics=STORAGE, dialect="transform")
def pulled(*operands: Any, pull: Any, residuals: int) -> Any:
    """A linear function of the operands after the first `residuals`, of which only the transpose is known: `pull`."""


class Rule:
    """A derivative rule of a user's, which may be batched."""

    def batched(self) -> Rule:
        """The same for many examples."""
        raise NotImplementedError


def recording(tensors: Sequence[Tensor]) -> bool:
    """Whether a call is to be seen whole: a transform reads the trace, or a gradient may be asked for later."""
    builder = CURRENT.get()
    return isinstance(builder, Recorder) or (builder is None and any(t.requires_grad for t in tensors))


def record_call(kind: Any, function: Callable[[list[Tensor]], Any], tensors: Sequence[Tensor], **attrs: Any) -> Any:
    """A call of a function as one node of the trace that a transform reads, or of what is remembered."""
    builder = CURRENT.get()
    body = record(function, [t.type for t in tensors])
    if builder is None:
        operands = [*tensors, *body.closed]
        outs = replay(body.block, [plain(t) for t in operands])
        taped(kind, operands, attrs, outs, (body.block,))
        return body.build(outs)
    assert isinstance(builder, Recorder)
    if "rule" in attrs and any(t.is_traced and builder.owns(t.data) for t in body.closed):
        raise ArgumentError(
            "a function with a derivative rule of its own closes over a tensor of the function being transformed",
            location=here(), expected="everything it depends on among its arguments",
            suggestion="pass the tensor as an argument",
        )  # fmt: skip
    values = [_value(builder, t) for t in (*tensors, *body.closed)]
    types = tuple(v.type for v in body.block.results)
    node = builder.add(kind, values, attrs, types=types, regions=(body.block,))
    return body.build([Tensor(v) for v in node.results])


def linear_call(pull: Any, residuals: Sequence[Tensor], duals: Sequence[Dual], outs: Sequence[Tensor]) -> list[Dual]:
    """Results whose tangents are known only by their transpose: pull(residuals, g) for the operands that move."""
    builder = CURRENT.get()
    assert isinstance(builder, Recorder)
    moving = [d.tangent for d in duals if d.tangent is not None]
    values = [_value(builder, t) for t in (*residuals, *moving)]
    attrs = {"pull": pull, "residuals": len(residuals)}
    floats = [o for o in outs if o.dtype.is_float]
    tangents = iter(builder.add(pulled, values, attrs, types=tuple(o.type for o in floats)).results)
    return [Dual(o, Tensor(next(tangents)) if o.dtype.is_float else None) for o in outs]


@transpose(pulled)
def _(g: Any, *operands: Any, pull: Any, residuals: int) -> Any:
    found = pull(operands[:residuals], g if isinstance(g, tuple) else (g,))
    moving = operands[residuals:]
    return (*([None] * residuals), *(c if unknown(x) else None for c, x in zip(found, moving, strict=True)))


@dual.calls(checkpoint)
def _(node: Any, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    if not reverse:
        return walk(node.regions[0], *duals)
    primals, moves = [d.primal for d in duals], [d.tangent is not None for d in duals]
    block = node.regions[0]
    values = values_kept(node.attrs["policy"], block)
    found = replay(replace(block, results=(*block.results, *values)), primals)
    outs, held = found[: len(block.results)], found[len(block.results) :]

    def pull(residuals: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        # What follows is the same computation as before: the mark keeps passes from sharing the two.
        operands = [recompute(x) for x in residuals[: len(primals)]]
        saved = dict(zip(values, residuals[len(primals) :], strict=True))
        point, given = linearise(block, operands, moves, saved), iter(g)
        return point.pull([next(given) if o.dtype.is_float else None for o in outs])

    return linear_call(pull, [*primals, *held], duals, outs)


@dual.calls(custom_jvp)
def _(node: Any, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    count = node.attrs["rule"].count
    primals = [d.primal for d in duals[:count]]
    tangents = [splat(0, d.primal.type) if d.tangent is None else d.tangent for d in duals[:count]]
    outs, moved = node.attrs["rule"].push(primals, tangents)
    return [Dual(x, t) for x, t in zip(outs, moved, strict=True)]


@dual.calls(custom_vjp)
def _(node: Any, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    rule = node.attrs["rule"]
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

    return linear_call(pull, residuals, given, outs)


@batched(checkpoint, custom_jvp, custom_vjp)
def _(node: Any, lanes: list[Lane], walk: Any, size: Any) -> Sequence[Lane]:
    if not isinstance(CURRENT.get(), Recorder):  # no derivative is taken of this any more
        return walk(node.regions[0], *lanes)
    many = [lane.tensor if lane.batched else repeated(lane.tensor, size) for lane in lanes]
    attrs = {k: rule.batched() if isinstance(rule, Rule) else rule for k, rule in node.attrs.items()}

    def body(tensors: list[Tensor]) -> list[Tensor]:
        outs = spread_out(node.regions[0], [Lane(t, True) for t in tensors], size)
        return [o.tensor if o.batched else repeated(o.tensor, size) for o in outs]

    return [Lane(t, True) for t in record_call(node.op, body, many, **attrs)]


@dual.calls(called)
def _(node: Any, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    return walk(node.regions[0], *duals)


@batched(called)
def _(node: Any, lanes: list[Lane], walk: Any, size: Any) -> Sequence[Lane]:
    return walk(node.regions[0], *lanes)

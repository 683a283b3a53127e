"""Calls that a transform sees whole: functions with derivative rules of their own, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.autodiff import dual
from tessera.autodiff.dual import Dual
from tessera.autodiff.linear import linearise
from tessera.autodiff.record import Recorder, _value, call, record
from tessera.batching import Lane, repeated, spread_out
from tessera.batching import calls as batched
from tessera.errors import ArgumentError, UnsupportedOpError, here
from tessera.ir.builder import CURRENT
from tessera.op import STORAGE, op, transpose
from tessera.ops.basic import splat
from tessera.ops.control import _given, direct
from tessera.ops.derivatives import unknown
from tessera.tensor import Tensor


@op(infer=_given, coerce=direct, numerics=STORAGE, dialect="transform")
def checkpoint(*operands: Any) -> Any:
    """The results of the region, which reverse mode computes again rather than keep what is inside."""


@op(infer=_given, coerce=direct, numerics=STORAGE, dialect="transform")
def custom_jvp(*operands: Any, rule: Any) -> Any:
    """The results of the region, whose tangents `rule` gives."""


@op(infer=_given, coerce=direct, numerics=STORAGE, dialect="transform")
def custom_vjp(*operands: Any, rule: Any) -> Any:
    """The results of the region, whose cotangents `rule` takes back."""


@op(infer=_given, coerce=direct, numerics=STORAGE, dialect="transform")
def pulled(*operands: Any, pull: Any, residuals: int) -> Any:
    """A linear function of the operands after the first `residuals`, of which only the transpose is known: `pull`."""


def record_call(kind: Any, function: Callable[[list[Tensor]], Any], tensors: Sequence[Tensor], **attrs: Any) -> Any:
    """A call of a function as one node of the trace that a transform reads."""
    builder = CURRENT.get()
    assert isinstance(builder, Recorder)
    body = record(function, [t.type for t in tensors])
    if attrs and any(t.is_traced and builder.owns(t.data) for t in body.closed):
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
    primals = [d.primal for d in duals]
    outs = call(node, primals)
    moves = [d.tangent is not None for d in duals]

    def pull(operands: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        given = iter(g)
        return linearise(node.regions[0], operands, moves).pull(
            [next(given) if o.dtype.is_float else None for o in outs]
        )

    return linear_call(pull, primals, duals, outs)


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
    attrs = {k: rule.batched() for k, rule in node.attrs.items()}

    def body(tensors: list[Tensor]) -> list[Tensor]:
        outs = spread_out(node.regions[0], [Lane(t, True) for t in tensors], size)
        return [o.tensor if o.batched else repeated(o.tensor, size) for o in outs]

    return [Lane(t, True) for t in record_call(node.op, body, many, **attrs)]

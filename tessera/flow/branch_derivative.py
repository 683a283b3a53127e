"""Derivatives of cond, in both modes, and of while_loop in forward mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.autodiff import dual
from tessera.autodiff.calls import linear_call
from tessera.autodiff.dual import Dual, push
from tessera.autodiff.linear import linearise
from tessera.autodiff.record import again, replay
from tessera.errors import UnsupportedOpError
from tessera.flow.nodes import cond_of, while_of
from tessera.flow.scan_derivative import Moves, _paired, moving, settle
from tessera.ir.core import Block, Node
from tessera.ops import flow
from tessera.ops.derivatives import dense
from tessera.tensor import Tensor


@dual.calls(flow.cond)
def _(node: Node, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    condition, operands = duals[0].primal, duals[1:]
    moves = [d.tangent is not None for d in operands]
    if reverse:
        return _cond_reverse(node, condition, operands, moves)
    found = [moving(block, moves)[1] for block in node.regions]
    kept = [any(each) for each in zip(*found, strict=True)]

    def branch(block: Block) -> Callable[[list[Tensor]], list[Tensor]]:
        def run(tensors: list[Tensor]) -> list[Tensor]:
            outs = push(block, _paired(tensors, moves))
            moved = [dense(d.tangent, d.primal.type) for d, k in zip(outs, kept, strict=True) if k]
            return [*(d.primal for d in outs), *moved]

        return run

    tangents = [d.tangent for d in operands if d.tangent is not None]
    outs = cond_of(condition, [branch(b) for b in node.regions], [*(d.primal for d in operands), *tangents])
    return _paired(outs, kept)


def _cond_reverse(node: Node, condition: Tensor, operands: list[Dual], moves: Moves) -> list[Dual]:
    """The way back takes the same branch, and computes again what it needs of it."""
    primals = [d.primal for d in operands]
    outs = again(node, [condition, *primals])
    floats = [o.dtype.is_float for o in outs]

    def back(block: Block) -> Callable[[list[Tensor]], list[Tensor]]:
        def run(tensors: list[Tensor]) -> list[Tensor]:
            given = iter(tensors[len(primals) :])
            point = linearise(block, tensors[: len(primals)], moves)
            return point.pull([next(given) if f else None for f in floats])

        return run

    def pull(saved: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        return cond_of(saved[0], [back(b) for b in node.regions], [*saved[1:], *g])

    return linear_call(pull, [condition, *primals], operands, outs)


@dual.calls(flow.while_loop)
def _(node: Node, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    if reverse:
        raise UnsupportedOpError(
            "reverse mode through while_loop, whose number of steps is not known",
            suggestion="use ts.fori_loop or ts.scan, or forward mode: ts.jvp, ts.jacfwd",
        )
    count, end = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    carried, asked, consts = duals[:count], [d.primal for d in duals[count:end]], duals[end:]
    test, body = node.regions
    moves = settle(body, [d.tangent is not None for d in (*carried, *consts)], count)[0][:count]

    def split(tensors: Sequence[Tensor]) -> list[Dual]:
        return _paired(tensors, moves)

    def step(tensors: list[Tensor]) -> list[Tensor]:
        outs = push(body, [*split(tensors), *consts])
        return [
            *(d.primal for d in outs),
            *(dense(d.tangent, d.primal.type) for d, m in zip(outs, moves, strict=True) if m),
        ]

    start = [
        *(d.primal for d in carried),
        *(dense(d.tangent, d.primal.type) for d, m in zip(carried, moves, strict=True) if m),
    ]
    return split(while_of(lambda tensors: replay(test, [*tensors[:count], *asked])[0], step, start))

"""Control flow as nodes: made from functions of lists of tensors, recorded in the open trace or run at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.autodiff.record import Recorder, _value, flows, record, replay
from tessera.autodiff.tape import plain, taped
from tessera.errors import ArgumentError, here
from tessera.ir.builder import CURRENT, Builder
from tessera.ir.core import Block, Value
from tessera.op import Op, Rules
from tessera.ops import flow
from tessera.tensor import Tensor, like
from tessera.types import TensorType

Tensors = Sequence[Tensor]
Step = Callable[[list[Tensor]], Any]

# run(attrs, regions, operands) gives the results where no trace is open.
run = Rules("eager control flow")


def added(op: Op, operands: Tensors, attrs: Mapping[str, Any], regions: Sequence[Block], types: Any) -> list[Tensor]:
    """A node of the open trace, or its results where none is open."""
    builder = CURRENT.get()
    if builder is None:
        found = run.of(op)(attrs, regions, [plain(t) for t in operands])
        taped(op, operands, attrs, found, regions)
        return found
    values = [_value(builder, t) for t in operands]
    inner = regions if isinstance(builder, Recorder) else [settled(r) for r in regions]
    return [Tensor(v) for v in builder.add(op, values, attrs, types=tuple(types), regions=tuple(inner)).results]


@flows(*flow.OPS)
def _(node, tensors):
    return added(node.op, tensors, node.attrs, node.regions, node.result_types)


def settled(block: Block) -> Block:
    """A block in which calls with derivative rules are inlined: no transform will read it."""
    if not any(n.op.name.startswith("transform.") for n in block.walk()):
        return block
    builder = Builder()
    params = [Value(p.type, p.hint) for p in block.params]
    with builder.active():
        results = replay(block, [Tensor(p) for p in params])
    if builder.captures:
        raise ArgumentError(
            "a solver inside a loop or branch closes over an array", location=here(),
            suggestion="pass it to the function that the solver is given, as a tensor that it closes over",
        )  # fmt: skip
    return builder.block(params, [_value(builder, t) for t in results])


def slice_type(type: TensorType) -> TensorType:
    """The type of one slice along the first axis."""
    return type.with_shape(type.shape[1:])


def scan_of(step: Step, carry: Tensors, xs: Tensors, consts: Tensors, length: Any, reverse: bool = False) -> Any:
    """The results of a scan whose step takes (carry, slices, constants) as one list and gives (carry, results)."""
    types = [*(t.type for t in carry), *(slice_type(t.type) for t in xs), *(t.type for t in consts)]
    body = record(step, types, lines=True)
    return scan_node(body.block, carry, xs, [*consts, *body.closed], length, reverse)


def scan_node(block: Block, carry: Tensors, xs: Tensors, consts: Tensors, length: Any, reverse: bool) -> list[Tensor]:
    """A scan of a finished body."""
    stacked = [v.type.with_shape((length, *v.type.shape)) for v in block.results[len(carry) :]]  # type: ignore[union-attr]
    attrs = {"carry": len(carry), "xs": len(xs), "length": length, "reverse": reverse}
    types = (*(t.type for t in carry), *stacked)
    return added(flow.scan, [*carry, *xs, *consts], attrs, [block], types)


def cond_of(condition: Tensor, branches: Sequence[Step], operands: Tensors) -> list[Tensor]:
    """The results of one of two functions of a list of tensors."""
    types = [t.type for t in operands]
    bodies = [record(branch, types, lines=True) for branch in branches]
    closed = [t for body in bodies for t in body.closed]
    first, second = (b.block.params[len(types) :] for b in bodies)
    blocks = [
        _widened(bodies[0].block, len(types) + len(first), second),
        _widened(bodies[1].block, len(types), first),
    ]
    results = [v.type for v in blocks[0].results]
    return added(flow.cond, [condition, *operands, *closed], {}, blocks, results)


def _widened(block: Block, at: int, others: Sequence[Value]) -> Block:
    """A block with parameters, which it does not use, before the parameter `at`."""
    unused = tuple(Value(v.type) for v in others)
    return Block((*block.params[:at], *unused, *block.params[at:]), block.nodes, block.results)


def while_of(test: Step, step: Step, carry: Tensors) -> list[Tensor]:
    """The carried tensors after as many steps as the test allows."""
    types = [t.type for t in carry]
    asked, body = (record(f, types, lines=True) for f in (test, step))
    attrs = {"carry": len(carry), "test": len(asked.closed)}
    return added(flow.while_loop, [*carry, *asked.closed, *body.closed], attrs, [asked.block, body.block], types)


@run(flow.scan)
def _(attrs, regions, operands):
    count, inputs = attrs["carry"], attrs["xs"]
    carry, xs, consts = operands[:count], operands[count : count + inputs], operands[count + inputs :]
    order = range(attrs["length"])
    stacks: list[Any] = [None] * (len(regions[0].results) - count)
    for i in reversed(order) if attrs["reverse"] else order:
        slices = [like(x.data[i], slice_type(x.type)) for x in xs]
        outs = replay(regions[0], [*carry, *slices, *consts])
        carry = outs[:count]
        for place, y in enumerate(outs[count:]):
            if stacks[place] is None:
                stacks[place] = np.empty((len(order), *y.shape), y.dtype.numpy)
            stacks[place][i] = y.data
    made = [v.type.with_shape((len(order), *v.type.shape)) for v in regions[0].results[count:]]
    return [*carry, *(like(_stack(s, t), t) for s, t in zip(stacks, made, strict=True))]


def _stack(stack: Any, type: TensorType) -> np.ndarray:
    return np.zeros(type.shape, type.dtype.numpy) if stack is None else stack


@run(flow.cond)
def _(attrs, regions, operands):
    return replay(regions[0 if bool(operands[0].data) else 1], operands[1:])


@run(flow.while_loop)
def _(attrs, regions, operands):
    count = attrs["carry"]
    carry, split = list(operands[:count]), count + attrs["test"]
    while bool(replay(regions[0], [*carry, *operands[count:split]])[0].data):
        carry = replay(regions[1], [*carry, *operands[split:]])
    return carry

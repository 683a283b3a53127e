"""Region ops: scan, cond and while_loop built from functions of tensors, recorded in the open trace or executed
eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, user_location
from tessera.core.hooks import run_device_op, run_module
from tessera.core.types import TensorType, int64
from tessera.ir.builder import CURRENT_BUILDER, Builder
from tessera.ir.core import Block, Value
from tessera.ir.rules import Op, Rules
from tessera.ir.tensor import Tensor, as_tensor, get_elements, wrap_array
from tessera.ops.dialects import control_flow, host
from tessera.ops.tensor.random import get_random_state
from tessera.transforms.autodiff.tape import detach, record_on_tape
from tessera.transforms.recording import (
    TransformBuilder,
    control_flow_rules,
    eval_block,
    record_block,
    record_drawing_block,
    traced_value,
)

Tensors = Sequence[Tensor]
TensorsFunction = Callable[[list[Tensor]], Any]

# run(attrs, regions, operands) returns the results outside of a trace.
eager_control_flow_rules = Rules("eager control flow")


def bind_region_op(
    op: Op, operands: Tensors, attrs: Mapping[str, Any], regions: Sequence[Block], types: Any
) -> list[Tensor]:
    """Record a node in the open trace, or compute its results."""
    builder = CURRENT_BUILDER.get()
    if builder is None:
        given = [detach(t) for t in operands]
        if any(get_elements(t).__class__ is DeviceArray for t in given):
            found = run_device_op(op, given, attrs, regions, types)
        else:
            found = eager_control_flow_rules.of(op)(attrs, regions, given)
        record_on_tape(op, operands, attrs, found, regions)
        return found
    values = [traced_value(builder, t) for t in operands]
    inner = regions if isinstance(builder, TransformBuilder) else [inline_derivative_calls(r) for r in regions]
    return [Tensor(v) for v in builder.add(op, values, attrs, types=tuple(types), regions=tuple(inner)).results]


@control_flow_rules(*control_flow.FUNCTIONAL_FLOW_OPS, control_flow.launch)
def _(node, tensors):
    return bind_region_op(node.op, tensors, node.attrs, node.regions, node.result_types)


def inline_derivative_calls(block: Block) -> Block:
    """A block with calls that have derivative rules inlined: no transform reads it."""
    if not any(n.op.name.startswith("transform.") for n in block.walk()):
        return block
    builder = Builder()
    params = [Value(p.type, p.hint) for p in block.params]
    with builder.active():
        results = eval_block(block, [Tensor(p) for p in params])
    if builder.captures:
        raise ArgumentError(
            "a solver inside a loop or branch captures an array", location=user_location(),
            suggestion="capture it as a tensor in the function passed to the solver",
        )  # fmt: skip
    return builder.block(params, [traced_value(builder, t) for t in results])


def slice_type(type: TensorType) -> TensorType:
    """The type of one slice along the first axis."""
    return type.with_shape(type.shape[1:])


def bind_scan(
    step: TensorsFunction, carry: Tensors, xs: Tensors, consts: Tensors, length: Any, reverse: bool = False,
    draws: bool = False,
) -> Any:  # fmt: skip
    """The results of a scan whose step takes (carry, slices, constants) as one list and returns (carry, results).

    With `draws` the step may draw from the default generator, whose state is then one more slice.
    """
    types = [*(t.type for t in carry), *(slice_type(t.type) for t in xs), *(t.type for t in consts)]
    if not draws:
        body = record_block(step, types, lines=True)
        return bind_scan_block(body.block, carry, xs, [*consts, *body.closed], length, reverse)
    outer = get_random_state()
    body, state = record_drawing_block(step, types, len(carry) + len(xs), "a step of scan", loop=True)
    if state.drawn:
        xs = [*xs, outer.spread(state, length, reverse)]
    return bind_scan_block(body.block, carry, xs, [*consts, *body.closed], length, reverse)


def bind_scan_block(
    block: Block, carry: Tensors, xs: Tensors, consts: Tensors, length: Any, reverse: bool
) -> list[Tensor]:
    """A scan whose body is already recorded."""
    stacked = [v.type.with_shape((length, *v.type.shape)) for v in block.results[len(carry) :]]  # type: ignore[union-attr]
    attrs = {"carry": len(carry), "xs": len(xs), "length": length, "reverse": reverse}
    types = (*(t.type for t in carry), *stacked)
    return bind_region_op(control_flow.scan, [*carry, *xs, *consts], attrs, [block], types)


def bind_cond(condition: Tensor, branches: Sequence[TensorsFunction], operands: Tensors) -> list[Tensor]:
    """The results of one of two functions of a list of tensors."""
    types = [t.type for t in operands]
    bodies = [record_block(branch, types, lines=True) for branch in branches]
    closed = [t for body in bodies for t in body.closed]
    first, second = (b.block.params[len(types) :] for b in bodies)
    blocks = [
        _insert_unused_params(bodies[0].block, len(types) + len(first), second),
        _insert_unused_params(bodies[1].block, len(types), first),
    ]
    results = [v.type for v in blocks[0].results]
    return bind_region_op(control_flow.cond, [condition, *operands, *closed], {}, blocks, results)


def _insert_unused_params(block: Block, at: int, others: Sequence[Value]) -> Block:
    """A block with unused parameters inserted before the parameter `at`."""
    unused = tuple(Value(v.type) for v in others)
    return Block((*block.params[:at], *unused, *block.params[at:]), block.nodes, block.results)


def bind_while(test: TensorsFunction, step: TensorsFunction, carry: Tensors) -> list[Tensor]:
    """The carried tensors after the loop, which runs while the test holds.

    If a step draws from the default generator, the number of its first block of random words is carried too.
    """
    types, count = [t.type for t in carry], len(carry)

    def draw_and_step(given: list[Tensor]) -> list[Tensor]:
        found = list(step(given))
        random = get_random_state()
        return [*found, random.first + random.count] if random.drawn else found

    outer = get_random_state()
    body, random = record_drawing_block(draw_and_step, types, count, "a step of while_loop", loop=True)
    if random.drawn:
        carry = [*carry, as_tensor(outer.reserve(), TensorType((), int64))]
    types = [t.type for t in carry]
    asked = record_block(lambda given: test(given[:count]), types, lines=True)
    attrs = {"carry": len(carry), "test": len(asked.closed)}
    operands, blocks = [*carry, *asked.closed, *body.closed], [asked.block, body.block]
    return bind_region_op(control_flow.while_loop, operands, attrs, blocks, types)[:count]


@eager_control_flow_rules(control_flow.scan)
def _(attrs, regions, operands):
    count, inputs = attrs["carry"], attrs["xs"]
    carry, xs, consts = operands[:count], operands[count : count + inputs], operands[count + inputs :]
    order = range(attrs["length"])
    stacks: list[Any] = [None] * (len(regions[0].results) - count)
    for i in reversed(order) if attrs["reverse"] else order:
        slices = [wrap_array(x.data[i], slice_type(x.type)) for x in xs]
        outs = eval_block(regions[0], [*carry, *slices, *consts])
        carry = outs[:count]
        for place, y in enumerate(outs[count:]):
            if stacks[place] is None:
                stacks[place] = np.empty((len(order), *y.shape), y.dtype.numpy)
            stacks[place][i] = y.data
    made = [v.type.with_shape((len(order), *v.type.shape)) for v in regions[0].results[count:]]
    return [*carry, *(wrap_array(_stack_or_zeros(s, t), t) for s, t in zip(stacks, made, strict=True))]


def _stack_or_zeros(stack: Any, type: TensorType) -> np.ndarray:
    return np.zeros(type.shape, type.dtype.numpy) if stack is None else stack


@eager_control_flow_rules(control_flow.cond)
def _(attrs, regions, operands):
    return eval_block(regions[0 if bool(operands[0].data) else 1], operands[1:])


@eager_control_flow_rules(control_flow.while_loop)
def _(attrs, regions, operands):
    count = attrs["carry"]
    carry, split = list(operands[:count]), count + attrs["test"]
    while bool(eval_block(regions[0], [*carry, *operands[count:split]])[0].data):
        carry = eval_block(regions[1], [*carry, *operands[split:]])
    return carry


@eager_control_flow_rules(control_flow.launch)
def _(attrs, regions, operands):
    function = host.make_launched_function(attrs, regions[0], user_location())
    arrays, written = [t.data for t in operands], attrs["written"]
    found = host.launch_on_copies(function, written, arrays, lambda module, held: run_module(module, held, None))
    types: list[Any] = [function.params[i].type for i in written]
    return [wrap_array(a, ref.block(ref.shape)) for a, ref in zip(found, types, strict=True)]

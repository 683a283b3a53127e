"""Host ops: control flow of whole tensors, decompositions and long sorts, which the host runs at the Schedule level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tessera.core.types import RefType, TensorType, bool_, int64, scalar
from tessera.ir.core import Attrs, Block, Module, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.rules import REGISTRY, Rules
from tessera.lower.indexing_maps import get_shape
from tessera.ops.dialects import control_flow, host
from tessera.ops.tensor import sorting

# Control flow of whole tensors: loops and branches of the entry function, executed by the host.


# rule(lowering, node) adds host ops that compute a node's results into their buffers.
host_rules = Rules("control flow on the host")


def _allocate_buffer(lowering: Any, type: RefType | TensorType) -> Value:
    """A new buffer for a tensor."""
    attrs = {"shape": tuple(int(s) for s in type.shape), "dtype": type.policy or type.dtype, "offset": -1}
    return lowering.builder.add(host.alloc, [], attrs).out


def _copy_buffer(lowering: Any, source: Value, target: Value) -> None:
    """Copy one memory into another."""
    type = source.type
    value = Value(TensorType(type.shape, type.dtype, type.policy), source.hint)  # type: ignore[union-attr]
    lowering.buffers[value] = source
    lowering.add_copy(value, target)


@contextmanager
def _open_region(lowering: Any, made: list[Block], params: Sequence[Value] = ()) -> Iterator[None]:
    """Collect the nodes added inside as one more region."""
    views = dict(lowering.views)  # those made inside are not known outside
    with lowering.builder.region() as nodes:
        yield
    lowering.views = views
    made.append(Block(tuple(params), tuple(nodes), ()))


def _lower_region(lowering: Any, block: Block, buffers: Sequence[Value], targets: Sequence[Value]) -> None:
    """Lower a region: `buffers` hold its parameters, `targets` receive its results."""
    known = dict(zip(block.params, buffers, strict=True))
    inner = replace(lowering, uses=UseDef(block, nested=False), buffers=known, views={})
    inner.lower_block(block, targets)


def _init_carried(lowering: Any, node: Node, carry: int) -> list[Value]:
    """Allocate the buffers of the carried values, and copy the initial values."""
    states = [lowering.allocate(v) for v in node.results[:carry]]
    for value, state in zip(node.args[:carry], states, strict=True):
        lowering.add_copy(value, state)
    return states


def _lower_step(lowering: Any, block: Block, states: list[Value], buffers: list[Value], targets: list[Value]) -> None:
    """Lower one step: the next values go to new buffers, since the step reads the old ones, and are then copied."""
    nexts = [
        state if result is param else _allocate_buffer(lowering, state.type)  # type: ignore[arg-type]
        for state, result, param in zip(states, block.results, block.params, strict=False)
    ]
    _lower_region(lowering, block, buffers, [*nexts, *targets])
    for new, state in zip(nexts, states, strict=True):
        if new is not state:
            _copy_buffer(lowering, new, state)


@host_rules(control_flow.scan)
def _(lowering: Any, node: Node) -> None:
    carry, xs, length = (node.attrs[k] for k in ("carry", "xs", "length"))
    states = _init_carried(lowering, node, carry)
    stacks = [lowering.allocate(v) for v in node.results[carry:]]
    inputs = [lowering.buffers[v] for v in node.args[carry:]]
    index, regions = Value(scalar(int64), "i"), []  # type: ignore[var-annotated]
    with _open_region(lowering, regions, [index]):
        slices = [lowering.builder.add(host.at, [x, index]).out for x in inputs[:xs]]
        made = [lowering.builder.add(host.at, [y, index]).out for y in stacks]
        _lower_step(lowering, node.regions[0], states, [*states, *slices, *inputs[xs:]], made)
    first, step = (length - 1, -1) if node.attrs["reverse"] else (0, 1)
    lowering.builder.add(
        host.loop, [], {"first": first, "step": step, "count": length}, types=(), regions=tuple(regions)
    )


@host_rules(control_flow.cond)
def _(lowering: Any, node: Node) -> None:
    targets = [lowering.allocate(v) for v in node.results]
    flag, *buffers = (lowering.buffers[v] for v in node.args)
    regions: list[Block] = []
    for block in node.regions:
        with _open_region(lowering, regions):
            _lower_region(lowering, block, buffers, targets)
    lowering.builder.add(host.if_, [flag], {}, types=(), regions=tuple(regions))


@host_rules(control_flow.while_loop)
def _(lowering: Any, node: Node) -> None:
    carry, end = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    states = _init_carried(lowering, node, carry)
    asked = [lowering.buffers[v] for v in node.args[carry:end]]
    consts = [lowering.buffers[v] for v in node.args[end:]]
    flag, regions = _allocate_buffer(lowering, scalar(bool_)), []  # type: ignore[var-annotated]
    with _open_region(lowering, regions):
        _lower_region(lowering, node.regions[0], [*states, *asked], [flag])
    with _open_region(lowering, regions):
        _lower_step(lowering, node.regions[1], states, [*states, *consts], [])
    lowering.builder.add(host.while_, [flag], {}, types=(), regions=tuple(regions))


@host_rules(control_flow.launch)
def _(lowering: Any, node: Node) -> None:
    """The tile function of a user's kernel, which needs no lowering, on the buffers of its memories."""
    function, results = host.launched_function(node), dict(zip(node.attrs["written"], node.results, strict=True))
    refs = []
    for i, param in enumerate(function.params):
        operand = node.args[i] if i < len(node.args) else None
        if i in results:
            refs.append(_prepare_written_buffer(lowering, operand, results[i]))
        else:
            refs.append(lowering.view_buffer(operand, tuple(param.type.shape)))
    attrs = {"kernel": lowering.name_function(function), "grid": node.attrs["grid"]}
    lowering.builder.add(host.launch, refs, attrs, types=())


def _prepare_written_buffer(lowering: Any, operand: Value | None, result: Value) -> Value:
    """The buffer of a launch's result: that of the operand if nothing else uses it, else a copy of the operand."""
    if operand is not None and result not in lowering.buffers and lowering.is_consumed(operand):
        lowering.buffers[result] = lowering.buffers[operand]
    target = lowering.allocate(result)
    if operand is not None:
        source = lowering.view_buffer(operand, get_shape(result))
        if source is not target:
            _copy_buffer(lowering, source, target)
    return target


def find_host_control_flow(module: Module) -> list[Node]:
    """The loops and branches of a Schedule or Tile module that the host executes."""
    return [n for n in module.main.body.walk() if n.op in (host.loop, host.while_, host.if_)]


# Ops without another lowering.
HOST_ONLY_OPS = tuple(op for op in REGISTRY.values() if op.name.startswith("ts.") and "host" in op.effects)


@host_rules(*HOST_ONLY_OPS, sorting.argsort)
def _(lowering: Any, node: Node) -> None:
    operands = [lowering.view_buffer(v, get_shape(v)) for v in node.args]
    results = [lowering.allocate(v) for v in node.results]
    attrs = {"op": node.op.name, "operands": len(operands), "attrs": Attrs(node.attrs)}
    lowering.builder.add(host.call, [*operands, *results], attrs, types=())


def find_host_calls(module: Module) -> list[Node]:
    """The calls of a Schedule or Tile module that run on the host."""
    return [n for n in module.main.body.walk() if n.op is host.call]

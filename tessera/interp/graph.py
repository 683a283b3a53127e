"""Graph interpreter: evaluates a Graph function op by op on NumPy arrays; scan and cond run in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ShapeError
from tessera.core.hooks import run_graph_launch
from tessera.core.shapes import bind_shapes
from tessera.interp.host import keep_heap_pages
from tessera.interp.observers import is_observed, observe_graph, report_ops
from tessera.interp.sanitizer.report import ACTIVE_CHECKS
from tessera.ir.builder import NodeSemantics, evaluate_block
from tessera.ir.core import Function, Node, Value
from tessera.ir.numerics.interval_arithmetic import require_exact
from tessera.ir.rules import Rules
from tessera.lower.passes.type_conversion import specialise_shapes
from tessera.ops.dialects import control_flow as ops
from tessera.ops.dialects import tile

control_flow_rules = Rules("graph control flow")


@control_flow_rules(tile.line, tile.pause)
def _(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
    return ()  # a debugger's line mark


@control_flow_rules(ops.scan)
def _(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
    count, inputs = node.attrs["carry"], node.attrs["xs"]
    carry, xs, consts = list(args[:count]), args[count : count + inputs], args[count + inputs :]
    length = len(xs[0]) if xs else int(node.attrs["length"])
    order = range(length)
    slices: list[Any] = [None] * length
    for i in reversed(order) if node.attrs["reverse"] else order:
        outs = run(node.regions[0], *carry, *(x[i] for x in xs), *consts)
        carry, slices[i] = outs[:count], outs[count:]
    stacks = zip(*slices, strict=True) if length else [() for _ in node.results[count:]]
    return [*carry, *(_stack_slices(s, v) for s, v in zip(stacks, node.results[count:], strict=True))]


def _stack_slices(slices: Sequence[Any], value: Value) -> Any:
    if not slices:
        return np.zeros((0, *value.type.shape[1:]), value.type.dtype.numpy)  # type: ignore[arg-type]
    return np.stack(slices)


@control_flow_rules(ops.cond)
def _(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
    return run(node.regions[0 if require_exact(args[0]) else 1], *args[1:])


@control_flow_rules(ops.while_loop)
def _(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
    count, end = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    test, body = node.regions
    carry, asked, consts = list(args[:count]), args[count:end], args[end:]
    while require_exact(run(test, *carry, *asked)[0]):
        carry = run(body, *carry, *consts)
    return carry


@control_flow_rules(ops.launch)
def _(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
    return run_graph_launch(node, args)


def run(function: Function, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Run a Graph function on arrays and return its results; the arrays' shapes bind symbolic sizes.

    Raises:
        ShapeError: an array does not have the shape of its parameter.
    """
    keep_heap_pages()
    function = specialise_to_arrays(function, arrays)

    def meaning(node: Node, args: list[Any], run: Any) -> tuple[Any, ...]:
        if node.op in control_flow_rules:
            return control_flow_rules.of(node.op)(node, args, run)
        return node.op.execute(node.types, node.result_types, node.attrs, args)

    checked: NodeSemantics = meaning
    checks = ACTIVE_CHECKS.get()
    if checks is not None and checks.nan:
        from tessera.interp.sanitizer.value_checks import check_graph_values  # in debug mode alone

        checked = check_graph_values(meaning, checks)
    if not is_observed(function.body):
        with report_ops(checked, function.body, f"interpreting {function.name}") as shown:
            return [np.asarray(a) for a in evaluate_block(function.body, arrays, shown)]
    with observe_graph(checked, function, arrays) as seen:
        return [np.asarray(a) for a in evaluate_block(function.body, arrays, seen)]


def bind_sizes(function: Function, arrays: Sequence[Any]) -> dict[str, int]:
    """Bind the symbolic sizes of a function's parameters to the arrays' sizes."""
    sizes: dict[str, Any] = {}
    pairs = [(p.type.shape, np.shape(a)) for p, a in zip(function.params, arrays, strict=True)]
    if misfit := bind_shapes(pairs, sizes):
        name = function.params[misfit.number].hint or misfit.number
        raise ShapeError(f"argument {name}: {misfit.problem}", location=function.loc)
    return sizes


def specialise_to_arrays(function: Function, arrays: Sequence[Any]) -> Function:
    """A function whose symbolic sizes are those of its arguments.

    Raises:
        ShapeError: an array does not have the shape of its parameter.
    """
    sizes = bind_sizes(function, arrays)
    return specialise_shapes(function, sizes) if sizes else function

"""Control flow: If, Loop and Scan, whose bodies are graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from tessera.core.types import int64
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.rearrange import flip
from tessera.ops.tensor.shape import reshape, stack
from tessera.transforms.flow.control_flow import cond, scan, while_loop

MAX_UNROLLED = 4096  # iterations of a loop whose state changes its shape while a model is compiled


def _is_traced(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_traced


@rule("If", foldable=False)
def _(call: NodeCall, condition: Tensor) -> tuple[Any, ...]:
    if not _is_traced(condition):
        taken = "then_branch" if bool(condition.numpy().reshape(())) else "else_branch"
        return tuple(call.run_graph(taken, ()))

    def then() -> list[Tensor]:
        return _tensors(call, call.run_graph("then_branch", ()))

    def other() -> list[Tensor]:
        return _tensors(call, call.run_graph("else_branch", ()))

    return tuple(cond(reshape(condition, shape=()), then, other))


def _tensors(call: NodeCall, values: Sequence[Any]) -> list[Tensor]:
    """Results of a branch or body of a compiled model, which are tensors."""
    if not all(isinstance(v, Tensor) for v in values):
        raise call.refuse("results that are no tensors, in a compiled model", "run the model without a target")
    return list(values)


@rule("Loop", foldable=False)
def _(call: NodeCall, count: Tensor | None, condition: Tensor | None, *state: Any) -> tuple[Any, ...]:
    if _is_traced(count) or _is_traced(condition) or _condition_is_traced(call, state):
        return _loop_in_trace(call, count, condition, state)
    return _loop_at_once(call, count, condition, state)


def _condition_is_traced(call: NodeCall, state: Sequence[Any]) -> bool:
    """Whether, in a trace, the loop may end by a value that is not known: its body computes the condition."""
    if CURRENT_BUILDER.get() is None:
        return False
    body = call.attr("body")
    source = body.outputs[0]
    while source.producer() is not None and source.producer().op_type == "Identity":
        source = source.producer().inputs[0]
    constant = source.producer() is None or source.producer().op_type == "Constant"
    return not constant and any(_is_traced(x) for x in state)


def _loop_at_once(call: NodeCall, count: Tensor | None, condition: Tensor | None, state: Sequence[Any]) -> tuple:
    """The loop in Python; in a trace its iterations are recorded one after the other."""
    body: ir.Graph = call.attr("body")
    most = None if count is None else int(count.numpy().reshape(()))
    going: Any = True if condition is None else bool(condition.numpy().reshape(()))
    carried = list(state)
    rows: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - len(state))]
    i = 0
    while going and (most is None or i < most):
        if CURRENT_BUILDER.get() is not None and i >= MAX_UNROLLED:
            raise call.refuse(f"a loop of more than {MAX_UNROLLED} iterations in a compiled model")
        flag = Tensor(np.asarray(going, bool)) if isinstance(going, bool) else going
        results = call.run_graph("body", [Tensor(np.asarray(i, np.int64)), flag, *carried])
        flag, carried = results[0], results[1 : 1 + len(carried)]
        if _is_traced(flag):
            raise call.refuse("a condition that depends on the inputs, with results of each iteration")
        going = bool(flag.numpy().reshape(()))
        for row, value in zip(rows, results[1 + len(carried) :], strict=True):
            row.append(value)
        i += 1
    return *carried, *(_stack_rows(call, row, k + 1 + len(carried)) for k, row in enumerate(rows))


def _stack_rows(call: NodeCall, row: list[Any], output: int) -> Any:
    """The results of all iterations along a new first axis; of none, an empty tensor as the body declares it."""
    if row:
        return np.stack(row) if isinstance(row[0], np.ndarray) else stack(row, axis=0)
    declared = call.attr("body").outputs[output]
    sizes = [n if isinstance(n, int) else 0 for n in declared.shape or ()]
    if declared.dtype is None:
        raise call.refuse("no iterations, and a result of unknown type")
    return Tensor(np.zeros((0, *sizes), declared.dtype.numpy()))


def _loop_in_trace(call: NodeCall, count: Tensor | None, condition: Tensor | None, state: Sequence[Any]) -> tuple:
    """The loop as a while loop of the program: its state keeps its types, and iterations leave no results."""
    body: ir.Graph = call.attr("body")
    if len(body.outputs) != 1 + len(state):
        raise call.refuse(
            "a loop whose number of iterations depends on the inputs, with results of each iteration",
            "run the model without a target",
        )
    carried = _tensors(call, state)
    first = Tensor(np.asarray(True)) if condition is None else reshape(condition, shape=())
    most = None if count is None else reshape(cast(count, dtype=int64), shape=())

    def goes_on(i: Tensor, flag: Tensor, *_: Tensor) -> Tensor:
        return flag if most is None else flag & (i < most)

    def step(i: Tensor, flag: Tensor, *now: Tensor) -> tuple[Tensor, ...]:
        results = _tensors(call, call.run_graph("body", [i, flag, *now]))
        return i + 1, reshape(results[0], shape=()), *results[1:]

    out = while_loop(goes_on, step, (Tensor(np.asarray(0, np.int64)), first, *carried))
    return tuple(out[2:])


@rule("Scan", foldable=False)
def _(call: NodeCall, *operands: Any) -> tuple[Any, ...]:
    body: ir.Graph = call.attr("body")
    many = call.attr("num_scan_inputs")
    if call.since < 9:
        return _scan_batches(call, operands)
    state, inputs = list(operands[: len(operands) - many]), list(operands[len(operands) - many :])
    axes = call.attr("scan_input_axes", None) or [0] * many
    backwards = call.attr("scan_input_directions", None) or [0] * many
    rows = [_prepare_input(x, a, b) for x, a, b in zip(inputs, axes, backwards, strict=True)]
    finals, outs = _scan(call, state, rows)
    count = len(body.outputs) - len(state)
    out_axes = call.attr("scan_output_axes", None) or [0] * count
    directions = call.attr("scan_output_directions", None) or [0] * count
    placed = [_place_output(x, a, b) for x, a, b in zip(outs, out_axes, directions, strict=True)]
    return *finals, *placed


def _scan(call: NodeCall, state: list[Tensor], rows: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    def step(carried: list[Tensor], parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        results = _tensors(call, call.run_graph("body", [*carried, *parts]))
        return results[: len(carried)], results[len(carried) :]

    finals, outs = scan(step, state, rows)
    return list(finals), list(outs or [])


def _prepare_input(x: Tensor, axis: int, backwards: int) -> Tensor:
    from tessera.ops.tensor.matrices import moveaxis

    rows = moveaxis(x, axis, 0) if axis else x
    return flip(rows, 0) if backwards else rows


def _place_output(x: Tensor, axis: int, backwards: int) -> Tensor:
    from tessera.ops.tensor.matrices import moveaxis

    rows = flip(x, 0) if backwards else x
    return moveaxis(rows, 0, axis) if axis else rows


def _scan_batches(call: NodeCall, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Scan of opset 8: all operands have a leading batch axis, and the first gives lengths, which may be left out."""
    if operands[0] is not None:
        raise call.refuse("lengths of sequences in opset 8")
    many = call.attr("num_scan_inputs")
    given = operands[1:]
    outs = []
    for b in range(given[0].shape[0]):
        each = [x[b] for x in given]
        finals, rows = _scan(call, each[: len(each) - many], each[len(each) - many :])
        outs.append([*finals, *rows])
    return tuple(stack([o[i] for o in outs], axis=0) for i in range(len(outs[0])))

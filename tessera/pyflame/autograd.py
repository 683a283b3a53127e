"""Automatic differentiation of lazy graphs: gradient mode, and `backward` (PyFlame API reference).

`backward` assembles the graph of its argument, differentiates it with `ts.vjp` inside one `ts.jit` program, and adds
the gradients to `grad` of the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, TraceError, user_location
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ops.api.creation import ones
from tessera.pyflame.lazy_graph import (
    GRAD_ENABLED,
    Expression,
    LazyProgram,
    assemble,
    evaluate,
    release,
    run_gradients,
)
from tessera.pyflame.tensor import BACKWARD_HOOK, Tensor, elements_of


class GradMode:
    """Whether calls are recorded for `backward`; a setting of the current thread.

    >>> GradMode.is_enabled()
    True
    """

    @staticmethod
    def is_enabled() -> bool:
        """Whether calls are recorded."""
        return GRAD_ENABLED.get()

    @staticmethod
    def set_enabled(enabled: bool) -> None:
        """Choose whether calls are recorded."""
        if not isinstance(enabled, bool):
            raise ArgumentError(
                "set_enabled takes True or False", location=user_location(), received=repr(enabled),
                expected="True or False",
            )  # fmt: skip
        GRAD_ENABLED.set(enabled)


@contextmanager
def no_grad() -> Iterator[None]:
    """A context whose results are constants for `backward`; also a decorator.

    >>> with no_grad():
    ...     GradMode.is_enabled()
    False
    """
    token = GRAD_ENABLED.set(False)
    try:
        yield
    finally:
        GRAD_ENABLED.reset(token)


@contextmanager
def enable_grad() -> Iterator[None]:
    """A context that records for `backward`, inside of `no_grad`."""
    token = GRAD_ENABLED.set(True)
    try:
        yield
    finally:
        GRAD_ENABLED.reset(token)


def backward(output: Tensor, grad_output: Any = None, retain_graph: bool = False) -> None:
    """Add the gradients of `output` to `grad` of the leaves that it depends on.

    The leaves are those with `requires_grad`. If the graph has none of these, all float leaves receive a gradient.
    `grad_output` is the gradient of `output`; a tensor of one element needs none. The graph is freed, unless
    `retain_graph`.

    >>> import tessera.pyflame as pf
    >>> x = pf.tensor([1.0, 2.0])
    >>> backward((x * x).sum())
    >>> x.grad.numpy().tolist()
    [2.0, 4.0]

    Raises:
        ShapeError: `output` has several elements and there is no `grad_output`, or that has another shape.
        ArgumentError: the graph is freed, or nothing in it can have a gradient.
        DTypeError: `output` is not of a float type.
    """
    _check_output(output)
    cotangent = _read_cotangent(output, grad_output)
    expression = output._expression
    program = assemble([expression], _find_leaves(expression, []), "backward")
    _check_alive(program)
    moving = _choose_leaves(program, expression)
    evaluate(program.leaves)
    wanted = [expression, *_list_pending(program, expression)]
    program = assemble(wanted, _find_leaves(expression, wanted), "backward")
    results, gradients = run_gradients(program, [program.leaves.index(x) for x in moving], cotangent)
    for x, elements in zip(wanted, results, strict=True):
        x.elements = elements if x.elements is None else x.elements
    for x, found in zip(moving, gradients, strict=True):
        _accumulate(x, found)
    if not retain_graph:
        _free(program, wanted)


def _find_leaves(output: Expression, wanted: list[Expression]) -> Callable[[Expression], bool]:
    """What ends the graph of a backward: leaves, constants that it does not compute, and what needs no gradient."""
    computed, asked = frozenset(wanted), output.needs_gradient

    def is_leaf(x: Expression) -> bool:
        return x.record is None or (x not in computed and (x.constant or (asked and not x.needs_gradient)))

    return is_leaf


def _list_pending(program: LazyProgram, output: Expression) -> list[Expression]:
    """What the program computes on the way and someone holds: new states of modules, results of the forward."""
    found = [result() for record in program.records() for result in record.results]
    return [x for x in found if x is not None and x is not output and x.elements is None and x.owner() is not None]


BACKWARD_HOOK.append(backward)


def _check_output(output: Any) -> None:
    if not isinstance(output, Tensor):
        raise ArgumentError(
            "backward takes a tensor", location=user_location(), received=type(output).__name__,
            expected="a tensor of PyFlame",
        )  # fmt: skip
    if CURRENT_BUILDER.get() is not None:
        raise TraceError("backward() while a program is traced", location=user_location(), suggestion="use ts.grad")
    if not output.dtype.is_float:
        raise DTypeError(
            "backward of a tensor that is not a float", location=user_location(), received=repr(output.dtype),
            expected="a float tensor",
        )  # fmt: skip


def _read_cotangent(output: Tensor, grad_output: Any) -> Any:
    type = output._expression.type
    if grad_output is None:
        if output.numel != 1:
            raise ShapeError(
                "backward of a tensor that is not a scalar needs grad_output", location=user_location(),
                expected="a tensor of one element", received=f"shape {output.shape}",
                suggestion="reduce it, as in output.mean(), or pass grad_output",
            )  # fmt: skip
        return ones(type.shape, type.dtype)
    given = grad_output if isinstance(grad_output, Tensor) else None
    if given is None or given.shape != output.shape:
        raise ShapeError(
            "grad_output does not match the output", location=user_location(),
            expected=f"a tensor of shape {output.shape}",
            received=f"shape {given.shape}" if given else type_name(grad_output),
        )  # fmt: skip
    if given.dtype is not output.dtype:
        raise DTypeError(
            "grad_output has another element type", location=user_location(), expected=repr(output.dtype),
            received=repr(given.dtype),
        )  # fmt: skip
    return elements_of(given)


def type_name(value: Any) -> str:
    """The name of a value's type, for errors."""
    return type(value).__name__


def _check_alive(program: LazyProgram) -> None:
    freed = next((x for x in program.order if x.is_freed), None)
    if freed is not None:
        raise ArgumentError(
            f"backward through a graph that an earlier backward freed: {freed.label} at {freed.location}",
            location=user_location(), expected="a graph that is computed again after each backward",
            suggestion="pass retain_graph=True to the earlier backward, or compute the output again",
        )  # fmt: skip


def _choose_leaves(program: LazyProgram, output: Expression) -> list[Expression]:
    """The leaves that receive a gradient.

    Raises:
        ArgumentError: there are none.
    """
    free = [x for x in program.leaves if not x.constant and x.record is None and x.type.dtype.is_float]
    owned = [x for x in free if x.owner() is not None]
    asked = [x for x in owned if x.owner()._wants_gradient]
    found = asked if output.needs_gradient or asked else owned
    if output.constant or not found:
        raise ArgumentError(
            "backward of a tensor that depends on nothing with a gradient", location=user_location(),
            received=f"{output.label} at {output.location}", expected="a result of float tensors outside of no_grad",
        )  # fmt: skip
    return found


def _accumulate(leaf: Expression, found: Any) -> None:
    owner = leaf.owner()
    if owner is None:
        return
    total = found if owner.grad is None else elements_of(owner.grad) + found
    owner.grad = Tensor(Expression(total.type, "gradient", elements=total, layout=leaf.layout, constant=True))


def _free(program: LazyProgram, wanted: list[Expression]) -> None:
    for record in program.records():
        record.freed[0] = True
    for x in (*program.order, *wanted):
        if x.elements is not None:
            release(x)

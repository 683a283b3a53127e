"""Gradient tape: reverse mode over eagerly executed ops, for tensors with `requires_grad` (Wengert 1964)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError, Location, ShapeError, TraceError, user_location
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.core import Attrs, Block, Node, Value
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor, as_tensor, wrap_array
from tessera.ops.tensor.basic import splat
from tessera.transforms.autodiff.linearisation import linearise


@dataclass(frozen=True, eq=False)
class TapeEntry:
    """One op on tensors of which at least one needs a gradient."""

    op: Op
    operands: tuple[Tensor, ...]
    attrs: Attrs
    results: tuple[Tensor, ...]
    regions: tuple[Block, ...]
    loc: Location


def record_on_tape(
    op: Op,
    operands: Sequence[Tensor],
    attrs: Mapping[str, Any],
    results: Sequence[Tensor],
    regions: Sequence[Block] = (),
) -> None:
    """Record an op on the tape, if one of its operands needs a gradient."""
    if CURRENT_BUILDER.get() is None and any(t.requires_grad for t in operands):
        bare = tuple(wrap_array(t.data, t.type) for t in results)  # a reference cycle would never be freed
        made = TapeEntry(op, tuple(operands), Attrs(attrs), bare, tuple(regions), user_location())
        for number, tensor in enumerate(results):
            if tensor.dtype.is_float:
                tensor.requires_grad, tensor.history = True, (made, number)  # type: ignore[attr-defined]


def detach(tensor: Tensor) -> Tensor:
    """The same elements, without a record."""
    return wrap_array(tensor.data, tensor.type) if tensor.requires_grad else tensor


def find_tape_entry(tensor: Tensor) -> tuple[TapeEntry, int] | None:
    """The record that made a tensor; None for a leaf."""
    return getattr(tensor, "history", None)


def backpropagate(tensor: Tensor, gradient: Any = None) -> None:
    """`Tensor.backward`: linearises what the tape has recorded, and pulls the gradient back to the leaves."""
    g = _check_gradient(tensor, gradient)
    start = find_tape_entry(tensor)
    if start is None:
        _accumulate_gradient(tensor, g)
        return
    order = list(_sort_topologically(start[0]))
    block, leaves, saved, values = _build_tape_block(order)
    target = values[start]
    moves = [leaf.requires_grad for leaf in leaves]
    point = linearise(Block(block.params, block.nodes, (target,)), [detach(x) for x in leaves], moves, saved)
    moving = [x for x in leaves if x.requires_grad]
    for leaf, found in zip(moving, point.pull_back([g]), strict=True):
        _accumulate_gradient(leaf, found)


def _check_gradient(tensor: Tensor, gradient: Any) -> Tensor:
    if tensor.is_traced:
        raise TraceError("backward() of a traced tensor", location=user_location(), suggestion="use ts.grad inside jit")
    if not tensor.requires_grad:
        raise ArgumentError(
            "backward() of a tensor that does not depend on one with requires_grad=True", location=user_location(),
            received=str(tensor.type), suggestion="make the parameters with requires_grad=True",
        )  # fmt: skip
    if gradient is None and tensor.shape:
        raise ShapeError(
            "backward() of a tensor that is not a scalar needs a gradient",
            location=user_location(),
            received=str(tensor.type),
            suggestion="reduce it first, or pass the cotangent",
        )
    g = splat(1, tensor.type) if gradient is None else as_tensor(gradient, tensor.type)
    if g.shape != tensor.shape:
        raise ShapeError(
            "the gradient has another shape", location=user_location(), expected=str(tensor.type), received=str(g.type)
        )
    if g.dtype != tensor.dtype:
        raise DTypeError(
            "the gradient has another type", location=user_location(), expected=str(tensor.type), received=str(g.type)
        )
    return g


def _accumulate_gradient(leaf: Tensor, g: Tensor) -> None:
    leaf.grad = detach(g) if leaf.grad is None else detach(leaf.grad + g)


def _sort_topologically(last: TapeEntry) -> Iterator[TapeEntry]:
    """The records in topological order."""
    seen: set[TapeEntry] = set()
    work: list[tuple[TapeEntry, bool]] = [(last, False)]
    while work:
        made, done = work.pop()
        if done:
            yield made
        elif made not in seen:
            seen.add(made)
            work.append((made, True))
            work += [(found[0], False) for x in made.operands if (found := find_tape_entry(x)) is not None]


def _build_tape_block(order: Sequence[TapeEntry]) -> tuple[Block, list[Tensor], dict[Value, Tensor], dict[Any, Value]]:
    """The recorded ops as a block: the tensors of its parameters, the known values, and the value of each result."""
    leaves: dict[Tensor, Value] = {}
    values: dict[Any, Value] = {}
    nodes: list[Node] = []
    saved: dict[Value, Tensor] = {}
    for made in order:
        args = []
        for x in made.operands:
            found = find_tape_entry(x)
            args.append(leaves.setdefault(x, Value(x.type)) if found is None else values[found])
        results = tuple(Value(t.type) for t in made.results)
        values.update({(made, i): v for i, v in enumerate(results)})
        saved.update(zip(results, made.results, strict=True))
        nodes.append(Node(made.op, tuple(args), made.attrs, results, made.regions, made.loc))
    return Block(tuple(leaves.values()), tuple(nodes), ()), list(leaves), saved, values

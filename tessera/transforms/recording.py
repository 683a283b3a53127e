"""Recording: traces a function of tensors into a closed block (closure conversion), and binds blocks and nodes again.

Helpers flatten the arguments of transforms, check them and put tensors back into their containers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, Location, ShapeError, TesseraError, user_location
from tessera.core.pytree import TreeDef, call_and_collect, call_and_warn, flatten, map_leaves
from tessera.core.types import TensorType, int64, to_python_numbers
from tessera.frontend.jit import line_marks
from tessera.frontend.jit.tracing import to_result_tensor
from tessera.ir.builder import CURRENT_BUILDER, Builder, evaluate_block
from tessera.ir.core import Block, Node, Value
from tessera.ir.rules import Rules
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.dialects import tile
from tessera.ops.tensor.random import RandomState, get_random_state, trace_random_state

# Recording a function for a transform, as a closed block.


class TransformBuilder(Builder):
    """A trace for a transform: calls with derivative rules stay calls in it."""

    def __init__(self, params: Sequence[Value]) -> None:
        super().__init__()
        self.params = frozenset(params)

    def owns(self, value: Value) -> bool:
        """Whether a value belongs to this trace, not to an enclosing one."""
        return value in self.params or value in self.producers


@dataclass(frozen=True)
class ClosedBlock:
    """A closed block: its parameters are the arguments, then `closed`, the captured values."""

    block: Block
    closed: tuple[Tensor, ...]
    results: TreeDef

    def build(self, leaves: Sequence[Any]) -> Any:
        """The function's result container with these leaves."""
        return self.results.build(iter(leaves))


def record_block(
    function: Callable[[list[Tensor]], Any], types: Sequence[TensorType], lines: bool = False
) -> ClosedBlock:
    """The block of a function of a list of tensors; with `lines` it has marks of source lines for the debugger."""
    params = [Value(t) for t in types]
    builder = TransformBuilder(params)
    with line_marks.mark_region_lines(builder) if lines else nullcontext(), builder.active():
        leaves, tree = flatten(function([Tensor(p) for p in params]), empty=True)
        results = [traced_value(builder, to_result_tensor(leaf)) for _, leaf in leaves]
    block = builder.block(params, results)
    outer = tuple(_iterate_outer_values(block))
    closed = (
        *(builder.owners.get(id(a), Tensor(a)) for a, _ in builder.captures.values()),
        *(Tensor(v) for v in outer),
    )
    return ClosedBlock(_close_block(block, outer), closed, tree)


def record_drawing_block(
    function: Callable[[list[Tensor]], Any], types: Sequence[TensorType], at: int, owner: str, loop: bool
) -> tuple[ClosedBlock, RandomState]:
    """The block of a function that is traced once for several runs, and its draws from the default generator.

    If it draws, the block has one more parameter at `at`: the first block of random words of a run.
    """
    state = RandomState(get_random_state().seed, owner=owner, loop=loop)

    def run(given: list[Tensor]) -> Any:
        state.first = given[at]
        with trace_random_state(state):
            return function([*given[:at], *given[at + 1 :]])

    body = record_block(run, [*types[:at], TensorType((), int64), *types[at:]], lines=loop)
    state.check_not_reseeded()
    if state.drawn:
        return body, state
    params = body.block.params
    return replace(body, block=replace(body.block, params=(*params[:at], *params[at + 1 :]))), state


def _close_block(block: Block, outer: Sequence[Value]) -> Block:
    """A block with a parameter for each captured value."""
    if not outer:
        return block
    own = {v: Value(v.type, v.hint) for v in outer}

    def renamed(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(own.get(v, v) for v in values)

    nodes = tuple(n if own.keys().isdisjoint(n.args) else replace(n, args=renamed(n.args)) for n in block.nodes)
    return Block((*block.params, *own.values()), nodes, renamed(block.results))


def traced_value(builder: Builder, tensor: Tensor) -> Value:
    return tensor.data if tensor.is_traced else builder.capture(tensor.data, tensor)


def _iterate_outer_values(block: Block) -> Iterator[Value]:
    """The captured values of enclosing traces, in the order of their use."""
    known = set(block.params)
    for node in block.nodes:
        for value in node.args:
            if value not in known:
                known.add(value)
                yield value
        known.update(node.results)
    for value in block.results:
        if value not in known:
            known.add(value)
            yield value


# again(node, tensors): loops and branches stay nodes in every trace, and run outside of one.
control_flow_rules = Rules("control flow")


@control_flow_rules(tile.line, tile.pause)
def _(node, tensors):
    return []  # marks of lines belong to the program as it was first traced


def rebind_node(node: Node, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A node on other operands: recorded in the open trace, or run."""
    if node.op in control_flow_rules:
        return control_flow_rules.of(node.op)(node, tensors)
    if node.regions:
        return _rebind_call(node, tensors)
    out = bind_op(node.op, tensors, node.attrs)
    return list(out) if isinstance(out, tuple) else [out]


def _rebind_call(node: Node, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A call on other operands: it stays a call in the trace of a transform, and is inlined elsewhere."""
    builder = CURRENT_BUILDER.get()
    if not isinstance(builder, TransformBuilder):
        return eval_block(node.regions[0], tensors)
    values = [traced_value(builder, t) for t in tensors]
    made = builder.add(node.op, values, node.attrs, types=node.result_types, regions=node.regions)
    return [Tensor(v) for v in made.results]


def eval_block(block: Block, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a block on tensors."""

    def meaning(node: Node, args: list[Tensor], walk: Any) -> list[Tensor]:
        try:
            with set_location(node.loc):
                return rebind_node(node, args)
        except TesseraError as error:
            if error.location == user_location():  # ops that run at once know only the line that runs the transform
                error.location = node.loc
            raise

    return evaluate_block(block, tensors, meaning)


@contextmanager
def set_location(location: Location) -> Iterator[None]:
    """A context in which recorded nodes get the source location of a node."""
    builder = CURRENT_BUILDER.get()
    with builder.at(location) if builder is not None else nullcontext():
        yield


# Arguments of transforms: containers of tensors, flattened and checked.


@dataclass(frozen=True)
class FloatArguments:
    """Arguments as float tensors with their names, and their container.

    `kept` are the leaves among them that derivatives leave alone, by their number: buffers of modules.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    tree: TreeDef
    kept: Mapping[int, Any] = field(default_factory=dict)

    @property
    def types(self) -> list[TensorType]:
        """The types of the tensors."""
        return [t.type for t in self.tensors]

    def build(self, leaves: Sequence[Any]) -> Any:
        """The container with these tensors, and what derivatives leave alone as it was."""
        return self._merge(leaves, self.kept)

    def build_gradients(self, leaves: Sequence[Any]) -> Any:
        """The container with these gradients, and None for what derivatives leave alone."""
        return self._merge(leaves, dict.fromkeys(self.kept))

    def _merge(self, leaves: Sequence[Any], kept: Mapping[int, Any]) -> Any:
        moving = iter(leaves)
        count = len(leaves) + len(kept)
        return self.tree.build(iter([kept[i] if i in kept else next(moving) for i in range(count)]))


def flatten_float_arguments(value: Any, name: str) -> FloatArguments:
    """A container of tensors to differentiate by; None in it stays None.

    Raises:
        DTypeError: a leaf is not of a float type.
    """
    leaves, tree = flatten(value, name, empty=True)
    fixed = tree.list_fixed()
    kept = {i: x for i, ((_, x), keep) in enumerate(zip(leaves, fixed, strict=True)) if keep}
    moving = [(n, x) for (n, x), keep in zip(leaves, fixed, strict=True) if not keep]
    return FloatArguments(tuple(n for n, _ in moving), tuple(_check_float(n, x) for n, x in moving), tree, kept)


def flatten_chosen_arguments(function: Callable[..., Any], args: Sequence[Any], where: Sequence[int]) -> FloatArguments:
    """The arguments of a call at these positions, as a list of containers; errors name the function's parameters.

    Raises:
        DTypeError: a leaf is not of a float type.
    """
    try:
        return flatten_float_arguments([args[i] for i in where], "")
    except DTypeError:
        for i in where:
            flatten_float_arguments(args[i], _parameter_name(function, i))
        raise


def _parameter_name(function: Callable[..., Any], position: int) -> str:
    """The name of a positional parameter; "argument 2" where the function does not tell."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[: position + 1]
    except (TypeError, ValueError):
        parameters = []
    known = len(parameters) > position and not any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return parameters[position].name if known else f"argument {position}"


def _check_float(name: str, value: Any) -> Tensor:
    tensor = as_tensor(value)
    if not tensor.dtype.is_float:
        raise DTypeError(
            f"no derivative with respect to {name}: its elements are not floats", location=user_location(),
            expected="a float tensor", received=str(tensor.type),
            suggestion="cast it first with .to(ts.f32), or name another argument in argnums",
        )  # fmt: skip
    return tensor


def arrays_to_tensors(value: Any) -> Any:
    """A container with its arrays converted to tensors."""
    return map_leaves(lambda x: Tensor(x) if isinstance(x, np.ndarray) else x, value)


def normalise_argnums(argnums: int | Sequence[int], count: int, exactly: int | None = None) -> tuple[int, ...]:
    """The positions in `argnums`, which are different, and as many as `exactly` says.

    Raises:
        ArgumentError: one is no integer, out of range, or there twice.
    """
    argnums = to_python_numbers(argnums)
    listed = tuple(argnums) if isinstance(argnums, (tuple, list, range)) else (argnums,)
    for number in listed:
        if not isinstance(number, int) or not -count <= number < count:
            raise ArgumentError(
                f"argument {number!r} was not passed by position", location=user_location(),
                expected=f"argnums from 0 to {count - 1}", received=str(argnums),
            )  # fmt: skip
    found = tuple(n % count for n in listed)
    if len(set(found)) < len(found) or (exactly is not None and len(found) != exactly):
        raise ArgumentError(
            f"argnums is {argnums}", location=user_location(), received=f"{len(found)} arguments",
            expected="different arguments" if exactly is None else f"{exactly} argument",
        )  # fmt: skip
    return found


def record_arguments(
    function: Callable[..., Any], chosen: FloatArguments, insert: Callable[[Any], Any]
) -> tuple[ClosedBlock, Any]:
    """A function recorded with respect to some arguments; `insert` calls it with these among the others."""
    outcome: list[Any] = []

    def run(given: list[Tensor]) -> Any:
        outcome.append(call_and_warn(lambda *new: insert(new), *chosen.build(given)))
        return outcome[0]

    return record_block(run, chosen.types), outcome[0]


def record_with_updates(
    chosen: FloatArguments, insert: Callable[[Any], Any]
) -> tuple[ClosedBlock, Any, tuple[str, ...]]:
    """As `record_arguments`; the results are the function's and a tuple of new buffers, whose paths come last."""
    outcome: list[Any] = []

    def run(given: list[Tensor]) -> Any:
        outcome.extend(call_and_collect(lambda *new: insert(new), *chosen.build(given)))
        return outcome[0], tuple(outcome[1].values())

    return record_block(run, chosen.types), outcome[0], tuple(outcome[1])


def check_scalar_result(value: Any, name: str) -> None:
    """Refuse a function whose result has no gradient.

    Raises:
        ArgumentError: the result is not a tensor, and so does not depend on the arguments.
        ShapeError: it is not a scalar.
        DTypeError: it is not of a float type.
    """
    if not isinstance(value, Tensor):
        raise ArgumentError(
            f"the result of {name} does not depend on its arguments", location=user_location(),
            expected="a scalar tensor computed from them", received=type(value).__name__,
            suggestion="return (loss, aux) with has_aux=True to return more than the loss",
        )  # fmt: skip
    if value.shape:
        raise ShapeError(
            f"the gradient of {name} needs a scalar result", location=user_location(), expected="shape ()",
            received=str(value.type), suggestion="reduce it: ts.mean(loss); or use ts.jacrev or ts.vjp",
        )  # fmt: skip
    if not value.dtype.is_float:
        raise DTypeError(
            f"the result of {name} is not a float",
            location=user_location(),
            expected="a float scalar",
            received=str(value.type),
        )


def replace_arguments(args: Sequence[Any], where: Sequence[int], new: Sequence[Any]) -> Iterator[Any]:
    """Positional arguments with some replaced."""
    replaced = dict(zip(where, new, strict=True))
    return (replaced.get(i, a) for i, a in enumerate(args))

"""Recording a function for a transform: a block that takes everything it uses as a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tessera import marks
from tessera.errors import Location
from tessera.evaluate import evaluate
from tessera.ir.builder import CURRENT, Builder
from tessera.ir.core import Block, Node, Value
from tessera.op import Rules
from tessera.ops import checks
from tessera.pytree import Tree, flatten
from tessera.tensor import Tensor, bind
from tessera.tracing import _as_result
from tessera.types import TensorType


class Recorder(Builder):
    """A trace that a transform reads: calls with rules of their own stay calls in it."""

    def __init__(self, params: Sequence[Value]) -> None:
        super().__init__()
        self.params = frozenset(params)

    def owns(self, value: Value) -> bool:
        """Whether a value belongs to this trace, and not to one around it."""
        return value in self.params or value in self.producers


@dataclass(frozen=True)
class Recorded:
    """A closed block: its parameters are the arguments, then `closed`, what the function used from outside."""

    block: Block
    closed: tuple[Tensor, ...]
    results: Tree

    def build(self, leaves: Sequence[Any]) -> Any:
        """What the function returns, with these leaves."""
        return self.results.build(iter(leaves))


def record(function: Callable[[list[Tensor]], Any], types: Sequence[TensorType], lines: bool = False) -> Recorded:
    """The block of a function of a list of tensors; with `lines` its lines are marked as those around it are."""
    params = [Value(t) for t in types]
    builder = Recorder(params)
    with marks.within(builder) if lines else nullcontext(), builder.active():
        leaves, tree = flatten(function([Tensor(p) for p in params]), empty=True)
        results = [_value(builder, _as_result(leaf)) for _, leaf in leaves]
    block = builder.block(params, results)
    outer = tuple(_outside(block))
    closed = (
        *(builder.owners.get(id(a), Tensor(a)) for a, _ in builder.captures.values()),
        *(Tensor(v) for v in outer),
    )
    return Recorded(_closed(block, outer), closed, tree)


def _closed(block: Block, outer: Sequence[Value]) -> Block:
    """A block with a parameter of its own for each value from outside."""
    if not outer:
        return block
    own = {v: Value(v.type, v.hint) for v in outer}

    def renamed(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(own.get(v, v) for v in values)

    nodes = tuple(n if own.keys().isdisjoint(n.args) else replace(n, args=renamed(n.args)) for n in block.nodes)
    return Block((*block.params, *own.values()), nodes, renamed(block.results))


def _value(builder: Builder, tensor: Tensor) -> Value:
    return tensor.data if tensor.is_traced else builder.capture(tensor.data, tensor)


def _outside(block: Block) -> Iterator[Value]:
    """The values of traces around this one, in the order of their use."""
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


# again(node, tensors): loops and branches stay nodes in every trace, and run where none is open.
flows = Rules("control flow")


@flows(checks.line, checks.pause)
def _(node, tensors):
    return []  # marks of lines are for the program as it was first traced


def again(node: Node, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A node on other operands: recorded in the open trace, or run."""
    if node.op in flows:
        return flows.of(node.op)(node, tensors)
    if node.regions:
        return call(node, tensors)
    out = bind(node.op, tensors, node.attrs)
    return list(out) if isinstance(out, tuple) else [out]


def call(node: Node, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A call on other operands: it stays one where a transform reads the trace, and is inlined elsewhere."""
    builder = CURRENT.get()
    if not isinstance(builder, Recorder):
        return replay(node.regions[0], tensors)
    values = [_value(builder, t) for t in tensors]
    made = builder.add(node.op, values, node.attrs, types=node.result_types, regions=node.regions)
    return [Tensor(v) for v in made.results]


def replay(block: Block, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a block on tensors."""

    def meaning(node: Node, args: list[Tensor], walk: Any) -> list[Tensor]:
        with located(node.loc):
            return again(node, args)

    return evaluate(block, tensors, meaning)


@contextmanager
def located(location: Location) -> Iterator[None]:
    """Give what is recorded inside the place of the node it comes from."""
    builder = CURRENT.get()
    with builder.at(location) if builder is not None else nullcontext():
        yield

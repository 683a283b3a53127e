"""IR builder: the insertion point where tracing, the kernel front end and passes record nodes; and the current
numerics context."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np

from tessera.core.errors import Location, TesseraError, user_location
from tessera.core.types import TensorType, Type, as_dtype
from tessera.ir.core import Attrs, Block, Node, Value
from tessera.ir.rules import Op

# The builder.


class Builder:
    """A growing list of nodes; inner regions are opened by `region`.

    `captures` holds the arrays that traced code closes over: each becomes one more parameter. `owners` holds the
    tensors of those that ask for gradients.
    """

    def __init__(self) -> None:
        self._open: list[list[Node]] = [[]]
        self.producers: dict[Value, Node] = {}
        self.captures: dict[int, tuple[np.ndarray, Value]] = {}
        self.owners: dict[int, Any] = {}
        self.location: Location | None = None

    def add(
        self,
        op: Op,
        args: Sequence[Value],
        attrs: Mapping[str, Any] | None = None,
        *,
        types: tuple[Type, ...] | None = None,
        regions: tuple[Block, ...] = (),
        loc: Location | None = None,
    ) -> Node:
        """Append a node; its result types come from the op's rule unless given."""
        place = loc or self.location or user_location()
        attributes = Attrs(op.complete(attrs or {}))
        try:
            if types is None:
                types = op.result_types(tuple(v.type for v in args), attributes)
        except TesseraError as error:
            raise error.at(place) from None
        node = Node(op, tuple(args), attributes, tuple(Value(t) for t in types), regions, place)
        self.append(node)
        return node

    def append(self, node: Node) -> None:
        """Append a finished node."""
        self._open[-1].append(node)
        for value in node.results:
            self.producers[value] = node

    def holds(self, node: Node) -> bool:
        """Whether the values of a node are in scope: it was added at the top, or in a region that is still open."""
        return any(node in nodes for nodes in self._open)

    def capture(self, array: np.ndarray, owner: Any = None) -> Value:
        """The parameter for an array that the traced code closes over; `owner` is the tensor that holds it, if any."""
        if owner is not None and owner.requires_grad:
            self.owners[id(array)] = owner
        if id(array) not in self.captures:
            type = TensorType(array.shape, as_dtype(array.dtype))
            self.captures[id(array)] = (array, Value(type, f"capture{len(self.captures)}"))
        return self.captures[id(array)][1]

    @contextmanager
    def region(self) -> Iterator[list[Node]]:
        """Collect the nodes added inside; the caller makes a Block of them."""
        nodes: list[Node] = []
        self._open.append(nodes)
        try:
            yield nodes
        finally:
            self._open.pop()

    @contextmanager
    def at(self, location: Location | None) -> Iterator[None]:
        """Set the location of the nodes added inside."""
        before, self.location = self.location, location
        try:
            yield
        finally:
            self.location = before

    @contextmanager
    def active(self) -> Iterator[Builder]:
        """Make this the current builder: ops called inside record to it."""
        token = CURRENT_BUILDER.set(self)
        try:
            yield self
        finally:
            CURRENT_BUILDER.reset(token)

    def block(self, params: Sequence[Value], results: Sequence[Value]) -> Block:
        """Everything added at the top level, as a block; captures become trailing parameters."""
        captured = tuple(v for _, v in self.captures.values())
        return Block((*params, *captured), tuple(self._open[0]), tuple(results))


CURRENT_BUILDER: ContextVar[Builder | None] = ContextVar("builder", default=None)


# The current numerics context, which may intercept op calls, or None.


class NumericsContext(Protocol):
    """A context that intercepts the op calls made in it."""

    def call(self, op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> Any:
        """The results of an op on a user's operands."""

    def key(self) -> Hashable:
        """A cache key of everything that a trace made in this context depends on."""


CURRENT_NUMERICS: ContextVar[NumericsContext | None] = ContextVar("numerics", default=None)


@contextmanager
def override_numerics(instead: NumericsContext | None) -> Iterator[None]:
    """Use another numerics context, or none, for the calls made inside."""
    token = CURRENT_NUMERICS.set(instead)
    try:
        yield
    finally:
        CURRENT_NUMERICS.reset(token)

"""IR builder and evaluator: where nodes are recorded, the current numerics context, and the walk that applies one
semantics function to each node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import Location, TesseraError, trace_location
from tessera.core.types import TensorType, Type, as_dtype
from tessera.ir.core import Attrs, Block, Function, Node, Value
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
        self.captures: dict[int, tuple[Any, Value]] = {}
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
        place = loc or self.location or trace_location()
        attributes = _complete_attributes(op, attrs)
        try:
            if types is None:
                types = op.result_types(tuple([v.type for v in args]), attributes.plain())
        except TesseraError as error:
            raise error.at(place) from None
        node = Node(op, tuple(args), attributes, tuple([Value(t) for t in types]), regions, place)
        self.append(node)
        return node

    def append(self, node: Node) -> None:
        """Append a finished node."""
        self._open[-1].append(node)
        producers = self.producers
        for value in node.results:
            producers[value] = node

    def holds(self, node: Node) -> bool:
        """Whether the values of a node are in scope: it was added at the top, or in a region that is still open."""
        return any(node in nodes for nodes in self._open)

    def capture(self, array: np.ndarray | DeviceArray, owner: Any = None) -> Value:
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

    def collect(self, location: Location | None, record: Callable[[], Any]) -> tuple[Any, list[Node]]:
        """What a function returns, and the nodes that it adds, at a location; as `at` with `region`, in less time."""
        before, self.location, nodes = self.location, location, list[Node]()
        self._open.append(nodes)
        try:
            return record(), nodes
        finally:
            self._open.pop()
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


NO_ATTRIBUTES = Attrs()


def _complete_attributes(op: Op, attrs: Mapping[str, Any] | None) -> Attrs:
    """The attributes of a node, with those that the op has a default for."""
    if not attrs and not op.attrs:
        return NO_ATTRIBUTES
    if attrs.__class__ is Attrs and [*attrs.plain()] == [*op.attrs]:  # type: ignore[union-attr]
        return attrs  # type: ignore[return-value]
    return Attrs(op.complete(attrs or {}))


CURRENT_BUILDER: ContextVar[Builder | None] = ContextVar("builder", default=None)


# The current numerics context, which may intercept op calls, or None.


class NumericsContext(Protocol):
    """A context that intercepts the op calls made in it."""

    def call(self, op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> Any:
        """The results of an op on a user's operands."""

    def key(self) -> Hashable:
        """A cache key of everything that a trace made in this context depends on."""

    def cast_state(self, x: Any) -> Any:
        """The initial state of a loop as the results of ops in this context have it."""


CURRENT_NUMERICS: ContextVar[NumericsContext | None] = ContextVar("numerics", default=None)
# The rank that runs this code in an SPMD program (tessera/dist), or None: a trace is of one rank.
CURRENT_RANK_NUMBER: ContextVar[int | None] = ContextVar("rank number", default=None)


@contextmanager
def override_numerics(instead: NumericsContext | None) -> Iterator[None]:
    """Use another numerics context, or none, for the calls made inside."""
    token = CURRENT_NUMERICS.set(instead)
    try:
        yield
    finally:
        CURRENT_NUMERICS.reset(token)


# Evaluator: walks a block and applies one semantics function to each node, to interpret, copy or rewrite it.


# semantics(node, operands, walk) gives the results; walk(block, *inputs) evaluates an inner region.
NodeSemantics = Callable[[Node, list[Any], Any], Sequence[Any]]


class Evaluation:
    """An evaluation in progress: the values so far; a call evaluates an inner region on inputs."""

    __slots__ = ("env", "meaning")

    def __init__(self, meaning: NodeSemantics, env: dict[Value, Any]) -> None:
        self.meaning = meaning
        self.env = env

    def __call__(self, block: Block, *inputs: Any) -> list[Any]:
        return evaluate_block(block, inputs, self.meaning, self.env)

    def with_values(self, env: dict[Value, Any]) -> Evaluation:
        """The same evaluation with other values."""
        return Evaluation(self.meaning, env)


def evaluate_block(
    block: Block, args: Sequence[Any], meaning: NodeSemantics, env: dict[Value, Any] | None = None
) -> list[Any]:
    """Evaluate a block: apply the semantics function to each node in order.

    With NumPy semantics this interprets; with a builder it copies, inlines or rewrites.
    """
    env = {} if env is None else env
    env.update(zip(block.params, args, strict=True))
    walk, node = Evaluation(meaning, env), None
    try:
        for node in block.nodes:
            results = meaning(node, [env[v] for v in node.args], walk)
            if len(node.results) == 1 == len(results):
                env[node.results[0]] = results[0]
            else:
                env.update(zip(node.results, results, strict=True))
    except TesseraError as error:
        assert node is not None
        raise error.at(node.loc) from None
    return [env[v] for v in block.results]


def make_copier(builder: Builder) -> NodeSemantics:
    """Make the semantics function that copies each node into a builder, at its own location."""

    def copy(node: Node, args: list[Value], run: Callable[..., list[Any]]) -> tuple[Value, ...]:
        regions = tuple([copy_region(builder, region, run) for region in node.regions]) if node.regions else ()
        results = tuple([Value(v.type) for v in node.results])
        builder.append(Node(node.op, tuple(args), node.attrs, results, regions, node.loc))
        return results

    return copy


def make_keeper(builder: Builder, is_plain: Callable[[Block], bool]) -> NodeSemantics:
    """Make the semantics function that appends each node to a builder: the node itself where its operands and its
    regions are as they were and it has not been appended yet, else a copy.

    `is_plain` holds for regions of whose nodes each would be kept or copied.
    """
    kept: set[Node | Block] = set()

    def keep(node: Node, args: list[Value], run: Evaluation) -> tuple[Value, ...]:
        regions = tuple([keep_region(region, run) for region in node.regions]) if node.regions else ()
        if node not in kept and regions == node.regions and tuple(args) == node.args:
            kept.add(node)
            builder.append(node)
            return node.results
        results = tuple([Value(v.type) for v in node.results])
        builder.append(Node(node.op, tuple(args), node.attrs, results, regions, node.loc))
        return results

    def keep_region(region: Block, run: Evaluation) -> Block:
        if region in kept:
            return copy_region(builder, region, run)
        kept.add(region)
        if is_plain(region) and kept.isdisjoint(region.all_nodes) and all([run.env.get(v) is v for v in region.free]):
            kept.update(region.all_nodes)
            return region
        with builder.region() as nodes:
            results = run(region, *region.params)
        same = tuple(results) == region.results and tuple(nodes) == region.nodes
        return region if same else Block(region.params, tuple(nodes), tuple(results))

    return keep


def copy_region(builder: Builder, region: Block, run: Callable[..., list[Any]]) -> Block:
    """Evaluate a region into a builder, with fresh parameters."""
    params = tuple(Value(p.type, p.hint) for p in region.params)
    with builder.region() as nodes:
        results = run(region, *params)
    return Block(params, tuple(nodes), tuple(results))


def copy_block(block: Block) -> Block:
    """A closed block with values of its own."""
    builder = Builder()
    return copy_region(builder, block, Evaluation(make_copier(builder), {}))


def separate_regions(function: Function) -> Function:
    """The function with values of its own in each region: a trace that replays a node shares the node's regions."""
    regions = [id(region) for node in function.body.walk() for region in node.regions]
    return function if len(set(regions)) == len(regions) else rebuild_function(function, make_copier)


def rebuild_function(
    function: Function, meaning_of: Callable[[Builder], NodeSemantics], builder: Builder | None = None
) -> Function:
    """Evaluate a function with semantics that record into a builder, and make a function of what is recorded."""
    builder = builder or Builder()
    params = tuple(Value(p.type, p.hint) for p in function.params)
    with builder.active(), override_numerics(None):  # types say already what a numeric context asked for
        results = evaluate_block(function.body, params, meaning_of(builder))
    assert not builder.captures, "a rewrite captured an array"
    return Function(function.name, builder.block(params, results), function.attrs, function.loc)

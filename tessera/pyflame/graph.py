"""Graph inspection: the lazy graph of a tensor as nodes, one for each call (PyFlame API reference)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, Location, user_location
from tessera.ir.core import Function, Module
from tessera.ir.printer import print_module
from tessera.pyflame import dtypes
from tessera.pyflame.dtypes import DType
from tessera.pyflame.layouts import MeshLayout
from tessera.pyflame.lazy_graph import Expression, LazyProgram, assemble
from tessera.pyflame.tensor import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """A specification of a tensor: shape, element type and layout.

    >>> TensorSpec([2, 3], DType.float32).num_bytes
    24
    """

    shape: list[int]
    dtype: DType = DType.float32
    layout: MeshLayout = MeshLayout("single_pe")

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Node:
    """A call in the graph, or a leaf: its type, its inputs, its result, and the line that made it."""

    id: int
    op_type: str
    inputs: tuple[Node, ...]
    spec: TensorSpec
    location: Location
    is_evaluated: bool

    @property
    def output_shape(self) -> list[int]:
        """The shape of the result."""
        return self.spec.shape

    @property
    def output_dtype(self) -> DType:
        """The element type of the result."""
        return self.spec.dtype

    @property
    def layout(self) -> MeshLayout:
        """The layout of the result."""
        return self.spec.layout

    def __repr__(self) -> str:
        inputs = ", ".join(f"%{node.id}" for node in self.inputs)
        layout = "" if self.layout.kind == "single_pe" else f" {self.layout!r}"
        state = " (evaluated)" if self.is_evaluated else ""
        return f"%{self.id} = {self.op_type}({inputs}) : {self.output_shape} {self.output_dtype.name}{layout}{state}"


class Graph:
    """The graph of some tensors: its nodes in topological order, and the function of Tessera's Graph IR.

    >>> import tessera.pyflame as pf
    >>> print(get_graph(pf.relu(pf.ones([2]))))
    Graph(2 nodes)
      %0 = ones() : [2] float32
      %1 = relu(%0) : [2] float32
    """

    def __init__(self, program: LazyProgram, wanted: tuple[Expression, ...]) -> None:
        self.program = program
        self.wanted = wanted
        self._leaves = frozenset(program.leaves)
        self._nodes: dict[Expression, Node] = {}
        for x in program.order:
            self._add(x)

    def _add(self, x: Expression) -> None:
        inputs = x.record.inputs if x.record is not None and x not in self._leaves else ()
        self._nodes[x] = Node(
            len(self._nodes), x.label, tuple(self._nodes[i] for i in inputs), _specify(x), x.location, x.is_evaluated
        )

    @property
    def nodes(self) -> list[Node]:
        """The nodes; each follows its inputs."""
        return list(self._nodes.values())

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self._nodes)

    @property
    def inputs(self) -> list[Node]:
        """The leaves."""
        return [self._nodes[x] for x in self.program.leaves]

    @property
    def outputs(self) -> list[Node]:
        """The nodes of the tensors whose graph this is."""
        return [self._nodes[x] for x in self.wanted]

    @property
    def function(self) -> Function:
        """The function of Tessera's Graph IR: its parameters are the leaves."""
        return self.program.function

    def ir(self) -> str:
        """The Graph IR as text."""
        return print_module(Module("graph", (self.function,)))

    def __len__(self) -> int:
        return self.num_nodes

    def __str__(self) -> str:
        return "\n".join([f"Graph({self.num_nodes} nodes)", *(f"  {node!r}" for node in self.nodes)])

    def __repr__(self) -> str:
        return f"Graph(num_nodes={self.num_nodes})"


def _specify(x: Expression) -> TensorSpec:
    shape = [int(n) for n in x.type.shape]
    return TensorSpec(shape, dtypes.as_dtype(x.type.dtype), x.layout or MeshLayout.single_pe())


def make_graph(*tensors: Tensor) -> Graph:
    """The graph of several tensors.

    Raises:
        ArgumentError: an argument is not a tensor.
    """
    for x in tensors:
        if not isinstance(x, Tensor):
            raise ArgumentError(
                "the graph of something that is not a tensor", location=user_location(),
                received=f"{type(x).__name__} {x!r}"[:80], expected="a tensor of PyFlame",
            )  # fmt: skip
    wanted = tuple(x._expression for x in tensors)
    return Graph(assemble(wanted, lambda x: x.record is None, "graph"), wanted)


def get_graph(tensor: Tensor) -> Graph:
    """The graph that computes a tensor."""
    return make_graph(tensor)


def get_node(tensor: Tensor) -> Node:
    """The node of a tensor in its graph.

    >>> import tessera.pyflame as pf
    >>> get_node(pf.ones([2]) * 2.0).op_type
    'mul'
    """
    return make_graph(tensor).outputs[0]


def print_graph(tensor: Tensor) -> None:
    """Print the graph of a tensor, a line for each node."""
    print(make_graph(tensor))


def as_graph(value: Any) -> Graph:
    """A graph, also from a tensor."""
    return value if isinstance(value, Graph) else make_graph(value)

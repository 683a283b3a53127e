"""Forward mode of kernels: the JVP of a launch is a launch of the tangent kernel, derived from the Tile IR.

A program of the tangent kernel computes each value with its tangent beside it (Wengert 1964). Each memory has a second
one with its tangents: loads, stores, additions and copies are repeated on it at the same indices. Loops carry the
tangents of their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import RefType, TensorType
from tessera.frontend.jit.line_marks import strip_marks
from tessera.frontend.kernel.trace import KernelBuilder
from tessera.ir.builder import override_numerics
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import eliminate_dead_nodes, expand_composites, merge_equal_nodes
from tessera.ir.rules import Rules
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor.basic import splat
from tessera.transforms.autodiff.linearisation import Dual, push_forward
from tessera.transforms.flow.region_ops import bind_region_op

# forward(kernel, node) adds the node's values, and their tangents.
forward_rules = Rules("tangents of a kernel")
LINEAR_UPDATES = ("add", "exchange")  # atomic updates whose tangents are the same updates


def bind_tangent_launch(node: Node, duals: Sequence[Dual]) -> list[Dual]:
    """Launch the tangent kernel of a launch: its results and their tangents."""
    kernel = TangentKernel(node, tuple(d.tangent is not None for d in duals))
    function = kernel.build()
    primals = [d.primal for d in duals]
    tangents = [
        splat(0, x.type) if d.tangent is None else d.tangent
        for d, x, m in zip(duals, primals, kernel.doubled, strict=True)
        if m
    ]
    found = iter(_bind(node, function, [*primals, *tangents], kernel.written))
    outs = [next(found) for _ in node.results]
    return [Dual(o, next(found) if o.dtype.is_float else None) for o in outs]


def make_tangent_node(node: Node, moves: Sequence[bool]) -> Node:
    """The launch of the tangents alone: operands are those of the launch, then their tangents; results are tangents."""
    kernel = TangentKernel(node, tuple(moves), has_primals=False)
    function = kernel.build()
    doubled = [v for v, m in zip(node.args, kernel.doubled, strict=True) if m]
    args = tuple(Value(v.type, v.hint) for v in (*node.args, *doubled))
    types = _result_types(function, kernel.written)
    results = tuple(Value(t) for t in types)
    return Node(node.op, args, _launch_attrs(node, function, kernel.written), results, (function.body,), node.loc)


def _launch_attrs(node: Node, function: Function, written: tuple[int, ...]) -> Attrs:
    named = {"kernel": function.name, "grid": node.attrs["grid"], "written": written, "attrs": function.attrs}
    return Attrs(named)


def _result_types(function: Function, written: Sequence[int]) -> tuple[TensorType, ...]:
    refs: list[Any] = [function.params[i].type for i in written]
    return tuple(TensorType(r.shape, r.dtype, r.policy) for r in refs)


def _bind(node: Node, function: Function, operands: Sequence[Tensor], written: tuple[int, ...]) -> list[Tensor]:
    attrs = _launch_attrs(node, function, written)
    return bind_region_op(node.op, operands, attrs, [function.body], _result_types(function, written))


@dataclass
class TangentKernel:
    """The tangent kernel of a launch under construction.

    `values` has what each value of the kernel has become, `tangents` its tangent (none: zero), and `memory` for each
    ref of the kernel the ref of its tangents.
    """

    node: Node
    moves: tuple[bool, ...]
    has_primals: bool = True  # whether the memories themselves are results too
    builder: KernelBuilder = field(default_factory=KernelBuilder)
    values: dict[Value, Any] = field(default_factory=dict)
    tangents: dict[Value, Tensor] = field(default_factory=dict)
    memory: dict[Value, Value] = field(default_factory=dict)

    @cached_property
    def body(self) -> Block:
        """The body of the kernel itself, without the debugger's marks."""
        return strip_marks(self.node.regions[0])

    @cached_property
    def results(self) -> list[Value]:
        """The written memories."""
        return [self.body.params[i] for i in self.node.attrs["written"]]

    @cached_property
    def doubled(self) -> list[bool]:
        """Which operands have a memory of tangents."""
        copies = any(n.op is tile.async_copy for n in self.body.walk())
        operands = self.body.params[: len(self.node.args)]
        return [
            p.type.dtype.is_float and (m or copies or p in self.results)
            for p, m in zip(operands, self.moves, strict=True)
        ]

    @property
    def written(self) -> tuple[int, ...]:
        """The numbers of the parameters that are results: memories, then their tangents."""
        order = {p: i for i, p in enumerate(self.params)}
        found = [order[self.values[p]] for p in self.results] if self.has_primals else []
        return (*found, *(order[self.memory[p]] for p in self.results if p.type.dtype.is_float))

    def build(self) -> Function:
        """The tangent kernel: its parameters are the operands and tangents, then new memories and theirs.

        Raises:
            UnsupportedOpError: a node of the kernel has no tangent.
        """
        count = len(self.node.args)
        operands, fresh = self.body.params[:count], self.body.params[count:]
        self.values.update({p: Value(p.type, p.hint) for p in self.body.params})
        double = [p for p, m in zip(operands, self.doubled, strict=True) if m]
        late = [p for p in fresh if p.type.dtype.is_float]
        self.memory = {p: Value(RefType(p.type.shape, p.type.dtype), f"{p.hint}_tangent") for p in (*double, *late)}
        new = fresh if self.has_primals else ()
        self.params = (
            *(self.values[p] for p in operands), *(self.memory[p] for p in double),
            *(self.values[p] for p in new), *(self.memory[p] for p in late),
        )  # fmt: skip
        with self.builder.active(), override_numerics(None):
            self.run(self.body)
        attrs = Attrs({k: v for k, v in self.node.attrs["attrs"].items() if k == "group"})
        block = self.builder.block(self.params, ())
        function = Function(f"{self.node.attrs['kernel']}_jvp", block, attrs, self.node.loc)
        body = eliminate_dead_nodes(merge_equal_nodes(expand_composites(function).body))
        return replace(function, body=body)

    def make_error(self, node: Node, what: str) -> UnsupportedOpError:
        """The error for a kernel without tangents of its own."""
        return UnsupportedOpError(
            f"no tangents of {self.node.attrs['kernel']}: {what}", location=node.loc,
            expected="loads, stores, loops, branches and ops on blocks",
            suggestion="give the kernel a rule: @kernel.jvp",
        )  # fmt: skip

    def run(self, block: Block) -> None:
        """Add the nodes of a block again, each with the tangents of its results."""
        for node in block.nodes:
            with self.builder.at(node.loc):
                (forward_rules.get(node.op) or _push_pure)(self, node)

    def raw(self, values: Sequence[Value]) -> list[Value]:
        """What values have become, as IR values."""
        return [x.data if isinstance(x := self.values[v], Tensor) else x for v in values]

    def tangent(self, value: Value) -> Value:
        """The tangent of a block; zeros if it has none."""
        found = self.tangents.get(value)
        return (splat(0, value.type) if found is None else found).data  # type: ignore[arg-type]

    def repeat(self, node: Node, args: Sequence[Value] | None = None) -> list[Any]:
        """Add a node again; its results."""
        types = tuple(v.type for v in node.results)
        made = self.builder.add(node.op, self.raw(node.args) if args is None else args, node.attrs, types=types)
        return [Tensor(v) if isinstance(v.type, TensorType) else v for v in made.results]

    def keep(self, node: Node, args: Sequence[Value] | None = None) -> None:
        """Add a node again as it is."""
        self.values.update(zip(node.results, self.repeat(node, args), strict=True))


def _push_pure(kernel: TangentKernel, node: Node) -> None:
    """A node without effects: its derivative rule. Others are repeated if nothing that they take has a tangent."""
    moves = any(v in kernel.tangents for v in node.args)
    floats = any(isinstance(v.type, TensorType) and v.type.dtype.is_float for v in node.results)
    if node.regions or (moves and floats and (node.op.effects or not node.op.name.startswith("ts."))):
        raise kernel.make_error(node, f"{node.op.name} in it")
    if not moves or not floats:
        kernel.keep(node)
        return
    params = tuple(Value(v.type, v.hint) for v in node.args)  # an operand may occur twice
    duals = [Dual(kernel.values[v], kernel.tangents.get(v)) for v in node.args]
    found = push_forward(Block(params, (replace(node, args=params),), node.results), duals)
    for value, dual in zip(node.results, found, strict=True):
        kernel.values[value] = dual.primal
        if dual.tangent is not None:
            kernel.tangents[value] = dual.tangent


@forward_rules(tile.load, tile.gather)
def _(kernel: TangentKernel, node: Node) -> None:
    kernel.keep(node)
    ref, rest = node.args[0], kernel.raw(node.args[1:])
    other = node.args[ref.type.rank + 2 :]  # type: ignore[union-attr]
    if ref in kernel.memory:
        given = [*rest[: len(rest) - len(other)], *(kernel.tangent(v) for v in other)]
        kernel.tangents[node.out] = kernel.repeat(node, [kernel.memory[ref], *given])[0]
    elif any(v in kernel.tangents for v in other):
        raise kernel.make_error(node, "a load whose `other` alone has a derivative")


@forward_rules(tile.store, tile.scatter)
def _(kernel: TangentKernel, node: Node) -> None:
    ref, value, *rest = node.args
    if kernel.has_primals or ref not in kernel.results:
        kernel.keep(node)
    if ref in kernel.memory:
        kernel.repeat(node, [kernel.memory[ref], kernel.tangent(value), *kernel.raw(rest)])
    elif value in kernel.tangents:
        raise kernel.make_error(node, "a store of a block with a derivative to memory without one")


@forward_rules(tile.atomic)
def _(kernel: TangentKernel, node: Node) -> None:
    ref, value, *rest = node.args
    kernel.keep(node)
    if ref not in kernel.memory:
        return
    if node.attrs["kind"] not in LINEAR_UPDATES:
        raise kernel.make_error(node, f"an atomic {node.attrs['kind']} in it")
    found = kernel.repeat(node, [kernel.memory[ref], kernel.tangent(value), *kernel.raw(rest)])
    kernel.tangents[node.out] = found[0]


@forward_rules(tile.alloc)
def _(kernel: TangentKernel, node: Node) -> None:
    kernel.keep(node)
    if node.attrs["dtype"].is_float:
        kernel.memory[node.out] = kernel.repeat(node)[0]  # type: ignore[assignment]


@forward_rules(tile.async_copy)
def _(kernel: TangentKernel, node: Node) -> None:
    kernel.keep(node)
    to, source, *rest = node.args
    if to in kernel.memory:
        kernel.repeat(node, [kernel.memory[to], kernel.memory[source], *kernel.raw(rest)])


# Loops and branches: the tangents of carried floats are carried too.


def _is_float(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype.is_float


def _double(kernel: TangentKernel, values: Sequence[Value]) -> list[Value]:
    """What values have become, then the tangents of the floats."""
    return [*kernel.raw(values), *(kernel.tangent(v) for v in values if _is_float(v))]


def _set(kernel: TangentKernel, values: Sequence[Value], found: Sequence[Value]) -> None:
    kernel.values.update(zip(values, map(Tensor, found), strict=False))
    floats = [v for v in values if _is_float(v)]
    kernel.tangents.update(zip(floats, map(Tensor, found[len(values) :]), strict=True))


def _rebuild(kernel: TangentKernel, region: Block, lead: int, has_tangents: bool = True) -> Block:
    """A region whose parameters after the first `lead` are carried, with their tangents."""
    carried = region.params[lead:]
    floats = [p for p in carried if _is_float(p)]
    params = [Value(p.type, p.hint) for p in (*region.params, *floats)]
    with kernel.builder.region() as nodes:
        kernel.values.update(zip(region.params[:lead], map(Tensor, params), strict=False))
        _set(kernel, carried, params[lead:])
        kernel.run(region)
        results = _double(kernel, region.results) if has_tangents else kernel.raw(region.results)
    return Block(tuple(params), tuple(nodes), tuple(results))


def _add(kernel: TangentKernel, node: Node, args: Sequence[Value], regions: Sequence[Block]) -> None:
    floats = [v.type for v in node.results if _is_float(v)]
    types = (*(v.type for v in node.results), *floats)
    made = kernel.builder.add(node.op, args, node.attrs, types=types, regions=tuple(regions))
    _set(kernel, node.results, made.results)


@forward_rules(control_flow.for_)
def _(kernel: TangentKernel, node: Node) -> None:
    args = [*kernel.raw(node.args[:3]), *_double(kernel, node.args[3:])]
    _add(kernel, node, args, [_rebuild(kernel, node.regions[0], 1)])


@forward_rules(control_flow.while_)
def _(kernel: TangentKernel, node: Node) -> None:
    test, body = node.regions
    _add(kernel, node, _double(kernel, node.args), [_rebuild(kernel, test, 0, False), _rebuild(kernel, body, 0)])


@forward_rules(control_flow.if_)
def _(kernel: TangentKernel, node: Node) -> None:
    _add(kernel, node, kernel.raw(node.args), [_rebuild(kernel, r, 0) for r in node.regions])

"""Reverse mode of kernels: the adjoint of a launch is a launch of the adjoint kernel, derived from the Tile IR.

A program of the adjoint kernel computes the values of its program again, then visits the nodes in reverse (Griewank and
Walther, "Evaluating Derivatives", 2008, chapter 3): the cotangent of a stored block is loaded from the cotangent of the
memory, and the cotangent of a loaded block is added to that of its memory. A loop stores its carried values in scratch
memory on the way forward and loads them on the way back. Where the access maps show that no two programs load the same
element, the addition needs no atomics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tessera.core.errors import UnsupportedOpError
from tessera.core.hooks import ungroup_launch
from tessera.core.symbolic_dim import Size
from tessera.core.types import DType, RefType, TensorType, f32, f64, int64
from tessera.frontend.jit.line_marks import strip_marks
from tessera.frontend.kernel.trace import KernelBuilder
from tessera.ir.builder import override_numerics
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import eliminate_dead_nodes, expand_composites, merge_equal_nodes
from tessera.ir.rules import Rules
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor.basic import cast, full, splat
from tessera.ops.tensor.elementwise import where
from tessera.ops.tensor.reduce import sum as sum_
from tessera.ops.tensor.shape import iota, reshape
from tessera.transforms.autodiff.call_primitives import add_transpose_call, custom_vjp, must_record_call, record_call
from tessera.transforms.autodiff.custom_rules import CustomVjpRule
from tessera.transforms.autodiff.linearisation import Dual, call_jvp_rules, linearise
from tessera.transforms.flow.launch_accesses import KernelAccesses
from tessera.transforms.flow.launch_tangents import bind_tangent_launch, make_tangent_node
from tessera.transforms.flow.region_ops import bind_region_op

# reverse(adjoint, node) adds the node's values and returns what to do on the way back, or None.
reverse_rules = Rules("adjoint of a kernel")
Step = Callable[[], None]


@call_jvp_rules(control_flow.launch)
def _(node: Node, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    if not reverse:
        return bind_tangent_launch(node, duals)
    primals = [d.primal for d in duals]
    outs = bind_region_op(node.op, primals, node.attrs, node.regions, node.result_types)
    moves = [d.tangent is not None for d in duals]

    def pull(residuals: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        given = iter(g)
        cotangents = [next(given) if o.dtype.is_float else None for o in outs]
        return bind_adjoint(node, moves, residuals, cotangents)

    return add_transpose_call(pull, primals, duals, outs)


def bind_adjoint(
    node: Node, moves: Sequence[bool], primals: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor]:
    """The cotangents of the operands of a launch that move, by its adjoint kernel; differentiable in turn."""
    given = [g for g in cotangents if g is not None]
    tensors = [*primals, *given]
    if not must_record_call(tensors):
        return launch_adjoint(node, moves, primals, given)
    size = len(primals)

    def forward(xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return launch_adjoint(node, moves, xs[:size], xs[size:]), list(xs)

    def backward(xs: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        return _pull_adjoint(node, moves, xs[:size], xs[size:], g)

    name = f"the adjoint of {node.attrs['kernel']}"
    rule = CustomVjpRule(name, len(tensors), forward, backward, derives=True)
    return record_call(custom_vjp, lambda xs: forward(xs)[0], tensors, rule=rule)


def _pull_adjoint(
    node: Node, moves: Sequence[bool], primals: Sequence[Tensor], given: Sequence[Tensor], g: Sequence[Tensor]
) -> list[Tensor]:
    """The cotangents of the operands of an adjoint, J(x)ᵀ w, for the cotangents `g` of its results.

    That of w is J(x) g, and that of x the gradient of w · J(x) g: both come from the tangent kernel.
    """
    tangent = make_tangent_node(node, moves)
    operands = [*primals, *g]
    pushed = bind_region_op(tangent.op, operands, tangent.attrs, tangent.regions, tangent.result_types)
    floats = [x.dtype.is_float for x in primals]
    found = iter(bind_adjoint(tangent, [*floats, *(False for _ in g)], operands, given))
    return [*(next(found) if m else splat(0, x.type) for x, m in zip(primals, floats, strict=True)), *pushed]


def launch_adjoint(
    node: Node, moves: Sequence[bool], primals: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Launch the adjoint kernel of a launch: the cotangents of the operands that move."""
    kernel = AdjointKernel(_ungroup_communication(node), tuple(moves))
    function = kernel.build()
    moving = [x for x, m in zip(primals, moves, strict=True) if m]
    zeros = [splat(0, TensorType(x.shape, sum_dtype(x.dtype))) for x in moving]
    operands = [*primals, *cotangents, *zeros]
    stored = tile.find_written_refs(function.body)
    first = len(operands) - len(zeros)  # from here on: the gradients, then scratch memory
    written = tuple(i for i, p in enumerate(function.params) if p in stored or i >= first)
    refs: list[Any] = [function.params[i].type for i in written]
    types = tuple(ref.block(ref.shape) for ref in refs)
    attrs = {"kernel": function.name, "grid": node.attrs["grid"], "written": written, "attrs": function.attrs}
    found = bind_region_op(node.op, operands, attrs, [function.body], types)
    made = [g for g, i in zip(found, written, strict=True) if first <= i < len(operands)]
    return [cast(g, dtype=x.dtype) if g.dtype != x.dtype else g for g, x in zip(made, moving, strict=True)]


_COMMUNICATION = {tile.alloc, tile.collect, tile.exchange, tile.meet}


def _ungroup_communication(node: Node) -> Node:
    """A launch whose tiles communicate as one of single programs, whose values and memory the adjoint can follow."""
    group = int(node.attrs["attrs"].get("group", 1))
    ops = {n.op for n in node.regions[0].walk()}
    return ungroup_launch(node, counted=True) if group > 1 and ops & _COMMUNICATION else node


def sum_dtype(dtype: DType) -> DType:
    """The type in which the cotangents of a memory are summed."""
    return f64 if dtype == f64 else f32


@dataclass
class AdjointKernel:
    """The adjoint of a launch under construction.

    `values` has what each value of the kernel has become, `cotangents` the sums so far on the way back. `active` values
    depend on operands that move. `memory` has for each ref of the kernel the ref of its cotangent.
    """

    node: Node
    moves: tuple[bool, ...]
    builder: KernelBuilder = field(default_factory=KernelBuilder)
    values: dict[Value, Any] = field(default_factory=dict)
    cotangents: dict[Value, Tensor] = field(default_factory=dict)
    active: set[Value] = field(default_factory=set)
    memory: dict[Value, Value] = field(default_factory=dict)
    scratch: list[Value] = field(default_factory=list)
    homes: dict[Value, Block] = field(default_factory=dict)  # the memory that the kernel allocates, and where
    reread: set[Value] = field(default_factory=set)  # which of it the way back reads again
    block: Block | None = None  # the one that a node is in
    is_recording: bool = True  # whether nodes leave steps for the way back

    @cached_property
    def body(self) -> Block:
        """The body of the kernel itself, without the debugger's marks."""
        return strip_marks(self.node.regions[0])

    @cached_property
    def accesses(self) -> KernelAccesses:
        """Which elements the kernel's programs access."""
        return KernelAccesses(self.body, tuple(self.node.attrs["grid"]) or (1,), self.group)

    def build(self) -> Function:
        """The adjoint kernel: its parameters are the operands, the cotangents of results, and those of operands.

        Raises:
            UnsupportedOpError: a node of the kernel has no derivative.
        """
        params = self._make_params()
        self._check_memories()
        with self.builder.active(), override_numerics(None):
            for step in reversed(self.run(self.body)):
                step()
        body = self._prune(self.builder.block((*params, *self.scratch), ()), len(params))
        attrs = Attrs({k: v for k, v in self.node.attrs["attrs"].items() if k == "group"})
        function = Function(f"{self.node.attrs['kernel']}_vjp", body, attrs, self.node.loc)
        body = eliminate_dead_nodes(merge_equal_nodes(expand_composites(function).body))
        return replace(function, body=body)

    def _make_params(self) -> list[Value]:
        operands = self.body.params[: len(self.node.args)]
        inputs = [Value(p.type, p.hint) for p in operands]
        self.values.update(zip(operands, inputs, strict=True))
        results = [self.body.params[i] for i in self.node.attrs["written"]]
        given = {p: Value(p.type, f"{p.hint}_cotangent") for p in results if p.type.dtype.is_float}
        moving = [p for p, m in zip(operands, self.moves, strict=True) if m]
        made = {p: Value(RefType(p.type.shape, sum_dtype(p.type.dtype)), f"{p.hint}_gradient") for p in moving}
        self.memory = {**given, **made}
        self.active = set(moving)
        return [*inputs, *given.values(), *made.values()]

    def _check_memories(self) -> None:
        """Refuse kernels that read what they write: the values at each read would have to be kept."""
        results = {self.body.params[i] for i in self.node.attrs["written"]}
        for node in self.body.walk():
            if node.args and node.args[0] in results and "read" in node.op.effects:
                raise self.make_error(node, f"a kernel that reads `{node.args[0].hint}`, which it writes")
        for param, moves in zip(self.body.params, self.moves, strict=False):
            if moves and param in results:
                raise self.make_error(self.node, f"a kernel that updates `{param.hint}`, which has a derivative")

    def make_error(self, node: Node, what: str) -> UnsupportedOpError:
        """The error for a kernel without a derivative of its own."""
        return UnsupportedOpError(
            f"no derivative of {self.node.attrs['kernel']}: {what}", location=node.loc,
            expected="loads, stores, loops, branches and ops on blocks",
            suggestion="give the kernel a rule, @kernel.vjp, or the function that launches it: @ts.custom_vjp",
        )  # fmt: skip

    # The way forward.

    def get(self, value: Value) -> Any:
        """What a value of the kernel has become."""
        return self.values[value]

    def run(self, block: Block) -> list[Step]:
        """Add the nodes of a block again; the steps for the way back, in program order."""
        steps: list[Step] = []
        for node in block.nodes:
            self.block = block
            with self.builder.at(node.loc):
                rule = reverse_rules.get(node.op) or _reverse_pure
                step = rule(self, node)
            if step is not None and self.is_recording:
                steps.append(self._located(node, step))
        return steps

    def _located(self, node: Node, step: Step) -> Step:
        def run() -> None:
            with self.builder.at(node.loc):
                step()

        return run

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """Add values alone."""
        before, self.is_recording = self.is_recording, False
        yield
        self.is_recording = before

    def add(self, node: Node, args: Sequence[Any], attrs: Mapping[str, Any] | None = None) -> list[Any]:
        """Add a node on new operands, and return its results as tensors."""
        values = [a.data if isinstance(a, Tensor) else a for a in args]
        made = self.builder.add(node.op, values, node.attrs if attrs is None else attrs)
        return [Tensor(v) for v in made.results]

    def set_results(self, node: Node, found: Sequence[Any], active: bool) -> None:
        """Note what the results of a node have become."""
        self.values.update(zip(node.results, found, strict=True))
        if active:
            self.active.update(v for v in node.results if v.type.dtype.is_float)

    def is_active(self, values: Sequence[Value]) -> bool:
        """Whether any of some values depends on operands that move."""
        return not self.active.isdisjoint(values)

    # The way back.

    def accumulate(self, value: Value, g: Tensor) -> None:
        """Add to the cotangent of a value."""
        if value in self.active:
            self.cotangents[value] = self.cotangents[value] + g if value in self.cotangents else g

    def take(self, value: Value) -> Tensor | None:
        """The cotangent of a value, which is then complete."""
        return self.cotangents.pop(value, None)

    def find_cotangent(self, value: Value) -> Tensor:
        """The cotangent of a value so far; zeros if there is none."""
        found = self.cotangents.get(value)
        return splat(0, value.type) if found is None else found  # type: ignore[arg-type]

    # Scratch memory.

    def program(self) -> Tensor:
        """The number of this tile among all of the launch."""
        grid, group = tuple(self.node.attrs["grid"]) or (1,), self.group
        number: Any = None
        for axis, size in enumerate(grid):
            own = Tensor(self.builder.add(tile.program_id, [], {"axis": axis}).out)
            number = own if number is None else number * size + own
        if group > 1:
            number = number * group + Tensor(self.builder.add(tile.local_id, [], {}).out)
        return number

    @property
    def group(self) -> int:
        """The tiles of a group."""
        return int(self.node.attrs["attrs"].get("group", 1))

    def allocate_scratch(self, type: TensorType, trips: Size) -> Value:
        """Memory for a value of each trip of a loop of each tile."""
        tiles = math.prod(self.node.attrs["grid"]) * self.group
        ref = Value(RefType((tiles, trips, *type.shape), type.dtype), f"carried{len(self.scratch)}")
        self.scratch.append(ref)
        return ref

    def _prune(self, block: Block, fixed: int) -> Block:
        """Leave out the stores to scratch memory that nothing loads."""
        block = eliminate_dead_nodes(block)
        loaded = {n.args[0] for n in block.walk() if n.op is tile.load}
        unused = {p for p in block.params[fixed:] if p not in loaded}
        self.scratch = [p for p in self.scratch if p not in unused]
        return replace(_drop_stores(block, unused), params=(*block.params[:fixed], *self.scratch))


def _drop_stores(block: Block, refs: set[Value]) -> Block:
    kept = [n for n in block.nodes if not (n.op is tile.store and n.args[0] in refs)]
    nodes = tuple(replace(n, regions=tuple(_drop_stores(r, refs) for r in n.regions)) if n.regions else n for n in kept)
    return replace(block, nodes=nodes)


def _reverse_pure(adjoint: AdjointKernel, node: Node) -> Step | None:
    """A node without effects: its derivative rule, linearised here and transposed on the way back."""
    args = [adjoint.get(v) for v in node.args]
    active = adjoint.is_active(node.args) and any(v.type.dtype.is_float for v in node.results)
    if node.regions or node.op.effects or not node.op.name.startswith("ts."):
        if not active and not node.regions and not node.op.effects:
            adjoint.set_results(node, adjoint.add(node, args), False)
            return None
        raise adjoint.make_error(node, f"{node.op.name} in it")
    if not active or not adjoint.is_recording:
        adjoint.set_results(node, adjoint.add(node, args), active)
        return None
    moves = [v in adjoint.active for v in node.args]
    params = tuple(Value(v.type, v.hint) for v in node.args)  # an operand may occur twice
    point = linearise(Block(params, (replace(node, args=params),), node.results), args, moves)
    adjoint.set_results(node, point.results, True)

    def pull() -> None:
        given = [adjoint.take(v) for v in node.results]
        if any(g is not None for g in given):
            moving = [v for v, m in zip(node.args, moves, strict=True) if m]
            for value, g in zip(moving, point.pull_back(given), strict=True):
                adjoint.accumulate(value, g)

    return pull


# Memory.


@reverse_rules(tile.alloc)
def _(adjoint: AdjointKernel, node: Node) -> Step | None:
    """Memory of a program: the adjoint kernel has it too, and memory for its cotangent.

    That of a trip or a branch is there again when the way back computes the trip or branch again.
    """
    if adjoint.group > 1:
        raise adjoint.make_error(node, "memory of a group of tiles")
    adjoint.values[node.out] = adjoint.builder.add(node.op, [], node.attrs).out
    adjoint.homes[node.out] = adjoint.block  # type: ignore[assignment]
    if node.out.type.dtype.is_float and adjoint.is_recording:
        attrs = {**node.attrs, "dtype": sum_dtype(node.out.type.dtype)}
        made = adjoint.builder.add(node.op, [], attrs).out
        zero = full(shape=(), value=0, dtype=int64).data
        zeros = splat(0, TensorType(made.type.shape, made.type.dtype)).data
        adjoint.builder.add(tile.store, [made, zeros, *[zero] * made.type.rank], {})
        adjoint.memory[node.out] = made
    return None


def _store_locally(adjoint: AdjointKernel, node: Node) -> Step | None:
    """A store to a program's own memory: its loads need it, and on the way back it takes the cotangent."""
    ref, value = node.args[:2]
    outside = adjoint.homes[ref] is not adjoint.block
    if outside or ref in adjoint.reread:
        where_ = "in a loop or branch after it" if outside else "after a loop that reads it"
        raise adjoint.make_error(node, f"a store to memory that the kernel allocates, {where_}")
    adjoint.add(node, [adjoint.get(v) for v in node.args])
    moves = value in adjoint.active
    if not moves and ref not in adjoint.active:
        return None
    adjoint.active |= {ref} if moves else set()
    rest = [adjoint.get(v).data for v in node.args[2:]]

    def pull() -> None:
        target, type = adjoint.memory[ref], value.type
        if moves:
            g = _load_cotangent(adjoint, node, target, rest)
            g = _sum_spread(g, type)  # type: ignore[arg-type]
            adjoint.accumulate(value, cast(g, dtype=type.dtype) if g.dtype != type.dtype else g)
        adjoint.builder.add(node.op, [target, splat(0, type.with_dtype(target.type.dtype)).data, *rest], node.attrs)  # type: ignore[union-attr]

    return pull


def _load_cotangent(adjoint: AdjointKernel, node: Node, target: Value, rest: list[Value]) -> Tensor:
    """The cotangents of the elements that a store writes; 0 where its mask does not hold."""
    if node.op is tile.store:
        attrs = {"shape": node.args[1].type.shape, "edge": node.attrs["edge"], "vector": node.attrs["vector"]}
        return Tensor(adjoint.builder.add(tile.load, [target, *rest], attrs).out)
    return Tensor(adjoint.builder.add(tile.gather, [target, *rest], {}).out)


def _sum_spread(g: Tensor, type: TensorType) -> Tensor:
    """The cotangent of a value that is stored along axes where it has one element."""
    spread = [a for a, (n, m) in enumerate(zip(g.shape, type.shape, strict=False)) if m == 1 and n != 1]
    return reshape(sum_(g, axis=tuple(spread)), shape=type.shape) if spread else g


@reverse_rules(tile.load, tile.gather)
def _(adjoint: AdjointKernel, node: Node) -> Step | None:
    ref = node.args[0]
    args = [adjoint.get(v) for v in node.args]
    rest, other = args[1:], node.args[ref.type.rank + 2 :]  # type: ignore[union-attr]
    if adjoint.homes.get(ref, adjoint.block) is not adjoint.block:
        adjoint.reread.add(ref)
    moves, other_moves = ref in adjoint.memory and ref in adjoint.active, adjoint.is_active(other)
    adjoint.set_results(node, adjoint.add(node, args), moves or other_moves)

    def pull() -> None:
        g = adjoint.take(node.out)
        if g is None:
            return
        if other_moves:
            _pull_other(adjoint, node, g, rest)
        if moves:
            target = adjoint.memory[ref]
            g = cast(g, dtype=target.type.dtype) if g.dtype != target.type.dtype else g
            (add_block if node.op is tile.load else add_elements)(adjoint, node, target, g, rest)

    return pull if moves or other_moves else None


def _pull_other(adjoint: AdjointKernel, node: Node, g: Tensor, rest: list[Any]) -> None:
    """The cotangent of the value that a load gives for the elements that it does not read from memory."""
    ref, rank = node.args[0], len(rest) - 2
    indices = rest[:rank]
    if node.op is tile.load:
        indices = [start + _make_ramp(node.attrs["shape"], axis) for axis, start in enumerate(indices)]
    g = where(_find_mask(node, indices, rest, ref), splat(0, g.type), g)
    value = node.args[rank + 2]
    shape = value.type.shape  # type: ignore[union-attr]
    lost = g.ndim - len(shape)
    spread = [a for a in range(g.ndim) if a < lost or shape[a - lost] != g.shape[a]]
    g = reshape(sum_(g, axis=tuple(spread)), shape=shape) if spread else g
    adjoint.accumulate(value, g)


def add_block(adjoint: AdjointKernel, node: Node, target: Value, g: Tensor, rest: list[Any]) -> None:
    """Add a block to the memory that it was loaded from."""
    rank, shape = target.type.rank, node.attrs["shape"]  # type: ignore[union-attr]
    if not adjoint.accesses.is_owned_by_program(node.args[0]):
        indices = [start + _make_ramp(shape, axis) for axis, start in enumerate(rest[:rank])]
        mask = _find_mask(node, indices, rest, target)
        _add_atomically(adjoint, target, g, indices, mask)
        return
    values = [r.data for r in rest[: rank + 1]]
    attrs = {"shape": shape, "edge": node.attrs["edge"], "vector": node.attrs["vector"]}
    held = Tensor(adjoint.builder.add(tile.load, [target, *values], attrs).out)
    attrs = {"edge": node.attrs["edge"], "vector": node.attrs["vector"]}
    adjoint.builder.add(tile.store, [target, (held + g).data, *values], attrs)


def add_elements(adjoint: AdjointKernel, node: Node, target: Value, g: Tensor, rest: list[Any]) -> None:
    """Add elements to where they were gathered from."""
    rank = target.type.rank  # type: ignore[union-attr]
    _add_atomically(adjoint, target, g, rest[:rank], rest[rank] if len(rest) > rank else None)


def _add_atomically(
    adjoint: AdjointKernel, target: Value, g: Tensor, indices: Sequence[Tensor], mask: Tensor | None
) -> None:
    operands = [target, g.data, *(i.data for i in indices), *(() if mask is None else (mask.data,))]
    adjoint.builder.add(tile.atomic, operands, {"kind": "add"})


def _make_ramp(shape: Sequence[int], axis: int) -> Tensor:
    """The positions along an axis of a block, in a block of the same rank that is of size 1 along the others."""
    sizes = tuple(n if a == axis else 1 for a, n in enumerate(shape))
    return iota(shape=sizes, axis=axis, dtype=int64)


def _find_mask(node: Node, indices: Sequence[Tensor], rest: list[Any], target: Value) -> Tensor | None:
    """The elements that a load reads from memory: inside, where it clips, and under its mask."""
    rank = len(indices)
    found = [rest[rank]] if len(rest) > rank else []
    if node.attrs.get("edge") == "clip":
        sizes = target.type.shape
        found += [(i >= 0) & (i < n) for i, n in zip(indices, sizes, strict=True)]
    mask: Any = None
    for each in found:
        mask = each if mask is None else mask & each
    return mask


@reverse_rules(tile.store, tile.scatter)
def _(adjoint: AdjointKernel, node: Node) -> Step | None:
    """A store, which the adjoint kernel leaves out: the cotangent of its value is in the memory's cotangent."""
    ref, value = node.args[:2]
    if ref in adjoint.homes:
        return _store_locally(adjoint, node)
    if ref not in adjoint.memory:
        return None
    moves, overwritten = value in adjoint.active, adjoint.accesses.may_be_overwritten(node)
    if moves and adjoint.accesses.overlap_between_programs(node):
        raise adjoint.make_error(node, f"several programs store to the same elements of `{ref.hint}`")
    rest = [adjoint.get(v).data for v in node.args[2:]]

    def pull() -> None:
        target, type = adjoint.memory[ref], value.type
        assert isinstance(type, TensorType)
        if not moves:  # the value stored before it has no part in the result
            zeros = splat(0, TensorType(type.shape, target.type.dtype)).data
            adjoint.builder.add(node.op, [target, zeros, *rest], node.attrs)
            return
        if node.op is tile.store:
            op, attrs = tile.load, {"shape": type.shape, "edge": node.attrs["edge"], "vector": node.attrs["vector"]}
        else:
            op, attrs = tile.gather, {}
        g = Tensor(adjoint.builder.add(op, [target, *rest], attrs).out)
        if overwritten:  # the value stored before it has no part in the result
            adjoint.builder.add(node.op, [target, splat(0, g.type).data, *rest], node.attrs)
        spread = [a for a, (n, m) in enumerate(zip(g.shape, type.shape, strict=False)) if m == 1 and n != 1]
        g = reshape(sum_(g, axis=tuple(spread)), shape=type.shape) if spread else g
        adjoint.accumulate(value, cast(g, dtype=type.dtype) if g.dtype != type.dtype else g)

    return pull if moves or overwritten else None

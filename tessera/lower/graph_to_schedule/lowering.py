"""Graph to Schedule: each value that is kept becomes a buffer, computed by one kernel (bufferisation)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tessera.core.errors import Location, UnsupportedOpError
from tessera.core.symbolic_dim import Size
from tessera.core.types import RefType, Type
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value, find_size_names, merge_scopes, structural_key
from tessera.ir.rewrite import UseDef
from tessera.ir.rules import Op
from tessera.lower import lowering_plan
from tessera.lower.graph_to_schedule import host_ops, kernel_body
from tessera.lower.graph_to_schedule.fusion import FusionCluster, form_clusters, strip_reshapes
from tessera.lower.graph_to_schedule.kernel_body import BodyBuilder, MemorySlot, collapse_dims, point_rules
from tessera.lower.graph_to_schedule.tile_sizes import choose_tile_sizes
from tessera.lower.indexing_maps import (
    IndexExpr,
    KernelDims,
    get_shape,
)
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import control_flow, host, schedule
from tessera.ops.tensor import basic, contractions, scatter, shape

assert kernel_body  # fills the table of bodies


@dataclass(frozen=True)
class MemoryRegion:
    """A slice of a result: `new` from the indices `start` on, in the memory `target`, which is `old` elsewhere."""

    old: Value
    new: Value
    target: Value
    start: tuple[Size, ...]
    last: bool = True  # no kernel reads `old` after the one that computes `new`


@dataclass
class ScheduleLowering:
    """A Schedule module under construction: the buffer of each value, and the tile functions that it launches."""

    plan: LoweringPlan
    uses: UseDef
    builder: Builder = field(default_factory=Builder)
    buffers: dict[Value, Value] = field(default_factory=dict)
    views: dict[MemorySlot, Value] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    # Results of the block that a launch computes in their own memory.
    placed: set[Value] = field(default_factory=set)
    regions: list[MemoryRegion] = field(default_factory=list)
    # The names of the tile functions, by what they compute.
    names: dict[Hashable, str] = field(default_factory=dict)
    name: str = ""  # of the function that is lowered: no tile function has it

    @staticmethod
    def of(function: Function, plan: LoweringPlan) -> ScheduleLowering:
        """The initial state of the lowering of a function."""
        block = function.body
        return ScheduleLowering(plan, UseDef(block, nested=False), name=function.name)

    def lower_block(self, block: Block, targets: Sequence[Value]) -> None:
        """Lower a block whose parameters have buffers; each result goes into its target."""
        for region in self.regions:  # donation leaves these copies out: the slices alone are written then
            self.add_copy(region.old, region.target)
        for value, target in zip(block.results, targets, strict=True):
            self.buffers.setdefault(value, target)
        kept = self.share_result_memory(block, targets) | {region.new for region in self.regions}
        self.share_buffers(block)
        launched = lowering_plan.find_library_ops(self.plan) | frozenset(host_ops.host_rules)
        function = Function("block", block)
        clusters = form_clusters(function, launched, kept, self.plan)
        self.regions = [replace(r, last=self.is_last(r, clusters)) for r in self.regions]
        for cluster in clusters:
            self.lower_cluster(cluster)
        for value, target in zip(block.results, targets, strict=True):
            self.add_copy(value, target)
        for region in self.regions:
            if self.find_memory(region.new) in self.buffers:  # it was not computed in its place
                self.add_copy(region.new, region.target, region.start)

    def take_regions(self, block: Block, targets: Sequence[Value]) -> tuple[Block, list[Value]]:
        """A block without the results that are updated slices of parameters, and the other results' targets."""
        updates = {n.out: n for n in block.nodes if n.op is scatter.update_slice}
        for value, target in zip(block.results, targets, strict=True):
            if value in updates:
                old, new = updates[value].args
                self.regions.append(MemoryRegion(old, new, target, updates[value].attrs["start"]))
        kept = [(v, t) for v, t in zip(block.results, targets, strict=True) if v not in updates]
        nodes = tuple(n for n in block.nodes if n.op is not scatter.update_slice)
        block = replace(block, nodes=nodes, results=tuple(v for v, _ in kept))
        self.uses = UseDef(block, nested=False)
        return block, [t for _, t in kept]

    def view_buffer(self, value: Value, shape: tuple[Size, ...]) -> Value:
        """The buffer of a value, viewed as a shape; a launch reads through reshapes."""
        value = self.find_memory(value)
        place = self.buffers[value]
        if tuple(place.type.shape) == shape:
            return place
        if (value, shape) not in self.views:
            self.views[value, shape] = self.builder.add(host.view, [place], {"shape": shape}).out
        return self.views[value, shape]

    def find_memory(self, value: Value) -> Value:
        """The value that has a buffer: this one, or what it is a reshape of."""
        return value if value in self.buffers else strip_reshapes(value, self.uses)

    def allocate(self, value: Value) -> Value:
        """The buffer of a value: an output, or a new allocation."""
        if value not in self.buffers:
            attrs = {"shape": get_shape(value), "dtype": value.type.policy or value.type.dtype, "offset": -1}
            self.buffers[value] = self.builder.add(host.alloc, [], attrs).out
        return self.buffers[value]

    def share_buffers(self, block: Block) -> None:
        """Compute a memory that only a launch uses, and that it writes, where the launch's result is wanted."""
        for node in reversed(block.nodes):
            if node.op is not control_flow.launch:
                continue
            for i, result in zip(node.attrs["written"], node.results, strict=True):
                if i < len(node.args) and result in self.buffers and self.is_consumed(node.args[i]):
                    self.buffers.setdefault(node.args[i], self.buffers[result])

    def share_result_memory(self, block: Block, targets: Sequence[Value]) -> frozenset[Value]:
        """Compute products, windows, and new memory of launches, where the result is wanted that is a reshape of them.

        Returns these values, which are in memory in any case.
        """
        kept = set()
        library = lowering_plan.find_library_ops(self.plan)
        producers = (contractions.dot, basic.cast, shape.strided_view, control_flow.launch, *library)
        for value, target in zip(block.results, targets, strict=True):
            source = strip_reshapes(value, self.uses)
            node = self.uses.find(source, *producers)
            if source is value or node is None or source in self.buffers or 0 in get_shape(source):
                continue
            if self.buffers[value] is target:
                self.buffers[source] = self.builder.add(host.view, [target], {"shape": get_shape(source)}).out
                self.placed.add(value)
                kept.add(source)
        return frozenset(kept)

    def is_consumed(self, value: Value) -> bool:
        """Whether a value is computed in this block into memory of its own, and used once."""
        node = self.uses.find(value, *point_rules, control_flow.launch)
        return node is not None and strip_reshapes(value, self.uses) is value and self.uses.count_uses(value) == 1

    def is_last(self, region: MemoryRegion, clusters: Sequence[FusionCluster]) -> bool:
        """Whether no cluster after the one of a region reads what the region overwrites."""
        roots = [c.root for c in clusters]
        later = clusters[roots.index(region.new) + 1 :] if region.new in roots else []
        read = {v for c in later for v in (*c.access_points, *(self.uses[c.root].args if not c.inlined else ()))}
        return all(strip_reshapes(v, self.uses) is not region.old for v in read)

    def find_region(self, value: Value) -> MemoryRegion | None:
        """The slice of a result that a value is computed in: the only one that has it, where nothing else does, and
        where all reads of what it overwrites have been before."""
        found = [region for region in self.regions if region.new is value]
        alone = len(found) == 1 and not self.uses.count_uses(value) and self.find_memory(value) not in self.buffers
        return found[0] if alone and found[0].last else None

    def lower_cluster(self, cluster: FusionCluster) -> None:
        """Add the kernel, launch or host op that computes a cluster's root."""
        if cluster.root in self.placed:
            return
        node = self.uses[cluster.root]
        with self.builder.at(node.loc):
            if node.op in host_ops.host_rules:
                host_ops.host_rules.of(node.op)(self, node)
            elif 0 in get_shape(cluster.root):
                self.allocate(cluster.root)
            elif not cluster.inlined:
                self.add_launch(node)
            elif (region := self.find_region(cluster.root)) is not None:
                self.add_kernel(cluster, region.target, region.start)
            else:
                self.add_kernel(cluster, self.allocate(cluster.root))

    def add_launch(self, node: Node) -> None:
        """Add a launch of a library kernel."""
        found = lowering_plan.find_library_launch(node, self.plan)
        assert found is not None, "a launch that was not possible was kept"
        operands = [self.view_buffer(v, shape) for v, shape in zip(node.args, found.shapes, strict=True)]
        self.allocate(node.out)
        operands.append(self.view_buffer(node.out, found.result))
        self.builder.add(host.launch, operands, {"kernel": self.name_function(found.function), "grid": found.grid})

    def name_function(self, function: Function) -> str:
        """The name of a tile function in the module, which is added once."""
        key = _make_key(function)
        if key not in self.names:
            taken, number, name = {self.name, *self.names.values()}, 0, function.name
            while name in taken:
                number += 1
                name = f"{function.name}_{number}"
            self.names[key] = name
            self.functions.append(replace(function, name=name))
            return name
        name = self.names[key]
        self.functions = [merge_scopes(f, function) if f.name == name else f for f in self.functions]
        return name

    def add_kernel(self, cluster: FusionCluster, target: Value, start: Sequence[Size] = ()) -> None:
        """One schedule.kernel, which writes the elements of the target from `start` on, if given."""
        order = order_dims(cluster)
        body = BodyBuilder(cluster, order, self.uses, lambda v: self.buffers[self.find_memory(v)].hint)
        for value in sorted(cluster.inlined, key=self.uses.order.__getitem__):
            for point in cluster.points(value):  # in order, so that no body runs deep
                body.compute_element(value, point)
        more = [self.allocate(value) for value in cluster.exports]
        places = [Value(ref.type, ref.hint or "out") for ref in (*more, target)]
        with body.builder.at(self.builder.location):
            for (value, point), place in zip(cluster.exports.items(), places, strict=False):
                body.export(value, point, place)
            body.store(cluster.root, places[-1], start)
        refs = [self.view_buffer(value, shape) for value, shape in body.slots]
        self.add_body(body, places, [*refs, *more, target], make_dims(cluster, order))

    def add_body(self, body: BodyBuilder, places: Sequence[Value], refs: list[Value], dims: KernelDims) -> None:
        """Add a finished body, whose last parameters are `places`."""
        block = body.block(*places)
        if self.plan.collapse:
            block, dims, views = collapse_dims(block, dims, splits=self.plan.parallel is not None)
            refs = [self.view_as(refs[number], shape) for number, shape in views]
        attrs = {"dims": dims, "schedule": choose_tile_sizes(block, dims, self.plan)}
        self.builder.add(schedule.kernel, refs, attrs, types=(), regions=(block,))

    def view_as(self, ref: Value, shape: tuple[Size, ...]) -> Value:
        """A buffer viewed as a shape."""
        if tuple(ref.type.shape) == shape:  # type: ignore[union-attr]
            return ref
        if (ref, shape) not in self.views:
            self.views[ref, shape] = self.builder.add(host.view, [ref], {"shape": shape}).out
        return self.views[ref, shape]

    def add_copy(self, source: Value, target: Value, start: Sequence[Size] = ()) -> None:
        """Copy a value to another buffer: to its elements from `start` on, if given."""
        held = self.view_buffer(source, get_shape(source))
        if held is target or 0 in get_shape(source):
            return
        cluster = FusionCluster.of(source)
        order = order_dims(cluster)
        body = BodyBuilder(cluster, order, self.uses, lambda v: held.hint)
        place = Value(target.type, target.hint)
        with body.builder.at(self.builder.location):
            body.store(source, place, start)
        self.add_body(body, [place], [held, target], make_dims(cluster, order))


def _make_key(function: Function) -> Hashable:
    """A key of what a tile function computes: equal ones are one function, wherever they are launched."""
    return structural_key(replace(function, name="", loc=Location()))


def make_ref(type: Type) -> RefType:
    """The type of the buffer of a tensor."""
    return RefType(tuple(type.shape), type.dtype, policy=type.policy)


def order_dims(cluster: FusionCluster) -> list[int]:
    """The order of the kernel's dims: for a product batch, rows, columns, then the summed dims."""
    every = list(range(len(cluster.extents)))
    if cluster.product is None:
        return every
    (point,) = cluster.points(cluster.product)
    listed = [d for e in point.indices for d in _order_by_stride(e)]
    return [*(d for d in every[: cluster.parallel] if d not in listed), *listed, *every[cluster.parallel :]]


def _order_by_stride(expr: IndexExpr) -> list[int]:
    strides = {d: c for a, c in expr.terms for d in a.dims}
    return sorted(strides, key=strides.__getitem__, reverse=True)


def make_dims(cluster: FusionCluster, order: list[int]) -> KernelDims:
    """The dims attribute: parallel ones are i0, i1, …, reduced ones r0, r1, …"""
    kinds = ["parallel" if d < cluster.parallel else "reduce" for d in order]
    names = [f"i{d}" if d < cluster.parallel else f"r{d - cluster.parallel}" for d in order]
    return tuple((name, cluster.extents[d], kind) for name, d, kind in zip(names, order, kinds, strict=True))


def _walk_tensor_ops(block: Block) -> Iterator[Node]:
    """The nodes of a block and of its regions, except the tile functions of launches."""
    for node in block.nodes:
        yield node
        if node.op is not control_flow.launch:
            for region in node.regions:
                yield from _walk_tensor_ops(region)


def is_result_slice(node: Node, function: Function, uses: UseDef) -> bool:
    """Whether an update of a slice is a result alone, of a parameter: memory, a part of which one kernel writes."""
    alone = node.out in function.results and uses.count_uses(node.out) == 1
    return alone and node.args[0] in function.params and 0 not in get_shape(node.args[1])


def check_schedulable(function: Function, launched: Collection[Op]) -> None:
    """Raise an error for a function that cannot be scheduled."""
    uses = UseDef(function)
    for node in _walk_tensor_ops(function.body):
        if node.op is scatter.update_slice and is_result_slice(node, function, uses):
            continue
        if node.op not in point_rules and node.op not in launched:
            raise UnsupportedOpError(
                f"{node.op.name} cannot be scheduled",
                location=node.loc,
                expected="ops on tensors; composites are expanded first",
                suggestion="run the program at the Graph level: target interp",
            )


def to_schedule(module: Module, plan: LoweringPlan | None = None) -> Module:
    """Lower a Graph module of primitive ops to a Schedule module; sizes may be symbolic.

    Raises:
        UnsupportedOpError: an op cannot be scheduled.
        UnknownSizeError: the lowering of an op needs the value of a symbolic size.
    """
    function, plan = module.main, plan or LoweringPlan()
    check_schedulable(function, lowering_plan.find_library_ops(plan) | frozenset(host_ops.host_rules))
    lowering = ScheduleLowering.of(function, plan)
    params = tuple(Value(make_ref(p.type), p.hint or f"x{i}") for i, p in enumerate(function.params))
    lowering.buffers.update(zip(function.params, params, strict=True))
    outputs = [Value(make_ref(v.type), _name_output(i, len(function.results))) for i, v in enumerate(function.results)]
    with lowering.builder.at(function.loc):
        lowering.lower_block(*lowering.take_regions(function.body, outputs))
    block = lowering.builder.block([*params, *outputs], ())
    names = find_size_names(function)
    kept = {"sizes": names, "constraints": function.attrs.get("constraints", ())} if names else {}
    main = Function(function.name, block, Attrs({"outputs": len(outputs), **kept}), function.loc)
    return Module("schedule", (main, *lowering.functions))


def _name_output(number: int, count: int) -> str:
    return "out" if count == 1 else f"out{number}"

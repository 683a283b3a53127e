"""Graph to Schedule: each value that is kept becomes a buffer, computed by one kernel (bufferisation)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from tessera.core.errors import ShapeError, UnsupportedOpError
from tessera.core.symbolic_dim import symbol_names
from tessera.core.types import RefType, Type
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.rules import Op
from tessera.lower import lowering_plan
from tessera.lower.affine import IndexExpr, KernelDims
from tessera.lower.graph_to_schedule import host_ops, kernel_body
from tessera.lower.graph_to_schedule.fusion import FusionCluster, form_clusters, strip_reshapes
from tessera.lower.graph_to_schedule.kernel_body import BodyBuilder, MemorySlot, point_rules
from tessera.lower.graph_to_schedule.tiling import choose_tile_sizes
from tessera.lower.indexing_maps import get_shape
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import host, schedule

assert kernel_body  # fills the table of bodies


@dataclass
class ScheduleLowering:
    """A Schedule module under construction: the buffer of each value, and the tile functions that it launches."""

    plan: LoweringPlan
    uses: UseDef
    order: tuple[Node, ...]
    builder: Builder = field(default_factory=Builder)
    buffers: dict[Value, Value] = field(default_factory=dict)
    views: dict[MemorySlot, Value] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)

    @staticmethod
    def of(block: Block, plan: LoweringPlan) -> ScheduleLowering:
        """The initial state of the lowering of a block."""
        return ScheduleLowering(plan, UseDef(block, nested=False), block.nodes)

    def lower_block(self, block: Block, targets: Sequence[Value]) -> None:
        """Lower a block whose parameters have buffers; each result goes into its target."""
        for value, target in zip(block.results, targets, strict=True):
            self.buffers.setdefault(value, target)
        launched = lowering_plan.find_library_ops(self.plan) | frozenset(host_ops.host_rules)
        for cluster in form_clusters(Function("block", block), launched):
            self.lower_cluster(cluster)
        for value, target in zip(block.results, targets, strict=True):
            self.add_copy(value, target)

    def view_buffer(self, value: Value, shape: tuple[int, ...]) -> Value:
        """The buffer of a value, viewed as a shape; a launch reads through reshapes."""
        if value not in self.buffers:
            value = strip_reshapes(value, self.uses)
        place = self.buffers[value]
        if tuple(place.type.shape) == shape:
            return place
        if (value, shape) not in self.views:
            self.views[value, shape] = self.builder.add(host.view, [place], {"shape": shape}).out
        return self.views[value, shape]

    def allocate(self, value: Value) -> Value:
        """The buffer of a value: an output, or a new allocation."""
        if value not in self.buffers:
            attrs = {"shape": get_shape(value), "dtype": value.type.policy or value.type.dtype, "offset": -1}
            self.buffers[value] = self.builder.add(host.alloc, [], attrs).out
        return self.buffers[value]

    def lower_cluster(self, cluster: FusionCluster) -> None:
        """Add the kernel, launch or host op that computes a cluster's root."""
        node = self.uses[cluster.root]
        with self.builder.at(node.loc):
            if node.op in host_ops.host_rules:
                host_ops.host_rules.of(node.op)(self, node)
            elif 0 in get_shape(cluster.root):
                self.allocate(cluster.root)
            elif not cluster.inlined:
                self.add_launch(node)
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
        same = [f for f in self.functions if f.body is function.body]
        if not same:
            taken = sum(f.name.startswith(function.name) for f in self.functions)
            same = [replace(function, name=f"{function.name}_{taken}" if taken else function.name)]
            self.functions += same
        return same[0].name

    def add_kernel(self, cluster: FusionCluster, target: Value) -> None:
        """One schedule.kernel."""
        order = order_dims(cluster)
        body = BodyBuilder(cluster, order, self.uses, lambda v: self.buffers[v].hint)
        for node in self.order:
            if node.results[0] in cluster.inlined:
                for point in cluster.points(node.results[0]):  # in order, so that no body runs deep
                    body.compute_element(node.results[0], point)
        place = Value(target.type, target.hint or "out")
        with body.builder.at(self.builder.location):
            body.store(cluster.root, place)
        refs = [self.view_buffer(value, shape) for value, shape in body.slots]
        self.add_body(body, place, [*refs, target], make_dims(cluster, order))

    def add_body(self, body: BodyBuilder, place: Value, refs: list[Value], dims: KernelDims) -> None:
        """Add a finished body."""
        block = body.block(place)
        attrs = {"dims": dims, "schedule": choose_tile_sizes(block, dims, self.plan)}
        self.builder.add(schedule.kernel, refs, attrs, types=(), regions=(block,))

    def add_copy(self, source: Value, target: Value) -> None:
        """Copy a value to another buffer."""
        if self.buffers[source] is target or 0 in get_shape(source):
            return
        cluster = FusionCluster.of(source)
        order = order_dims(cluster)
        body = BodyBuilder(cluster, order, self.uses, lambda v: self.buffers[v].hint)
        place = Value(target.type, target.hint)
        with body.builder.at(self.builder.location):
            body.store(source, place)
        self.add_body(body, place, [self.buffers[source], target], make_dims(cluster, order))


def make_ref(type: Type) -> RefType:
    """The type of the buffer of a tensor."""
    return RefType(tuple(int(s) for s in type.shape), type.dtype, policy=type.policy)


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


def check_schedulable(function: Function, launched: Collection[Op]) -> None:
    """Raise an error for a function that cannot be scheduled."""
    for node in function.body.walk():
        if node.op not in point_rules and node.op not in launched:
            raise UnsupportedOpError(
                f"{node.op.name} cannot be scheduled",
                location=node.loc,
                expected="ops on tensors; composites are expanded first",
                suggestion="run the program at the Graph level: target interp",
            )
    for value in (*function.params, *(v for n in function.body.walk() for v in n.results)):
        if symbol_names(value.type.shape):
            raise ShapeError(
                "a program of symbolic sizes cannot be scheduled",
                location=function.loc,
                received=str(value.type),
                suggestion="give the sizes: tessera.lower.passes.type_conversion.specialise_shapes(function, sizes)",
            )


def to_schedule(module: Module, plan: LoweringPlan | None = None) -> Module:
    """Lower a Graph module of known sizes and primitive ops to a Schedule module.

    Raises:
        UnsupportedOpError: an op cannot be scheduled.
        ShapeError: a size is symbolic.
    """
    function, plan = module.main, plan or LoweringPlan()
    check_schedulable(function, lowering_plan.find_library_ops(plan) | frozenset(host_ops.host_rules))
    lowering = ScheduleLowering.of(function.body, plan)
    params = tuple(Value(make_ref(p.type), p.hint or f"x{i}") for i, p in enumerate(function.params))
    lowering.buffers.update(zip(function.params, params, strict=True))
    outputs = [Value(make_ref(v.type), _name_output(i, len(function.results))) for i, v in enumerate(function.results)]
    with lowering.builder.at(function.loc):
        lowering.lower_block(function.body, outputs)
    block = lowering.builder.block([*params, *outputs], ())
    main = Function(function.name, block, Attrs({"outputs": len(outputs)}), function.loc)
    return Module("schedule", (main, *lowering.functions))


def _name_output(number: int, count: int) -> str:
    return "out" if count == 1 else f"out{number}"

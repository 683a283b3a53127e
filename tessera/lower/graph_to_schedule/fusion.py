"""Kernel fusion: which values of a graph are kept in memory, and which kernel computes each of the others.

A cluster is a kernel under construction: its root, its iteration dims, and the points at which it reads each value.
Nodes are visited from the last to the first, so that every consumer of a value has a kernel before the value does. A
value is inlined into its consumer's kernel where that is legal and cheap; otherwise it becomes a root: the result of
a kernel of its own, kept in memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from tessera.core.symbolic_dim import Size, estimate_size, order_of_size, symbol_names
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import UseDef, has_effect
from tessera.ir.rules import Op, Rules
from tessera.lower import lowering_plan
from tessera.lower.indexing_maps import (
    POINTWISE,
    REDUCTIONS,
    AccessPoint,
    IndexDigit,
    IndexExpr,
    delinearise,
    find_operand_points,
    find_reduced_axes,
    get_shape,
    keeps_long_axes,
    linearise,
    make_index,
)
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, contractions, shape
from tessera.ops.tensor.basic import fusion_barrier, recompute

# Clusters.


@dataclass
class FusionCluster:
    """A kernel under construction, which grows from its root towards the inputs.

    `extents` are the iteration dims: the root's axes, then those that reductions add. `wants` holds
    every value that is read and the points it is read at, in order. `row` is the dim that the reductions
    share; `product` says that there is a dot, of which there is at most one and never beside a row.
    """

    root: Value
    extents: list[Size]
    parallel: int
    access_points: dict[Value, dict[AccessPoint, None]] = field(default_factory=dict)
    inlined: set[Value] = field(default_factory=set)
    reduced: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    row: int | None = None
    product: Value | None = None
    exports: dict[Value, AccessPoint] = field(default_factory=dict)  # values of each row that it stores besides

    @staticmethod
    def of(root: Value) -> FusionCluster:
        """The cluster that holds nothing but its root."""
        sizes = list(get_shape(root))
        start = FusionCluster(root, sizes, len(sizes))
        start.access_points[root] = {AccessPoint(tuple(start.index(d) for d in range(len(sizes)))): None}
        return start

    def index(self, dim: int) -> IndexExpr:
        """The index of one of its dims."""
        return make_index(dim, self.extents[dim])

    def points(self, value: Value) -> list[AccessPoint]:
        """Where a value is read."""
        return list(self.access_points.get(value, ()))

    def inline_node(self, node: Node) -> None:
        """Inline a node: its operands are read here, too."""
        self.inlined.add(node.out)
        for point in self.points(node.out):
            for operand, at in zip(node.args, self.operands(node, point), strict=True):
                self.access_points.setdefault(operand, {})[at] = None

    def operands(self, node: Node, point: AccessPoint) -> list[AccessPoint]:
        """The points at which a node computed here at `point` reads its operands."""
        return find_operand_points(node, point, [self.index(d) for d in self.reduced.get(node.out, ())])

    def find_unused_dims(self, point: AccessPoint) -> list[int]:
        """The parallel dims of more than one index that a point does not depend on."""
        return [d for d in range(self.parallel) if self.extents[d] != 1 and d not in point.dims]

    def count_recomputations(self, point: AccessPoint) -> int:
        """How often a value at a point is recomputed where programs share nothing."""
        return math.prod(estimate_size(self.extents[d]) for d in self.find_unused_dims(point) if d != self.row)

    @property
    def sums_rows(self) -> bool:
        """Whether its rows are reduced to numbers: no program stores a row."""
        return self.row is not None and self.row >= self.parallel and self.product is None

    def find_free_dim(self, points: Collection[AccessPoint], extent: Size) -> int | None:
        """A dim that a reduction at some points can share with others that have run along it before."""
        used = frozenset().union(*(p.dims for p in points))
        dims = range(self.parallel, len(self.extents))
        return next((d for d in dims if d not in used and self.extents[d] == extent), None)

    def add_reduction_dims(self, node: Node) -> None:
        """New dims for the axes that a node reduces."""
        first = len(self.extents)
        sizes = [get_shape(node.args[0])[axis] for axis in find_reduced_axes(node)]
        self.extents += sizes
        self.reduced[node.out] = tuple(range(first, first + len(sizes)))


EXPENSIVE = tuple(o for o in POINTWISE if o.is_transcendental)
CHEAP = tuple(o for o in POINTWISE if o not in (*EXPENSIVE, basic.cast))
VIEWS = (shape.reshape, shape.permute, shape.slice_, basic.broadcast_to, recompute, fusion_barrier)
INLINED = frozenset((*POINTWISE, *VIEWS))
CONSTANTS = (basic.full, basic.dim_value, shape.iota)
# The most cheap ops that each consumer recomputes rather than reading their result from memory.
MAX_RECOMPUTED_OPS = 2
# The same for a kernel that reduces columns and reads results of reductions of rows.
MAX_COLUMN_OPS = 8
# A kernel does not compute a value of more ops, which depends on reductions, so often.
MIN_RECOMPUTATIONS = 256
# A reduction to at most this part of a value's elements is memory where the value is recomputed.
MIN_REDUCED = 16
# The most points at which kernels compute one value; it bounds recomputation in chains of stencils.
MAX_ACCESS_POINTS = 4
MAX_PARTS = 32  # of concatenations that one kernel chooses between, and holds in registers
MAX_PADDED_POINTS = 32  # of padded memory
# The most nodes of a kernel: passes and generators take longer than in proportion, and walk chains recursively.
MAX_KERNEL_NODES = 1024
# The most values of its rows that a kernel stores besides its result.
MAX_EXPORTS = 4
# Rows so many times as long as those that a kernel normalises itself it adds up by parts.
MAX_PART_ROWS = 4
# The most rows of a left operand for which a dot reads windows with gaps in place.
MAX_GATHERED_ROWS = 128


@dataclass
class KernelFusion:
    """The fusion decision in progress: clusters so far, values that must be roots, and operands of dots.

    `memory` are the values that become roots in any case. `gathers` says that threads read each element by itself, so
    that indices with divisions cost no more than others. `own_row` as in `LoweringPlan`.
    """

    function: Function
    launched: frozenset[Op]
    uses: UseDef
    clusters: list[FusionCluster] = field(default_factory=list)
    forced_roots: set[Value] = field(default_factory=set)
    viewed: set[Value] = field(default_factory=set)  # reshapes that kernels read as views of memory
    operands: set[Value] = field(default_factory=set)
    shares_rows: bool = False  # whether kernels of rows store what other kernels read of them, too
    memory: set[Value] = field(default_factory=set)
    sources: dict[Value, frozenset[Node]] = field(default_factory=dict)  # see `find_sources`
    gathers: bool = False
    least_results: int = 1  # of a kernel whose rows are reduced part by part
    own_row: int = 0  # elements of a row that each program of a product of the row computes; 0: they are in memory

    def run(self) -> list[FusionCluster]:
        """The clusters in execution order; a launched node is a cluster with nothing inlined."""
        nodes = self.function.body.nodes
        self.forced_roots |= {*self.function.results, *(n.args[0] for n in nodes if n.op is fusion_barrier)}
        self.memory = {self.base(v) for n in nodes if n.op in (contractions.dot, *self.launched) for v in n.args}
        for node in nodes:
            self.sources |= dict.fromkeys(node.results, self.find_sources(node))
        for node in reversed(nodes):
            self.visit(node)
        return self.clusters[::-1]

    def visit(self, node: Node) -> None:
        """Assign one node to clusters."""
        value, rest = node.results[0], frozenset(node.results[1:])
        wanting = [c for c in self.clusters if value in c.access_points or not rest.isdisjoint(c.access_points)]
        if not wanting and self.forced_roots.isdisjoint(node.results) and not has_effect(node):
            return
        if value in self.viewed and value not in self.forced_roots:
            return
        if node.op in self.launched:
            # A host loop reads the buffers of its operands; a kernel may read a view.
            views = node.op in lowering_plan.library_rules or node.op is control_flow.launch
            self.forced_roots |= {strip_reshapes(v, self.uses) if views else v for v in node.args}
            self.clusters.append(FusionCluster.of(value))
            return
        if value in self.forced_roots or not self.fits(node, wanting):
            wanting = [self.find_exporter(node, wanting) or self.add_root(node)]
        for cluster in wanting:
            self.place(node, cluster)

    def add_root(self, node: Node) -> FusionCluster:
        """A kernel of its own for a node."""
        made = FusionCluster.of(node.results[0])
        self.clusters.append(made)
        self.operands.discard(made.root)
        if node.op in _ROOT_RULES:
            _ROOT_RULES.of(node.op)(self, node, made, made.points(made.root)[0])
        return made

    def find_exporter(self, node: Node, wanting: list[FusionCluster]) -> FusionCluster | None:
        """The first kernel, in execution order, of those that read a value of its rows, if it is to compute it.

        It then stores the value, for the others or as a result: the row is read once.
        """
        read = len(wanting) + (node.out in self.function.results)
        if not self.shares_rows or read < 2 or not self.may_export(node.out):
            return None
        for first in reversed(wanting):
            start = next(i for i, c in enumerate(self.clusters) if c is first)
            end = 1 + max(i for i, c in enumerate(self.clusters) if any(c is w for w in wanting))
            earlier = self.clusters[start + 1 : end]  # in execution order, which they are to come after
            made = {v for c in earlier for v in (c.root, *c.exports)}
            free = made.isdisjoint(first.access_points) and all(c.inlined for c in earlier)  # or they are launches
            if free and self.is_exported(node, first):
                self.clusters[start:end] = [*earlier, first]
                first.exports[node.out] = first.points(node.out)[0]
                return first
            if first.row is not None or first.product is not None:
                return None
        return None

    def is_exported(self, node: Node, cluster: FusionCluster) -> bool:
        """Whether a kernel computes and stores a value of its rows."""
        points = cluster.points(node.out)
        if node.op not in (*POINTWISE, *REDUCTIONS) or len(points) != 1 or len(cluster.exports) >= MAX_EXPORTS:
            return False
        return self.is_of_rows(node, cluster, points[0]) and self.fits(node, [cluster])

    def may_export(self, value: Value) -> bool:
        """Whether a value may be memory that a kernel writes besides its result: no product or launch reads it."""
        held = value in self.operands or (value in self.forced_roots and value not in self.function.results)
        return not held and not any(user.op in self.launched for user in self.uses.users(value))

    def is_of_rows(self, node: Node, cluster: FusionCluster, point: AccessPoint) -> bool:
        """Whether a value at a point is a number for each row that a kernel reduces, or for each element of the rows.

        A kernel that reads sums of what it computes from rows is about to reduce these.
        """
        if cluster.product is not None or point.guards or not point.covers(get_shape(node.out)):
            return False
        if self.depends_on(node.out, contractions.dot):
            return False
        missing = cluster.find_unused_dims(point)
        rest = [d for d in missing if d != cluster.row]
        if cluster.row is not None:
            return not rest
        if len(missing) != 1:
            return False
        found = self.sources[node.out]  # reductions alone
        extents = [[get_shape(n.args[0])[a] for a in find_reduced_axes(n)] for n in found]
        whole = all(get_shape(n.out) == get_shape(node.out) for n in found)
        return bool(found) and whole and all(e == [cluster.extents[missing[0]]] for e in extents)

    def place(self, node: Node, cluster: FusionCluster) -> None:
        """Inline a node in a cluster, and note what that requires of its operands."""
        cluster.inline_node(node)
        if node.op is contractions.dot or (node.out in self.operands and self.is_view(node)):
            self.operands |= set(node.args)
        if node.op is shape.reshape and not self.folds(node, cluster):
            # A reshape whose indices do not split reads memory: a reshape of memory is free.
            self.viewed.add(node.args[0])
            self.forced_roots.add(strip_reshapes(node.args[0], self.uses))

    def folds(self, node: Node, cluster: FusionCluster) -> bool:
        """Whether what a kernel reads through an inlined reshape has an index without divisions of sums."""
        if self.gathers and keeps_long_axes(node):
            return True
        read = [i for p in cluster.points(node.args[0]) for i in p.indices]
        if not self.gathers:
            before, after = get_shape(node.args[0]), get_shape(node.out)
            torn = [p for p in cluster.points(node.out) if p.is_torn(after)]
            read += [i for p in torn for i in delinearise(linearise(p.indices, after), before)]
        return all(i.is_clean for i in read)

    def fits(self, node: Node, wanting: list[FusionCluster]) -> bool:
        """Whether a node may be inlined in all clusters that read it."""
        if node.op in POINTWISE and any(len(c.inlined) >= MAX_KERNEL_NODES for c in wanting):
            return False
        if node.out in self.operands and not (self.is_view(node) and self.is_read_in_place(node, wanting)):
            return False
        if node.op in POINTWISE and not is_widening(node):
            if self.is_product_epilogue(node.out, wanting) or self.is_reduction_epilogue(node.out, wanting):
                return False
            if any(self.is_computed_anew(node.out, c) for c in wanting):
                return False
        return bool(_FUSION_RULES.of(node.op)(self, node, wanting))

    def is_view(self, node: Node) -> bool:
        """Whether a dot can read through this node: it computes nothing, and reads memory."""
        if node.op is basic.cast:
            return is_widening(node) or not self.is_computed(node.args[0])
        return node.op in (*VIEWS, *CONSTANTS, shape.strided_view)

    def is_read_in_place(self, node: Node, wanting: list[FusionCluster]) -> bool:
        """Whether dots gain from reading a view rather than a copy: windows with gaps are gathered for every tile."""
        if node.op is not shape.strided_view or _is_contiguous(node):
            return True
        products = [self.uses[c.product] for c in wanting if c.product is not None]
        return all(estimate_size(get_shape(n.args[0])[-2]) <= MAX_GATHERED_ROWS for n in products)

    def base(self, value: Value) -> Value:
        """The value below a chain of views."""
        while value in self.uses and self.uses[value].op in VIEWS:
            value = self.uses[value].args[0]
        return value

    def is_computed(self, value: Value) -> bool:
        """Whether a value is computed, rather than a view of an input."""
        return self.base(value) in self.uses

    def is_cheap(self, value: Value) -> bool:
        """Whether a value takes only a few cheap ops to compute from memory: the inputs, and what is widened.

        What is far smaller than the value counts as memory, too; beside a widened operand all results of reductions do:
        the narrow operand is read instead of the wide value.
        """
        node = self.uses.get(value)
        widens = node is not None and any(v in self.uses and is_widening(self.uses[v]) for v in node.args)
        few = _estimate_count(value) / MIN_REDUCED
        return self._left(value, MAX_RECOMPUTED_OPS, math.inf if widens else few, few) >= 0

    def _left(self, value: Value, budget: int, most: float, few: float) -> int:
        """The rest of a budget after the ops that compute a value from memory; negative where it does not suffice.

        A result of a reduction of at most `most` elements is memory, and so is any value of at most `few`, and one that
        so many nodes use that kernels do not compute it at all their points.
        """
        node = self.uses.get(value)
        if node is None or node.op in (*CONSTANTS, *self.launched) or is_widening(node):
            return budget
        if node.op in REDUCTIONS and _estimate_count(value) <= most:
            return budget
        if _estimate_count(value) <= max(few, 1):
            return budget
        if budget < MAX_RECOMPUTED_OPS and len(self.uses.users(value)) >= MAX_ACCESS_POINTS:
            return budget
        if node.op not in (*CHEAP, *VIEWS, basic.cast):
            return -1
        budget -= 0 if node.op in VIEWS else 1
        for each in dict.fromkeys(node.args):
            budget = self._left(each, budget, most, few) if budget >= 0 else budget
        return budget

    def find_sources(self, node: Node) -> frozenset[Node]:
        """The reductions and dots from which elementwise ops and views alone lead to a node; itself, if it is one."""
        if node.op not in INLINED:
            return frozenset((node,) if node.op in (*REDUCTIONS, contractions.dot) else ())
        return frozenset().union(*(self.sources.get(v, ()) for v in node.args if v not in self.memory))

    def walk_producers(self, value: Value, kept: Collection[Value], narrow: bool = False) -> Iterator[Node]:
        """As `find_sources`, with the nodes between, up to the values `kept`, and if `narrow` up to widening casts."""
        seen, work = set[Value](), [value]
        while work:
            node = self.uses.get(value := work.pop())
            if node is None or value in seen:
                continue
            yield node
            seen.add(value)
            if node.op in INLINED and not (narrow and is_widening(node)):
                work += [v for v in node.args if v not in self.memory and v not in kept]

    def depends_on(self, value: Value, *ops: Op) -> bool:
        """Whether a value depends on a reduction or dot of these ops through elementwise ops and views alone."""
        return any(n.op in ops for n in self.sources.get(value, ()))

    def is_product_epilogue(self, value: Value, wanting: list[FusionCluster]) -> bool:
        """Whether a value belongs to the epilogue of a dot rather than to a kernel that reduces rows.

        The dot cannot be inlined there, and its epilogue is free. It ends where a value is widened (memory keeps the
        narrow one), and at a value that kernels read already.
        """
        if value in self.forced_roots or all(c.row is None for c in wanting):
            return False
        if not self.depends_on(value, contractions.dot) or self.depends_on(value, *REDUCTIONS):
            return False
        read = {v for c in self.clusters for v in c.access_points}
        return any(n.op is contractions.dot for n in self.walk_producers(value, read, narrow=True))

    def is_reduction_epilogue(self, value: Value, wanting: list[FusionCluster]) -> bool:
        """Whether a value depends on reductions along one axis, and a kernel that reads it reduces along another.

        Those reductions need kernels of their own, which compute the value in their epilogue. Where an operand is
        widened, the value is inlined, and memory keeps the narrow operand.
        """
        if any(v in self.uses and is_widening(self.uses[v]) for v in self.uses[value].args):
            return False
        found = [n for n in self.sources[value] if n.op in REDUCTIONS and _have_same_rank(n.args[0], value)]
        if all(c.sums_rows for c in wanting):
            found = [n for n in found if not self.reduces_own_row(n)]
        axes = {axis for n in found for axis in find_reduced_axes(n)}
        rows = {a for c in wanting if c.row is not None for p in c.points(value) for a in p.axes_along(c.row)}
        if not axes or not rows or not rows.isdisjoint(axes):
            return False
        return not (self.is_cheap_beside_reductions(value) and self.are_kept(found, wanting))

    def is_computed_anew(self, value: Value, cluster: FusionCluster) -> bool:
        """Whether a kernel that reduces rows would compute a value that depends on reductions for hundreds of results.

        An example is a normalised row, or the activation of a product, that a product of a vector with a matrix reads.
        """
        count = max((cluster.count_recomputations(p) for p in cluster.points(value)), default=1)
        if cluster.row is None or count < MIN_RECOMPUTATIONS or self.is_cheap(value):
            return False
        if cluster.sums_rows and self.is_of_own_row(value, cluster):
            return False
        return self.depends_on(value, *REDUCTIONS)

    def is_of_own_row(self, value: Value, cluster: FusionCluster) -> bool:
        """Whether a value is one of a short row that a kernel reads, or that reductions of such rows make: a norm.

        Each program of a product of the row then computes it, instead of a kernel before the product. What depends on
        the results of another product alone is computed once, in the epilogue of that.
        """
        if not self.own_row or symbol_names(get_shape(value)) or _estimate_count(value) > self.own_row:
            return False
        found = [n for n in self.walk_producers(value, cluster.access_points) if n.op in REDUCTIONS]
        return not found or any(map(self.reduces_own_row, found))

    def reduces_own_row(self, node: Node, most: int = 1) -> bool:
        """Whether a node reduces a row that is short enough for each program of a product to reduce; or `most` such."""
        if node.op not in REDUCTIONS or not self.own_row or symbol_names(get_shape(node.args[0])):
            return False
        return _estimate_count(node.args[0]) <= most * self.own_row

    def is_cheap_beside_reductions(self, value: Value) -> bool:
        """Whether a value takes a few cheap ops to compute from memory and from results of reductions."""
        return self._left(value, MAX_COLUMN_OPS, math.inf, _estimate_count(value) / MIN_REDUCED) >= 0

    def are_kept(self, reductions: Sequence[Node], wanting: list[FusionCluster]) -> bool:
        """Whether kernels beside `wanting` read the results of reductions, which are then in memory in any case."""
        others = {v for c in self.clusters if not any(c is w for w in wanting) for v in c.access_points}
        return {n for v in others - self.forced_roots for n in self.sources.get(v, ())}.issuperset(reductions)


def _is_contiguous(node: Node) -> bool:
    """Whether the last axis of a strided view is that of its source, at stride 1."""
    along = node.attrs["strides"][-1]
    return bool(along[-1] == 1 and all(row[-1] == 0 for row in node.attrs["strides"][:-1]))


def _estimate_count(value: Value) -> int:
    return math.prod(estimate_size(n) for n in get_shape(value))


def _have_same_rank(x: Value, y: Value) -> bool:
    return x.type.rank == y.type.rank  # type: ignore[union-attr]


def strip_reshapes(value: Value, uses: UseDef) -> Value:
    """The value below a chain of reshapes, which has the same memory."""
    while value in uses and uses[value].op is shape.reshape:
        value = uses[value].args[0]
    return value


def is_widening(node: Node) -> bool:
    """Whether a node is a cast to a wider type: it costs nothing where it is read, and memory keeps the narrow one."""
    return node.op is basic.cast and node.args[0].type.dtype.bits < node.out.type.dtype.bits  # type: ignore[union-attr]


# rule(fusion, node, clusters): whether the clusters may inline the node; it may add dims to a cluster.
_FUSION_RULES = Rules("fusion")
# rule(fusion, node, cluster, point) prepares a cluster whose root is the node.
_ROOT_RULES = Rules("root")


def form_clusters(
    function: Function,
    launched: frozenset[Op] = frozenset(),
    kept: frozenset[Value] = frozenset(),
    plan: lowering_plan.LoweringPlan | None = None,
) -> list[FusionCluster]:
    """The kernels that compute a function, in order; the values `kept` are in memory in any case."""
    plan = plan or lowering_plan.LoweringPlan()
    fusion = KernelFusion(
        function, launched, UseDef(function, nested=False), forced_roots=set(kept), shares_rows=plan.shares_rows,
        gathers=plan.parallel is not None, own_row=plan.own_row, least_results=plan.programs,
    )  # fmt: skip
    return fusion.run()


@_FUSION_RULES(*CONSTANTS, *VIEWS)
def _(fusion, node, wanting):
    return True


@_FUSION_RULES(basic.cast)
def _(fusion, node, wanting):
    # Memory should hold the narrow type.
    source = node.args[0].type.dtype
    if source.bits > node.out.type.dtype.bits and any(
        _has_other_product(fusion, node, c) or len(c.points(node.out)) > MAX_ACCESS_POINTS for c in wanting
    ):
        return False
    return len(wanting) == 1 or not fusion.is_computed(node.args[0]) or source.bits <= node.out.type.dtype.bits


def _has_other_product(fusion: KernelFusion, node: Node, cluster: FusionCluster) -> bool:
    """Whether a node belongs to the epilogue of a product, and the cluster to that of another one."""
    own = {n for n in fusion.sources[node.out] if n.op is contractions.dot}
    read = {fusion.uses[v] for v in cluster.access_points if v in fusion.uses and v not in fusion.forced_roots}
    others = {n for n in read if n.op is contractions.dot} - own
    return bool(own) and node.out not in fusion.operands and (cluster.product is not None or bool(others))


@_FUSION_RULES(*CHEAP, shape.pad, shape.concatenate, shape.gather, shape.strided_view)
def _(fusion, node, wanting):
    # What is padded is read under guards; it is memory, if it is computed.
    pointwise = all(c.row is None for c in wanting) and fusion.is_cheap(node.args[0])
    if node.op is shape.pad and (len(wanting) == 1 or pointwise):
        return all(len(c.points(node.out)) <= MAX_PADDED_POINTS for c in wanting)
    if sum(len(c.points(node.out)) for c in wanting) > MAX_ACCESS_POINTS:
        return False
    if node.op is shape.concatenate and any(_count_parts(fusion, c) + len(node.args) > MAX_PARTS for c in wanting):
        return False
    return len(wanting) == 1 or fusion.is_cheap(node.out)


def _count_parts(fusion: KernelFusion, cluster: FusionCluster) -> int:
    """The parts of the concatenations of a kernel."""
    nodes = [fusion.uses[v] for v in cluster.inlined]
    return sum(len(n.args) for n in nodes if n.op is shape.concatenate)


@_FUSION_RULES(*EXPENSIVE)
def _(fusion, node, wanting):
    if len(wanting) > 1 or len(wanting[0].points(node.out)) > 1:
        return False
    (point,) = wanting[0].points(node.out)
    return wanting[0].count_recomputations(point) == 1 or fusion.depends_on(node.out, *REDUCTIONS)


def _find_single_point(node: Node, wanting: list[FusionCluster]) -> AccessPoint | None:
    """The only point at which the only kernel wants a node, if it is one without guards."""
    found = [p for c in wanting for p in c.points(node.out)]
    return found[0] if len(found) == 1 and not found[0].guards and found[0].is_clean else None


@_FUSION_RULES(*REDUCTIONS)
def _(fusion, node, wanting):
    axes = find_reduced_axes(node)
    if len(axes) != 1 or len(wanting) != 1:
        return False
    (cluster,), points = wanting, wanting[0].points(node.out)
    if any(p.guards or not p.is_clean for p in points):
        return False
    extent = get_shape(node.args[0])[axes[0]]
    if len(points) == 1 and _assign_reduction_dim(fusion, node, cluster, points[0], extent):
        return True
    return fusion.own_row > 0 and _share_reduction_dim(fusion, node, cluster, points, extent)


def _share_reduction_dim(
    fusion: KernelFusion, node: Node, cluster: FusionCluster, points: Sequence[AccessPoint], extent: Size
) -> bool:
    """Whether a reduction runs in a kernel that reduces rows to numbers; it is then noted.

    It runs along a dim that reductions before it have run along, or one of its own. Its results are computed once,
    such as those of both halves of a product's columns; or they are of the kernel's own row, or of parts of it: a row
    whose elements are sums costs several times its own reads, and is computed once.
    """
    if cluster.product is not None or symbol_names((*cluster.extents, extent)):
        return False
    own = cluster.sums_rows and all(map(cluster.find_unused_dims, points)) and _is_of_row(fusion, node, cluster, points)
    if not (own or _is_computed_once(fusion, node, cluster, points, extent)):
        return False
    if _prefers_product(fusion, node, cluster) or not (cluster.row is None or cluster.sums_rows):
        return False
    dim = cluster.find_free_dim(points, extent)
    if dim is None:
        cluster.add_reduction_dims(node)
        (dim,) = cluster.reduced[node.out]
    cluster.reduced[node.out] = (dim,)
    cluster.row = dim if cluster.row is None else cluster.row
    return True


def _is_of_row(fusion: KernelFusion, node: Node, cluster: FusionCluster, points: Sequence[AccessPoint]) -> bool:
    """Whether a reduction gives a number for a kernel's own row, or for each part of it."""
    if any(d >= cluster.parallel for p in points for d in p.dims):
        return fusion.uses.find(node.args[0], *VIEWS) is not None and fusion.reduces_own_row(node, MAX_PART_ROWS)
    return fusion.reduces_own_row(node)


def _is_computed_once(
    fusion: KernelFusion, node: Node, cluster: FusionCluster, points: Sequence[AccessPoint], extent: Size
) -> bool:
    """Whether a kernel needs each result of a reduction once: one of each of its results, or of short parts of rows."""
    results = math.prod(int(n) for n in cluster.extents[: cluster.parallel])
    held = math.prod(int(cluster.extents[d]) for d in {d for p in points for d in p.dims if d >= cluster.parallel})
    if held > 1 and results < fusion.least_results:
        return False
    if (held > 1 or cluster.row is not None) and held * int(extent) > fusion.own_row:
        return False
    if any(cluster.find_unused_dims(p) for p in points) or _is_of_parts(fusion, node):
        return False
    return len(points) * results * held <= _estimate_count(node.out)


def _is_of_parts(fusion: KernelFusion, node: Node) -> bool:
    """Whether the results of a reduction are reduced in the same way: it was split, so that programs share the work."""
    work, seen = [node.out], set[Value]()
    while work:
        value = work.pop()
        users = [] if value in seen else fusion.uses.users(value)
        seen.add(value)
        if any(user.op is node.op for user in users):
            return True
        work += [user.out for user in users if user.op in (*VIEWS, basic.cast)]
    return False


def _assign_reduction_dim(
    fusion: KernelFusion, node: Node, cluster: FusionCluster, point: AccessPoint, extent: int
) -> bool:
    """Whether a reduction may run along a dim that the kernel has, or a new one; it is then noted."""
    if cluster.product is not None or _prefers_product(fusion, node, cluster):
        return False
    unused = cluster.find_unused_dims(point)
    if cluster.row is not None:
        rest = [d for d in unused if d != cluster.row]
        if rest or cluster.extents[cluster.row] != extent or cluster.row in point.dims:
            return False
        cluster.reduced[node.out] = (cluster.row,)
        return True
    if not unused:
        cluster.add_reduction_dims(node)
        (cluster.row,) = cluster.reduced[node.out]
        return True
    if len(unused) > 1 or cluster.extents[unused[0]] != extent:
        return False
    cluster.row = unused[0]
    cluster.reduced[node.out] = (cluster.row,)
    return True


def _prefers_product(fusion: KernelFusion, node: Node, cluster: FusionCluster) -> bool:
    """Whether the cluster reads a dot that this reduction does not depend on: the dot is inlined instead."""
    wanted = [fusion.uses.find(v, contractions.dot) for v in cluster.access_points if v not in fusion.forced_roots]
    dots = {n for n in wanted if n is not None}
    return bool(dots) and not dots <= fusion.sources.get(node.args[0], frozenset())


@_ROOT_RULES(*REDUCTIONS)
def _(fusion, node, cluster, point):
    cluster.add_reduction_dims(node)
    if len(cluster.reduced[node.out]) == 1:
        (cluster.row,) = cluster.reduced[node.out]


@_FUSION_RULES(contractions.dot)
def _(fusion, node, wanting):
    point = _find_single_point(node, wanting)
    cluster = wanting[0]
    if point is None or not all(_covers_axes(e, cluster.extents) for e in point.indices):
        return False
    if cluster.row is not None or cluster.product is not None or cluster.find_unused_dims(point):
        return False
    _ROOT_RULES.of(contractions.dot)(fusion, node, cluster, point)
    return True


def _covers_axes(expr: IndexExpr, extents: Sequence[Size]) -> bool:
    """Whether an index covers the start of an axis: whole dims without an offset, and without gaps between them."""
    if expr.constant or not all(isinstance(a, IndexDigit) and a.divisor == 1 and not a.modulus for a, _ in expr.terms):
        return False
    reach: Size = 1
    for atom, stride in sorted(expr.terms, key=lambda term: order_of_size(term[1])):
        if stride != reach:
            return False
        reach = stride * extents[atom.dim]  # type: ignore[union-attr]
    return True


@_ROOT_RULES(contractions.dot)
def _(fusion, node, cluster, point):
    cluster.add_reduction_dims(node)
    cluster.product = node.out

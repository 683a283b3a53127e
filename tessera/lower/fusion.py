"""Fusion: which values of a graph are kept in memory, and which kernel computes each of the others.

Nodes are visited from the last to the first, so that every consumer of a value has found its kernel
before the value does. A value goes into the kernel that wants it where that is legal and costs little;
otherwise it becomes a *root*: the result of a kernel of its own, kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tessera.ir.core import Function, Node, Value
from tessera.lower import launches
from tessera.lower.cluster import Cluster
from tessera.lower.points import POINTWISE, REDUCTIONS, Point, reduced_axes, shape_of
from tessera.op import Op, Rules
from tessera.ops import basic, elementwise, linalg, shape
from tessera.ops.recompute import recompute

_e = elementwise
EXPENSIVE = (_e.exp, _e.exp2, _e.log, _e.log2, _e.tanh, _e.erf, _e.sin, _e.cos, _e.pow)
CHEAP = tuple(o for o in POINTWISE if o not in (*EXPENSIVE, basic.cast))
VIEWS = (shape.reshape, shape.permute, shape.slice_, basic.broadcast_to, recompute)
CONSTANTS = (basic.full, shape.iota)
# How many cheap ops are computed again in each kernel that wants them rather than kept in memory.
RECOMPUTED = 2
# At how many places kernels compute one value, so that neighbours of neighbours do not multiply.
MOST_POINTS = 4


@dataclass
class Fusion:
    """The decision under way: clusters so far, values that must be roots, and operands of dots.

    `memory` are the values that are sure to become roots, known before their turn comes.
    """

    function: Function
    launched: frozenset[Op]
    producers: dict[Value, Node] = field(default_factory=dict)
    clusters: list[Cluster] = field(default_factory=list)
    forced: set[Value] = field(default_factory=set)
    operands: set[Value] = field(default_factory=set)
    memory: set[Value] = field(default_factory=set)

    def run(self) -> list[Cluster]:
        """The clusters in the order in which they run; launched nodes stand among them with nothing inlined."""
        self.producers = {v: n for n in self.function.body.nodes for v in n.results}
        self.forced |= set(self.function.results)
        keeping = [n for n in self.function.body.nodes if n.op in (linalg.dot, *self.launched)]
        self.memory = {self.base(v) for n in keeping for v in n.args}
        for node in reversed(self.function.body.nodes):
            self.visit(node)
        return self.clusters[::-1]

    def visit(self, node: Node) -> None:
        """Find the place of one node."""
        value = node.results[0]
        wanting = [c for c in self.clusters if any(v in c.wants for v in node.results)]
        if not wanting and self.forced.isdisjoint(node.results):
            return
        if node.op in self.launched:
            # A loop wants its own values in memory; a launch, only their elements.
            self.forced |= {beneath(v, self.producers) if node.op in launches.rules else v for v in node.args}
            self.clusters.append(Cluster.of(value))
            return
        if value in self.forced or not self.fits(node, wanting):
            wanting = [Cluster.of(value)]
            self.clusters += wanting
            self.operands.discard(value)
            if node.op in _PREPARE:
                _PREPARE.of(node.op)(self, node, wanting[0], wanting[0].points(value)[0])
        for cluster in wanting:
            self.place(node, cluster)

    def place(self, node: Node, cluster: Cluster) -> None:
        """Compute a node in a cluster, and pass on what its operands must be."""
        cluster.take(node)
        if node.op is linalg.dot or (node.out in self.operands and node.op in (*VIEWS, basic.cast)):
            self.operands |= set(node.args)
        if node.op is shape.reshape and not all(p.is_clean for p in cluster.points(node.args[0])):
            # Indices that do not come apart are not chased further: a reshape of memory is free.
            self.forced.add(node.args[0])

    def fits(self, node: Node, wanting: list[Cluster]) -> bool:
        """Whether a node may be computed in all clusters that want it."""
        if node.out in self.operands and not self.is_view(node):
            return False
        if node.op in POINTWISE and not is_widening(node):
            if self.ends_product(node.out, wanting) or self.ends_rows(node.out, wanting):
                return False
        return bool(_FITS.of(node.op)(self, node, wanting))

    def is_view(self, node: Node) -> bool:
        """Whether a dot can read through this node: nothing is computed, and memory lies below."""
        if node.op is basic.cast:
            return is_widening(node) or not self.is_computed(node.args[0])
        return node.op in (*VIEWS, *CONSTANTS)

    def base(self, value: Value) -> Value:
        """The value that a chain of views moves the elements of."""
        while value in self.producers and self.producers[value].op in VIEWS:
            value = self.producers[value].args[0]
        return value

    def is_computed(self, value: Value) -> bool:
        """Whether there is more than moved elements between a value and the inputs."""
        return self.base(value) in self.producers

    def is_cheap(self, value: Value) -> bool:
        """Whether few cheap ops lie between a value and the inputs."""
        return self._left(value, RECOMPUTED) >= 0

    def _left(self, value: Value, budget: int) -> int:
        """What is left of a budget after paying for the ops that compute a value; below 0 where it is not enough."""
        node = self.producers.get(value)
        if node is None or node.op in CONSTANTS:
            return budget
        if node.op not in (*CHEAP, *VIEWS, basic.cast):
            return -1
        budget -= 0 if node.op in VIEWS else 1
        for each in dict.fromkeys(node.args):
            budget = self._left(each, budget) if budget >= 0 else budget
        return budget

    def above(self, value: Value) -> Iterator[Node]:
        """The nodes that only elementwise ops and views lie between and a value, and those ops."""
        seen: set[Value] = set()
        work = [value]
        while work:
            value = work.pop()
            node = self.producers.get(value)
            if node is None or value in seen:
                continue
            yield node
            seen.add(value)
            work += [v for v in node.args if v not in self.memory] if node.op in (*POINTWISE, *VIEWS) else ()

    def is_above(self, value: Value, *ops: Op) -> bool:
        """Whether only elementwise ops and views lie between a value and one of these ops."""
        return any(n.op in ops for n in self.above(value))

    def ends_product(self, value: Value, wanting: list[Cluster]) -> bool:
        """Whether a value is better kept by the kernel of a dot than computed where rows are reduced.

        The dot cannot come along, and what follows it is free there.
        """
        if value in self.forced or all(c.row is None for c in wanting):
            return False
        return self.is_above(value, linalg.dot) and not self.is_above(value, *REDUCTIONS)

    def ends_rows(self, value: Value, wanting: list[Cluster]) -> bool:
        """Whether a value comes of reductions along one axis, and a kernel that wants it reduces along another.

        Those reductions need kernels of their own, which had better compute the value as well; but where it is made
        of a narrower one, that.
        """
        if any(v in self.producers and is_widening(self.producers[v]) for v in self.producers[value].args):
            return False
        found = [n for n in self.above(value) if n.op in REDUCTIONS and _same_rank(n.args[0], value)]
        axes = {axis for n in found for axis in reduced_axes(n)}
        rows = {a for c in wanting if c.row is not None for p in c.points(value) for a in p.axes_along(c.row)}
        return bool(axes) and bool(rows) and rows.isdisjoint(axes)


def _same_rank(x: Value, y: Value) -> bool:
    return x.type.rank == y.type.rank  # type: ignore[union-attr]


def beneath(value: Value, producers: Mapping[Value, Node]) -> Value:
    """What a value is only another shape of: both are the same memory."""
    while value in producers and producers[value].op is shape.reshape:
        value = producers[value].args[0]
    return value


def is_widening(node: Node) -> bool:
    """Whether a node is a cast to a wider type: it costs nothing where it is read, and memory keeps the narrow one."""
    return node.op is basic.cast and node.args[0].type.dtype.bits < node.out.type.dtype.bits  # type: ignore[union-attr]


# fits(fusion, node, clusters): whether the clusters may compute the node; it may add dims to a cluster.
_FITS = Rules("fusion")
# What a root needs before it computes its own node.
_PREPARE = Rules("root")


def clusters(function: Function, launched: frozenset[Op] = frozenset()) -> list[Cluster]:
    """The kernels that compute a function, in order."""
    return Fusion(function, launched).run()


@_FITS(*CONSTANTS)
def _(fusion, node, wanting):
    return True


@_FITS(*VIEWS)
def _(fusion, node, wanting):
    return True


@_FITS(basic.cast)
def _(fusion, node, wanting):
    # A narrow type is what should be kept in memory.
    source = node.args[0].type.dtype
    return len(wanting) == 1 or not fusion.is_computed(node.args[0]) or source.bits <= node.out.type.dtype.bits


@_FITS(*CHEAP, shape.pad, shape.concatenate, shape.gather)
def _(fusion, node, wanting):
    if sum(len(c.points(node.out)) for c in wanting) > MOST_POINTS:
        return False
    return len(wanting) == 1 or fusion.is_cheap(node.out)


@_FITS(*EXPENSIVE)
def _(fusion, node, wanting):
    if len(wanting) > 1 or len(wanting[0].points(node.out)) > 1:
        return False
    (point,) = wanting[0].points(node.out)
    return wanting[0].repeats(point) == 1 or fusion.is_above(node.out, *REDUCTIONS)


def _alone(node: Node, wanting: list[Cluster]) -> Point | None:
    """The only point at which the only kernel wants a node, if it is one without guards."""
    found = [p for c in wanting for p in c.points(node.out)]
    return found[0] if len(found) == 1 and not found[0].guards and found[0].is_clean else None


@_FITS(*REDUCTIONS)
def _(fusion, node, wanting):
    point = _alone(node, wanting)
    axes = reduced_axes(node)
    if point is None or len(axes) != 1:
        return False
    return _share_row(fusion, node, wanting[0], point, shape_of(node.args[0])[axes[0]])


def _share_row(fusion: Fusion, node: Node, cluster: Cluster, point: Point, extent: int) -> bool:
    """Whether a reduction may run along a dim that the kernel has, or a new one; it is then noted."""
    if cluster.product is not None or _would_join(fusion, node, cluster):
        return False
    unused = cluster.unused(point)
    if cluster.row is not None:
        rest = [d for d in unused if d != cluster.row]
        if rest or cluster.extents[cluster.row] != extent or cluster.row in point.dims:
            return False
        cluster.reduced[node.out] = (cluster.row,)
        return True
    if not unused:
        cluster.add_dims(node)
        (cluster.row,) = cluster.reduced[node.out]
        return True
    if len(unused) > 1 or cluster.extents[unused[0]] != extent:
        return False
    cluster.row = unused[0]
    cluster.reduced[node.out] = (cluster.row,)
    return True


def _would_join(fusion: Fusion, node: Node, cluster: Cluster) -> bool:
    """Whether a dot that does not lead to this reduction is wanted here: it had better come than the reduction."""
    wanted = [fusion.producers.get(v) for v in cluster.wants if v not in fusion.forced]
    dots = {n for n in wanted if n is not None and n.op is linalg.dot}
    return bool(dots) and not dots <= set(fusion.above(node.args[0]))


@_PREPARE(*REDUCTIONS)
def _(fusion, node, cluster, point):
    cluster.add_dims(node)
    if len(cluster.reduced[node.out]) == 1:
        (cluster.row,) = cluster.reduced[node.out]


@_FITS(linalg.dot)
def _(fusion, node, wanting):
    point = _alone(node, wanting)
    if point is None or not all(_is_whole(e) for e in point.indices):
        return False
    cluster = wanting[0]
    if cluster.row is not None or cluster.product is not None or cluster.unused(point):
        return False
    _PREPARE.of(linalg.dot)(fusion, node, cluster, point)
    return True


def _is_whole(expr) -> bool:
    """Whether an index walks an axis from end to end: whole dims, no part left out."""
    return expr.constant == 0 and all(a.divisor == 1 and not a.modulus for a, _ in expr.terms)


@_PREPARE(linalg.dot)
def _(fusion, node, cluster, point):
    cluster.add_dims(node)
    cluster.product = node.out

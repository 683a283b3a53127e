"""Sharding propagation: the layout of every value of a Graph function on a mesh, and the collectives between layouts.

After GSPMD (Xu et al. 2021) and Shardy: each op has a rule that names the axes which are cut alike. Nodes are visited
in order; where operands disagree, the cheapest agreement by a cost model of links and arithmetic is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import TensorType
from tessera.dist.mesh import Mesh
from tessera.dist.sharding import Dims
from tessera.ir.core import Block, Node, Value
from tessera.ir.rules import AxisFactors, sharding


@dataclass(frozen=True)
class Link:
    """What connects the ranks along a mesh axis: bytes per second of one rank, and seconds for each message."""

    bandwidth: float
    latency: float


NVLINK = Link(450e9, 3e-6)  # NVLink 4, one direction
NETWORK = Link(50e9, 10e-6)  # 400 Gbit/s
# Arithmetic of one device, to weigh work that every rank repeats against bytes that it sends.
FLOPS, MEMORY_BANDWIDTH = 400e12, 3e12


@dataclass(frozen=True)
class Layout:
    """How the ranks hold a value: the mesh axes that cut each of its axes, and those along which it is partial."""

    dims: Dims
    partial: tuple[str, ...] = ()
    kind: str = "sum"  # the reduction that makes a partial value whole

    def __str__(self) -> str:
        cut = ", ".join("+".join(d) if d else "-" for d in self.dims)
        return f"[{cut}]" + (f" {self.kind} over {'+'.join(self.partial)}" if self.partial else "")


@dataclass(frozen=True)
class Transfer:
    """A collective that changes the layout of a value: op, mesh axes, the bytes that each rank sends, and the time."""

    op: str
    axes: tuple[str, ...]
    bytes: int
    seconds: float
    split: int = 0
    join: int = 0
    kind: str = "sum"


@dataclass
class PlannedNode:
    """A node of the function: the layouts that its operands are brought to, and those of its results."""

    node: Node
    operands: list[Layout]
    results: list[Layout]
    moves: list[list[Transfer]]


@dataclass
class ShardingPlan:
    """The layouts of all values of a function, node by node; its results are brought to `outputs`."""

    mesh: Mesh
    links: Mapping[str, Link]
    inputs: list[Layout]
    steps: list[PlannedNode] = field(default_factory=list)
    outputs: list[Layout] = field(default_factory=list)
    results: tuple[Value, ...] = ()
    moves: list[list[Transfer]] = field(default_factory=list)  # of the results

    def transfers(self) -> Iterator[Transfer]:
        """All collectives in order; a value that several nodes use in one layout is moved once."""
        seen: set[Any] = set()
        uses = [(v, m) for s in self.steps for v, m in zip(s.node.args, s.moves, strict=True)]
        for value, moves in [*uses, *zip(self.results, self.moves, strict=True)]:
            if (value, tuple(moves)) not in seen:
                seen.add((value, tuple(moves)))
                yield from (t for t in moves if t.op != "local_part")


def whole(rank: int) -> Layout:
    """The layout of a value that every rank holds whole."""
    return Layout(((),) * rank)


def tensor_type(value: Value) -> TensorType:
    """The type of a value that is a tensor."""
    assert isinstance(value.type, TensorType)
    return value.type


# Cost of a change of layout.


def count_bytes(type: TensorType, dims: Dims, mesh: Mesh) -> int:
    """The bytes of a value that one rank holds."""
    parts = math.prod(mesh.count(axes) for axes in dims)
    return math.prod(int(n) for n in type.shape) * type.dtype.numpy.itemsize // max(parts, 1)


def _make_transfer(plan: ShardingPlan, op: str, axes: tuple[str, ...], held: int, **places: Any) -> Transfer:
    """A collective; `held` is the bytes of the larger of operand and result on one rank (ring algorithms)."""
    count = plan.mesh.count(axes)
    link = min((plan.links[a] for a in axes), key=lambda x: x.bandwidth)
    seconds = estimate_collective(op, held, count, link)
    return Transfer(op, axes, count_sent(op, held, count), seconds, **places)


def count_sent(op: str, held: int, count: int) -> int:
    """The bytes that each of `count` ranks sends, with `held` bytes in the larger of operand and result."""
    if op == "collective_permute":
        return held
    return (2 if op == "all_reduce" else 1) * held * (count - 1) // count


def estimate_collective(op: str, held: int, count: int, link: Link) -> float:
    """The seconds of a collective: its bytes, and its messages around a ring, or of a tree where these are fewer.

    >>> estimate_collective("all_gather", 1000, 2, Link(bandwidth=1000.0, latency=2.0))
    2.5
    """
    if count == 1:
        return 0.0
    messages = 1 if op == "collective_permute" else min(count - 1, 2 * math.ceil(math.log2(count)))
    rounds = 2 if op == "all_reduce" else 1
    return count_sent(op, held, count) / link.bandwidth + rounds * messages * link.latency


def find_transfers(plan: ShardingPlan, type: TensorType, have: Layout, want: Dims) -> list[Transfer]:
    """The collectives that bring a value from a layout to whole parts; cuts of what a rank holds cost nothing."""
    found: list[Transfer] = []
    dims, mesh = list(have.dims), plan.mesh
    if have.partial:
        at = next((i for i, d in enumerate(want) if d == (*dims[i], *have.partial)), None)
        held = count_bytes(type, tuple(dims), mesh)
        if at is not None and have.kind == "sum":
            found.append(_make_transfer(plan, "reduce_scatter", have.partial, held, split=at))
            dims[at] = want[at]
        else:
            found.append(_make_transfer(plan, "all_reduce", have.partial, held, kind=have.kind))
    for i, j in itertools.permutations(range(len(dims)), 2):
        moved = dims[i][len(_common(dims[i], want[i])) :]
        if moved and want[j] == (*dims[j], *moved):
            held = count_bytes(type, tuple(dims), mesh)
            found.append(_make_transfer(plan, "all_to_all", moved, held, split=j, join=i))
            dims[i], dims[j] = dims[i][: -len(moved)], want[j]
    for i, axes in enumerate(dims):
        kept = _common(axes, want[i])
        if len(kept) < len(axes):
            dims[i] = kept
            held = count_bytes(type, tuple(dims), mesh)
            found.append(_make_transfer(plan, "all_gather", axes[len(kept) :], held, join=i))
    cuts = [(i, want[i][len(d) :]) for i, d in enumerate(dims) if d != want[i]]
    return found + [Transfer("local_part", axes, 0, 0.0, split=i) for i, axes in cuts]


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(x for x, y in itertools.takewhile(lambda p: p[0] == p[1], zip(a, b, strict=False)))


# Propagation.


def plan_shardings(
    block: Block, inputs: Sequence[Layout], mesh: Mesh, links: Mapping[str, Link], outputs: Sequence[Layout | None]
) -> ShardingPlan:
    """The layouts of a block's values for those of its parameters; an output without a layout keeps what it has."""
    plan = ShardingPlan(mesh, links, list(inputs), results=block.results)
    known: dict[Value, Layout] = dict(zip(block.params, inputs, strict=True))
    for node in block.nodes:
        step = _plan_node(plan, node, [known[v] for v in node.args])
        plan.steps.append(step)
        known.update(zip(node.results, step.results, strict=True))
    for value, wanted in zip(block.results, outputs, strict=True):
        have = known[value]
        to = Layout(have.dims) if wanted is None else wanted
        plan.outputs.append(to)
        plan.moves.append(find_transfers(plan, tensor_type(value), have, to.dims))
    return plan


def find_factors(node: Node) -> AxisFactors | None:
    """The sharding rule of a node; None for one whose operands and results are whole."""
    if node.regions or node.op.effects:
        return None
    if node.op.pointwise:
        ranks = [tensor_type(v).rank for v in (*node.args, *node.results)]
        names = [tuple(range(r)) for r in ranks]
        return AxisFactors(tuple(names[: len(node.args)]), tuple(names[len(node.args) :]))
    if node.op not in sharding:
        return None
    return sharding.of(node.op)(node.types, node.result_types, **node.attrs)  # type: ignore[no-any-return]


def _plan_node(plan: ShardingPlan, node: Node, have: list[Layout]) -> PlannedNode:
    factors = find_factors(node)
    if factors is None:
        choice: dict[Any, tuple[str, ...]] = {}
        factors = AxisFactors(
            tuple((None,) * tensor_type(v).rank for v in node.args),
            tuple((None,) * tensor_type(v).rank for v in node.results),
        )
    else:
        choice = min(_list_choices(plan, node, factors, have), key=lambda c: _estimate(plan, node, factors, have, c))
    operands = [Layout(_dims_of(names, choice)) for names in factors.operands]
    types = [tensor_type(v) for v in node.args]
    moves = [find_transfers(plan, t, h, o.dims) for t, h, o in zip(types, have, operands, strict=True)]
    return PlannedNode(node, operands, [_result_layout(names, factors, choice) for names in factors.results], moves)


def _dims_of(names: Sequence[Any], choice: Mapping[Any, tuple[str, ...]]) -> Dims:
    return tuple(choice.get(n, ()) if n is not None else () for n in names)


def _result_layout(names: Sequence[Any], factors: AxisFactors, choice: Mapping[Any, tuple[str, ...]]) -> Layout:
    cut = [(f, kind) for f, kind in factors.reduced.items() if choice.get(f)]
    partial = tuple(axis for f, _ in cut for axis in choice[f])
    return Layout(_dims_of(names, choice), partial, cut[0][1] if cut else "sum")


MAX_CHOICES = 256  # agreements that are compared for one node


def _list_choices(
    plan: ShardingPlan, node: Node, factors: AxisFactors, have: Sequence[Layout]
) -> Iterator[dict[Any, tuple[str, ...]]]:
    """The agreements for a node: each factor is cut as an operand has it, or whole; a mesh axis cuts one factor."""
    proposals: dict[Any, list[tuple[str, ...]]] = {}
    sizes: dict[Any, int] = {}
    for value, names, layout in zip(node.args, factors.operands, have, strict=True):
        for i, name in enumerate(names):
            if name is not None:
                sizes[name] = math.gcd(sizes.get(name, 0), int(tensor_type(value).shape[i]))
                proposals.setdefault(name, []).extend([layout.dims[i]] if layout.dims[i] else [])
    for value, names in zip(node.results, factors.results, strict=True):
        for i, name in enumerate(names):
            if name is not None:
                sizes[name] = math.gcd(sizes.get(name, 0), int(tensor_type(value).shape[i]))
    order = [n for n, found in proposals.items() if found]
    listed = [[*dict.fromkeys(proposals[n]), ()] for n in order]
    for chosen in itertools.islice(itertools.product(*listed), MAX_CHOICES):
        used = [a for axes in chosen for a in axes]
        fits = all(sizes[n] % plan.mesh.count(axes) == 0 for n, axes in zip(order, chosen, strict=True))
        if len(set(used)) == len(used) and fits:
            yield dict(zip(order, chosen, strict=True))
    yield {}


def _estimate(
    plan: ShardingPlan, node: Node, factors: AxisFactors, have: Sequence[Layout], choice: Mapping[Any, tuple[str, ...]]
) -> float:
    """The seconds of a node under an agreement: moving its operands, its own work, and making its results whole."""
    seconds = 0.0
    for value, names, layout in zip(node.args, factors.operands, have, strict=True):
        transfers = find_transfers(plan, tensor_type(value), layout, _dims_of(names, choice))
        seconds += sum(t.seconds for t in transfers)
    for value, names in zip(node.results, factors.results, strict=True):
        result = _result_layout(names, factors, choice)
        held = count_bytes(tensor_type(value), result.dims, plan.mesh)
        seconds += held / MEMORY_BANDWIDTH
        if result.partial:
            seconds += _make_transfer(plan, "all_reduce", result.partial, held).seconds
    return seconds + _estimate_arithmetic(plan, node, factors, choice)


def _estimate_arithmetic(
    plan: ShardingPlan, node: Node, factors: AxisFactors, choice: Mapping[Any, tuple[str, ...]]
) -> float:
    sizes = {
        n: int(tensor_type(v).shape[i])
        for v, names in zip((*node.args, *node.results), (*factors.operands, *factors.results), strict=True)
        for i, n in enumerate(names)
        if n is not None
    }
    work = math.prod(size // plan.mesh.count(choice.get(n, ())) for n, size in sizes.items())
    return 2.0 * work / FLOPS


def check_plannable(block: Block, name: str) -> None:
    """Refuse a function that a plan cannot run.

    Raises:
        UnsupportedOpError: it has a collective already, or a symbolic size.
    """
    for node in block.walk():
        if "collective" in node.op.effects:
            raise UnsupportedOpError(
                f"{name} has the collective {node.op.__name__}: it is a program of ranks already", location=node.loc,
                expected="a program on whole tensors", suggestion="run it with ts.spmd",
            )  # fmt: skip

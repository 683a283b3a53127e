"""Tiling: the tile size of each dim of a kernel, and the dim that a loop walks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tessera.ir.core import Attrs, Block, Node
from tessera.lower.affine import BodyIndexing, IndexDigit, IndexExpr, KernelDims, analyse_body
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import schedule

# The least elements of a program, down to which tiles are halved while there are too few programs.
MIN_TILE_M, MIN_TILE_N, MIN_FLAT_TILE = 16, 32, 1024


@dataclass
class TileSizeSearch:
    """The tile sizes of a kernel, while they are chosen."""

    block: Block
    forms: BodyIndexing
    plan: LoweringPlan
    tile: list[int] = field(default_factory=list)
    loop: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tile = [n if kind == "reduce" else 1 for _, n, kind in self.dims]
        self.accesses = [self.forms.indices(n) for n in self.block.nodes if n.op in (schedule.load, schedule.store)]

    @property
    def dims(self) -> KernelDims:
        """The dims of the kernel."""
        return self.forms.dims

    def parallel(self) -> list[int]:
        """The dims over which programs are distributed."""
        return [d for d, (_, _, kind) in enumerate(self.dims) if kind == "parallel" and d not in self.loop]

    def cut(self, dim: int, target: int, multiple: int = 1) -> int:
        """The largest tile of a dim near a target, from half of it on: one that divides the dim if there is one."""
        extent = self.dims[dim][1]
        if extent <= target:
            return extent
        radices = self._radices(dim)
        fits = [t for t in range(target, (target - 1) // 2, -1) if all(t % r == 0 or r % t == 0 for r in radices)]
        even = [t for t in fits if t % multiple == 0]
        exact = [t for t in even if extent % t == 0]
        return next(iter((*exact, *even, *fits, target)))

    def _radices(self, dim: int) -> set[int]:
        """The sizes at which accesses split a dim: tiles that divide them, or are multiples, are blocks of memory."""
        digits = [a for access in self.accesses for e in access for a, _ in e.terms]
        found = [d for d in digits if isinstance(d, IndexDigit) and d.dim == dim]
        return {r for d in found for r in (d.divisor, d.divisor * d.modulus) if r > 1}

    def fill(self, dims: Iterable[int], budget: int, multiple: int = 1) -> int:
        """Take whole dims, the innermost first, while the budget of elements lasts; return the rest of the budget."""
        held = 1
        for dim in dims:
            size = self.cut(dim, max(budget, 1), multiple // math.gcd(multiple, held))
            self.tile[dim] = size
            held *= size
            budget = budget // size if size == self.dims[dim][1] else 0
        return budget

    def find_contiguous_dims(self) -> set[int]:
        """The dims along which some access has unit stride."""
        return {d for access in self.accesses if access for d in find_unit_stride_dims(access[-1])}

    def programs(self) -> int:
        """How many programs there are."""
        return math.prod(-(-self.dims[d][1] // self.tile[d]) for d in self.parallel())

    def shrink(self, groups: Sequence[tuple[Sequence[int], int]]) -> None:
        """Halve tiles while there are fewer programs than wanted; a group holds at least so many elements."""
        while self.programs() < self.plan.programs:
            ratios = [math.prod(self.tile[d] for d in dims) / least for dims, least in groups]
            best = max(range(len(groups)), key=ratios.__getitem__)
            dim = next((d for d in groups[best][0] if self.tile[d] > 1), None)
            if ratios[best] < 2 or dim is None:
                return
            self.tile[dim] = self.cut(dim, -(-self.tile[dim] // 2))


def find_unit_stride_dims(expr: IndexExpr) -> set[int]:
    """The dims in which an index has unit stride."""
    return {a.dim for a, c in expr.terms if isinstance(a, IndexDigit) and c == 1 and a.divisor == 1}


def choose_tile_sizes(block: Block, dims: KernelDims, plan: LoweringPlan) -> Attrs:
    """Choose the tile sizes and the loop of a kernel."""
    tiling = TileSizeSearch(block, analyse_body(block, dims), plan)
    nodes = {n.op: n for n in block.nodes}
    for op, rule in _TILING_RULES:
        if op in nodes:
            rule(tiling, nodes[op])
            break
    return Attrs({"tile": tuple(tiling.tile), "loop": tuple(tiling.loop)})


def _tile_matmul(tiling: TileSizeSearch, node: Node) -> None:
    plan, k = tiling.plan, node.attrs["dim"]
    left, right = (tiling.forms.depends[v] - {k} for v in node.args)
    m, n = sorted(left - right), sorted(right - left)
    tiling.fill(reversed(m), plan.m, plan.multiple)
    tiling.fill(
        reversed(n), plan.busy_n if plan.busy_n and _has_costly_epilogue(tiling.block, node) else plan.n, plan.multiple
    )
    if tiling.dims[k][1] > plan.whole_k:
        tiling.tile[k] = tiling.cut(k, plan.k, plan.multiple)
        tiling.loop = [k]
    tiling.shrink([(m, MIN_TILE_M), (n, MIN_TILE_N)])


def _has_costly_epilogue(block: Block, product: Node) -> bool:
    """Whether functions that cost more than a few instructions follow a product in its kernel."""
    return any(n.op.is_transcendental for n in block.nodes[block.nodes.index(product) + 1 :])


def _tile_reduction(tiling: TileSizeSearch, node: Node) -> None:
    plan = tiling.plan
    rows = {n.attrs["dim"] for n in tiling.block.nodes if n.op is schedule.reduce}
    row = max(rows, key=lambda d: tiling.dims[d][1])
    rest = math.prod(tiling.dims[d][1] for d in rows - {row})
    fastest = tiling.find_contiguous_dims()
    others = [d for d in tiling.parallel() if d != row]
    lanes = [] if row in fastest else [d for d in others if d in fastest]
    left = tiling.fill(reversed(lanes), plan.lanes)
    held = math.prod(tiling.tile[d] for d in lanes) * rest
    limit = plan.row_limit if not lanes else max(plan.rows // held, 1)
    tiling.tile[row] = tiling.cut(row, max(limit, 1))
    if tiling.tile[row] < tiling.dims[row][1]:
        tiling.loop = [row]
    budget = plan.rows // (held * tiling.tile[row]) if left or not lanes else 1
    tiling.fill([d for d in reversed(others) if d not in lanes], budget)
    tiling.shrink([(others, 1)])


def _tile_pointwise(tiling: TileSizeSearch, node: Node) -> None:
    plan, dims = tiling.plan, tiling.parallel()
    if not dims:
        return
    crossed = sorted(tiling.find_contiguous_dims() & set(dims))
    budget = plan.pointwise
    if len(crossed) > 1:  # one access is by rows, another by columns: a tile is square
        tiling.fill(reversed(crossed), plan.lanes * plan.lanes)
        for dim in crossed:
            tiling.tile[dim] = tiling.cut(dim, plan.lanes)
        budget //= math.prod(tiling.tile[d] for d in crossed)
        dims = [d for d in dims if d not in crossed]
    tiling.fill(reversed(dims), max(budget, 1))
    tiling.shrink([(tiling.parallel(), MIN_FLAT_TILE)])


_TILING_RULES: tuple[tuple[object, Callable[[TileSizeSearch, Node], None]], ...] = (
    (schedule.contract, _tile_matmul),
    (schedule.reduce, _tile_reduction),
    (schedule.store, _tile_pointwise),
)

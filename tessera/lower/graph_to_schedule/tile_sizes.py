"""Tiling: the tile size of each dim of a kernel, and the dim that a loop walks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from tessera.core.symbolic_dim import Dim, Size, estimate_size, find_size_limit, round_up
from tessera.core.types import bf16, bool_, f16, fp8_e4m3, fp8_e5m2, int8, uint8
from tessera.ir.core import Attrs, Block, Node, Value
from tessera.lower.indexing_maps import (
    BodyIndexing,
    IndexDigit,
    IndexExpr,
    KernelDims,
    analyse_body,
    get_tensor_type,
)
from tessera.lower.lowering_plan import (
    BLOCK_RATES,
    EVEN_BLOCKS,
    LEAST_LANES,
    NARROW_LANES,
    WARPGROUP_SIDE,
    LoweringPlan,
    estimate_waves,
)
from tessera.ops.dialects import schedule
from tessera.ops.tensor import elementwise

# The least elements of a program, down to which tiles are halved while there are too few programs.
MIN_TILE_M, MIN_TILE_N, MIN_FLAT_TILE = 16, 32, 1024
LEAST_FLAT_TILE = 128  # of programs that load many values for each element
# The results that programs of short columns have at least, unless these have more elements together.
MIN_RESULTS, MAX_COLUMNS = 256, 1 << 13
# The elements of columns that a program holds because it reads them twice, and the least columns.
MAX_HELD_COLUMNS, MIN_HELD_LANES = 1 << 14, 32
# The most elements of rows that are reduced together, the least rows, and the least programs that are left then.
MAX_ROWS_TOGETHER, MIN_ROWS_TOGETHER, ROW_PROGRAMS = 1 << 13, 4, 1024
OWN_ROW_GAIN = 2  # of both where each program also computes a row that all multiply by
FOLDED = {"sum", "max", "min"}  # reductions of a loop whose rounds are added up in registers
# Short rows of pointwise kernels are cut in tiles that have so many times fewer columns: that divide them, and others.
EVEN_PADDING, LEAST_EVEN_COLUMNS, LEAST_EVEN_ROWS, EVEN_GAIN, UNEVEN_GAIN = 1.25, 32, 8, 1.3, 1.5
# Rows of an array, of so many elements at least, which a tile that more reductions than that share does not join.
LEAST_ROW, LEAST_SHARED = 32, 3
WHOLE_TILES = 64  # of a dim, of which one may be partial
# Bytes of an element whose runs are `lanes` long; those of narrower ones are longer, where they pad no more than this.
RUN_BYTES, RUN_PADDING = 4, 1.1
CROSSED_GAIN = 2  # of the elements of a transposed tile with one short dim, where blocks are padded
# That remain where programs of pointwise kernels hold more elements: two for each multiprocessor, or more where each
# element is made of more than so many loads; what larger tiles may pad more.
MANY_PROGRAMS, MANY_WINDOW_PROGRAMS, FEW_LOADS, GROWN_PADDING = 264, 4096, 4, 1.05
# A symbolic size is cut in about so many tiles, of at least so many elements: small sizes then waste little.
SYMBOLIC_TILES, MIN_SYMBOLIC_TILE = 64, 16


@dataclass
class TileSizeSearch:
    """The tile sizes of a kernel, while they are chosen."""

    block: Block
    forms: BodyIndexing
    plan: LoweringPlan
    tile: list[int] = field(default_factory=list)
    loop: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tile = [n if kind == "reduce" else 1 for _, n, kind in self.dims]  # type: ignore[misc]  # or it is looped
        self.extents = [estimate_size(n) for _, n, _ in self.dims]
        self.accesses = [self.forms.indices(n) for n in self.block.nodes if n.op in (schedule.load, schedule.store)]

    @property
    def dims(self) -> KernelDims:
        """The dims of the kernel."""
        return self.forms.dims

    def parallel(self) -> list[int]:
        """The dims over which programs are distributed."""
        return [d for d, (_, _, kind) in enumerate(self.dims) if kind == "parallel" and d not in self.loop]

    def cut(self, dim: int, target: int, multiple: int = 1) -> int:
        """The largest tile of a dim near a target, from half of it on: one that divides the dim if there is one.

        Where blocks are padded to powers of two, it is the one at most the target, or half of it if that divides.
        """
        extent, typical = self.dims[dim][1], self.extents[dim]
        if not self.is_static(dim):
            target = min(target, max(MIN_SYMBOLIC_TILE, _floor_power_of_two(typical // SYMBOLIC_TILES)))
            target = int(min(target, max(1, find_size_limit(extent))))
        elif typical <= target:
            return typical
        if self.plan.power_of_two_tiles:
            target = _floor_power_of_two(target)
            multiple = max(multiple, target // 2)
        radices = self._radices(dim)
        sizes = range(target, (target - 1) // 2, -1)
        fits = [t for t in sizes if _fits_radices(t, radices)] if radices else sizes
        if radices and self.plan.power_of_two_tiles:  # a block of several axes is padded along each
            fits = [t for t in fits if self._count_padded(t, radices) <= self.pad(target)] or fits
        even = [t for t in fits if t % multiple == 0]
        exact = [t for t in even if extent % t == 0]
        return next(iter((*exact, *even, *fits, target)))

    def _count_padded(self, tile: int, radices: Iterable[int]) -> int:
        """The elements in registers of a tile that is a block of several axes of memory."""
        count, inner = 1, 1
        for r in (*sorted(radices), tile):
            if r <= tile and r % inner == 0 and tile % r == 0:
                count, inner = count * self.pad(r // inner), r
        return count

    def cut_to_rows(self, dim: int, size: int) -> int:
        """A tile of a dim that many reductions share, or one row of an array of which it has several, where each is
        padded to a power of two: memory's block, of one more axis, would have other elements in each thread."""
        reductions = sum(node.op is schedule.reduce for node in self.block.nodes)
        if reductions <= LEAST_SHARED or not self.plan.power_of_two_tiles or not self.is_static(dim):
            return size
        rows = [r for r in self._radices(dim) if r & (r - 1) and size % r == 0 and size >= r >= LEAST_ROW]
        return min(rows, default=size)

    def pad(self, size: int) -> int:
        """The elements that an axis of a block takes in registers."""
        return 1 << (size - 1).bit_length() if self.plan.power_of_two_tiles else size

    def balance(self, dim: int, most: int, multiple: int) -> int:
        """The tile of a dim, a multiple of a number and at most `most`, whose tiles pad the dim least, or 0."""
        if not multiple or not self.is_static(dim):
            return 0
        radices, extent = self._radices(dim), self.extents[dim]
        fits = [t for t in range(max(most // 2, 1), most + 1) if t % multiple == 0 and _fits_radices(t, radices)]
        return min(fits, key=lambda t: (round_up(extent, t), -t), default=0)

    def is_static(self, dim: int) -> bool:
        """Whether the size of a dim is known."""
        return not isinstance(self.dims[dim][1], Dim)

    def _radices(self, dim: int) -> set[int]:
        """The sizes at which accesses split a dim: tiles that divide them, or are multiples, are blocks of memory."""
        digits = [a for access in self.accesses for e in access for a, _ in e.terms]
        found = [d for d in digits if isinstance(d, IndexDigit) and d.dim == dim]
        radices = {r for d in found for r in (d.divisor, d.divisor * d.modulus)}
        return {r for r in radices if isinstance(r, int) and r > 1}

    def fill(self, dims: Iterable[int], budget: int, multiple: int = 1, most_padding: float = math.inf) -> int:
        """Take whole dims, the innermost first, while the budget of elements lasts; return the rest of the budget."""
        held, extent = 1, cast(Size, 1)
        for dim in dims:
            extent = extent * self.dims[dim][1]
            most = -(-find_size_limit(extent) // held) if isinstance(extent, Dim) else math.inf
            target, factor = int(max(min(budget, most), 1)), multiple // math.gcd(multiple, held)
            size = self.cut(dim, target, factor)
            if self.extents[dim] > target and round_up(self.extents[dim], size) > most_padding * self.extents[dim]:
                size = self.balance(dim, target, factor) or size
            self.tile[dim] = size
            held *= size
            budget = budget // self.pad(size) if size >= self.extents[dim] else 0
        return budget

    def find_contiguous_dims(self) -> set[int]:
        """The dims along which some access of the most elements has unit stride: the others cost little either way."""
        sizes = [self._count_elements(access) for access in self.accesses]
        main = [access for access, size in zip(self.accesses, sizes, strict=True) if size == max(sizes)]
        return {d for access in main if access for d in find_unit_stride_dims(access[-1])}

    def _count_elements(self, access: Sequence[IndexExpr]) -> int:
        """The elements that an access touches, if no two indices meet."""
        return math.prod(self.extents[d] for d in {d for e in access for a, _ in e.terms for d in a.dims})

    def count_moved_bytes(self) -> int:
        """The bytes that a kernel reads and writes for each of its elements, without what is read by many."""
        nodes = [n for n in self.block.nodes if n.op in (schedule.load, schedule.store)]
        sizes = [self._count_elements(access) for access in self.accesses]
        main = [n for n, size in zip(nodes, sizes, strict=True) if size == max(sizes)]
        # Of loads under masks, as of the parts of a concatenation or of a window, about one reads memory.
        masked = [n for n in main if n.op is schedule.load and len(n.args) > 1 + n.args[0].type.rank]  # type: ignore[union-attr]
        values = [n.out if n.op is schedule.load else n.args[1] for n in main if n not in masked[1:]]
        return sum(max(1, v.type.dtype.bits // 8) for v in values)  # type: ignore[union-attr]

    def find_overlapping_dims(self) -> set[int]:
        """The dims that share an axis of memory with a later dim and overlap it, as those of windows do.

        Tiled along both, a block of memory is no block of elements.
        """
        found: set[int] = set()
        for expr in (e for access in self.accesses for e in access):
            digits = sorted((abs(c), a.dim) for a, c in expr.terms if isinstance(a, IndexDigit) and isinstance(c, int))
            dims = {d for _, d in digits}
            reach = sum(c * (self.extents[d] - 1) for c, d in digits[:-1])
            if len(dims) == len(digits) > 1 and reach >= digits[-1][0]:
                found |= dims - {max(dims)}
        return found

    def find_widest_rows(self) -> set[int]:
        """The reduced dims that a value of the results has which has the most elements for each of them."""
        rows = frozenset(n.attrs["dim"] for n in self.block.nodes if n.op is schedule.reduce)
        results = {d for d in self.parallel() if self.extents[d] > 1} - rows
        values = [self.forms.depends[v] for n in self.block.nodes for v in n.results]
        found = [dims & rows for dims in values if dims >= results and dims & rows] or [rows]
        return set(max(found, key=lambda dims: (sum(not self.is_static(d) for d in dims), self._count_rows(dims))))

    def _count_rows(self, dims: Iterable[int]) -> int:
        return math.prod(self.extents[d] for d in dims)

    def count_padded(self) -> int:
        """The elements of all programs, with those that pad their tiles."""
        return self.programs() * math.prod(self.pad(self.tile[d]) for d in self.parallel())

    def programs(self) -> int:
        """How many programs there are."""
        return math.prod(-(-self.extents[d] // self.tile[d]) for d in self.parallel())

    def shrink(self, groups: Sequence[tuple[Sequence[int], int]], wanted: int | None = None) -> None:
        """Halve tiles while there are fewer programs than wanted; a group holds at least so many elements."""
        while self.programs() < (wanted or self.plan.programs):
            ratios = [math.prod(self.tile[d] for d in dims) / least for dims, least in groups]
            best = max(range(len(groups)), key=ratios.__getitem__)
            dim = next((d for d in groups[best][0] if self.tile[d] > 1), None)
            if ratios[best] < 2 or dim is None:
                return
            self.tile[dim] = self.cut(dim, -(-self.tile[dim] // 2))


def _fits_radices(tile: int, radices: Iterable[int]) -> bool:
    return all(tile % r == 0 or r % tile == 0 for r in radices)


def _floor_power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number > 0 else 0


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
    peel = {"peel": True} if plan.peel and tiling.loop and schedule.contract not in nodes else {}
    return Attrs({"tile": tuple(tiling.tile), "loop": tuple(tiling.loop), **peel})


COLUMN_PADDING = 1.1  # of the results along memory of reductions, beyond which tiles pad them least
PACKED_PADDING = 1.1  # of the columns of a packed product, beyond which tiles pad them least
SMALL_PRODUCT = 1 << 20  # multiply-adds, fewer of which take less time than to divide them among threads
# Blocks of a product grow to so many rows while they and their results have at most so many bytes, and so many
# programs are left for each that is wanted.
MAX_BLOCK_ROWS, MAX_BLOCK_BYTES, BLOCKS_OF_A_PROGRAM = 1024, 1 << 19, 4
COPIED_TYPES = (f16, bf16, fp8_e4m3, fp8_e5m2, int8, uint8)
COPY_ALIGNMENT = 16  # bytes that divide a row of memory which tensor maps load
BLOCK_GAIN = 0.95  # of the time of waves, from which on it is the measure of blocks
MAX_EPILOGUE_DEPTH = 4096  # of a contraction beside which what follows takes time: measured, equal at about 6,000


def _tile_matmul(tiling: TileSizeSearch, node: Node) -> None:
    plan, k = tiling.plan, node.attrs["dim"]
    left, right = (tiling.forms.depends[v] - {k} for v in node.args)
    m, n = sorted(left - right), sorted(right - left)
    narrow = _count_narrow_elements(node) if plan.product_pack else 1
    packs = plan.product_pack > 0
    tiling.fill(reversed(m), plan.m * narrow, 1 if packs else plan.multiple, 0.0 if packs else math.inf)
    wide = plan.busy_n if plan.busy_n and _prefers_narrow_blocks(tiling, node, m, n) else plan.n
    inner = n[-1:] if plan.flat_windows and n and _fills_vectors(tiling.extents[n[-1]], plan) else n
    tiling.fill(reversed(inner), wide * min(narrow, 2), plan.multiple, PACKED_PADDING if packs else math.inf)
    if tiling.extents[k] > plan.whole_k or not tiling.is_static(k):
        tiling.tile[k] = tiling.balance(k, plan.k, plan.balance_k) or tiling.cut(k, plan.k, plan.multiple)
        tiling.loop = [k]
    if plan.product_pack and all(map(tiling.is_static, (*m, *n))):
        _heighten_blocks(tiling, node, m, n)
        if math.prod(tiling.extents) >= SMALL_PRODUCT:
            _balance_packing(tiling, m, n, plan.product_pack * narrow, narrow > 1)
    else:
        tiling.shrink([(m, MIN_TILE_M), (n, MIN_TILE_N)])
        _balance_waves(tiling, node, m, n)
        _pad_rows(tiling, node, m, n)


def _heighten_blocks(tiling: TileSizeSearch, product: Node, m: Sequence[int], n: Sequence[int]) -> None:
    """More rows for blocks of a product of which there are many, while a cache holds the rows and their results: each
    program packs its columns of the right operand again. Not where the rows are packed, too: they lie across memory."""
    k, before = product.attrs["dim"], list(tiling.tile)
    load = next((x for x in tiling.block.nodes if x.op is schedule.load and x.out is product.args[0]), None)
    if load is None or k not in find_unit_stride_dims(tiling.forms.indices(load)[-1]):
        return
    columns, least = math.prod(tiling.tile[d] for d in n), math.prod(tiling.tile[d] for d in m)
    held = max(tiling.tile[k], columns) * get_tensor_type(product.args[0]).dtype.bits // 8
    rows = MAX_BLOCK_ROWS
    while rows > least:
        if rows * held <= MAX_BLOCK_BYTES:
            for d in m:
                tiling.tile[d] = 1
            tiling.fill(reversed(m), rows, 1, 0.0)
            if tiling.programs() >= BLOCKS_OF_A_PROGRAM * tiling.plan.programs:
                return
        rows //= 2
    tiling.tile = before


def _balance_waves(tiling: TileSizeSearch, product: Node, m: Sequence[int], n: Sequence[int]) -> None:
    """Blocks whose waves of programs take the least time, where that is less by far.

    Of products that copies feed, whose columns need not be a power of two. Where much follows a product, only in place
    of blocks that are too small for a warp group.
    """
    plan, k = tiling.plan, product.attrs["dim"]
    if plan.processors is None or not plan.wave_blocks or not _feeds_by_copies(tiling, product, m, n):
        return
    block, most = (tiling.tile[m[0]], tiling.tile[n[0]]), plan.n
    if _has_costly_epilogue(tiling, product, m, n):
        if min(block) >= WARPGROUP_SIDE:
            return
        most = plan.busy_n or plan.n
    outer = math.prod(tiling.extents[d] for d in tiling.parallel() if d not in (*m, *n))
    narrow = get_tensor_type(product.args[0]).dtype.bits == 8  # twice as many are multiplied at once
    sizes = outer, tiling.extents[m[0]], tiling.extents[k] // (1 + narrow), tiling.extents[n[0]]
    if sizes[1] < WARPGROUP_SIDE // 2 or sizes[3] < WARPGROUP_SIDE:
        return  # bound by memory
    turned = _runs_along(tiling, product.args[1], k)
    blocks = [each for each in (EVEN_BLOCKS if narrow else BLOCK_RATES) if each[0] <= plan.m and each[1] <= most]
    found = {each: estimate_waves(sizes, each, plan.processors, turned) for each in blocks}
    best = min(found, key=found.__getitem__, default=block)
    if best != block and found[best] < BLOCK_GAIN * estimate_waves(sizes, block, plan.processors, turned):
        tiling.tile[m[0]], tiling.tile[n[0]] = best


def _runs_along(tiling: TileSizeSearch, v: Value, dim: int) -> bool:
    """Whether neighbours along a dim are neighbours in the memory that a value is loaded from."""
    load = next(node for node in tiling.block.nodes if v in node.results)
    return dim in find_unit_stride_dims(tiling.forms.indices(load)[-1])


def _feeds_by_copies(tiling: TileSizeSearch, product: Node, m: Sequence[int], n: Sequence[int]) -> bool:
    """Whether tensor maps load both operands of a product, of 8-bit elements along the contraction."""
    made = {v: node for node in tiling.block.nodes for v in node.results}
    sides = (*m, *n)
    if len(m) != 1 or len(n) != 1 or not all(map(tiling.is_static, (*sides, product.attrs["dim"]))):
        return False
    if not set(sides) <= set(tiling.parallel()):
        return False
    for v in product.args:
        node = made.get(v)
        if node is None or node.op is not schedule.load or len(node.args) != 1 + node.args[0].type.rank:  # type: ignore[union-attr]
            return False  # a load under a mask is no copy
        type = node.args[0].type
        row = type.shape[-1]  # type: ignore[union-attr]
        if not isinstance(row, int) or row * type.dtype.bits // 8 % COPY_ALIGNMENT:  # type: ignore[union-attr]
            return False
        if type.dtype not in COPIED_TYPES:  # type: ignore[union-attr]
            return False
        if type.dtype.bits == 8 and not _runs_along(tiling, v, product.attrs["dim"]):  # type: ignore[union-attr]
            return False
    return True


def _pad_rows(tiling: TileSizeSearch, product: Node, m: Sequence[int], n: Sequence[int]) -> None:
    """Blocks of few rows as high as an instruction of a warp group, where the columns are as many: such a product is
    bound by the memory of its right operand, which a ring of copies reads faster."""
    least, typed = tiling.plan.warpgroup_rows, get_tensor_type(product.args[0]).dtype
    rows, columns = (math.prod(tiling.tile[d] for d in dims) for dims in (m, n))
    whole = len(m) == 1 and tiling.is_static(m[0]) and rows == tiling.extents[m[0]]
    if whole and typed.is_float and typed.bits == 16 and least // 4 < rows < least <= columns:
        tiling.tile[m[0]] = least


def _count_narrow_elements(product: Node) -> int:
    """How many elements of the operands have 32 bits: so many are multiplied at once, but packed one by one."""
    return max(32 // max(get_tensor_type(v).dtype.bits for v in product.args), 1)


def _balance_packing(tiling: TileSizeSearch, m: Sequence[int], n: Sequence[int], pack: int, packs_rows: bool) -> None:
    """Where there are fewer programs than wanted, the tiles of least cost; `pack` is that of an element.

    Each program packs its columns of the right operand again, and its rows of a left operand of narrow elements. The
    cost is the mean of what one thread and of what as many threads as programs are wanted need, in multiply-adds for
    each element of the contraction.
    """
    wanted, whole = tiling.plan.programs, list(tiling.tile)
    if tiling.programs() >= wanted:
        return
    found: dict[tuple[int, ...], int] = {}
    for rows in _halve(tiling, m, MIN_TILE_M):
        for columns in _halve(tiling, n, MIN_TILE_N, tiling.plan.multiple):
            tiling.tile = [columns.get(d, rows.get(d, t)) for d, t in enumerate(whole)]
            programs, width = tiling.programs(), round_up(math.prod(columns.values()), tiling.plan.multiple)
            height = math.prod(rows.values())
            each = (height + pack) * width + height * pack * packs_rows
            found[tuple(tiling.tile)] = programs * each + wanted * each * -(-programs // wanted)
    tiling.tile = list(min(found.items(), key=lambda each: each[1])[0])


def _halve(tiling: TileSizeSearch, dims: Sequence[int], least: int, multiple: int = 1) -> Iterator[dict[int, int]]:
    """The tiles of dims, then halved and halved again, the first dim of more than one element first.

    The halves of the last dim, which lies along memory, are multiples of a number.
    """
    tile = {d: tiling.tile[d] for d in dims}
    yield dict(tile)
    while math.prod(tile.values()) > least:
        dim = next(d for d in dims if tile[d] > 1)
        step = multiple if dim == dims[-1] else 1
        half = tiling.cut(dim, round_up(-(-tile[dim] // 2), step), step)
        if half == tile[dim] or math.prod(tile.values()) // tile[dim] * half < least:
            return
        tile[dim] = half
        yield dict(tile)


def _fills_vectors(columns: int, plan: LoweringPlan) -> bool:
    """Whether an axis of columns alone suffices for a tile; with a part of another, vectors would cross its ends."""
    return columns >= 2 * plan.multiple and columns % plan.multiple != 0


def _prefers_narrow_blocks(tiling: TileSizeSearch, node: Node, m: Sequence[int], n: Sequence[int]) -> bool:
    """Whether what follows a product costs more than a few instructions, or narrow blocks fill processors better."""
    costly = _has_costly_epilogue(tiling, node, m, n)
    if costly or not all(map(tiling.is_static, (*m, *n))):
        return costly
    rows, columns = (math.prod(tiling.extents[d] for d in dims) for dims in (m, n))
    outer = math.prod(tiling.extents[d] for d in tiling.parallel() if d not in (*m, *n))
    return tiling.plan.fills_waves(outer, rows, columns, tiling.extents[node.attrs["dim"]])


def _has_costly_epilogue(tiling: TileSizeSearch, product: Node, m: Sequence[int], n: Sequence[int]) -> bool:
    """Whether functions that cost more than a few instructions are in a product's kernel, but not in its operands.

    A matrix that is loaded for the results, such as a residual, costs as much. A deep contraction outlasts both.
    """
    if tiling.extents[product.attrs["dim"]] > MAX_EPILOGUE_DEPTH:
        return False
    block = tiling.block
    made: set[Value] = set(product.args)
    for node in reversed(block.nodes[: block.nodes.index(product)]):
        made |= set(node.args) if made & set(node.results) else set()
    rest = [node for node in block.nodes if node.results and node.out not in made]
    loaded = [tiling.forms.depends[node.out] for node in rest if node.op is schedule.load]
    return any(node.op.is_transcendental for node in rest) or any(dims & set(m) and dims & set(n) for dims in loaded)


def _tile_reduction(tiling: TileSizeSearch, node: Node) -> None:
    plan = tiling.plan
    rows = tiling.find_widest_rows()
    row = max(rows, key=lambda d: (not tiling.is_static(d), tiling.extents[d]))
    rest = math.prod(int(tiling.dims[d][1]) for d in rows - {row})
    fastest = tiling.find_contiguous_dims()
    others = [d for d in tiling.parallel() if d != row]
    lanes = [] if row in fastest else [d for d in others if d in fastest]
    if lanes and _hold_columns(tiling, row, rest, lanes):
        return
    # Of what no cache holds, longer runs are read, which cross fewer pages.
    wider = plan.widen(math.prod(tiling.extents))
    along = wider * (plan.result_lanes or plan.lanes)
    if lanes and tiling.is_static(lanes[-1]):
        along = plan.fit_lanes(tiling.extents[lanes[-1]], along)
    if plan.power_of_two_tiles:
        left = tiling.fill(reversed(lanes), along)
    else:  # a program computes whole blocks: its registers end near the axis
        left = tiling.fill(reversed(lanes), along, most_padding=COLUMN_PADDING)
    held = math.prod(tiling.tile[d] for d in lanes) * rest
    elements = wider * (plan.result_rows or plan.rows) if lanes else plan.rows
    if len(rows) > 1 and plan.own_row:  # sums of short sums: such a kernel waits for memory, and small programs less
        elements //= 2
    limit = _limit_row(tiling, row, others) if not lanes else max(elements // held, 1)
    whole = tiling.cut(row, max(limit, 1))
    tiling.tile[row] = tiling.cut_to_rows(row, whole)
    if tiling.tile[row] < tiling.extents[row] or not tiling.is_static(row):
        tiling.loop = [row]
    budget = elements // (held * whole) if left or not lanes else 1
    rest_dims = [d for d in others if d not in lanes]
    if (
        plan.power_of_two_tiles and lanes and left and not tiling.loop
    ):  # a thread for each result, which adds up a column
        budget = max(
            budget, min(MIN_RESULTS, MAX_COLUMNS // tiling.tile[row]) // math.prod(tiling.tile[d] for d in lanes)
        )
    if not lanes and not tiling.loop:
        budget = max(budget, _count_rows_together(tiling, row, others))
    tiling.fill(reversed(rest_dims), budget)
    apart = bool(lanes) and plan.result_lanes is not None
    if apart and plan.parallel is not None:
        tiling.shrink([(lanes, NARROW_LANES)], plan.parallel)
    tiling.shrink([(rest_dims, 1), (lanes, LEAST_LANES)] if apart else [(others, 1)])
    longest = elements // (math.prod(tiling.tile[d] for d in others) * rest)
    if apart and tiling.loop and tiling.is_static(row) and longest > tiling.tile[row]:  # fewer rounds wait for memory
        tiling.tile[row] = tiling.cut_to_rows(row, tiling.cut(row, longest))
        tiling.loop = [row] if tiling.tile[row] < tiling.extents[row] else []


def _hold_columns(tiling: TileSizeSearch, row: int, rest: int, lanes: Sequence[int]) -> bool:
    """Take whole columns that a kernel reads twice, as norms along an outer axis do, if registers hold them."""
    again = tiling.dims[row][2] == "parallel" or _has_dependent_reductions(tiling.block)
    if not (tiling.plan.power_of_two_tiles and again and all(map(tiling.is_static, (row, *lanes)))):
        return False
    most = MAX_HELD_COLUMNS // (tiling.pad(tiling.extents[row]) * rest)
    if most < MIN_HELD_LANES or tiling.plan.result_lanes is None:
        return False
    tiling.fill(reversed(lanes), min(most, tiling.plan.result_lanes))
    tiling.tile[row] = tiling.extents[row]
    tiling.shrink([(lanes, MIN_HELD_LANES)])
    return True


def _count_rows_together(tiling: TileSizeSearch, row: int, others: Sequence[int]) -> int:
    """The rows of a program that reduces whole rows to numbers: one for each warp, if programs remain enough."""
    plan = tiling.plan
    stores = [tiling.forms.indices(n) for n in tiling.block.nodes if n.op is schedule.store]
    kept = any(row in a.dims for access in stores for e in access for a, _ in e.terms)
    count, depends = math.prod(tiling.extents[d] for d in others), tiling.forms.depends
    own = any(n.op is schedule.reduce and not depends[n.out] & set(others) for n in tiling.block.nodes)
    whole = {d for d in (row, *others) if tiling.extents[d] != 1}
    matrices = sum(n.op is schedule.load and whole <= depends[n.out] for n in tiling.block.nodes)
    for gain in (OWN_ROW_GAIN, 1) if own and matrices == 1 else (1,):
        together = min(gain * plan.row_warps, gain * MAX_ROWS_TOGETHER // tiling.pad(tiling.tile[row]))
        if together >= MIN_ROWS_TOGETHER and not kept and count >= together * ROW_PROGRAMS:
            return together
    return 1


def _limit_row(tiling: TileSizeSearch, row: int, others: Sequence[int]) -> int:
    """The elements of a row that a program holds; fewer of rows that are walked again or that go through costly
    functions, if there are many of them, and of those whose loop adds up its rounds in registers.

    Several programs then share a processor: one reads while another computes. The threads of a smaller program may have
    more registers each, so that none spills.
    """
    plan = tiling.plan
    walked_again = tiling.dims[row][2] == "parallel" or _has_dependent_reductions(tiling.block)
    costly = any(node.op.is_transcendental for node in tiling.block.nodes)
    kinds = {node.attrs["kind"] for node in tiling.block.nodes if node.op is schedule.reduce}
    if plan.row_tile is not None and tiling.extents[row] > plan.row_limit and not walked_again and kinds <= FOLDED:
        return plan.rows
    if plan.row_tile is None or not (walked_again or costly) or tiling.extents[row] <= plan.row_limit:
        return plan.row_limit
    held = plan.row_tile * (plan.parallel or 1) // math.prod(tiling.extents[d] for d in others)
    return max(plan.row_tile, min(plan.row_limit, 1 << max(held - 1, 0).bit_length()))


def _has_dependent_reductions(block: Block) -> bool:
    """Whether a reduction reads what another one gives, as a sum of squared deviations reads the mean."""
    made: set[Value] = set()
    for node in block.nodes:
        if node.op is schedule.reduce and made & set(node.args):
            return True
        if node.op is schedule.reduce or made & set(node.args):
            made |= set(node.results)
    return False


def _tile_pointwise(tiling: TileSizeSearch, node: Node) -> None:
    """Programs have more elements only where these are no padding."""
    budget, start = _count_pointwise_elements(tiling), list(tiling.tile)
    _tile_elements(tiling, budget)
    while budget > tiling.plan.pointwise:
        budget, larger, padded = budget // 2, list(tiling.tile), tiling.count_padded()
        tiling.tile = list(start)
        _tile_elements(tiling, budget)
        if padded <= GROWN_PADDING * tiling.count_padded():
            tiling.tile = larger
            return


def _tile_elements(tiling: TileSizeSearch, budget: int) -> None:
    plan, dims = tiling.plan, tiling.parallel()
    if not dims:
        return
    overlapping = tiling.find_overlapping_dims()
    dims = [d for d in dims if d not in overlapping]
    crossed = sorted(tiling.find_contiguous_dims() & set(dims))
    if len(crossed) > 1:  # one access is by rows, another by columns: a tile is square
        tiling.fill(reversed(crossed), plan.lanes * plan.lanes)
        for dim in crossed:
            tiling.tile[dim] = _cut_run(tiling, dim, plan.lanes)
        _widen_stored_runs(tiling, crossed)
        short, long = min(crossed, key=tiling.extents.__getitem__), max(crossed, key=tiling.extents.__getitem__)
        most = CROSSED_GAIN * plan.lanes if plan.power_of_two_tiles else plan.lanes
        spare = most // tiling.pad(tiling.tile[short])
        if tiling.extents[short] <= plan.lanes and spare > 1:  # more of a dim beside a short one
            tiling.tile[long] = tiling.cut(long, spare * plan.lanes)
        budget //= math.prod(tiling.tile[d] for d in crossed)
        dims = [d for d in dims if d not in crossed]
    if dims and plan.pointwise < tiling.extents[dims[-1]] <= plan.divided_row and _compares_index(tiling, dims[-1]):
        budget = max(budget, tiling.extents[dims[-1]])
    if dims and (columns := _find_even_columns(tiling, dims[-1], budget)):
        tiling.tile[dims[-1]], dims, budget = columns, dims[:-1], budget // columns
        if dims and (rows := _find_even_rows(tiling, dims[-1], budget)):
            tiling.tile[dims[-1]], dims, budget = rows, dims[:-1], budget // rows
    tiling.fill(reversed(dims), max(budget, 1), plan.multiple)  # the rows of a tile begin with a line of the cache
    if dims:
        _widen_tile(tiling, dims[-1], budget)
        _tile_outer_dim(tiling, dims, budget)
    tiling.shrink([(tiling.parallel(), _limit_flat_tile(tiling))])


def _cut_run(tiling: TileSizeSearch, dim: int, target: int) -> int:
    """The tile of a dim along which memory is read or written in runs: not half of the target, if that pads little."""
    size, extent = tiling.cut(dim, target), tiling.extents[dim]
    if not (tiling.plan.power_of_two_tiles and tiling.is_static(dim) and size < target < extent):
        return size
    little = round_up(extent, target) <= RUN_PADDING * extent
    return target if little and _fits_radices(target, tiling._radices(dim)) else size


def _widen_stored_runs(tiling: TileSizeSearch, crossed: Sequence[int]) -> None:
    """Runs that are stored have as many bytes for narrow types as for f32, if that pads little."""
    store = next(n for n in tiling.block.nodes if n.op is schedule.store)
    runs = [d for d in crossed if d in find_unit_stride_dims(tiling.forms.indices(store)[-1])]
    factor = RUN_BYTES // max(1, store.args[1].type.dtype.bits // 8)  # type: ignore[union-attr]
    if len(runs) != 1 or not tiling.plan.power_of_two_tiles or factor <= 1:
        return
    before = tiling.tile[runs[0]]
    tiling.tile[runs[0]] = _cut_run(tiling, runs[0], factor * tiling.plan.lanes)
    pads = round_up(tiling.extents[runs[0]], tiling.tile[runs[0]]) > RUN_PADDING * tiling.extents[runs[0]]
    if pads or tiling.programs() < MANY_PROGRAMS:
        tiling.tile[runs[0]] = before


def _limit_flat_tile(tiling: TileSizeSearch) -> int:
    """The least elements of a program: fewer where each is made of many loads, for which a thread waits in turn."""
    if not tiling.plan.power_of_two_tiles:
        return MIN_FLAT_TILE
    loads = sum(node.op is schedule.load for node in tiling.block.nodes)
    return max(MIN_FLAT_TILE // _floor_power_of_two(max(loads, 1)), LEAST_FLAT_TILE)


def _widen_tile(tiling: TileSizeSearch, dim: int, budget: int) -> None:
    """A whole tile instead of half of one that divides a long dim: of many tiles the last one may be partial."""
    whole = _floor_power_of_two(budget)
    if not tiling.plan.power_of_two_tiles or not tiling.is_static(dim) or tiling.tile[dim] >= whole:
        return
    if tiling.extents[dim] >= WHOLE_TILES * whole and _fits_radices(whole, tiling._radices(dim)):
        tiling.tile[dim] = whole


def _tile_outer_dim(tiling: TileSizeSearch, dims: Sequence[int], budget: int) -> None:
    """Two of an outer dim, where the tile of an inner one is half of what a program holds, since that divides it.

    They share no axis of memory: of that, the tile would be no block.
    """
    held = math.prod(tiling.pad(tiling.tile[d]) for d in dims)
    dims = [d for d in dims if tiling.extents[d] > 1]
    part = next((i for i in reversed(range(1, len(dims))) if tiling.tile[dims[i]] < tiling.extents[dims[i]]), 0)
    if not part or not tiling.plan.power_of_two_tiles or 2 * held > budget or not tiling.is_static(dims[part - 1]):
        return
    pair = {dims[part - 1], dims[part]}
    mixed = any(pair <= {d for a, _ in e.terms for d in a.dims} for access in tiling.accesses for e in access)
    tiling.tile[dims[part - 1]] = 1 if mixed else 2


def _find_even_columns(tiling: TileSizeSearch, dim: int, budget: int) -> int:
    """The columns of tiles that pad rows far less than one tile of a power of two does, or 0.

    Threads without an element take part in all that a program does; but tiles of parts of rows begin anywhere in lines
    of memory, unless they divide the rows.
    """
    extent, widest = tiling.extents[dim], tiling.pad(tiling.extents[dim])
    if not (
        tiling.plan.power_of_two_tiles and tiling.is_static(dim) and LEAST_EVEN_COLUMNS < extent < widest <= budget
    ):
        return 0
    radices = tiling._radices(dim)
    sizes = [widest >> i for i in range(widest.bit_length()) if widest >> i >= LEAST_EVEN_COLUMNS]
    padded = {n: round_up(extent, n) for n in sizes if _fits_radices(n, radices)}
    gains = {n: round_up(extent, widest) / size for n, size in padded.items()}
    enough = [n for n, gain in gains.items() if gain >= (EVEN_GAIN if extent % n == 0 else UNEVEN_GAIN)]
    return next((n for n in enough if padded[n] <= EVEN_PADDING * extent), 0)


def _find_even_rows(tiling: TileSizeSearch, dim: int, budget: int) -> int:
    """The most rows, a power of two, of tiles that pad a dim little, or 0."""
    if not tiling.is_static(dim):
        return 0
    extent, radices = tiling.extents[dim], tiling._radices(dim)
    sizes = [1 << i for i in reversed(range(LEAST_EVEN_ROWS.bit_length() - 1, budget.bit_length()))]
    return next((n for n in sizes if round_up(extent, n) <= EVEN_PADDING * extent and _fits_radices(n, radices)), 0)


def _count_pointwise_elements(tiling: TileSizeSearch) -> int:
    """The elements of a program: more of narrow types where there are many programs, so that each moves some bytes."""
    plan, budget = tiling.plan, tiling.plan.pointwise
    total, moved = math.prod(tiling.extents[d] for d in tiling.parallel()), tiling.count_moved_bytes()
    # Of windows, whose elements are made of many loads, programs take longer, and registers hold fewer.
    loads = sum(n.op is schedule.load for n in tiling.block.nodes)
    least = MANY_PROGRAMS if loads <= FEW_LOADS else MANY_WINDOW_PROGRAMS
    while budget * moved < plan.pointwise_bytes and total // (2 * budget) >= least:
        budget *= 2
    return budget


def _compares_index(tiling: TileSizeSearch, dim: int) -> bool:
    """Whether a kernel compares the index of a dim, as concatenations, pads and rolls do."""
    shifted: set[Value] = set()
    for node in tiling.block.nodes:
        if node.op is schedule.index and node.attrs["dim"] == dim:
            shifted.add(node.out)
        elif shifted & set(node.args) and node.op in (elementwise.add, elementwise.sub):
            shifted.add(node.out)
        elif shifted & set(node.args) and any(v.type.dtype == bool_ for v in node.results):  # type: ignore[union-attr]
            return tiling.is_static(dim)
    return False


_TILING_RULES: tuple[tuple[object, Callable[[TileSizeSearch, Node], None]], ...] = (
    (schedule.contract, _tile_matmul),
    (schedule.reduce, _tile_reduction),
    (schedule.store, _tile_pointwise),
)

"""Library launches: graph ops that lower to a kernel of this library, where that is faster than their loop nests.

`scatter_add` of many pairs is one launch of a kernel with atomic additions; those of attention are in
`tessera.stdlib.attention_launches`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from tessera.core.symbolic_dim import Dim, symbol_names
from tessera.core.types import DType, bf16, bool_, f16, f32, f64, int32, uint8
from tessera.ir.core import Attrs, Node, TensorType, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.rules import Rules
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.lowering_plan import (
    LibraryLowering,
    LoweringPlan,
    library_lowerings,
    library_operands,
    library_rules,
    simplified_lowerings,
)
from tessera.ops.tensor import (
    basic,
    contractions,
    decompositions,
    reduce,
    running_extremes,
    shape,
    sorting,
)
from tessera.ops.tensor.basic import cast, full
from tessera.ops.tensor.scatter import pick_updates, scatter, scatter_add
from tessera.stdlib import attention_launches, row_scans, row_selection, row_sorting
from tessera.stdlib.column_extremes import find_extreme_places, find_outer_axis
from tessera.stdlib.convolution import match_windows
from tessera.stdlib.deterministic_reductions import (
    PlaceCheck,
    combine_sorted,
    is_unsorted,
    update_in_place,
    update_unsorted,
)
from tessera.stdlib.digit_sorting import are_digits_faster, fits_group, sort_by_digits, sort_words
from tessera.stdlib.direct_convolution import match_direct
from tessera.stdlib.exact_sums import MAX_WIDTH, add_exactly, count_exactly, has_few_numbers, is_exact
from tessera.stdlib.exclusive_scans import ExclusiveScan, is_flip, match_preceded, match_shifted
from tessera.stdlib.extreme_places import crosses_rows, divides_rows, find_in_columns, find_in_parts
from tessera.stdlib.gathered_products import match_gathered
from tessera.stdlib.indirect_convolution import match_indirect
from tessera.stdlib.indirect_gradients import match_shifted_sums, match_window_gradient
from tessera.stdlib.placed_extremes import find_last_updates, take_extremes
from tessera.stdlib.row_products import match_row_product
from tessera.stdlib.running_sums import running_sums
from tessera.stdlib.small_matrices import (
    count_lanes,
    factor_batch,
    factor_columns,
    factor_lanes,
    fits_columns,
    fits_lanes,
    fits_orthogonal_lanes,
    is_small,
    orthogonalise_batch,
    orthogonalise_columns,
    orthogonalise_lanes,
    solve_batch,
    solve_columns,
    solve_lanes,
)
from tessera.stdlib.split_k import ChunkedProduct, JoinedProduct, match_chunked_product, match_deep_product
from tessera.stdlib.split_products import SplitProduct, match_split_product
from tessera.stdlib.summed_products import match_summed_product
from tessera.stdlib.thin_products import ThinProduct, match_thin_product
from tessera.stdlib.weight_gradients import match_weight_gradient

# Up to this many pairs of index and update the lowering is as fast, and can be fused.
MAX_DENSE_PAIRS = 256
MAX_SUMMED_ROWS = 8


def load_library_launches() -> Rules:
    """The table of these rules: importing this module and that of attention fills it."""
    assert attention_launches
    return library_rules


# Up to this many elements recursive doubling is as fast as a scan, and can be fused.
MAX_DOUBLED = 16


SCANS = {
    reduce.cumsum: "sum",
    reduce.cumprod: "prod",
    running_extremes.cummax: "max",
    running_extremes.cummin: "min",
}


@library_lowerings(*SCANS)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """A scan in one pass, or in chunks where a target has many programs to run; doubling needs to know the size."""
    if plan.serial_scans:
        return _scan_serially(node)
    in_chunks = _scan_exclusively(match_shifted(uses, node), plan) or _scan_in_chunks(node, node.args[0], plan)
    symbolic = isinstance(get_shape(node.args[0])[node.attrs["axis"]], Dim)
    return in_chunks or (_scan_serially(node) if symbolic else None)


@library_lowerings(shape.gather)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """A scan from the last element on, where both its operand and its result are flipped."""
    joined = uses.find(node.args[0], shape.concatenate)
    if joined is not None and uses.count_uses(joined.out) == 1 and is_flip(uses, node):
        along = node.attrs["axis"] == joined.attrs["axis"]
        return _scan_exclusively(match_preceded(uses, joined, flipped=True), plan) if along else None
    scan = uses.find(node.args[0], *SCANS)
    source = uses.find(scan.args[0], shape.gather) if scan is not None else None
    if source is None or plan.serial_scans or uses.count_uses(node.args[0]) > 1:
        return None
    axis = scan.attrs["axis"]  # type: ignore[union-attr]
    if any(n.attrs["axis"] != axis or not is_flip(uses, n) for n in (node, source)):
        return None
    return _scan_in_chunks(scan, source.args[0], plan, reverse=True)  # type: ignore[arg-type]


@library_lowerings(shape.concatenate)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """An exclusive scan: the neutral number before that of all elements but the last one."""
    return _scan_exclusively(match_preceded(uses, node), plan)


def _scan_exclusively(found: ExclusiveScan | None, plan: LoweringPlan) -> LibraryLowering | None:
    if found is None or plan.serial_scans:
        return None
    return _scan_in_chunks(found.scan, found.source, plan, found.reverse, found.initial)


def _scan_in_chunks(
    node: Node, x: Value, plan: LoweringPlan, reverse: bool = False, initial: Any = None
) -> LibraryLowering | None:
    """A scan of `x` in chunks: from the last element on if `reverse`, exclusive if it has an `initial` number."""
    type, out = get_tensor_type(x), get_tensor_type(node.out)
    sizes, at = get_shape(x), node.attrs["axis"] + len(get_shape(x))
    if plan.parallel is None or 0 in sizes or (isinstance(sizes[at], int) and sizes[at] <= MAX_DOUBLED):
        return None
    if type.policy is not None or out.policy is not None:
        return None
    folded = (math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :]))
    combine = SCANS[node.op]
    state = _find_state(combine, type, out.dtype)

    def scan(x: Tensor) -> Tensor:
        found = running_sums(shape.reshape(x, shape=folded), state, out.dtype, combine, reverse, initial)
        return shape.reshape(found, shape=sizes)

    return LibraryLowering((x,), scan)


@library_lowerings(scatter_add)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """Exact sums of few numbers, or those of the sorted updates, where a target has many programs to run; else one
    update after the other."""
    x, places, _ = node.args
    sizes, at = get_shape(x), node.attrs["axis"] + len(get_shape(x))
    count = math.prod(get_shape(places))
    rest = math.prod(sizes[at + 1 :])
    serial, dtype = plan.parallel is None, get_tensor_type(x).dtype
    if not _has_many_pairs(node, serial) or dtype.bits < 8 or dtype == bool_:
        return None
    folded = _fold_sizes(node) if not serial else (0, 0, 0)
    if serial or is_unsorted(folded, int(count)):
        return _lower_in_place(node, uses, "add", serial)
    if int(sizes[at]) <= MAX_SUMMED_ROWS and int(rest) > MAX_WIDTH:
        return None  # a sum of the chosen updates for each row: one program would walk the many updates of a row
    exact = is_exact(dtype, folded, int(count))
    number = _find_number(uses, node.args[2]) if exact and not dtype.is_float else None
    if number is not None and folded[0] == folded[2] == 1 and has_few_numbers(folded[1], int(count)):
        return LibraryLowering(node.args[:2], partial(_count_places, node, int(number)))

    def add(x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
        return add_exactly(x, places, updates) if exact else combine_sorted(x, places, updates, "add")

    return _lower_folded(node, add)


def _find_number(uses: UseDef, value: Value) -> Any:
    """The number that all elements of a tensor are, or None."""
    while (node := uses.find(value, basic.broadcast_to, shape.reshape)) is not None:
        value = node.args[0]
    found = uses.find(value, basic.full)
    return None if found is None else found.attrs["value"]


def _count_places(node: Node, number: int, x: Tensor, places: Tensor) -> Tensor:
    """A scatter that adds one number everywhere."""
    at = node.attrs["axis"] + x.ndim
    flat = shape.check_index(shape.reshape(places, shape=(-1,)), size=x.shape[at], along=at)
    return shape.reshape(count_exactly(shape.reshape(x, shape=(-1,)), flat, number), shape=x.shape)


def _fold_sizes(scatter: Node) -> tuple[int, int, int]:
    """The sizes [L, N, R] of the operand of a scatter along N, which are static."""
    sizes = tuple(map(int, get_shape(scatter.args[0])))
    at = scatter.attrs["axis"] + len(sizes)
    return math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])


def _lower_folded(node: Node, function: Callable[..., Tensor]) -> LibraryLowering:
    return LibraryLowering(node.args, lambda *operands: _on_folded(function, node, True, *operands))


def _lower_in_place(node: Node, uses: UseDef, mode: str, serial: bool = True) -> LibraryLowering:
    """One update after the other, or a program for each of few, which checks each place as it is read: the check of all
    places becomes its own."""
    x, places, updates = node.args
    along = node.attrs["axis"] + len(get_shape(x))
    known = uses.find(places, shape.check_index)
    attrs = known.attrs if known is not None else {"size": get_shape(x)[along], "along": along}
    check = PlaceCheck(Attrs(shape.check_index.complete(attrs)), node.loc if known is None else known.loc)
    way = partial(_update_serially if serial else update_unsorted, mode=mode, check=check)
    operands = (x, known.args[0] if known is not None else places, updates)
    return LibraryLowering(operands, lambda *operands: _on_folded(way, node, False, *operands))


def _has_many_pairs(node: Node, serial: bool) -> bool:
    """Whether a scatter has more pairs of a place and an update than are as fast in its lowering; of symbolic sizes it
    may have, which is for one update after the other alone."""
    x, places, updates = node.args
    size, count = get_shape(x)[node.attrs["axis"]], math.prod(get_shape(places))
    if get_tensor_type(x).policy is not None or 0 in (*get_shape(x), *get_shape(updates), count):
        return False
    if symbol_names((*get_shape(x), count)):
        return serial
    return size * count > MAX_DENSE_PAIRS and max(int(size), int(count)) < row_sorting.INDEX_MASK


def _on_folded(
    function: Callable[..., Tensor], node: Node, checks: bool, x: Tensor, places: Tensor, updates: Tensor
) -> Tensor:
    """A function of an operand [L, N, R], places [P], checked or not, and updates [L, P, R], applied to a scatter's."""
    at, count = node.attrs["axis"] + x.ndim, math.prod(places.shape)
    lead, rest = math.prod(x.shape[:at]), math.prod(x.shape[at + 1 :])
    flat = shape.reshape(places, shape=(count,))
    flat = shape.check_index(flat, size=x.shape[at], along=at) if checks else flat
    more = shape.reshape(updates, shape=(lead, count, rest))
    found = function(shape.reshape(x, shape=(lead, x.shape[at], rest)), flat, more)
    return shape.reshape(found, shape=x.shape)


@library_lowerings(scatter)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """One update after the other; where a target has many programs to run, through atomic maxima of integers, and
    products of the sorted updates."""
    dtype, mode, serial = get_tensor_type(node.args[0]).dtype, node.attrs["mode"], plan.parallel is None
    if not _has_many_pairs(node, serial) or (dtype.bits < 8 and dtype != bool_):
        return None
    if mode == "set" and not serial and is_unsorted(_fold_sizes(node), math.prod(map(int, get_shape(node.args[1])))):
        return _lower_in_place(node, uses, mode, serial)
    ways = {"set": _replace_last, "multiply": _multiply_sorted, "min": _take_least, "max": _take_largest}
    return _lower_in_place(node, uses, mode) if serial else _lower_folded(node, ways[mode])


def _update_serially(x: Tensor, places: Tensor, updates: Tensor, mode: str, check: PlaceCheck) -> Tensor:
    if mode == "multiply":
        return _multiply(x, places, updates, partial(update_in_place, check=check))
    if mode == "add" and x.dtype.is_float and x.type.accumulate != x.dtype:  # rounded once
        wide = x.type.accumulate
        found = update_in_place(cast(x, dtype=wide), places, cast(updates, dtype=wide), mode, check)
        return cast(found, dtype=x.dtype)
    if x.dtype == bool_:
        found = _update_serially(cast(x, dtype=uint8), places, cast(updates, dtype=uint8), mode, check)
        return cast(found, dtype=bool_)
    return update_in_place(x, places, updates, mode, check)


def _multiply(x: Tensor, places: Tensor, updates: Tensor, combine: Callable[..., Tensor]) -> Tensor:
    """The product of each place's updates, and then with `x`, as the lowering has it; narrow types are rounded once."""
    wide = uint8 if x.dtype == bool_ else x.type.accumulate if x.dtype.is_float else x.dtype
    ones = full(shape=x.shape, value=1, dtype=wide)
    factors = combine(ones, places, cast(updates, dtype=wide), "multiply")
    return cast(cast(x, dtype=wide) * factors, dtype=x.dtype)


def _multiply_sorted(x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    return _multiply(x, places, updates, combine_sorted)


def _take_least(x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    return take_extremes(x, places, updates, lowest=True)


def _take_largest(x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    return take_extremes(x, places, updates, lowest=False)


def _replace_last(x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    return pick_updates(x, find_last_updates(places, int(x.shape[1])), updates, axis=-2)


# Up to this many elements comparing all pairs is as fast as a network, and can be fused.
MAX_PAIRED = 32
MAX_CHOSEN = 0.5  # of a row: a sort costs little more than to choose so many elements and sort them
MAX_WALKED = 1 << 16  # elements of a row, for each row, that one program of many walks digit by digit
MAX_ROUND_ROW = 2048  # elements of a row from which on a program finds a bound of the first few (measured)
MAX_ROUND_WORK = 1 << 15  # elements that all rounds of a minimum read of a longer row, in the time of that


@library_lowerings(sorting.argsort)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """A sort of rows, by digits where a target has many programs to run, unless the host sorts or only the first places
    are taken."""
    wide = plan.parallel is not None and _has_wide_rows(node)
    if plan.host_sort is not None or not (wide or _has_row_keys(node)) or _is_only_selected(node, uses, plan):
        return None
    axis, descending = node.attrs["axis"], node.attrs["descending"]
    by_digits = plan.parallel is not None and not wide and are_digits_faster(get_tensor_type(node.args[0]), axis)
    sort = sort_words if wide else sort_by_digits if by_digits else row_sorting.sort_places
    return LibraryLowering(node.args, lambda x: row_sorting.on_rows(x, axis, lambda rows: sort(rows, descending)))


@library_lowerings(shape.slice_)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """The first places of a sort (top-k), or one of its places (medians), by selection."""
    source = uses.get(node.args[0])
    if source is None or not _is_selected(node, uses, plan) or not _is_only_selected(source, uses, plan):
        return None
    axis, descending = source.attrs["axis"], source.attrs["descending"]
    first, count = _get_places(node, axis)
    size, few = int(get_shape(source.args[0])[axis]), first == 0 and count <= row_sorting.MAX_SELECTED
    short = size < MAX_ROUND_ROW or count * size <= MAX_ROUND_WORK
    in_rounds = few and short and _has_row_keys(source)

    def select(rows: Tensor) -> Tensor:
        if first > 0:
            chunk = row_selection.CHUNK if plan.parallel is None else row_selection.find_wide_chunk(rows)
            return row_selection.select_place(rows, first, descending, chunk)
        if plan.parallel is not None and _has_wide_rows(source):
            if fits_group(size):
                order = sort_words(rows, descending)
                return shape.slice_(order, start=(0, 0), stop=(order.shape[0], count), step=(1, 1))
            chunk = row_selection.find_wide_chunk(rows)
            return row_selection.select_front(rows, count, descending, chunk, chunk)
        if plan.parallel is not None:
            return row_selection.select_in_parallel(rows, count, descending)
        if in_rounds:
            return row_sorting.select_places(rows, count, descending)
        return row_selection.select_front(rows, count, descending)

    return LibraryLowering(source.args, lambda x: row_sorting.on_rows(x, axis, select))


@library_lowerings(contractions.dot)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """A convolution that reads its windows in place; where a target has tensor cores, one as an implicit GEMM, a large
    or thin f32 product split into bf16, and a product of narrower types with few results or unaligned rows cut along
    its contraction or of copied operands."""
    types = [get_tensor_type(v) for v in (*node.args, node.out)]
    dtype, out = types[0].dtype, types[2].dtype
    if types[1].dtype != dtype or any(t.policy is not None for t in types):
        return None
    same, plain = out == dtype, out == dtype == f32
    if plan.indirect_windows and same and dtype in (f32, f64):
        indirect = match_indirect(uses, *node.args) or match_window_gradient(uses, node)
        if indirect is not None:
            return LibraryLowering(indirect.operands, indirect.compute)
    if not plan.tensor_cores:
        deep = match_deep_product(uses, node.args[0], node.args[1], out, plan) if plan.product_pack else None
        return None if deep is None else LibraryLowering((deep.left.source, deep.right.source), deep.compute)
    if plain and (shifted := match_weight_gradient(uses, node, plan)) is not None:
        return LibraryLowering(shifted.operands, shifted.compute)
    if plain and (gathered := match_gathered(uses, *node.args)) is not None:
        return LibraryLowering((gathered.product.windows.image, gathered.product.weights), gathered.compute)
    floats = same and dtype in (f32, bf16, f16)
    if floats and (windows := match_windows(uses, node.args[0], node.args[1], plan.wave_blocks)) is not None:
        return LibraryLowering((windows.windows.image, windows.weights), windows.compute)
    if floats and (direct := match_direct(uses, *node.args)) is not None:
        return LibraryLowering((direct.product.windows.image, direct.product.weights), direct.compute)
    found: ThinProduct | SplitProduct | ChunkedProduct | JoinedProduct | None
    if same and (rows := match_row_product(uses, node.args[0], node.args[1])) is not None:
        return LibraryLowering((rows.vectors, rows.matrix.source), rows.compute)
    found = (match_thin_product(uses, *node.args) or match_split_product(uses, *node.args)) if plain else None
    found = found or match_chunked_product(uses, node.args[0], node.args[1], out, plan.wave_blocks)
    return None if found is None else LibraryLowering((found.left.source, found.right.source), found.compute)


@simplified_lowerings(shape.concatenate)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """The sums that are the gradient of a depthwise convolution's weights, where many programs run side by side."""
    found = match_shifted_sums(uses, node) if plan.parallel is not None else None
    return None if found is None else LibraryLowering(found.operands, found.compute)


library_operands[reduce.sum] = contractions.dot


@library_lowerings(reduce.sum)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """The gradient of weights of a convolution, which reads its windows in place; on tensor cores as products with a
    shifted image, and other sums of products."""
    found = match_window_gradient(uses, node) if plan.indirect_windows else None
    if found is not None:
        return LibraryLowering(found.operands, found.compute)
    shifted = match_weight_gradient(uses, node, plan) if plan.tensor_cores else None
    if shifted is not None:
        return LibraryLowering(shifted.operands, shifted.compute)
    summed = match_summed_product(uses, node) if plan.tensor_cores else None
    return None if summed is None else LibraryLowering((summed.left.source, summed.right.source), summed.compute)


@library_lowerings(reduce.argmin, reduce.argmax)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """The place of an extreme along an outer axis, whose threads exchange pairs of a value and a place only at the end,
    and of few long rows by parts; on a processor the extreme of whole rows first.

    A kernel that carries pairs along the axis would exchange both in each iteration.
    """
    if plan.parallel is None:
        return LibraryLowering(node.args, lambda x: find_in_columns(node, x)) if crosses_rows(node, uses) else None
    out, axis = get_tensor_type(node.out), find_outer_axis(node)
    if divides_rows(node, plan.parallel):
        return LibraryLowering(node.args, lambda x: find_in_parts(node, x))
    if axis is None:
        return None

    def find(x: Tensor) -> Tensor:
        places = find_extreme_places(x, axis, node.op is reduce.argmin)
        return cast(shape.reshape(places, shape=out.shape), dtype=out.dtype)

    return LibraryLowering(node.args, find)


@library_lowerings(decompositions.solve, decompositions.cholesky)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """Small matrices, some in each program, where a target has many programs to run; on a processor a batch of the
    smallest, one in each lane; else the host's LAPACK."""
    sizes, dtype, solves = get_shape(node.out), get_tensor_type(node.out).dtype, node.op is decompositions.solve
    plain = all(get_tensor_type(v).policy is None for v in (*node.args, node.out))
    if symbol_names(sizes) or 0 in sizes or not plain:
        return None
    *outer, side, width = (int(n) for n in sizes)
    if plan.parallel is None:
        if fits_lanes(dtype, math.prod(outer), side, width if solves else None, plan.matrix_steps):
            return LibraryLowering(node.args, solve_lanes if solves else factor_lanes)
        most, lanes = plan.matrix_side // (2 if solves else 1), count_lanes(dtype)  # rows are exchanged
        if not fits_columns(dtype, math.prod(outer), most, side, width):
            return None
        if solves:
            return LibraryLowering(node.args, lambda a, b: solve_lanes(a, b, solve_columns, lanes))
        return LibraryLowering(node.args, lambda x: factor_lanes(x, factor_columns, lanes))
    return LibraryLowering(node.args, solve_batch if solves else factor_batch) if is_small(dtype, side, width) else None


@library_lowerings(decompositions.qr)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """Small matrices, some in each program, where a target has many programs to run; on a processor a batch of the
    smallest, one in each lane; else the host's LAPACK."""
    type = get_tensor_type(node.args[0])
    if type.policy is not None or symbol_names(type.shape) or 0 in type.shape:
        return None
    if plan.parallel is not None:
        small = type.dtype == f32 and is_small(type.dtype, *(int(n) for n in type.shape[-2:]))
        return LibraryLowering(node.args, orthogonalise_batch) if small else None
    if fits_orthogonal_lanes(type, plan.matrix_steps):
        return LibraryLowering(node.args, orthogonalise_lanes)
    *outer, rows, columns = (int(n) for n in type.shape)
    if type.dtype != f32 or not fits_columns(type.dtype, math.prod(outer), plan.matrix_side, rows, columns):
        return None
    return LibraryLowering(node.args, lambda x: orthogonalise_lanes(x, orthogonalise_columns))


def _find_state(combine: str, type: TensorType, result: DType) -> DType:
    """The type in which a scan combines elements, whose bits are those of an integer."""
    if combine not in ("sum", "prod") and result == bool_:
        return int32
    return type.accumulate if type.dtype.is_float else result


MIN_SCANNED = 16  # shorter rows are scanned by doubling, which can be fused


def _scan_serially(node: Node) -> LibraryLowering | None:
    x, type, axis = node.args[0], get_tensor_type(node.out), node.attrs["axis"]
    sizes = get_shape(x)
    plain = type.policy is None and get_tensor_type(x).policy is None
    if not plain or (isinstance(sizes[axis], int) and sizes[axis] < MIN_SCANNED):
        return None
    if 0 in sizes:  # no elements
        return LibraryLowering(node.args, lambda x: cast(x, dtype=type.dtype))
    at, combine = axis % len(sizes), SCANS[node.op]
    wide = _find_state(combine, type, type.dtype)
    return LibraryLowering(node.args, lambda x: cast(row_scans.scan_axis(x, at, combine, wide), dtype=type.dtype))


@library_lowerings(reduce.prod)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """The product of a symbolic number of elements, for which a tree of halves has no static depth."""
    type, sizes, axes = get_tensor_type(node.out), get_shape(node.args[0]), node.attrs["axis"]
    count = math.prod(sizes[a] for a in axes)
    if isinstance(count, int) or type.policy is not None or get_tensor_type(node.args[0]).policy:
        return None
    wide = type.accumulate if type.dtype.is_float else type.dtype
    kept = [a for a in range(-len(sizes), 0) if a not in axes]

    def multiply(x: Tensor) -> Tensor:
        rows = shape.reshape(shape.permute(x, axes=(*kept, *axes)), shape=(math.prod(sizes[a] for a in kept), count))
        return shape.reshape(cast(row_scans.multiply_axis(rows, wide), dtype=type.dtype), shape=type.shape)

    return LibraryLowering(node.args, multiply)


def _is_only_selected(sort: Node, uses: UseDef, plan: LoweringPlan) -> bool:
    """Whether nothing reads a sort but slices that selection computes."""
    readers = uses.users(sort.out)
    return len(readers) == uses.count_uses(sort.out) and all(_is_selected(n, uses, plan) for n in readers)


def _has_row_keys(node: Node) -> bool:
    """Whether a sort is one of long rows of static sizes, whose elements have keys."""
    return _has_long_rows(node) and row_sorting.has_keys(get_tensor_type(node.args[0]).dtype, _count_row(node))


def _has_wide_rows(node: Node) -> bool:
    """Whether a sort is one of long rows of static sizes, whose elements have 64 bits."""
    return _has_long_rows(node) and get_tensor_type(node.args[0]).dtype.bits == 64


def _has_long_rows(node: Node) -> bool:
    """Whether a sort is one of rows of static sizes that are too long to compare all pairs."""
    sizes = get_shape(node.args[0])
    return not symbol_names(sizes) and 0 not in sizes and MAX_PAIRED < _count_row(node) < row_sorting.INDEX_MASK


def _count_row(sort: Node) -> int:
    return int(get_shape(sort.args[0])[sort.attrs["axis"]])


def _get_places(node: Node, axis: int) -> tuple[int, int]:
    """The first place that a slice takes along an axis, and their number."""
    first = tuple(node.attrs["start"])[axis]
    return int(first), int(get_shape(node.out)[axis])


def _is_selected(node: Node, uses: UseDef, plan: LoweringPlan) -> bool:
    """Whether a slice takes so few places from the front of a sort, or one of its places, that they are selected."""
    source = uses.get(node.args[0]) if node.op is shape.slice_ else None
    if source is None or source.op is not sorting.argsort or not _has_long_rows(source):
        return False
    sizes, axis, size = get_shape(node.args[0]), source.attrs["axis"], _count_row(source)
    (first, count), whole = _get_places(node, axis), list(get_shape(node.out))
    whole[axis] = sizes[axis]
    if tuple(whole) != sizes or not count or any(n != 1 for n in node.attrs["step"]) or (first and count > 1):
        return False
    if plan.parallel is None:
        return plan.host_sort is not None and count <= size * MAX_CHOSEN
    wide = _has_wide_rows(source)
    if not (wide or _has_row_keys(source)):
        return False
    walked = size <= MAX_WALKED * (math.prod(sizes) // size) and count <= min(row_sorting.MAX_CHUNK, size * MAX_CHOSEN)
    return walked or (
        not wide and not first and (count <= row_sorting.MAX_SELECTED or row_selection.has_key_bound(size, count))
    )

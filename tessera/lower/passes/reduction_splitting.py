"""Reduction splitting (rfactor): long reductions with few results become partial results and their combination.

A kernel gives each result to one program. Where that leaves most of a GPU idle, or lets a processor walk few columns
of long rows, the reduced axis is folded into parts of equal length, which programs reduce side by side, and a second
reduction combines the partial results. The tree depends on the sizes alone, so equal inputs give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tessera.core.symbolic_dim import Size, round_up, symbol_names
from tessera.core.types import DType, TensorType
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.lowering_plan import LEAST_LANES, NARROW_LANES, LoweringPlan
from tessera.lower.passes.canonicalisation import COMBINERS
from tessera.lower.passes.product_rewrites import is_turned
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.reduce import find_neutral_element
from tessera.ops.tensor.shape import pad, reshape

Axes = tuple[int, ...]  # counted from the end
KINDS = {reduce.sum: "sum", reduce.max: "max", reduce.min: "min"}
MIN_SERIAL_ELEMENTS = 1 << 17  # a program that reduces fewer costs less than a second launch
MIN_PART_ELEMENTS = 1 << 14  # of a part
# Reductions of so few elements to several results are not split where programs of few results read so few.
SMALL_REDUCTION, MAX_NARROW_ELEMENTS = 1 << 23, 1 << 15
MAX_EPILOGUE = 16  # ops between a product and its result in memory
MAX_COMPUTED_AGAIN = 4  # elementwise ops that are computed again rather than read from memory
PART_MULTIPLE = 64  # elements: vector loads of every type are aligned at its multiples
MAX_CHAIN = 64  # pointwise ops that the kernels of all parts compute
REARRANGEMENTS = (
    shape.permute, shape.slice_, shape.pad, shape.concatenate, shape.gather, shape.strided_view, basic.broadcast_to,
)  # fmt: skip
MAX_STRETCH, MAX_CHAIN_STRETCH = 2.0, 1.25  # a rest of a chain of pointwise ops costs a launch alone
SMALL_ELEMENTS = 1 << 24  # reductions of so few take little longer than a launch


@dataclass(frozen=True)
class AxisSplit:
    """An axis (from the end) in `parts` of `length` elements; `rest` elements follow them."""

    axis: int
    parts: int
    length: int
    rest: int


def split_reductions(function: Function, plan: LoweringPlan) -> Function:
    """Split the sums, maxima and minima that would leave most of the programs of a target without work."""
    if plan.reduction_parts is None and plan.parallel is None:
        return function
    patterns, uses = RewritePatterns("reduction splitting"), UseDef(function)

    @patterns(*COMBINERS)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        value, axes = node.args[0], node.attrs["axis"]
        again = plan.parallel is not None and uses.count_uses(value) > 1
        held = _compute_again(rewriter, uses, value, args[0]) if again else args[0]
        chain, sizes = find_flat_chain(uses, value) if held is args[0] else None, get_shape(value)
        if chain is not None:
            sizes, axes = _merge_reduced_axes(sizes, axes)
        along = _reads_along_sum(uses, node)
        small = math.prod(s for s in sizes if isinstance(s, int)) <= SMALL_ELEMENTS
        stretch = MAX_STRETCH if chain is None or small else MAX_CHAIN_STRETCH
        merged = find_merged_axes(uses, value) if chain is None else {}
        split = choose_split(replace(get_tensor_type(value), shape=sizes), axes, plan, along, stretch, merged)
        operand = SplitOperand(rewriter, value, held, sizes, chain)
        return (_reduce_in_parts(node, operand, axes, split, value in uses).data,) if split else None

    return rewrite_function(function, patterns)


def _compute_again(rewriter: Rewriter, uses: UseDef, value: Value, held: Value) -> Value:
    """A value that others read too, computed for a reduction alone, if that takes few ops: memory does not hold it.

    A split reduction is a kernel of its own, which would read it from memory that another kernel has written.
    """
    nodes = _list_pointwise(uses, value)
    if nodes is None or sum(n.op.is_transcendental for n in nodes) > 1:
        return held
    return _copy_nodes(rewriter, {n.out: n for n in nodes}, value, {})


def _copy_nodes(rewriter: Rewriter, nodes: Mapping[Value, Node], value: Value, made: dict[Value, Value]) -> Value:
    """Copies of the nodes that compute a value; what they read, and no node computes, is marked as recomputed."""
    if value not in made:
        node = nodes.get(value)
        if node is None:
            made[value] = rewriter.add(basic.recompute, rewriter.new(value))
        else:
            args = [_copy_nodes(rewriter, nodes, v, made) for v in node.args]
            made[value] = rewriter.add(node.op, *args, **node.attrs)
    return made[value]


def _list_pointwise(uses: UseDef, value: Value) -> list[Node] | None:
    """The nodes that compute a value from memory and from results of reductions; None if they are none or many."""
    found: list[Node] = []
    work = [value]
    while work:
        node = uses.get(work.pop())
        if node is None or node in found or not (node.op.pointwise or node.op in (basic.broadcast_to, basic.full)):
            continue
        if node.op is basic.cast and node.args[0].type.dtype.bits > node.out.type.dtype.bits:  # type: ignore[union-attr]
            continue  # memory holds the narrow value
        found.append(node)
        work += node.args
    computed = sum(node.op.pointwise for node in found)
    return found if 0 < computed <= MAX_COMPUTED_AGAIN else None


@dataclass(frozen=True)
class SplitOperand:
    """The operand of a reduction, adjacent reduced axes merged; views of it move to the leaves of its pointwise ops."""

    rewriter: Rewriter
    value: Value
    held: Value  # what it has become
    sizes: tuple[Size, ...]
    chain: frozenset[Value] | None  # the values that are computed again; None: the operand is read as it is

    def view(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """What a view, a function of the merged operand, gives."""
        return self._visit(self.value, change, {}) if self.chain else change(self._merge(self.held))

    def _visit(self, v: Value, change: Callable[[Tensor], Tensor], known: dict[Value, Tensor]) -> Tensor:
        if v not in self.chain:  # type: ignore[operator]
            return change(self._merge(self.rewriter.new(v)))
        if v not in known:
            known[v] = self._compute(self.rewriter.uses[v], change, known)
        return known[v]

    def _compute(self, node: Node, change: Callable[[Tensor], Tensor], known: dict[Value, Tensor]) -> Tensor:
        if node.op is shape.reshape:
            return self._visit(node.args[0], change, known)
        if node.op.pointwise:
            args = [self._visit(v, change, known).data for v in node.args]
            return Tensor(self.rewriter.add(node.op, *args, **node.attrs))
        scalars = [reshape(Tensor(self.rewriter.new(v)), shape=()).data for v in node.args]
        return change(Tensor(self.rewriter.add(node.op, *scalars, **{**node.attrs, "shape": self.sizes})))

    def _merge(self, v: Value) -> Tensor:
        return Tensor(v) if get_shape(v) == self.sizes else reshape(Tensor(v), shape=self.sizes)


def _merge_reduced_axes(sizes: tuple[Size, ...], axes: Axes) -> tuple[tuple[Size, ...], Axes]:
    """The sizes with adjacent reduced axes as one, and the axes: parts of that may begin within a row.

    Rows of odd lengths begin at any address, but their parts then begin at aligned ones.
    """
    merged: list[Size] = []
    reduced: list[int] = []
    for a in range(-len(sizes), 0):
        if a in axes and a - 1 in axes and merged:
            merged[-1] = merged[-1] * sizes[a]
        else:
            merged.append(sizes[a])
            reduced += [len(merged) - 1] if a in axes else []
    return tuple(merged), tuple(at - len(merged) for at in reduced)


def find_flat_chain(uses: UseDef, value: Value) -> frozenset[Value] | None:
    """The pointwise ops and reshapes that compute a value from memory of its size, so that rows may be cut anywhere.

    None where an element depends on others. Where several ops use an expensive result, or one that the epilogue of a
    product computes, it counts as memory.
    """
    chain: set[Value] = set()
    producer = uses.get(value)
    block = None if producer is None else uses.block_of(producer)
    return frozenset(chain) if _extend_chain(uses, value, block, chain) else None


def _extend_chain(uses: UseDef, v: Value, block: Block | None, chain: set[Value]) -> bool:
    """Add a value of a block, and what computes it, to a chain; whether its rows may be cut anywhere."""
    node = uses.get(v)
    if node is None or v in chain or uses.block_of(node) is not block:
        return True
    if uses.count_uses(v) > 1 and (node.op.is_transcendental or _ends_product(uses, v)):
        return True
    if node.op is shape.reshape:
        chain.add(v)
        return _extend_chain(uses, node.args[0], block, chain)
    if node.op.pointwise:
        chain.add(v)
        return len(chain) <= MAX_CHAIN and all(_extend_chain(uses, x, block, chain) for x in node.args)
    if node.op is basic.full or (node.op is basic.broadcast_to and all(n == 1 for n in get_shape(node.args[0]))):
        chain.add(v)
        return True
    return node.op not in REARRANGEMENTS


def _ends_product(uses: UseDef, value: Value) -> bool:
    """Whether pointwise ops and reshapes, each with one use, compute a value from a matrix product or a kernel."""
    node = uses.get(value)
    for _ in range(MAX_EPILOGUE):
        if node is None or not (node.op.pointwise or node.op is shape.reshape):
            break
        made = [
            n
            for x in node.args
            if (n := uses.get(x)) and n.op not in (basic.full, basic.broadcast_to) and uses.count_uses(x) == 1
        ]
        node = made[0] if made else None
    return node is not None and node.op in (contractions.dot, control_flow.launch)


def find_merged_axes(uses: UseDef, value: Value) -> dict[int, tuple[int, ...]]:
    """For each axis, counted from the end, that a reshape has merged of several: the elements of the inner ones, of the
    inner two, and so on. Parts of other lengths are blocks of no slice of what is reshaped, which is then written."""
    node = uses.find(value, shape.reshape)
    if node is None or symbol_names((*get_shape(value), *get_shape(node.args[0]))):
        return {}
    found: dict[int, tuple[int, ...]] = {}
    source = [int(n) for n in get_shape(node.args[0])]  # type: ignore[call-overload]
    for axis in range(-1, -len(get_shape(value)) - 1, -1):
        size, inner, steps = int(get_shape(value)[axis]), 1, []  # type: ignore[call-overload]
        while inner < size and source and size % (inner * source[-1]) == 0:
            inner *= source.pop()
            steps.append(inner)
        if inner != size:
            return found
        found[axis] = tuple(n for n in steps[:-1] if n > 1)
    return found


def choose_split(
    type: TensorType, axes: Axes, plan: LoweringPlan, along: bool, stretch: float,
    merged: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> AxisSplit | None:  # fmt: skip
    """The split of a reduction, or None where it has programs enough, or little work for each.

    `along`: what it reduces lies along memory, though its last axis is another, so that each result is a program.
    Parts without a rest may be `stretch` times as long as others. `merged`: as of `find_merged_axes`.
    """
    most = plan.reduction_parts or plan.parallel
    assert most is not None
    if type.policy is not None or symbol_names(type.shape) or not axes or 0 in type.shape:
        return None
    sizes = [int(n) for n in type.shape]
    most_lanes = plan.widen(math.prod(sizes)) * (plan.result_lanes or plan.lanes)
    programs = _count_programs(sizes, axes, 1 if along else plan.fit_lanes(sizes[-1], most_lanes))
    if plan.power_of_two_tiles and not along and _is_narrowed(sizes, axes, most):
        return None
    each = math.prod(sizes) // programs
    parts = min(most // programs, each // MIN_PART_ELEMENTS)
    axis = max(axes, key=lambda a: (sizes[a], -a))
    if each < MIN_SERIAL_ELEMENTS or parts < 2 or sizes[axis] < 2 * parts:
        return None
    return _divide_axis(axis, sizes[axis], parts, stretch, merged.get(axis, ()))


def _is_narrowed(sizes: Sequence[int], axes: Axes, most: int) -> bool:
    """Whether programs of fewer results along memory do: enough of them read long runs, or each reads little."""
    if _count_programs(sizes, axes, NARROW_LANES) >= most // 2:
        return True
    each = math.prod(sizes) // _count_programs(sizes, axes, LEAST_LANES)
    return each <= MAX_NARROW_ELEMENTS and math.prod(sizes) <= SMALL_REDUCTION


def _count_programs(sizes: Sequence[int], axes: Sequence[int], lanes: int) -> int:
    """The programs of a reduction: one for each result, or for `lanes` of them along the contiguous axis."""
    rank = len(sizes)
    kept = [a for a in range(-rank, 0) if a not in axes]
    lane = next((a for a in range(-1, -rank - 1, -1) if sizes[a] > 1), -1)
    count = math.prod(sizes[a] for a in kept)
    return count if lane in axes else count // sizes[lane] * -(-sizes[lane] // lanes)


def _divide_axis(axis: int, size: int, parts: int, stretch: float, merged: Sequence[int] = ()) -> AxisSplit:
    """About so many parts of an axis: without a rest if a length near to that divides the size, of whole `merged` axes.

    Parts of the last axis begin at a multiple of so many elements, for vector loads.
    """
    step = PART_MULTIPLE if axis == -1 and size >= parts * PART_MULTIPLE else 1
    length = round_up(-(-size // parts), step)
    even = [n for n in range(length, min(int(stretch * length), size // 2) + 1, step) if size % n == 0]
    whole = [n for n in even if _fits_merged(n, merged)]
    if merged and not whole:  # rather than aligned: other parts are written before they are read
        most = min(int(stretch * length), size // 2)
        whole = [n for n in range(-(-size // parts), most + 1) if size % n == 0 and _fits_merged(n, merged)]
    exact = next(iter((*whole, *even)), None)
    if exact is not None:
        return AxisSplit(axis, size // exact, exact, 0)
    if parts * step <= length:  # one part less is a part too much for the last program: the rest is short
        length -= step
    return AxisSplit(axis, size // length, length, size % length)


def _fits_merged(length: int, merged: Sequence[int]) -> bool:
    """Whether parts of this length are blocks of axes that have been merged."""
    return all(length % m == 0 or m % length == 0 for m in merged)


def _reduce_in_parts(node: Node, operand: SplitOperand, axes: Axes, split: AxisSplit, computed: bool) -> Tensor:
    """The results of a reduction from those of its parts.

    A rest is reduced apart; for values that are `computed` otherwise than by a chain of pointwise ops, and then in two
    kernels, it is filled to a whole part.
    """
    op, sizes, at = node.op, operand.sizes, split.axis + len(operand.sizes)
    type = get_tensor_type(node.args[0])
    wide = type.accumulate if op is reduce.sum and type.dtype.is_float else type.dtype
    size, end = int(sizes[at]), split.parts * split.length
    filled = operand.chain is None and computed and end < size
    extra = -(-split.rest // split.length) if filled else 0

    def whole_parts(x: Tensor) -> Tensor:
        if filled:
            more = [extra * split.length - split.rest if a == at else 0 for a in range(len(sizes))]
            x = pad(x, low=(0,) * len(sizes), high=tuple(more), value=find_neutral_element(KINDS[op], x.dtype))
        x = narrow(x, at, 0, end) if split.rest and not filled else x
        return reshape(x, shape=(*sizes[:at], split.parts + extra, split.length, *sizes[at + 1 :]))

    inner = tuple(a if a >= split.axis else a - 1 for a in axes)
    folded = op(_cast_to(operand.view(whole_parts), wide), axis=inner, keepdims=True)
    total = op(folded, axis=(split.axis - 1,), keepdims=False)
    if split.rest and not filled:
        rest = _cast_to(operand.view(lambda x: narrow(x, at, end, size)), wide)
        total = COMBINERS[op](total, op(rest, axis=axes, keepdims=True))
    return _cast_to(reshape(total, shape=get_shape(node.out)), get_tensor_type(node.out).dtype)


def _cast_to(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype == dtype else cast(x, dtype=dtype)


# Vector products: a matrix product with few rows or columns as a reduction of elementwise products. Such a product
# reads each element of the matrix once or a few times: it is bound by memory, and packing a matrix for a product of
# blocks would cost more than the product.


def _reads_along_sum(uses: UseDef, node: Node) -> bool:
    """Whether a reduction over the last axis but one is that of a vector product with a matrix turned in memory."""
    product = uses.get(node.args[0])
    if product is None or product.op is not elementwise.mul or node.attrs["axis"] != (-2,):
        return False
    return any(is_turned(uses, factor) for factor in product.args)

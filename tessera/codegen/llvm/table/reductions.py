"""Reductions: loops over the reduced axes, in the order of memory, that carry vector accumulators, combined in a fixed
order.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from tessera.codegen.contract import get_tensor_type, is_special_policy, static_shape
from tessera.codegen.llvm.passes.bufferisation import is_block
from tessera.codegen.llvm.table.emission import format_call, statement_rule
from tessera.codegen.llvm.table.index_sets import divide_axis, strip_mine
from tessera.codegen.llvm.table.loop_fusion import (
    allocate_block,
    choose_vector_width,
    element_rule,
    emit_element,
    emit_operation,
    emit_pointwise,
    emit_scalar_loops,
    make_ramp_index,
    round_to_storage,
    widen_lane,
)
from tessera.codegen.llvm.table.reduction_combiners import (
    COMBINERS,
    ReductionCombiner,
    ReductionState,
    combine_across_lanes,
    combine_rows,
    combine_tree,
    find_combiner,
)
from tessera.codegen.llvm.text.builder import (
    ZERO_LANE,
    ElementHints,
    LaneIndex,
    LaneKind,
    LaneMemo,
    LaneValue,
    LineSection,
    LoopBody,
    LoopBuilder,
    RegisterType,
    get_element_bytes,
    get_register_type,
)
from tessera.codegen.llvm.text.memory import StridedMemRef, fit_vector_width, store_lane
from tessera.core.types import GLOBAL, RefType, bool_, f32, f64
from tessera.ir.core import Node, Value
from tessera.ir.rules import Op, Rules
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, elementwise, reduce, shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


# The axis of the block at hand that each axis of a value is; None where it is none of them.
AxisMap = tuple[int | None, ...]
# rule(node, axes) gives the axis map of the first operand of a node that moves elements.
movement_rules = Rules("llvm axis map")


def count_gathers(kernel: LlvmKernelContext, v: Value) -> Counter[int]:
    """For each axis of a value of rank > 0, the number of reads that are gathers where lanes run along it.

    A read is none if it is contiguous along the axis, or does not depend on it.
    """
    found: Counter[int] = Counter()
    seen: set[tuple[Value, AxisMap]] = set()
    work: list[tuple[Value, AxisMap]] = [(v, tuple(range(len(static_shape(v.type)))))]
    while work:
        value, axes = work.pop()
        if (value, axes) in seen or not axes or value in kernel.scalars:
            continue
        seen.add((value, axes))
        node = kernel.producers.get(value)
        if value in kernel.buffers or (node is not None and node.op is tile.load):
            found.update(_find_strided_axes(value, axes))
        elif node is not None:
            work += [(x, _map_operand(node, x, axes)) for x in node.args]
    return found


def _find_strided_axes(value: Value, axes: AxisMap) -> list[int]:
    """The axes along which the memory of a value is strided: all but the last of those of more than one element."""
    long = [a for a, n in zip(axes, static_shape(value.type), strict=True) if n != 1]
    return [a for a in long[:-1] if a is not None]


def _map_operand(node: Node, x: Value, axes: AxisMap) -> AxisMap:
    rule = movement_rules.get(node.op)
    if rule is not None:
        return rule(node, axes)  # type: ignore[no-any-return]
    return axes if node.op.pointwise and static_shape(x.type) == static_shape(node.out.type) else ()


@movement_rules(shape.permute)
def _(node, axes):
    order: Sequence[int] = node.attrs["axes"]
    return tuple(axes[order.index(a)] for a in range(len(order)))


@movement_rules(basic.broadcast_to)
def _(node, axes):
    return axes[len(axes) - node.args[0].type.rank :]


@movement_rules(shape.reshape)
def _(node, axes):
    before, after = node.args[0].type.shape, node.out.type.shape
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return ()
    long = iter(a for a, n in zip(axes, after, strict=True) if n != 1)
    return tuple(None if n == 1 else next(long) for n in before)


# Hints: what the elements of a sum allow, and which of its operands stream from memory.


def find_contractible(kernel: LlvmKernelContext, v: Value) -> frozenset[Value]:
    """The sums of which a summed value consists, but for products.

    Differences are no part of it: what cancels exactly by itself would leave the rounding error of a product.
    """
    fused = _list_fused(kernel, v, (elementwise.mul, elementwise.add))
    return frozenset(value for value, node in fused if node.op is elementwise.add)


def find_streamed(kernel: LlvmKernelContext, v: Value) -> frozenset[Value]:
    """The loads of a value that stream: each program reads the next contiguous piece of a large array.

    Only those of a product of several: a processor foresees one plain stream, and fetching it again costs a third.
    """
    loads = [(value, node) for value, node in _list_fused(kernel, v, joined=True) if node.op is tile.load]
    return frozenset(value for value, node in loads if len(loads) > 1 and _is_streamed(node))


def _is_streamed(load: Node) -> bool:
    memory, block = load.args[0].type, load.attrs["shape"]
    if not isinstance(memory, RefType) or memory.space != GLOBAL or not all(isinstance(n, int) for n in memory.shape):
        return False
    first = next((a for a, n in enumerate(block) if n != 1), len(block))
    part, whole = math.prod(block), math.prod(memory.shape)
    contiguous = tuple(block[first + 1 :]) == tuple(memory.shape[first + 1 :])
    return contiguous and part < whole and whole * get_element_bytes(memory.dtype) >= STREAMED_BYTES


STREAMED_BYTES = 1 << 14  # smaller arrays stay in a cache between calls


def _list_fused(
    kernel: LlvmKernelContext, v: Value, through: Sequence[Op] | None = None, joined: bool = False
) -> Iterator[tuple[Value, Node]]:
    """The fused values that a value is computed from, through movements and some pointwise ops (all by default).

    `joined`: also through blocks that are stored as they are computed.
    """
    work, seen = [v], set[Value]()
    while work:
        value = work.pop()
        node = kernel.producers.get(value)
        held = value in kernel.buffers or value in kernel.scalars or (value in kernel.joined and not joined)
        if node is None or value in seen or held:
            continue
        seen.add(value)
        yield value, node
        if node.op in movement_rules or (node.op.pointwise if through is None else node.op in through):
            work += node.args


def find_visited(kernel: LlvmKernelContext, x: Value) -> set[Value]:
    """The values of which a reduction of x computes each element once, where it computes that of x."""
    sizes, found, work = static_shape(x.type), set[Value](), [x]
    if any(len(divide_axis(kernel, n)) > 1 for n in sizes):  # loops of their own are divided where a comparison changes
        return found
    while work:
        v = work.pop()
        node = kernel.producers.get(v)
        if v in found or v in kernel.buffers or node is None or not is_block(v) or static_shape(v.type) != sizes:
            continue
        found.add(v)
        if node.op.pointwise and node.op is not elementwise.where and v.type.dtype != bool_:  # these may skip operands
            work += node.args
    return found


# Emission of reductions.


ACCUMULATOR_COUNT = 4  # independent accumulators hide the latency of an addition
CHEAP_OPS = 16  # of an element that is computed for several rows in one loop body
SHORT_ROW = 2  # registers of a row whose lanes are combined with those of others
LANE_REGISTERS, MAX_LANE_REGISTERS = 4, 8  # of results computed together where lanes have their own; of a whole axis
MANY_REGISTERS = 16  # of a whole axis of cheap results, where there are 32 registers: those of AVX-512


class LlvmReductionEmitter:
    """Emits one reduction: its axes, its combiner and the memory of its results."""

    def __init__(self, kernel: LlvmKernelContext, node: Node) -> None:
        self.kernel, self.node, self.x = kernel, node, node.args[0]
        self.shape = static_shape(self.x.type)
        axis = node.attrs["axis"]
        listed = axis if isinstance(axis, tuple) else (axis,)
        self.reduced = sorted(a % self.x.type.rank for a in listed) if self.shape else []
        count = math.prod(self.shape[a] for a in self.reduced)
        self.combiner: ReductionCombiner = find_combiner(node.op, get_tensor_type(self.x), count)
        self.target: StridedMemRef | None = allocate_block(kernel, node.out) if is_block(node.out) else None
        self.width = choose_vector_width(kernel, *self.combiner.dtypes[:1])
        ops = [n.op for _, n in _list_fused(kernel, self.x) if n.op.pointwise and n.op not in movement_rules]
        self.is_cheap = len(ops) <= CHEAP_OPS
        many = kernel.vector_bytes == 64 and self.is_cheap and not any(op.is_transcendental for op in ops)
        self.most_registers = MANY_REGISTERS if many else MAX_LANE_REGISTERS
        contractible = find_contractible(kernel, self.x) if node.op is reduce.sum else frozenset[Value]()
        same = self.combiner.element == get_tensor_type(self.x).dtype
        self._product = find_product(kernel, self.x) if node.op is reduce.sum and same else None
        self._hints = ElementHints(contractible, find_streamed(kernel, self.x))

    def make_body(
        self, width: int, mask: str | None, before: LineSection | None = None, outer: LaneMemo | None = None
    ) -> LoopBody:
        """A body that computes elements of this reduction."""
        return LoopBody(self.kernel, width, mask, before, outer, self._hints)

    def register_types(self, width: int) -> list[RegisterType]:
        """The register types of a state."""
        return [get_register_type(d, width) for d in self.combiner.dtypes]

    def initial_state(self, width: int) -> ReductionState:
        """The state before any element."""
        return tuple(
            name if width == 1 else f"splat ({t.element} {name})"
            for t, name in zip(self.register_types(width), self.combiner.identity, strict=True)
        )

    def load_state(self, body: LoopBody, index: LaneIndex) -> ReductionState:
        """The state of the elements at an index."""
        t = self.register_types(body.width)
        element = self.combiner.element
        value = widen_lane(body, self.x.type.dtype, element, emit_element(body, self.x, index))
        own = body.broadcast_lane(value, get_register_type(element, body.width))
        names = self.combiner.begin(body.text, body.width, own)
        if len(names) < len(t):
            names = (*names, *(body.broadcast_lane(index[a], t[-1]) for a in self.reduced))
        if body.mask is None:
            return names
        return tuple(
            body.text.let(f"select {kind.truth} {body.mask}, {kind} {x}, {kind} {none}")
            for kind, x, none in zip(t, names, self.initial_state(body.width), strict=True)
        )

    def accumulate(self, body: LoopBody, index: LaneIndex, state: ReductionState) -> ReductionState:
        """A state combined with the elements at an index."""
        if self._product is not None and body.mask is None:
            total = LaneValue(state[0], LaneKind.UNIFORM if body.width == 1 else LaneKind.VARYING)
            return (emit_contracted(body, self._product, total, index).name,)
        return self.combiner.combine(self.kernel.text, body.width, state, self.load_state(body, index))

    def store_result(self, body: LoopBody, index: LaneIndex, state: ReductionState) -> None:
        """Store a result, or bind a scalar one."""
        name, wide = self.combiner.finish(body.text, body.width, state)
        lane = LaneValue(name, LaneKind.INVARIANT if body.width == 1 else LaneKind.VARYING)
        lane = round_to_storage(body, get_tensor_type(self.node.out), wide, lane)
        if self.target is None:
            self.kernel.scalars[self.node.out] = lane.name
            return
        kept = self.node.attrs["keepdims"]
        place = [ZERO_LANE if a in self.reduced else i for a, i in enumerate(index) if kept or a not in self.reduced]
        store_lane(body, self.target, tuple(place), lane)


@statement_rule(*COMBINERS)
def _(kernel, node):
    reduction = LlvmReductionEmitter(kernel, node)
    long = [a for a, n in enumerate(reduction.shape) if n != 1]
    reduced = [a for a in long if a in reduction.reduced]
    kept = [a for a in long if a not in reduction.reduced]
    lanes = _find_lane_axis(reduction, reduced, kept)
    if not reduced or lanes is not None:
        _reduce_outer_axes(reduction, reduced, kept, lanes)
    else:
        _reduce_inner_axes(reduction, reduced, kept)
    if reduction.target is not None:
        kernel.buffers[node.out] = reduction.target


def _find_lane_axis(reduction: LlvmReductionEmitter, reduced: list[int], kept: list[int]) -> int | None:
    """The axis whose results the lanes of a register compute; None where lanes share a result.

    It is the innermost axis, or a longer one along which fewer reads are gathers.
    """
    gathers = count_gathers(reduction.kernel, reduction.x)
    inner = max([*kept, *reduced], default=None)
    best = min(kept, key=lambda a: (gathers[a], -a), default=None)
    if best is None or inner is None:
        return None
    if inner in kept:
        return best if gathers[best] < gathers[inner] else inner
    wide = reduction.shape[best] >= reduction.width // 2
    return best if wide and gathers[best] < gathers[inner] else None


def _reduce_outer_axes(reduction: LlvmReductionEmitter, reduced: list[int], kept: list[int], lanes: int | None) -> None:
    """Reduce over outer axes: each lane computes a result of its own, for several registers at once."""
    outer = [a for a in kept if a != lanes]
    jammed = outer.pop() if outer else None
    emit_scalar_loops(
        reduction.kernel,
        reduction.shape,
        outer,
        [ZERO_LANE] * len(reduction.shape),
        lambda here: _reduce_rows(reduction, reduced, here, jammed, lanes),
    )


def _reduce_rows(
    reduction: LlvmReductionEmitter, reduced: list[int], index: list[LaneValue], jammed: int | None, lanes: int | None
) -> None:
    """The results along an outer axis, several rows of them at a time (unroll and jam): accumulators of few registers
    hide the latency of an addition, and rows share what they read.
    """
    if jammed is None:
        _reduce_into_lanes(reduction, reduced, [index], lanes)
        return
    count = reduction.shape[jammed]
    size = _choose_jammed_rows(reduction, count, lanes)
    whole = count // size * size
    for start, stop, step in ((0, whole, size), (whole, count, 1)):
        if start == stop:
            continue
        with LoopBuilder(reduction.kernel.text, str(start), str(stop), step) as loop:
            places = [reduction.kernel.text.add(loop.index, str(n)) for n in range(step)]
            rows = [[*index[:jammed], LaneValue(place), *index[jammed + 1 :]] for place in places]
            _reduce_into_lanes(reduction, reduced, rows, lanes)


def _choose_jammed_rows(reduction: LlvmReductionEmitter, count: int, lanes: int | None) -> int:
    """How many rows are reduced together: so many that their registers are those of independent accumulators."""
    if not reduction.is_cheap:
        return 1
    length = 1 if lanes is None else reduction.shape[lanes]
    registers = -(-length // fit_vector_width(reduction.width, length))
    return max(1, min(ACCUMULATOR_COUNT // registers, count))


def _reduce_into_lanes(
    reduction: LlvmReductionEmitter, reduced: list[int], rows: Sequence[list[LaneValue]], axis: int | None
) -> None:
    """The results along one axis: groups of registers, then the remainder under a mask."""
    if axis is None:
        _reduce_registers(reduction, reduced, rows, None, [None], 1, None)
        return
    count = reduction.shape[axis]
    width = fit_vector_width(reduction.width, count)
    for start, stop, step, mask in _group_registers(count, width, reduction.most_registers):
        with LoopBuilder(reduction.kernel.text, start, stop, step) as loop:
            places = [reduction.kernel.text.add(loop.index, str(n)) for n in range(0, step, width)]
            _reduce_registers(reduction, reduced, rows, axis, places, width, mask)


def _group_registers(count: int, width: int, most: int) -> list[tuple[str, str, int, str | None]]:
    """The pieces of an axis of results, each of several registers: every piece reads all rows again."""
    whole = count // width
    size = whole if whole <= most else LANE_REGISTERS
    ends = [0, whole // size * size * width, whole * width] if whole else [0]
    groups = [(a, b, min(size * width, b - a)) for a, b in itertools.pairwise(ends) if a < b]
    rest = _strip_mine_from(whole * width, count, width) if count > whole * width else []
    return [*((str(a), str(b), step, None) for a, b, step in groups), *rest]


def _reduce_registers(
    reduction: LlvmReductionEmitter,
    reduced: list[int],
    rows: Sequence[list[LaneValue]],
    axis: int | None,
    places: Sequence[str | None],
    width: int,
    mask: str | None,
) -> None:
    """Reduce into the lanes of some registers, one at each place along an axis of each row."""
    size = len(reduction.combiner.dtypes)

    def list_indices(reduced_at: Sequence[LaneValue] | None = None) -> Iterator[LaneIndex]:
        """The index of each register, with the place in the reduced axes."""
        for row in rows:
            here = [*row] if reduced_at is None else [reduced_at[a] if a in reduced else i for a, i in enumerate(row)]
            for place in places:
                yield tuple(here) if axis is None else make_ramp_index(here, axis, str(place), width)

    def inside(here: Sequence[LaneValue], state: ReductionState) -> ReductionState:
        # A body of its own: what is invariant here may differ between iterations of the reduced axis.
        body, names = reduction.make_body(width, mask), list[str]()
        for n, at in enumerate(list_indices(here)):
            names += reduction.accumulate(body, at, state[n * size : (n + 1) * size])
        return tuple(names)

    start = reduction.initial_state(width) * (len(rows) * len(places))
    state = _emit_carrying_loops(reduction, reduction.shape, reduced, list(rows[0]), start, width, inside)
    for n, at in enumerate(list_indices()):
        body = LoopBody(reduction.kernel, width, mask)
        reduction.store_result(body, at, state[n * size : (n + 1) * size])


def _reduce_inner_axes(reduction: LlvmReductionEmitter, reduced: list[int], kept: list[int]) -> None:
    """Reduce axes that include the innermost one: one result at a time, or several where their rows are short."""
    size = _choose_combined_rows(reduction, reduced, kept)
    emit_scalar_loops(
        reduction.kernel,
        reduction.shape,
        kept if size == 1 else kept[:-1],
        [ZERO_LANE] * len(reduction.shape),
        lambda index: (
            _reduce_inner_axis(reduction, reduced, index)
            if size == 1
            else _reduce_short_rows(reduction, reduced[0], index, kept[-1], size)
        ),
    )


def _choose_combined_rows(reduction: LlvmReductionEmitter, reduced: list[int], kept: list[int]) -> int:
    """How many rows have their lanes combined together: to combine those of one takes longer than a short row."""
    if len(reduced) > 1 or not kept or not reduction.is_cheap:
        return 1
    length, count = reduction.shape[reduced[0]], reduction.shape[kept[-1]]
    width = fit_vector_width(reduction.width, length)
    return min(width, 1 << count.bit_length() - 1) if length <= SHORT_ROW * width else 1


def _reduce_short_rows(
    reduction: LlvmReductionEmitter, reduced: int, index: list[LaneValue], rows: int, size: int
) -> None:
    """The results along an axis, `size` at a time: each is one register, and their lanes are combined together."""
    text, count = reduction.kernel.text, reduction.shape[rows]
    width, whole = fit_vector_width(reduction.width, reduction.shape[reduced]), count // size * size
    with LoopBuilder(text, "0", str(whole), size) as loop:
        states = []
        for n in range(size):
            here = [*index]
            here[rows] = LaneValue(text.add(loop.index, str(n)))
            states.append(_reduce_row(reduction, here, reduced, width, reduction.initial_state(width)))
        state = combine_rows(text, reduction.combiner, width, states)
        reduction.store_result(LoopBody(reduction.kernel, size), make_ramp_index(index, rows, loop.index, size), state)
    if whole < count:
        rest = [*index]
        with LoopBuilder(text, str(whole), str(count)) as loop:
            rest[rows] = LaneValue(loop.index)
            _reduce_inner_axis(reduction, [reduced], rest)


def _reduce_inner_axis(reduction: LlvmReductionEmitter, reduced: list[int], index: list[LaneValue]) -> None:
    """Reduce over axes that include the innermost one: lanes are combined at the end."""
    axis, text = reduced[-1], reduction.kernel.text
    width = fit_vector_width(reduction.width, reduction.shape[axis])

    def inside(here: Sequence[LaneValue], state: ReductionState) -> ReductionState:
        return _reduce_row(reduction, list(here), axis, width, state)

    state = _emit_carrying_loops(
        reduction, reduction.shape, reduced[:-1], index, reduction.initial_state(width), width, inside
    )
    reduction.store_result(
        LoopBody(reduction.kernel), tuple(index), combine_across_lanes(text, reduction.combiner, width, state)
    )


def _emit_carrying_loops(
    reduction: LlvmReductionEmitter,
    shape: Sequence[int],
    axes: Sequence[int],
    index: list[LaneValue],
    state: ReductionState,
    width: int,
    inside: Callable[[Sequence[LaneValue], ReductionState], ReductionState],
) -> ReductionState:
    """Loops over some axes that carry a state through `inside(index, state)`."""
    if not axes:
        return inside(index, state)
    first, *rest = axes
    kinds = [str(t) for t in reduction.register_types(width)]
    types = kinds * (len(state) // len(kinds))
    with LoopBuilder(reduction.kernel.text, "0", str(shape[first]), 1, list(zip(types, state, strict=True))) as loop:
        here = [*index]
        here[first] = LaneValue(loop.index)
        loop.values = list(_emit_carrying_loops(reduction, shape, rest, here, tuple(loop.values), width, inside))
    return tuple(loop.values)


def _reduce_row(
    reduction: LlvmReductionEmitter, index: list[LaneValue], axis: int, width: int, state: ReductionState
) -> ReductionState:
    """The innermost axis: unrolled over several accumulators, then the remainder."""
    count, text = reduction.shape[axis], reduction.kernel.text
    before: LineSection = text.new_section()
    outer: dict = {}
    accumulators = ACCUMULATOR_COUNT if count >= 2 * ACCUMULATOR_COUNT * width else 1
    block = count // (accumulators * width) * accumulators * width
    states = [state, *(reduction.initial_state(width) for _ in range(accumulators - 1))]
    if accumulators > 1:
        states = _unroll_accumulators(reduction, index, axis, width, block, states, before, outer)
    for start, stop, step, mask in _strip_mine_from(block if accumulators > 1 else 0, count, width):
        carried = list(zip([str(t) for t in reduction.register_types(width)], states[0], strict=True))
        with LoopBuilder(text, start, stop, step, carried) as loop:
            body = reduction.make_body(width, mask, before, outer)
            loop.values = list(
                reduction.accumulate(body, make_ramp_index(index, axis, loop.index, width), tuple(loop.values))
            )
        states[0] = tuple(loop.values)
    return combine_tree(text, reduction.combiner, width, states)


def _strip_mine_from(first: int, count: int, width: int) -> list[tuple[str, str, int, str | None]]:
    """The pieces of an axis from `first`, a multiple of the width, to its end."""
    parts = strip_mine(count - first, width)
    return [(str(p.start + first), str(p.stop + first), p.width, p.mask) for p in parts]


def _unroll_accumulators(
    reduction: LlvmReductionEmitter,
    index: list[LaneValue],
    axis: int,
    width: int,
    stop: int,
    states: list[ReductionState],
    before: LineSection,
    outer: dict,
) -> list[ReductionState]:
    """A loop over several vectors, each with an accumulator of its own."""
    text, accumulators, size = reduction.kernel.text, len(states), len(states[0])
    kinds = [str(t) for t in reduction.register_types(width)] * accumulators
    with LoopBuilder(
        text, "0", str(stop), accumulators * width, list(zip(kinds, [n for s in states for n in s], strict=True))
    ) as loop:
        names: list[str] = []
        for n in range(accumulators):
            at = make_ramp_index(index, axis, text.add(loop.index, str(n * width)), width)
            body = reduction.make_body(width, None, before, outer)
            names += reduction.accumulate(body, at, tuple(loop.values[n * size : (n + 1) * size]))
        loop.values = names
    return [tuple(loop.values[n * size : (n + 1) * size]) for n in range(accumulators)]


# Contraction: a product that is added to a sum is rounded with it, where the processor has fused multiply-adds.
# `llvm.fmuladd` is fused where that is fast, and else rounds the product.


def find_product(kernel: LlvmKernelContext, v: Value) -> Node | None:
    """The fused product of floats that a value is, which nothing rounds but itself; None for any other value."""
    node, type = kernel.producers.get(v), get_tensor_type(v)
    if node is None or node.op is not elementwise.mul or v in {**kernel.buffers, **kernel.joined, **kernel.scalars}:
        return None
    return node if type.dtype in (f32, f64) and not is_special_policy(type.policy) else None


def emit_contracted(body: LoopBody, product: Node, addend: LaneValue, index: LaneIndex) -> LaneValue:
    """A product at an index plus an addend of its type."""
    dtype = get_tensor_type(product.out).dtype
    factors = [(emit_element(body, v, index), dtype) for v in product.args]

    def lines(width: int, d: str, *operands: str) -> list[str]:
        return [f"{d} = {format_call('llvm.fmuladd', get_register_type(dtype, width), *operands)}"]

    return emit_operation(body, lines, [*factors, (addend, dtype)])


@element_rule(elementwise.add)
def _(body, node, index):
    """A sum within a summed value, of which an operand is a product."""
    if node.out in body.hints.contractible and not is_special_policy(node.out.type.policy):
        for v, other in (node.args, reversed(node.args)):
            product = find_product(body.kernel, v)
            if product is not None:
                return emit_contracted(body, product, emit_element(body, other, index), index)
    return emit_pointwise(body, node, index)

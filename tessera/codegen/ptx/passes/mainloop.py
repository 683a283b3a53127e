"""Mainloop formation: loops of products whose operands a TMA copy can fetch.

A loop with one accumulator whose operands both come from global memory becomes one `gemm_mainloop`; products of other
loops are asynchronous where their right operand is fetched (`async_products`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.ptx.ops import (
    are_mma_compatible,
    gemm_mainloop,
    matmul_accumulate,
)
from tessera.codegen.ptx.text.builder import element_bytes
from tessera.core.types import (
    GLOBAL,
    DType,
    RefType,
    TensorType,
    bf16,
    f16,
    f32,
    fp8_e4m3,
    fp8_e5m2,
    int8,
    int32,
    int64,
    uint8,
)
from tessera.ir.analysis import AffineAnalysis, AffineForm
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, contractions, elementwise, shape

# `gemm_mainloop`: a loop with one accumulator, to which each round adds the product of two blocks from global memory
# whose starts are the index or invariant. It is emitted warp-specialised, with a ring buffer and wgmma.


SWIZZLE_ROW_BYTES = 128  # bytes of one row of the swizzle
MAINLOOP_COLUMNS = (64, 128, 256)
HALF_COLUMNS = (96, 160, 192, 224)  # of 16-bit operands alone: their sums have registers for the next power of two
WGMMA_BLOCK_ROWS = (64, 128, 256)
ACCUMULATOR_REGISTERS = 128  # registers of a thread for the accumulator
TMA_STRIDE = 16  # bytes that divide the length of a row in memory
# Operand types with their accumulator types. Operands of 8 bits are K-major.
ACCUMULATOR_TYPES = {bf16: f32, f16: f32, fp8_e4m3: f32, fp8_e5m2: f32, int8: int32, uint8: int32}
HALF_TYPES = (bf16, f16)
PRODUCT_OPS = (contractions.dot, matmul_accumulate)


@dataclass(frozen=True)
class OperandSource:
    """An operand in memory: the start of its block on each axis, and whether it is transposed.

    The rows of the block lie along `axis`, its columns along the last one.
    """

    ref: Value
    starts: tuple[Value, ...]
    block: tuple[int, ...]
    flipped: bool = False
    axis: int = -2


@dataclass(frozen=True)
class MatmulLoop:
    """A matching loop with its two operands; of a nest, the outermost one, and the iterations of all."""

    node: Node
    left: OperandSource
    right: OperandSource
    step: int
    nest: CollapsibleNest | None = None

    @property
    def depth(self) -> int:
        """The k extent of a stage: one row of the swizzle. Rounds of another extent are split or joined."""
        return SWIZZLE_ROW_BYTES // element_bytes(self.left.ref.type.dtype)  # type: ignore[union-attr]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The m, n and k extents of a round's product."""
        rows, depth = self.left.block[-2:][::-1] if self.left.flipped else self.left.block[-2:]
        return rows, self.right.block[-2 if self.right.flipped else -1], depth


@dataclass(frozen=True)
class CollapsibleNest:
    """A perfect nest of loops with constant bounds: the index and the iterations of each, from the outermost."""

    loops: tuple[Node, ...]
    counts: tuple[int, ...]
    lowers: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def indices(self) -> tuple[Value, ...]:
        """The indices of the loops."""
        return tuple(loop.regions[0].params[0] for loop in self.loops)

    def place(self, form: AffineForm) -> tuple[AffineForm, tuple[int, ...]]:
        """A form as one at the first iteration of all loops, and what each loop's iteration adds."""
        strides = [form.scalars.get(i, 0) for i in self.indices]
        first = form.constant + sum(n * low for n, low in zip(strides, self.lowers, strict=True))
        rest = {v: n for v, n in form.scalars.items() if v not in self.indices}
        return AffineForm(first, rest, form.ramps), tuple(n * s for n, s in zip(strides, self.steps, strict=True))


def form_mainloop(function: Function) -> Function:
    """The function with its loop of products as a `gemm_mainloop`, if exactly one loop at its top level matches."""
    uses = UseDef(function)
    loops = [found for node in function.body.nodes if (found := _match_mainloop(function, uses, node))]
    sums = [n for n in function.body.walk() if n.op in (matmul_accumulate, contractions.dot)]
    if len(loops) != 1 or len(sums) != 1:
        return function
    (loop,) = loops

    patterns = RewritePatterns("mainloop")

    @patterns(control_flow.for_)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        return _build_mainloop(rewriter.builder, loop, args, rewriter.walk.env, uses) if node is loop.node else None

    return rewrite_function(function, patterns)


def _build_mainloop(
    builder: Builder, loop: MatmulLoop, args: Sequence[Value], env: dict[Value, Value], uses: UseDef
) -> Sequence[Value]:
    """Build the `gemm_mainloop` of a loop."""
    if loop.nest is not None:
        return _build_collapsed(builder, loop, loop.nest, args, env, uses)
    index = loop.node.regions[0].params[0]
    lower, upper, _, acc = args
    starts: list[Value] = []

    def place(v: Value) -> int:
        if v is index:
            return -1
        # A start that the body defines is a constant.
        starts.append(env.get(v) or builder.add(basic.full, [], uses[v].attrs, loc=loop.node.loc).out)
        return len(starts) - 1

    left, right = (tuple(place(v) for v in side.starts) for side in (loop.left, loop.right))
    step = loop.step
    if loop.depth != loop.sizes[2]:
        step, upper = loop.depth, _round_upper_bound(builder, lower, upper, max(loop.step, loop.depth))
    attrs = {"left": left, "right": right, "flipped": loop.right.flipped, "turned": loop.left.flipped}
    attrs |= {"step": step, "block": (*loop.sizes[:2], loop.depth)}
    refs = [env[loop.left.ref], env[loop.right.ref]]
    return builder.add(gemm_mainloop, [acc, *refs, lower, upper, *starts], attrs, loc=loop.node.loc).results


def _build_collapsed(
    builder: Builder,
    loop: MatmulLoop,
    nest: CollapsibleNest,
    args: Sequence[Value],
    env: dict[Value, Value],
    uses: UseDef,
) -> Sequence[Value]:
    """Build the `gemm_mainloop` of a nest of loops, collapsed into one."""
    analysis, starts = AffineAnalysis(uses), list[Value]()
    numbers, strides = list[tuple[int, ...]](), list[list[tuple[int, ...]]]()
    for side in (loop.left, loop.right):
        forms = [nest.place(form) for v in side.starts if (form := analysis.find_form(v)) is not None]
        numbers.append(tuple(range(len(starts), len(starts) + len(forms))))
        starts += [_build_form(builder, form, env) for form, _ in forms]
        strides.append([steps for _, steps in forms])
    attrs = {"left": numbers[0], "right": numbers[1], "flipped": loop.right.flipped, "turned": loop.left.flipped}
    attrs |= {"step": 1, "block": (*loop.sizes[:2], loop.depth), "digits": nest.counts, "strides": strides}
    bounds = [_index_constant(builder, n) for n in (0, math.prod(nest.counts))]
    refs = [env[loop.left.ref], env[loop.right.ref]]
    return builder.add(gemm_mainloop, [args[3], *refs, *bounds, *starts], attrs, loc=loop.node.loc).results


def _build_form(builder: Builder, form: AffineForm, env: dict[Value, Value]) -> Value:
    """An affine form of scalars as a value."""
    terms = [_index_constant(builder, form.constant)] if form.constant or not form.scalars else []
    for v, factor in form.scalars.items():
        step = _index_constant(builder, factor)
        terms.append(env[v] if factor == 1 else builder.add(elementwise.mul, [env[v], step]).out)
    return functools.reduce(lambda x, y: builder.add(elementwise.add, [x, y]).out, terms)


def _round_upper_bound(builder: Builder, lower: Value, upper: Value, step: int) -> Value:
    """The end of a loop's last round, which may exceed its upper bound."""
    ends = [builder.producers.get(v) for v in (lower, upper)]
    if all(n is not None and n.op is basic.full for n in ends):
        first, last = (int(n.attrs["value"]) for n in ends if n is not None)
        return _index_constant(builder, first - (first - last) // step * step)
    one = _index_constant(builder, step)
    count = builder.add(elementwise.sub, [upper, lower]).out
    count = builder.add(elementwise.add, [count, _index_constant(builder, step - 1)]).out
    whole = builder.add(elementwise.mul, [builder.add(elementwise.floor_divide, [count, one]).out, one]).out
    return builder.add(elementwise.add, [lower, whole]).out


def _index_constant(builder: Builder, n: int) -> Value:
    return builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out


def _match_mainloop(function: Function, uses: UseDef, node: Node) -> MatmulLoop | None:
    """A node as a matching loop, or None."""
    if node.op is not control_flow.for_ or len(node.args) != 4 or int(function.attrs.get("group", 1)) != 1:
        return None
    nest = _find_nest(uses, node)
    alone = _match_loop(function, uses, node) if nest is None or len(nest.loops) == 1 else None
    return _match_nest(function, uses, nest) if alone is None and nest is not None else alone


def _match_loop(function: Function, uses: UseDef, node: Node) -> MatmulLoop | None:
    """A loop without loops in it whose starts of blocks are its index, or invariant."""
    (body,) = node.regions
    step, last = uses.get(node.args[2]), uses.get(body.results[0])
    if step is None or step.op is not basic.full or last is None or last.op is not matmul_accumulate:
        return None
    if last not in body.nodes or last.args[0] is not body.params[1]:
        return None
    inside = UseDef(body, nested=False)
    sides = [find_operand_source(inside, v) for v in last.args[1:]]
    used = {id(n) for n in body.nodes} - {id(last)}
    if None in sides or not all(_is_data_movement(n) for n in body.nodes if id(n) in used):
        return None
    found = MatmulLoop(node, sides[0], sides[1], int(step.attrs["value"]))  # type: ignore[arg-type]
    fits = (
        _has_wgmma_sizes(found)
        and _begins_whole_units(uses, found)
        and _has_even_depth(uses, found)
        and _has_fixed_operands(function, uses, found, body.params[0])
    )
    return found if fits else None


def _begins_whole_units(uses: UseDef, loop: MatmulLoop) -> bool:
    """Whether blocks begin at whole units of 16 bytes of a row in all rounds of a loop."""
    analysis, index = AffineAnalysis(uses), loop.node.regions[0].params[0]
    for side in (loop.left, loop.right):
        walked = side.starts[-1] is index
        form = analysis.find_form(loop.node.args[0] if walked else side.starts[-1])
        if form is None or not _is_whole(side, form, AffineForm(loop.step if walked else 0)):
            return False
    return True


def _find_nest(uses: UseDef, node: Node) -> CollapsibleNest | None:
    """The perfect nest of loops that a loop is the outermost of, which may be one; None where a bound is unknown."""
    loops = [node]
    while (inner := _find_inner_loop(loops[-1])) is not None:
        loops.append(inner)
    bounds = [[_read_constant(uses, v) for v in loop.args[:3]] for loop in loops]
    if any(n is None for each in bounds for n in each):
        return None
    lowers, uppers, steps = (tuple(int(n or 0) for n in column) for column in zip(*bounds, strict=True))
    counts = tuple(-((low - up) // step) for low, up, step in zip(lowers, uppers, steps, strict=True))
    return CollapsibleNest(tuple(loops), counts, lowers, steps) if min(counts) > 0 else None


def _find_inner_loop(loop: Node) -> Node | None:
    """The only loop in a loop's body, if it takes the carried value and gives it back, beside scalar arithmetic."""
    (body,) = loop.regions
    inner = [n for n in body.nodes if n.op is control_flow.for_]
    if (
        len(inner) != 1
        or len(inner[0].args) != 4
        or not all(n is inner[0] or is_scalar_arithmetic(n) for n in body.nodes)
    ):
        return None
    return inner[0] if inner[0].args[3] is body.params[1] and body.results == inner[0].results else None


def _read_constant(uses: UseDef, v: Value) -> int | None:
    node = uses.get(v)
    return int(node.attrs["value"]) if node is not None and node.op is basic.full else None


def _match_nest(function: Function, uses: UseDef, nest: CollapsibleNest) -> MatmulLoop | None:
    """A nest as a matching loop, if starts of blocks are affine in its indices."""
    (body,) = nest.loops[-1].regions
    last, inside = uses.get(body.results[0]), UseDef(body, nested=False)
    if last is None or last.op is not matmul_accumulate or last not in body.nodes or last.args[0] is not body.params[1]:
        return None
    sides = [find_operand_source(inside, v) for v in last.args[1:]]
    if None in sides or not all(n is last or _is_data_movement(n) or is_scalar_arithmetic(n) for n in body.nodes):
        return None
    found = MatmulLoop(nest.loops[0], sides[0], sides[1], nest.steps[-1], nest)  # type: ignore[arg-type]
    refs, analysis = {found.left.ref, found.right.ref}, AffineAnalysis(uses)
    if refs & tile.find_written_refs(function.body) or not refs <= set(function.params):
        return None
    forms = [analysis.find_form(v) for side in (found.left, found.right) for v in side.starts]
    bases = [v for f in forms if f is not None for v in f.scalars if v not in nest.indices]
    own = {v for n in nest.loops[0].regions[0].walk() for v in n.results}
    fits = all(f is not None and not f.ramps for f in forms)
    fits = fits and all(v not in own and is_known_ahead(uses, v) for v in bases)
    for side in (found.left, found.right):
        first, steps = nest.place(analysis.find_form(side.starts[-1]) or AffineForm(1))
        fits = fits and _is_whole(side, first, *(AffineForm(n) for n in steps))
    return found if fits and _has_wgmma_sizes(found) and found.sizes[2] == found.depth else None


def _is_whole(side: OperandSource, *columns: AffineForm) -> bool:
    """Whether numbers of columns are whole units of 16 bytes of a row: blocks that TMA fetches begin at no others."""
    assert isinstance(side.ref.type, RefType)
    unit = TMA_STRIDE // element_bytes(side.ref.type.dtype)
    return all(n % unit == 0 for form in columns for n in (form.constant, *form.scalars.values()))


def _is_data_movement(node: Node) -> bool:
    """Whether a node of the body only loads or moves a block, or is a constant."""
    return node.op in (tile.load, shape.reshape, shape.permute, basic.full)


def find_operand_source(
    inside: UseDef, v: Value, dtypes: tuple[DType, ...] = tuple(ACCUMULATOR_TYPES)
) -> OperandSource | None:
    """The load that a block comes from through transposes and reshapes of unit axes, or None."""
    node, flipped = inside.get(v), False
    while node is not None and node.op in (shape.permute, shape.reshape):
        (x,) = node.args
        if node.op is shape.permute:
            if tuple(node.attrs["axes"]) != (1, 0):
                return None
            flipped = not flipped
        elif [n for n in x.type.shape if n != 1] != [n for n in node.out.type.shape if n != 1]:  # type: ignore[union-attr]
            return None
        node = inside.get(x)
    if node is None or node.op is not tile.load:
        return None
    ref, *starts = node.args
    rank = ref.type.rank  # type: ignore[union-attr]
    axis = find_row_axis(node.attrs["shape"])
    if len(starts) != rank or not is_tma_fetchable(ref.type, dtypes) or axis is None:
        return None
    return OperandSource(ref, tuple(starts), tuple(node.attrs["shape"]), flipped, axis)


def find_row_axis(block: Sequence[int]) -> int | None:
    """The axis, from the end, along which a block whose columns lie along the last axis has its rows; None where it has
    several."""
    axes = [i - len(block) for i, n in enumerate(block[:-1]) if n != 1]
    return None if len(axes) > 1 or len(block) < 2 else axes[0] if axes else -2


def is_tma_fetchable(type: Any, dtypes: tuple[DType, ...] = HALF_TYPES) -> bool:
    """Whether TMA can fetch blocks of a ref of one of these types."""
    if not isinstance(type, RefType) or type.space != GLOBAL or not 2 <= type.rank <= 5:
        return False
    return type.dtype in dtypes and int(type.shape[-1]) * element_bytes(type.dtype) % TMA_STRIDE == 0


def _has_wgmma_sizes(loop: MatmulLoop) -> bool:
    """Whether wgmma takes blocks of these sizes and types."""
    if (loop.left.axis, loop.right.axis) != (-2, -2):
        return False
    rows, columns, _ = loop.sizes
    type = loop.left.ref.type
    assert isinstance(type, RefType)
    half = type.dtype in HALF_TYPES
    whole = rows in WGMMA_BLOCK_ROWS and columns in (*MAINLOOP_COLUMNS, *(HALF_COLUMNS if half else ()))
    whole = whole and (half or not loop.left.flipped)
    held = 1 << (columns - 1).bit_length()
    fits = rows * held // (min(rows, 128) * 2) <= ACCUMULATOR_REGISTERS and (half or loop.right.flipped)
    same = are_mma_compatible(type.dtype, loop.right.ref.type.dtype)  # type: ignore[union-attr]
    return whole and fits and same and type.block(()).accumulate == ACCUMULATOR_TYPES[type.dtype]


def _has_even_depth(uses: UseDef, loop: MatmulLoop) -> bool:
    """Whether rounds have the k extent of a stage, or can be split or joined because they are contiguous."""
    depth, index = loop.sizes[2], loop.node.regions[0].params[0]
    if depth == loop.depth:
        return True
    along = loop.left.starts[-2 if loop.left.flipped else -1], loop.right.starts[-1 if loop.right.flipped else -2]
    others = [*loop.left.starts, *loop.right.starts].count(index) > 2
    goes_on = loop.step == depth and set(along) == {index} and not others
    return goes_on and (depth % loop.depth == 0 or (loop.depth % depth == 0 and _can_join_rounds(uses, loop)))


def _can_join_rounds(uses: UseDef, loop: MatmulLoop) -> bool:
    """Whether joined rounds read nothing more than the loop does, except elements out of bounds."""
    ends = [uses.get(v) for v in loop.node.args[:2]]
    if any(n is None or n.op is not basic.full for n in ends):
        return False
    lower, upper = (int(n.attrs["value"]) for n in ends if n is not None)
    rounds = -((lower - upper) // loop.step)
    sides = ((loop.left, -2 if loop.left.flipped else -1), (loop.right, -1 if loop.right.flipped else -2))
    most = max(int(side.ref.type.shape[axis]) for side, axis in sides)  # type: ignore[union-attr]
    return rounds * loop.step % loop.depth == 0 or most <= lower + rounds * loop.step


def _has_fixed_operands(function: Function, uses: UseDef, loop: MatmulLoop, index: Value) -> bool:
    """Whether the operands are read-only parameters with starts that are the index or scalars of the program."""
    written = tile.find_written_refs(function.body)
    if {loop.left.ref, loop.right.ref} & written or not {loop.left.ref, loop.right.ref} <= set(function.params):
        return False
    starts = [v for side in (loop.left, loop.right) for v in side.starts if v is not index]
    return all(is_known_ahead(uses, v) for v in (*loop.node.args[:3], *starts))


def is_known_ahead(uses: UseDef, v: Value) -> bool:
    """Whether a scalar depends on program ids and parameters alone."""
    node = uses.get(v)
    if node is None:
        return v.type.rank == 0 if isinstance(v.type, TensorType) else False
    return is_scalar_arithmetic(node) and all(is_known_ahead(uses, x) for x in node.args)


def is_scalar_arithmetic(node: Node) -> bool:
    """Whether a node is arithmetic on scalars, or a program id."""
    scalar = all(isinstance(v.type, TensorType) and not v.type.rank for v in node.results)
    return (
        scalar
        and bool(node.results)
        and (node.op.pointwise or node.op in (basic.full, tile.program_id, tile.grid_size))
    )

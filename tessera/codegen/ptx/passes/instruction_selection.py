"""Instruction selection: patterns with one instruction or one op of the target.

Fused multiply-add contraction, exp2 with flushed subnormals, votes of a warp, elements of rows, accumulation into
products, and f32 products on tensor cores by splitting into three bf16 (Henry, Tang and Heinecke 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tessera.codegen.ptx.ops import (
    WARP_TILES,
    LaunchFacts,
    ballot,
    element,
    element_of_row,
    exp2_ftz,
    fma,
    matmul_accumulate,
    truncate_bf16,
)
from tessera.codegen.ptx.table.scalars.math_functions import emit
from tessera.core.types import REGISTER, DType, TensorType, bf16, f16, f32, f64, fp8_e4m3, fp8_e5m2, int32, int64
from tessera.ir.analysis import IntervalAnalysis
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import (
    RewritePatterns,
    Rewriter,
    UseDef,
    eliminate_dead_code,
    eliminate_dead_nodes,
    has_effect,
    rewrite_function,
)
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape

# FMA contraction: `x * y + z` and `x * y - z` of f32 blocks, rounded once.


@emit(fma)
def _(s, x, y, z):
    return s.do(f"fma.rn.{s.word}", x, y, z)


fma_contraction = RewritePatterns("fma contraction")


def contract_fma(function: Function) -> Function:
    """Make each f32 product that a sum or difference alone uses one fused multiply-add with it."""
    return eliminate_dead_code(rewrite_function(function, fma_contraction))


@fma_contraction(elementwise.add, elementwise.sub)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    place = next((i for i in PRODUCT_OPERANDS[node.op] if _is_contractible(rewriter.uses, node.args[i])), None)
    if place is None:
        return None
    x, y = (rewriter.new(v) for v in rewriter.uses[node.args[place]].args)
    z = args[1 - place]
    return rewriter.add(fma, x, y, rewriter.add(elementwise.neg, z) if node.op is elementwise.sub else z)


def _is_contractible(uses: UseDef, v: Value) -> bool:
    """Whether a value is an f32 product that is used once."""
    return uses.find(v, elementwise.mul) is not None and uses.count_uses(v) == 1 and _is_f32(v)


# Which operands of a sum or difference may be products.
PRODUCT_OPERANDS = {elementwise.add: (0, 1), elementwise.sub: (0,)}


def _is_f32(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype == f32


# exp2 selection: `where(x < -126, 0, exp2(x))` is one instruction with flushed subnormals; `exp2(x)` alone needs four.


MIN_NORMAL_EXPONENT = -126  # the exponent of the least normal f32


@emit(exp2_ftz)
def _(s, x):
    return s.text.let("ex2.approx.ftz.f32", "f32", x)


flushed_powers = RewritePatterns("exp2 with flushed subnormals")


def select_exp2_ftz(function: Function) -> Function:
    """Select the hardware instruction for f32 powers of two that are 0 where they would be subnormal."""
    return rewrite_function(function, flushed_powers, remove_dead=True)


@flushed_powers(elementwise.where)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    exponent = _match_flushed_power(rewriter.uses, node)
    return None if exponent is None else rewriter.add(exp2_ftz, rewriter.new(exponent))


def _match_flushed_power(uses: UseDef, node: Node) -> Value | None:
    """The exponent of a flushed power of two, or None."""
    if node.op is not elementwise.where or node.out.type.dtype != f32:  # type: ignore[union-attr]
        return None
    small, zero, power = (uses.get(v) for v in node.args)
    found = power is not None and power.op is elementwise.exp2 and small is not None and small.op is elementwise.less
    if not found or small is None or power is None or small.args[0] is not power.args[0]:
        return None
    limit = _splat_value(uses, small.args[1]) == MIN_NORMAL_EXPONENT and _splat_value(uses, node.args[1]) == 0
    return power.args[0] if limit and zero is not None else None


def _splat_value(uses: UseDef, v: Value) -> Any:
    """The value of a splat constant, or None."""
    node = uses.get(v)
    while node is not None and node.op is basic.broadcast_to:
        node = uses.get(node.args[0])
    return node.attrs["value"] if node is not None and node.op is basic.full else None


# Ballot selection: the bits of the tiles of a warp that vote yes are one instruction, for any of the 32 shuffles of
# which `tile.warp.ballot` consists.


ballots = RewritePatterns("ballots")


def select_ballots(function: Function) -> Function:
    """Select the hardware's vote where the votes of a warp are added up as bits."""
    return rewrite_function(function, ballots, remove_dead=True)


@ballots(reduce.sum)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    uses = rewriter.uses
    chosen = uses.find(node.args[0], elementwise.where)
    if chosen is None or _splat_value(uses, chosen.args[2]) != 0:
        return None
    votes = uses.find(chosen.args[0], tile.collect)
    if votes is None or votes.attrs["width"] != WARP_TILES or node.out.type.dtype != int64:  # type: ignore[union-attr]
        return None
    over_lanes = tuple(node.attrs["axis"]) == (-len(votes.out.type.shape),)  # type: ignore[union-attr]
    if not over_lanes or not _has_lane_bits(uses, chosen.args[1]):
        return None
    return rewriter.add(ballot, rewriter.new(votes.args[0]))


def _counts_lanes(uses: UseDef, v: Value) -> bool:
    """Whether a value is the index along its first axis, spread over the others."""
    node = uses.get(v)
    while node is not None and node.op in (basic.broadcast_to, shape.reshape):
        before, after = (x.type.shape for x in (node.args[0], node.out))  # type: ignore[union-attr]
        if before[:1] != after[:1]:
            return False
        node = uses.get(node.args[0])
    return node is not None and node.op is shape.iota and node.attrs["axis"] in (0, -len(node.attrs["shape"]))


def _has_lane_bits(uses: UseDef, v: Value) -> bool:
    """Whether a value has bit i in place i of its first axis."""
    node = uses.get(v)
    while node is not None and node.op is basic.broadcast_to and node.args[0].type.shape[:1] == v.type.shape[:1]:  # type: ignore[union-attr]
        node = uses.get(node.args[0])
    bits = node if node is not None and node.op is elementwise.shift_left else None
    return bits is not None and _splat_value(uses, bits.args[0]) == 1 and _counts_lanes(uses, bits.args[1])


# Row element selection: a sum of what is 0 but at one place of a row, which its lanes hold, is one shuffle.


PICKED, MOST_HELD = range(4, 65), 128  # elements of a row, and of a block: larger ones are laid out for their sums
PICKED_TYPES = ((f32, f32), (f64, f64), (int32, int32), (int32, int64), (int64, int64))  # of elements, and of their sum


def select_row_elements(function: Function) -> Function:
    """Select the element at a place of each row where all others are masked and added up."""
    ranges = IntervalAnalysis(UseDef(function), LaunchFacts.of(function).grid)
    for node in function.body.walk():
        if node.op is control_flow.for_:
            ranges.loop(node)
    patterns = RewritePatterns("elements of rows")
    patterns(reduce.sum)(lambda rewriter, node, args: _select_row_element(rewriter, node, ranges))
    return rewrite_function(function, patterns, remove_dead=True)


def _select_row_element(rewriter: Rewriter, node: Node, ranges: IntervalAnalysis) -> Value | None:
    uses, type, out = rewriter.uses, node.args[0].type, node.out.type
    assert isinstance(type, TensorType) and isinstance(out, TensorType)
    plain = (type.dtype, out.dtype) in PICKED_TYPES and type.policy is None
    chosen = uses.find(node.args[0], elementwise.where)
    few = type.shape[-1] in PICKED and math.prod(map(int, type.shape)) <= MOST_HELD
    if not plain or chosen is None or tuple(node.attrs["axis"]) != (-1,) or not few:
        return None
    place = _find_place_in_row(uses, chosen.args[0]) if _splat_value(uses, chosen.args[2]) == 0 else None
    if place is None:
        return None
    lead, (low, high) = type.shape[:-1], ranges.of(place)
    number = _splat_value(uses, place)
    if number is None:
        one = rewriter.add(basic.broadcast_to, rewriter.new(place), shape=(*lead, 1))
    else:
        one = rewriter.add(basic.full, shape=(*lead, 1), value=number, dtype=place.type.dtype)  # type: ignore[union-attr]
    inside = low >= 0 and high < type.shape[-1]
    found = rewriter.add(element_of_row, rewriter.new(chosen.args[1]), one, inside=inside)
    found = rewriter.add(basic.cast, found, dtype=out.dtype) if out.dtype != type.dtype else found
    return found if node.attrs["keepdims"] else rewriter.add(shape.reshape, found, shape=lead)


def _find_place_in_row(uses: UseDef, mask: Value) -> Value | None:
    """The only place along the last axis at which a mask can hold: a constant, or a block with one element there."""
    node = uses.get(mask)
    while node is not None and node.op is basic.broadcast_to and _has_last_axis(node):
        node = uses.get(node.args[0])
    if node is None or node.op is not elementwise.equal:
        return None
    for along, other in (node.args, tuple(reversed(node.args))):
        if not _counts_last_axis(uses, along):
            continue
        spread = uses.find(other, basic.broadcast_to)
        if _splat_value(uses, other) is not None or other.type.shape[-1:] == (1,):
            return other
        if spread is not None and not _has_last_axis(spread):
            return spread.args[0]
    return None


def _has_last_axis(node: Node) -> bool:
    """Whether a view has the last axis of its operand."""
    before, after = (x.type.shape for x in (node.args[0], node.out))  # type: ignore[union-attr]
    return before[-1:] == after[-1:]


def _counts_last_axis(uses: UseDef, v: Value) -> bool:
    """Whether a value is the index along its last axis, spread over the others."""
    node = uses.get(v)
    while node is not None and node.op in (basic.broadcast_to, shape.reshape) and _has_last_axis(node):
        node = uses.get(node.args[0])
    return node is not None and node.op is shape.iota and node.attrs["axis"] in (-1, len(node.attrs["shape"]) - 1)


# Element selection: one element of a block that a thread of a group holds in registers is its register. `b[3]` stores
# the block to memory of the thread and loads from there.


element_selection = RewritePatterns("elements")


def select_elements(function: Function) -> Function:
    """Make loads at constant places from memory that holds one block the elements of the block."""
    if function.attrs.get("group", 1) == 1:  # a tile's block is distributed over threads
        return function
    body = rewrite_function(function, element_selection).body
    return replace(function, body=eliminate_dead_nodes(body, lambda n: has_effect(n) and n.op is not tile.alloc))


@element_selection(tile.load)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    uses = rewriter.uses
    store, place = _find_block_store(uses, node.args[0]), _find_place(uses, node)
    return None if store is None or place is None else rewriter.add(element, rewriter.new(store.args[1]), place=place)


@element_selection(tile.store)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
    return () if _find_block_store(rewriter.uses, node.args[0]) is node else None


def _find_block_store(uses: UseDef, memory: Value) -> Node | None:
    """The store that fills memory of a thread, if all else that uses it are loads of elements after it."""
    made = uses.find(memory, tile.alloc)
    if made is None or made.attrs["space"] != REGISTER:
        return None
    store, *loads = uses.users(memory)
    if store.op is not tile.store or store.args[0] is not memory or store.args[1].type.shape != made.attrs["shape"]:  # type: ignore[union-attr]
        return None
    at_start = len(store.args) == 2 + len(made.attrs["shape"]) and all(
        _splat_value(uses, v) == 0 for v in store.args[2:]
    )
    home = uses.block_of(made)
    together = all(uses.block_of(n) is home for n in (store, *loads))
    return store if at_start and together and all(_find_place(uses, n) is not None for n in loads) else None


def _find_place(uses: UseDef, node: Node) -> tuple[int, ...] | None:
    """The constant place of the element that a load takes, or None."""
    if (
        node.op is not tile.load
        or any(n != 1 for n in node.attrs["shape"])
        or len(node.args) != 1 + len(node.attrs["shape"])
    ):
        return None
    place = [_splat_value(uses, v) for v in node.args[1:]]
    sizes = node.args[0].type.shape  # type: ignore[union-attr]
    inside = all(n is not None and 0 <= n < size for n, size in zip(place, sizes, strict=True))
    return tuple(int(n) for n in place) if inside else None


# Accumulator fusion: `acc + dot(a, b)` becomes one `matmul_accumulate`.


accumulation = RewritePatterns("accumulation")


def fuse_accumulation(function: Function) -> Function:
    """Make each product that is only added to a block of its own type one op with the addition."""
    return rewrite_function(function, accumulation, remove_dead=True)


@accumulation(elementwise.add)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    dots = [v for v in node.args if _is_accumulable(rewriter.uses, v, node)]
    if len(dots) != 1:
        return None
    dot = rewriter.uses[dots[0]]
    accumulator = next(a for a, v in zip(args, node.args, strict=True) if v is not dot.out)
    operands = [accumulator, *(rewriter.new(v) for v in dot.args)]
    return rewriter.builder.add(matmul_accumulate, operands, loc=dot.loc).out


def _is_accumulable(uses: UseDef, v: Value, user: Node) -> bool:
    """Whether a value is a product in the accumulation type that one node of its block alone uses."""
    dot = uses.find(v, contractions.dot)
    if dot is None or uses.block_of(dot) is not uses.block_of(user):
        return False
    return _is_exact(dot) and uses.count_uses(v) == 1


def _is_exact(dot: Node) -> bool:
    return dot.args[0].type.accumulate == dot.out.type.dtype  # type: ignore[union-attr]


# Product splitting: f32 products on tensor cores. If both operands were narrow, they are multiplied as such; an f32 is
# the sum of three bf16, whose products are exact in f32. The result differs from an f32 product only by the rounding of
# the sums, within the same bound (Henry, Tang and Heinecke 2019).


VIEW_OPS = (shape.permute, shape.reshape, basic.broadcast_to)
BF16_PARTS = 3
# Operand types of tensor cores, with the types that they represent exactly; an f32 is split into parts.
EXACT_TYPES = {bf16: (bf16, fp8_e4m3, fp8_e5m2, f32), f16: (f16, fp8_e4m3, fp8_e5m2)}


product_splitting = RewritePatterns("product splitting")


def split_products(function: Function) -> Function:
    """Make each f32 product, one side of which was narrower, a sum of products of 16-bit floats."""
    return rewrite_function(function, product_splitting, remove_dead=True)


@product_splitting(contractions.dot)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    return _ProductSplitter(rewriter).product(node, args) if _is_splittable(rewriter.uses, node) else None


def _is_splittable(uses: UseDef, node: Node) -> bool:
    """Whether a node is a product of f32 whose sides are exact in one 16-bit format, f32 that is cut in parts apart."""
    if node.op is not contractions.dot or any(v.type.dtype != f32 or v.type.accumulate != f32 for v in node.args):  # type: ignore[union-attr]
        return False
    return node.out.type.dtype == f32 and _find_operand_type(uses, node) is not None  # type: ignore[union-attr]


def _find_operand_type(uses: UseDef, node: Node) -> DType | None:
    """The operand type that represents both operands exactly, or None."""
    kinds = {_find_source_type(uses, v) for v in node.args}
    return next((held for held, exact in EXACT_TYPES.items() if kinds <= set(exact) and kinds != {f32}), None)


def _find_source_type(uses: UseDef, v: Value) -> DType:
    """The type that a block had before its cast to f32, through views."""
    node = uses.get(v)
    while node is not None and node.op in VIEW_OPS:
        node = uses.get(node.args[0])
    before = node.args[0].type.dtype if node is not None and node.op is basic.cast else f32  # type: ignore[union-attr]
    return before if before in (*EXACT_TYPES[bf16], *EXACT_TYPES[f16]) else f32


class _ProductSplitter:
    """Splits one product."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter, self.builder, self.uses = rewriter, rewriter.builder, rewriter.uses

    def product(self, node: Node, args: Sequence[Value]) -> Value:
        """The sum of the products of the parts, smallest first."""
        held = _find_operand_type(self.uses, node)
        left, right = (self._parts(v, x, held) for v, x in zip(node.args, args, strict=True))
        pairs = [(a, b) for a in reversed(left) for b in reversed(right)]
        total = self._dot(*pairs[0])
        for a, b in pairs[1:]:
            total = self.builder.add(elementwise.add, [total, self._dot(a, b)]).out
        return total

    def _dot(self, a: Value, b: Value) -> Value:
        return self.builder.add(contractions.dot, [a, b], {"dtype": f32}).out

    def _parts(self, v: Value, x: Value, held: DType | None) -> list[Value]:
        """An operand as blocks of a narrow type, the largest first: its narrow original, or the parts of an f32."""
        if (kind := _find_source_type(self.uses, v)) != f32:
            found = self._narrow(v)
            return [found if kind == held else self.builder.add(basic.cast, [found], {"dtype": held}).out]
        parts = [self.builder.add(truncate_bf16, [x]).out]
        x = self._first_rest(x, parts[0])
        for _ in range(BF16_PARTS - 2):
            parts.append(self.builder.add(truncate_bf16, [x]).out)
            x = self._rest(x, parts[-1])[0]
        return [*parts, self.builder.add(truncate_bf16, [x]).out]

    def _rest(self, x: Value, part: Value) -> tuple[Value, Value]:
        """The exact remainder after a part, and the part as f32."""
        wide = self.builder.add(basic.cast, [part], {"dtype": f32}).out
        return self.builder.add(elementwise.sub, [x, wide]).out, wide

    def _first_rest(self, x: Value, part: Value) -> Value:
        """The remainder after the first part; 0 for an infinity."""
        rest, wide = self._rest(x, part)
        same = self.builder.add(elementwise.equal, [x, wide]).out
        zero = self.builder.add(basic.full, [], {"shape": x.type.shape, "value": 0.0, "dtype": f32}).out
        return self.builder.add(elementwise.where, [same, zero, rest]).out

    def _narrow(self, v: Value) -> Value:
        """A block before its cast, with the views after the cast replayed."""
        node = self.uses[v]
        if node.op is basic.cast:
            return self.rewriter.new(node.args[0])
        return self.builder.add(node.op, [self._narrow(node.args[0])], node.attrs).out

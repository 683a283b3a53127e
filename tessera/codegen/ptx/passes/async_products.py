"""Asynchronous products: products in loops at the top level whose right operands TMA can fetch from global memory.

They become `async_mma`. The left operand is computed by the loop, or loaded before it and resident in shared memory.
Blocks of f32 that the loop computes left operands of are fetched, too, and read into registers (`fetched_block`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.ops import (
    async_mma,
    fetched_block,
    matmul_accumulate,
    pack_pairs,
    release_operand,
    resident_operand,
)
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.mainloop import (
    HALF_TYPES,
    PRODUCT_OPS,
    WGMMA_BLOCK_ROWS,
    OperandSource,
    find_operand_source,
    is_scalar_arithmetic,
)
from tessera.codegen.ptx.table.warpgroup.tensor_map import FETCHED_DEPTH
from tessera.core.types import TensorType, f32
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, eliminate_dead_code, rewrite_function
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, shape

ASYNC_MMA_COLUMNS = (64, 128, 256)
# Of blocks by columns, whose rows in memory are those of the swizzle: of shallow ones a whole row is fetched.
NARROW_COLUMNS, SHALLOW_DEPTHS = (16, 32), (16, 32)
ASYNC_MMA_DEPTHS = (64, 128, 256)
MAX_LOOP_REGISTERS = 224  # registers of a thread, for the accumulators and left operands of all products
VIEW_OPS = (shape.permute, shape.reshape, basic.cast)


@dataclass(frozen=True)
class AsyncProducts:
    """The products of a function with the sources of their right operands, and of the resident left operands."""

    right: dict[Node, OperandSource]
    left: dict[Value, OperandSource]
    last: dict[Value, Node]  # the last loop that reads a left operand
    fetched: dict[Value, OperandSource]  # the loads of blocks that left operands are computed of

    def is_same_block(self, product: Node | None, other: Node | None) -> bool:
        """Whether two products have one right operand."""
        return product in self.right and other in self.right and product.args[-1] is other.args[-1]  # type: ignore[union-attr]


def form_async_mma(function: Function) -> Function:
    """The function with all its products as `async_mma`, if each of them can be one."""
    found = _find_async_products(function)
    if found is None:
        return function
    order = [n for n in function.body.walk() if n.op in PRODUCT_OPS]
    before = dict(zip(order[1:], order, strict=False))
    after = {earlier: later for later, earlier in before.items()}
    packed: dict[Value, Value] = {}
    patterns = RewritePatterns("asynchronous products")

    @patterns(*PRODUCT_OPS)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value:
        if node.args[-2] not in found.left:
            _pack_left_operands(rewriter, node, order, packed)
        sharing = {
            "shares": found.is_same_block(before.get(node), node), "keeps": found.is_same_block(node, after.get(node)),
        }  # fmt: skip
        left = args[-2] if node.args[-2] in found.left else packed[node.args[-2]]
        return _build_async_mma(rewriter.builder, node, found.right[node], left, args, rewriter.walk.env, sharing)

    @patterns(control_flow.for_)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        released = [v for v, loop in found.last.items() if loop is node]
        results = rewriter.copy(node, args) if released else None
        for v in released:
            rewriter.builder.add(release_operand, [rewriter.new(v)])
        return results

    @patterns.any_op
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        made = node.results[0] if node.results else None
        side = found.left.get(made) or found.fetched.get(made)  # type: ignore[arg-type]
        if side is None:
            return None
        operands = [rewriter.new(v) for v in (side.ref, *side.starts)]
        if made in found.fetched:
            return _build_fetched_block(rewriter, node, side, operands)
        return rewriter.add(resident_operand, *operands, shape=static_shape(node.out), axis=side.axis)

    return eliminate_dead_code(rewrite_function(function, patterns))


def _build_fetched_block(rewriter: Rewriter, node: Node, side: OperandSource, operands: Sequence[Value]) -> Value:
    """The block of a load, fetched by rows of the product, as the load has it."""
    sizes = side.block[side.axis], side.block[-1]
    sizes = sizes[::-1] if side.flipped else sizes
    block = rewriter.add(fetched_block, *operands, shape=sizes, turned=side.flipped, axis=side.axis)
    block = rewriter.add(shape.permute, block, axes=(1, 0)) if side.flipped else block
    return rewriter.add(shape.reshape, block, shape=static_shape(node.out))


def _pack_left_operands(rewriter: Rewriter, node: Node, order: Sequence[Node], packed: dict[Value, Value]) -> None:
    """Pack a product's left operand, and first those of its loop that are known: packing waits for the products that
    read registers."""
    for each in order[order.index(node) :]:
        left = each.args[-2]
        if left not in packed and (each is node or left in rewriter.walk.env):
            packed[left] = rewriter.builder.add(pack_pairs, [rewriter.new(left)], {}, loc=node.loc).out


def _build_async_mma(
    builder: Builder,
    node: Node,
    side: OperandSource,
    left: Value,
    args: Sequence[Value],
    env: dict[Value, Value],
    sharing: dict[str, bool],
) -> Value:
    """Build an `async_mma`; its left operand is a resident one, or packed pairs in registers."""
    summed = node.op is matmul_accumulate
    depth, columns = static_shape(node.args[-1])
    attrs = {"block": (depth, columns), "flipped": side.flipped, "summed": summed, "axis": side.axis, **sharing}
    operands = [left, env[side.ref], *(args[:1] if summed else ()), *(env[v] for v in side.starts)]
    return builder.add(async_mma, operands, attrs, loc=node.loc).out


def _find_async_products(function: Function) -> AsyncProducts | None:
    """The products of a function as asynchronous ones, or None if one of them cannot be."""
    uses = UseDef(function)
    loops = [n for n in function.body.nodes if n.op is control_flow.for_]
    rights = {}
    for loop in loops:
        for node in loop.regions[0].nodes:
            if node.op in PRODUCT_OPS and (side := _match_right_operand(function, uses, loop, node)) is not None:
                rights[node] = side
    every = [n for n in function.body.walk() if n.op in PRODUCT_OPS]
    rows = {static_shape(n.out)[0] for n in rights}
    whole = bool(rights) and len(rights) == len(every) and len(rows) == 1 and rows <= set(WGMMA_BLOCK_ROWS)
    if not whole or int(function.attrs.get("group", 1)) != 1:
        return None
    left = _find_resident_operands(function, uses, list(rights))
    if _estimate_registers(uses, loops, rights, left) > MAX_LOOP_REGISTERS:
        return None
    fetched = {v: side for loop in loops for v, side in _find_fetched_blocks(function, uses, loop, rights).items()}
    read = {side.ref for side in (*rights.values(), *fetched.values())}
    if any(_loads_left_operand(loop, fetched) for loop in loops) or _find_written_refs(function) & read:
        return None
    reading = {v: [loop for loop in loops if any(v in n.args for n in loop.regions[0].nodes)][-1] for v in left}
    return AsyncProducts(rights, left, reading, fetched)


def _find_fetched_blocks(
    function: Function, uses: UseDef, loop: Node, rights: dict[Node, OperandSource]
) -> dict[Value, OperandSource]:
    """The loads of blocks of f32 in a loop that left operands are computed of, and that TMA can fetch."""
    inside, found = UseDef(loop.regions[0], nested=False), dict[Value, OperandSource]()
    products = [n for n in loop.regions[0].nodes if n in rights]
    made = inside.backward_slice([n.args[-2] for n in products])
    for v in (v for n in made if n.op not in (tile.load, shape.permute, shape.reshape) for v in n.args):
        side = find_operand_source(inside, v, (f32,))
        if side is None or side.ref not in function.params:
            continue
        known, sizes = {loop.regions[0].params[0], *function.params}, static_shape(v)
        ahead = all(_is_computable_ahead(uses, known, x) for x in (*loop.args[:2], *side.starts))
        if ahead and len(sizes) == 2 and sizes[0] == static_shape(products[0].out)[0] and not sizes[1] % FETCHED_DEPTH:
            found[_find_load(inside, v).out] = side
    return found


def _find_load(inside: UseDef, v: Value) -> Node:
    """The load that a block is a view of."""
    node = inside[v]
    while node.op is not tile.load:
        node = inside[node.args[0]]
    return node


def _loads_left_operand(loop: Node, fetched: dict[Value, OperandSource]) -> bool:
    """Whether a product's left operand is loaded in each round: other passes prefetch both operands then."""
    inside = UseDef(loop.regions[0], nested=False)
    for product in (n for n in loop.regions[0].nodes if n.op in PRODUCT_OPS):
        made = inside.get(product.args[-2])
        while made is not None and made.op in VIEW_OPS:
            made = inside.get(made.args[0])
        if made is not None and made.op is tile.load and made.out not in fetched and _is_only_viewed(inside, made.out):
            return True
    return False


def _is_only_viewed(inside: UseDef, v: Value) -> bool:
    """Whether products alone read a block, through views: nothing is computed of it."""
    readers = inside.users(v)
    return all(n.op in PRODUCT_OPS or (n.op in VIEW_OPS and _is_only_viewed(inside, n.out)) for n in readers)


def _find_written_refs(function: Function) -> set[Value]:
    return tile.find_written_refs(function.body)


def _estimate_registers(
    uses: UseDef, loops: Sequence[Node], rights: dict[Node, OperandSource], resident: Collection[Value]
) -> int:
    """An estimate of the registers of a thread: the accumulators, and the packed left operands of a loop, of which the
    resident ones lie in shared memory.
    """
    groups = min(2, max(static_shape(n.out)[0] for n in rights) // 64)
    sums = {_find_accumulator(uses, loops, n): math.prod(static_shape(n.out)) for n in rights}

    def lefts(loop: Node) -> set[Value]:
        return {n.args[-2] for n in loop.regions[0].nodes if n in rights}

    left = (sum(math.prod(static_shape(v)) // 2 for v in lefts(loop) - {*resident}) for loop in loops)
    return (sum(sums.values()) + max(left)) // (128 * groups)


def _find_accumulator(uses: UseDef, loops: Sequence[Node], product: Node) -> tuple[Node, int]:
    """The loop, and the number of its carried value, that a product's sums begin in; the product itself elsewhere."""
    owners = {v: (loop, i) for loop in loops for i, v in enumerate(loop.regions[0].params[1:])}
    owners |= {v: (loop, i) for loop in loops for i, v in enumerate(loop.results)}
    found, at = (product, 0), product.args[0] if product.op is matmul_accumulate else None
    while at is not None:
        made = uses.get(at)
        if at in owners:
            found = owners[at]
            at = found[0].args[3 + found[1]]
        else:
            at = made.args[0] if made is not None and made.op is matmul_accumulate else None
            found = (made, 0) if at is not None and made is not None else found
    return found


def _match_right_operand(function: Function, uses: UseDef, loop: Node, node: Node) -> OperandSource | None:
    """The source of a product's right operand, if TMA can fetch it and wgmma can read it."""
    left, right = node.args[-2:]
    dtype = right.type.dtype  # type: ignore[union-attr]
    inside = UseDef(loop.regions[0], nested=False)
    side = find_operand_source(inside, right)
    if side is None or dtype not in HALF_TYPES or left.type.dtype != dtype or node.out.type.dtype != f32:  # type: ignore[union-attr]
        return None
    depth, columns = static_shape(right)
    step = uses.get(loop.args[2])
    counted = step is not None and step.op is basic.full and int(step.attrs["value"]) > 0
    known = {loop.regions[0].params[0], *function.params}
    ahead = all(_is_computable_ahead(uses, known, v) for v in (*loop.args[:2], *side.starts))
    whole = columns in ASYNC_MMA_COLUMNS or (side.flipped and columns in NARROW_COLUMNS)
    deep = depth in ASYNC_MMA_DEPTHS or (side.flipped and depth in SHALLOW_DEPTHS)
    fits = deep and whole and side.ref in function.params
    return side if fits and counted and ahead and left.type.accumulate == f32 else None  # type: ignore[union-attr]


def _is_computable_ahead(uses: UseDef, known: set[Value], v: Value) -> bool:
    """Whether a scalar depends on program ids, parameters and the loop's index alone."""
    node = uses.get(v)
    if node is None:
        return v in known and isinstance(v.type, TensorType)
    return is_scalar_arithmetic(node) and all(_is_computable_ahead(uses, known, x) for x in node.args)


def _find_resident_operands(function: Function, uses: UseDef, products: Sequence[Node]) -> dict[Value, OperandSource]:
    """The left operands that are loaded before the loops and have no other use."""
    top = UseDef(function, nested=False)
    ours: Counter[Value] = Counter(n.args[-2] for n in products)
    written, found = _find_written_refs(function), {}
    for v in ours:
        side = find_operand_source(top, v) if uses.count_uses(v) == ours[v] else None
        if side is None or side.flipped or side.ref in written or side.ref not in function.params:
            continue
        if all(_is_computable_ahead(uses, set(function.params), s) for s in side.starts):
            found[v] = side
    return found

"""Instruction selection: patterns with one instruction or one op of the target.

Fused multiply-add contraction, exp2 with flushed subnormals, accumulation into products, and f32 products on tensor
cores by splitting into three bf16 (Henry, Tang and Heinecke 2019).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.codegen.ptx.ops import exp2_ftz, fma, matmul_accumulate, truncate_bf16
from tessera.codegen.ptx.table.scalars.arithmetic import emit
from tessera.core.types import DType, TensorType, bf16, f16, f32, fp8_e4m3, fp8_e5m2
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ir.evaluator import make_copier, rebuild_function
from tessera.ir.rewrite import eliminate_dead_code
from tessera.ops.tensor import basic, contractions, elementwise, shape

# The pass that multiplies and adds at once: `x * y + z` and `x * y - z` of f32 blocks, rounded once.


@emit(fma)
def _(s, x, y, z):
    return s.do(f"fma.rn.{s.word}", x, y, z)


def contract_fma(function: Function) -> Function:
    """The function with each product that only a sum or difference takes made together with it."""
    producers = {v: n for n in function.body.walk() for v in n.results}
    uses = Counter(v for n in function.body.walk() for v in (*n.args, *(r for b in n.regions for r in b.results)))
    products = {
        v: n for v, n in producers.items() if n.op is elementwise.mul and uses[v] == 1 and _is_f32(v)
    }  # fmt: skip

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = make_copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            place = next((i for i in PRODUCT_OPERANDS.get(node.op, ()) if node.args[i] in products), None)
            if place is None:
                return copy(node, args, run)
            x, y = (run.env[v] for v in products[node.args[place]].args)
            z = args[1 - place]
            with builder.at(node.loc):
                z = builder.add(elementwise.neg, [z], {}).out if node.op is elementwise.sub else z
                return builder.add(fma, [x, y, z], {}).results

        return meaning

    return eliminate_dead_code(rebuild_function(function, meaning_of))


# Which operands of a sum or difference may be products.
PRODUCT_OPERANDS = {elementwise.add: (0, 1), elementwise.sub: (0,)}


def _is_f32(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype == f32


# The pass for powers of two that are 0 where they would be subnormal: the hardware's own instruction gives them so.
#
# `where(x < -126, 0, exp2(x))` is one instruction, where `exp2(x)` alone needs four.


MIN_NORMAL_EXPONENT = -126  # the exponent of the least normal f32


@emit(exp2_ftz)
def _(s, x):
    return s.text.let("ex2.approx.ftz.f32", "f32", x)


def select_exp2_ftz(function: Function) -> Function:
    """The function with such powers of f32 as the hardware's."""
    producers = {v: n for n in function.body.walk() for v in n.results}
    powers = {n: x for n in function.body.walk() if (x := _match_flushed_power(producers, n)) is not None}
    if not powers:
        return function

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = make_copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if node in powers:
                return builder.add(exp2_ftz, [run.env[powers[node]]], {}, loc=node.loc).results
            return copy(node, args, run)

        return meaning

    return eliminate_dead_code(rebuild_function(function, meaning_of))


def _match_flushed_power(producers: Mapping[Value, Node], node: Node) -> Value | None:
    """What a node is such a power of."""
    if node.op is not elementwise.where or node.out.type.dtype != f32:  # type: ignore[union-attr]
        return None
    small, zero, power = (producers.get(v) for v in node.args)
    found = power is not None and power.op is elementwise.exp2 and small is not None and small.op is elementwise.less
    if not found or small is None or power is None or small.args[0] is not power.args[0]:
        return None
    limit = _splat_value(producers, small.args[1]) == MIN_NORMAL_EXPONENT and _splat_value(producers, node.args[1]) == 0
    return power.args[0] if limit and zero is not None else None


def _splat_value(producers: Mapping[Value, Node], v: Value) -> Any:
    """The number that a block is full of, or None."""
    node = producers.get(v)
    while node is not None and node.op is basic.broadcast_to:
        node = producers.get(node.args[0])
    return node.attrs["value"] if node is not None and node.op is basic.full else None


# The pass that adds products where they are summed: `acc + dot(a, b)` becomes one `multiply_add`.


RewriteRule = Callable[[Node, list[Any], Any], Sequence[Any]]


def fuse_accumulation(function: Function) -> Function:
    """The function with each product that is only added to a block of its own type added in place."""
    fused = _match_accumulations(function)
    if not fused:
        return function
    dots = {dot.out for dot in fused.values()}

    def meaning_of(builder: Builder) -> RewriteRule:
        copy = make_copier(builder)
        operands: dict[Value, list[Value]] = {}

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if node.results and node.results[0] in dots:
                operands[node.out] = args
                return [None]  # it is made where it is added
            if node.results and node.results[0] in fused:
                dot = fused[node.out]
                acc = next(a for a, v in zip(args, node.args, strict=True) if v is not dot.out)
                made = builder.add(matmul_accumulate, [acc, *operands[dot.out]], {}, loc=dot.loc)
                return made.results
            return copy(node, args, run)

        return meaning

    return rebuild_function(function, meaning_of)


def _match_accumulations(function: Function) -> dict[Value, Node]:
    """The sums to fuse, with the product that each takes: made in the same region, of the accumulation type."""
    uses: Counter[Value] = Counter()
    for node in function.body.walk():
        uses.update(node.args)
        uses.update(v for region in node.regions for v in region.results)
    found: dict[Value, Node] = {}
    blocks = [function.body, *(r for node in function.body.walk() for r in node.regions)]
    for block in blocks:
        dots = {n.out: n for n in block.nodes if n.op is contractions.dot and _is_exact(n) and uses[n.out] == 1}
        for node in block.nodes:
            taken = [v for v in node.args if v in dots] if node.op is elementwise.add else []
            if len(taken) == 1:
                found[node.out] = dots[taken[0]]
    return found


def _is_exact(dot: Node) -> bool:
    return dot.args[0].type.accumulate == dot.out.type.dtype  # type: ignore[union-attr]


# The pass that lets tensor cores form products of f32 with what was narrow: both narrow, or f32 cut into three bf16.
#
# Three numbers of 8 bits hold an f32's 24, and what a product of two bf16 is, an f32 holds. So such products differ
# from
# those of f32 by what their sums round, and are within the same bounds (Henry, Tang and Heinecke 2019).


VIEW_OPS = (shape.permute, shape.reshape, basic.broadcast_to)
BF16_PARTS = 3
# What products are formed in, and the types whose numbers it holds; an f32 it holds as parts.
EXACT_TYPES = {bf16: (bf16, fp8_e4m3, fp8_e5m2, f32), f16: (f16, fp8_e4m3, fp8_e5m2)}
Producers = Mapping[Value, Node]


def split_products(function: Function) -> Function:
    """The function with its products of f32, one side of which was narrower, as products of 16-bit floats."""
    producers = {v: node for node in function.body.walk() for v in node.results}
    if not any(_is_splittable(producers, node) for node in function.body.walk()):
        return function

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = make_copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if not _is_splittable(producers, node):
                return copy(node, args, run)
            with builder.at(node.loc):
                return [_ProductSplitter(builder, producers, run.env).product(node, args)]

        return meaning

    return eliminate_dead_code(rebuild_function(function, meaning_of))


def _is_splittable(producers: Producers, node: Node) -> bool:
    """Whether a node is a product of f32 whose sides are exact in one 16-bit format, f32 that is cut in parts apart."""
    if node.op is not contractions.dot or any(v.type.dtype != f32 or v.type.accumulate != f32 for v in node.args):  # type: ignore[union-attr]
        return False
    return node.out.type.dtype == f32 and _find_operand_type(producers, node) is not None  # type: ignore[union-attr]


def _find_operand_type(producers: Producers, node: Node) -> DType | None:
    """The type that a product's sides are multiplied in; None where none holds them."""
    kinds = {_find_source_type(producers, v) for v in node.args}
    return next((held for held, exact in EXACT_TYPES.items() if kinds <= set(exact) and kinds != {f32}), None)


def _find_source_type(producers: Producers, v: Value) -> DType:
    """The type that a block had before a cast that only views lie behind."""
    node = producers.get(v)
    while node is not None and node.op in VIEW_OPS:
        node = producers.get(node.args[0])
    before = node.args[0].type.dtype if node is not None and node.op is basic.cast else f32  # type: ignore[union-attr]
    return before if before in (*EXACT_TYPES[bf16], *EXACT_TYPES[f16]) else f32


class _ProductSplitter:
    """One product under rewriting; `env` holds what the function's values have become."""

    def __init__(self, builder: Builder, producers: Producers, env: Mapping[Value, Value]) -> None:
        self.builder, self.producers, self.env = builder, producers, env

    def product(self, node: Node, args: Sequence[Value]) -> Value:
        """The sum of the products of the parts, the smallest first."""
        held = _find_operand_type(self.producers, node)
        left, right = (self._parts(v, x, held) for v, x in zip(node.args, args, strict=True))
        pairs = [(a, b) for a in reversed(left) for b in reversed(right)]
        total = self._dot(*pairs[0])
        for a, b in pairs[1:]:
            total = self.builder.add(elementwise.add, [total, self._dot(a, b)]).out
        return total

    def _dot(self, a: Value, b: Value) -> Value:
        return self.builder.add(contractions.dot, [a, b], {"dtype": f32}).out

    def _parts(self, v: Value, x: Value, held: DType | None) -> list[Value]:
        """A side as blocks of a narrow type, the largest first: itself as it was, or an f32 in pieces."""
        if (kind := _find_source_type(self.producers, v)) != f32:
            found = self._narrow(v)
            return [found if kind == held else self.builder.add(basic.cast, [found], {"dtype": held}).out]
        parts = [self.builder.add(truncate_bf16, [x]).out]
        x = self._first_rest(x, parts[0])
        for _ in range(BF16_PARTS - 2):
            parts.append(self.builder.add(truncate_bf16, [x]).out)
            x = self._rest(x, parts[-1])[0]
        return [*parts, self.builder.add(truncate_bf16, [x]).out]

    def _rest(self, x: Value, part: Value) -> tuple[Value, Value]:
        """What a part leaves, exactly; and the part as f32."""
        wide = self.builder.add(basic.cast, [part], {"dtype": f32}).out
        return self.builder.add(elementwise.sub, [x, wide]).out, wide

    def _first_rest(self, x: Value, part: Value) -> Value:
        """The same; nothing of an infinity."""
        rest, wide = self._rest(x, part)
        same = self.builder.add(elementwise.equal, [x, wide]).out
        zero = self.builder.add(basic.full, [], {"shape": x.type.shape, "value": 0.0, "dtype": f32}).out
        return self.builder.add(elementwise.where, [same, zero, rest]).out

    def _narrow(self, v: Value) -> Value:
        """A block before its cast, with the views that lay behind that."""
        node = self.producers[v]
        if node.op is basic.cast:
            return self.env[node.args[0]]
        return self.builder.add(node.op, [self._narrow(node.args[0])], node.attrs).out

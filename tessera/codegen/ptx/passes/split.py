"""The pass that lets tensor cores form products of f32 with what was narrow: both narrow, or f32 cut into three bf16.

Three numbers of 8 bits hold an f32's 24, and what a product of two bf16 is, an f32 holds. So such products differ from
those of f32 by what their sums round, and are within the same bounds (Henry, Tang and Heinecke 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.codegen.ptx.ops import upper
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ops import basic, elementwise, linalg, shape
from tessera.passes.dead_code import sweep
from tessera.types import DType, bf16, f16, f32, fp8_e4m3, fp8_e5m2

VIEWS = (shape.permute, shape.reshape, basic.broadcast_to)
PARTS = 3
# What products are formed in, and the types whose numbers it holds; an f32 it holds as parts.
EXACT = {bf16: (bf16, fp8_e4m3, fp8_e5m2, f32), f16: (f16, fp8_e4m3, fp8_e5m2)}
Producers = Mapping[Value, Node]


def split_products(function: Function) -> Function:
    """The function with its products of f32, one side of which was narrower, as products of 16-bit floats."""
    producers = {v: node for node in function.body.walk() for v in node.results}
    if not any(_fits(producers, node) for node in function.body.walk()):
        return function

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if not _fits(producers, node):
                return copy(node, args, run)
            with builder.at(node.loc):
                return [_Split(builder, producers, run.env).product(node, args)]

        return meaning

    return sweep(rebuild(function, meaning_of))


def _fits(producers: Producers, node: Node) -> bool:
    """Whether a node is a product of f32 whose sides are exact in one 16-bit format, f32 that is cut in parts apart."""
    if node.op is not linalg.dot or any(v.type.dtype != f32 or v.type.accumulate != f32 for v in node.args):  # type: ignore[union-attr]
        return False
    return node.out.type.dtype == f32 and _held(producers, node) is not None  # type: ignore[union-attr]


def _held(producers: Producers, node: Node) -> DType | None:
    """The type that a product's sides are multiplied in; None where none holds them."""
    kinds = {_kind(producers, v) for v in node.args}
    return next((held for held, exact in EXACT.items() if kinds <= set(exact) and kinds != {f32}), None)


def _kind(producers: Producers, v: Value) -> DType:
    """The type that a block had before a cast that only views lie behind."""
    node = producers.get(v)
    while node is not None and node.op in VIEWS:
        node = producers.get(node.args[0])
    before = node.args[0].type.dtype if node is not None and node.op is basic.cast else f32  # type: ignore[union-attr]
    return before if before in (*EXACT[bf16], *EXACT[f16]) else f32


class _Split:
    """One product under rewriting; `env` holds what the function's values have become."""

    def __init__(self, builder: Builder, producers: Producers, env: Mapping[Value, Value]) -> None:
        self.builder, self.producers, self.env = builder, producers, env

    def product(self, node: Node, args: Sequence[Value]) -> Value:
        """The sum of the products of the parts, the smallest first."""
        held = _held(self.producers, node)
        left, right = (self._parts(v, x, held) for v, x in zip(node.args, args, strict=True))
        pairs = [(a, b) for a in reversed(left) for b in reversed(right)]
        total = self._dot(*pairs[0])
        for a, b in pairs[1:]:
            total = self.builder.add(elementwise.add, [total, self._dot(a, b)]).out
        return total

    def _dot(self, a: Value, b: Value) -> Value:
        return self.builder.add(linalg.dot, [a, b], {"dtype": f32}).out

    def _parts(self, v: Value, x: Value, held: DType | None) -> list[Value]:
        """A side as blocks of a narrow type, the largest first: itself as it was, or an f32 in pieces."""
        if (kind := _kind(self.producers, v)) != f32:
            found = self._narrow(v)
            return [found if kind == held else self.builder.add(basic.cast, [found], {"dtype": held}).out]
        parts = [self.builder.add(upper, [x]).out]
        x = self._first_rest(x, parts[0])
        for _ in range(PARTS - 2):
            parts.append(self.builder.add(upper, [x]).out)
            x = self._rest(x, parts[-1])[0]
        return [*parts, self.builder.add(upper, [x]).out]

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

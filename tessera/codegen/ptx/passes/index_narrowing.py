"""Index narrowing: blocks of indices that are proven to fit are computed in 32 bits (LLVM's induction variable and
type narrowing, by value ranges).

A GPU adds and multiplies 64-bit integers in several instructions. An address takes a 32-bit index in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.codegen.ptx.ops import LaunchFacts
from tessera.core.types import TensorType, int32, int64
from tessera.ir.analysis import IntervalAnalysis
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, eliminate_dead_code, rewrite_function
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

LOW, HIGH = -(1 << 31), (1 << 31) - 1
ARITHMETIC = (e.add, e.sub, e.mul, e.minimum, e.maximum, e.abs, e.where)
VIEWS = (basic.broadcast_to, shape.reshape, shape.permute)
COMPARISONS = (e.less, e.less_equal, e.greater, e.greater_equal, e.equal, e.not_equal)
DIVISIONS = (e.floor_divide, e.remainder)


def narrow_indices(function: Function) -> Function:
    """The function with its blocks of int64 in int32, where their intervals are within it, and addresses of these."""
    ranges = IntervalAnalysis(UseDef(function), LaunchFacts.of(function).grid)
    for node in function.body.walk():
        if node.op is control_flow.for_:
            ranges.loop(node)
    narrowing = _Narrowing(ranges)
    patterns = RewritePatterns("index narrowing")
    patterns(*ARITHMETIC, *VIEWS)(narrowing.compute)
    patterns(*DIVISIONS)(narrowing.divide)
    patterns(shape.iota, basic.full)(narrowing.make)
    patterns(*COMPARISONS)(narrowing.compare)
    patterns(basic.cast)(narrowing.convert)
    patterns(tile.gather)(narrowing.access)
    return eliminate_dead_code(rewrite_function(function, patterns))


class _Narrowing:
    """The patterns; `ranges` are the intervals of the function before."""

    def __init__(self, ranges: IntervalAnalysis) -> None:
        self.ranges = ranges

    def fits(self, v: Value) -> bool:
        """Whether a value is a plain int64 that is within 32 bits."""
        low, high = self.ranges.of(v)
        plain = isinstance(v.type, TensorType) and v.type.dtype == int64 and v.type.policy is None
        return plain and low >= LOW and high <= HIGH

    def is_block(self, v: Value) -> bool:
        """Whether a value is such a block."""
        return bool(v.type.shape) and self.fits(v)

    def compute(self, rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        """An op in 32 bits, whose result is widened again for what needs it."""
        wide = [v for v in node.args if v.type.dtype == int64]  # type: ignore[union-attr]
        if not self.is_block(node.out) or not all(map(self.fits, wide)):
            return None
        return _widen(rewriter, rewriter.add(node.op, *_narrow_all(rewriter, args), **node.attrs))

    def divide(self, rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        """A division by what is positive: another may overflow, or fail."""
        return self.compute(rewriter, node, args) if self.ranges.of(node.args[1])[0] > 0 else None

    def make(self, rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        """A constant block or the places along an axis."""
        if not self.is_block(node.out):
            return None
        return _widen(rewriter, rewriter.add(node.op, **{**node.attrs, "dtype": int32}))

    def compare(self, rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        """A comparison of two such blocks, or of one and a number."""
        if not node.out.type.shape or not all(map(self.fits, node.args)):
            return None
        return rewriter.add(node.op, *_narrow_all(rewriter, args), **node.attrs)

    def convert(self, rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        """A conversion of such a block, or to one."""
        if self.is_block(node.args[0]):
            narrow = _narrow_all(rewriter, args)
            return narrow[0] if node.attrs["dtype"] == int32 else rewriter.add(basic.cast, *narrow, **node.attrs)
        if not self.is_block(node.out) or node.args[0].type.dtype == int32:  # type: ignore[union-attr]
            return None
        return _widen(rewriter, rewriter.add(basic.cast, *args, dtype=int32))

    def access(self, rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        """A gather, whose indices of other kinds are narrowed too: those that are read from memory and checked."""
        last = 1 + node.args[0].type.rank  # type: ignore[union-attr]
        pairs = list(zip(node.args[1:last], args[1:last], strict=True))
        if not any(self.is_block(old) and _find_narrow(rewriter, new) is None for old, new in pairs):
            return None
        indices = [_widen(rewriter, _narrow(rewriter, new)) if self.is_block(old) else new for old, new in pairs]
        return rewriter.add(node.op, args[0], *indices, *args[last:], **node.attrs)


def _find_narrow(rewriter: Rewriter, v: Value) -> Value | None:
    """The block of 32 bits that an int64 was widened from."""
    node = rewriter.find_producer(v, basic.cast)
    return node.args[0] if node is not None and node.args[0].type.dtype == int32 else None  # type: ignore[union-attr]


def _narrow(rewriter: Rewriter, v: Value) -> Value:
    if v.type.dtype != int64:  # type: ignore[union-attr]
        return v
    found = _find_narrow(rewriter, v)
    return rewriter.add(basic.cast, v, dtype=int32) if found is None else found


def _narrow_all(rewriter: Rewriter, args: Sequence[Value]) -> list[Value]:
    return [_narrow(rewriter, v) for v in args]


def _widen(rewriter: Rewriter, v: Value) -> Any:
    return rewriter.add(basic.cast, v, dtype=int64)

"""Emission of decompositions: an IR function of scalars as a CSL function.

A value with one use is an expression where it is used, others are constants. A `where` is an `if`, and a constant that
only one branch uses is computed in that branch: rare cases cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tessera.core.types import DType, bool_, f32, int32, uint32
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ops.dialects import arith
from tessera.ops.tensor import basic
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f

SCALAR_TYPES = {f32: "f32", int32: "i32", uint32: "u32", bool_: "bool"}
# The functions of CSL's library; others are decompositions.
MATH_LIBRARY = {
    e.exp: "exp", e.log: "log", e.sqrt: "sqrt", e.tanh: "tanh", e.sin: "sin", e.cos: "cos", e.floor: "floor",
    e.ceil: "ceil", e.exp2: "exp2", e.log2: "log2", e.round: "round", e.pow: "pow", f.atan: "atan",
}  # fmt: skip
# (op) to the expression of its result. CSL has no fused multiply-add of scalars: it rounds twice.
EXPRESSIONS = {
    **{op: f"math.{name}({', '.join(len(op.operands) * ['{}'])})" for op, name in MATH_LIBRARY.items()},
    e.add: "({} + {})", e.sub: "({} - {})", e.mul: "({} * {})", arith.divide: "({} / {})", e.neg: "(-{})",
    arith.fma: "({} * {} + {})", arith.fmod: "math.fmod({}, {})", e.abs: "math.abs({})",
    e.bitwise_and: "({} & {})", e.bitwise_or: "({} | {})", e.bitwise_xor: "({} ^ {})",
    e.shift_left: "({} << {})", e.shift_right: "({} >> {})", arith.extract_bit: "(({} >> {}) & 1)",
    e.less: "({} < {})", e.less_equal: "({} <= {})", e.greater: "({} > {})", e.greater_equal: "({} >= {})",
    e.equal: "({} == {})", e.not_equal: "({} != {})",
    arith.copysign: "@bitcast(f32, (@bitcast(u32, {}) & 0x7FFFFFFF) | (@bitcast(u32, {}) & 0x80000000))",
}  # fmt: skip
BOOL_EXPRESSIONS = {e.bitwise_and: "({} and {})", e.bitwise_or: "({} or {})", e.bitwise_xor: "({} != {})"}


def format_function(name: str, function: Function, format_literal: Callable[[Any, DType], str]) -> str:
    """A decomposition as the text of a CSL function."""
    params = ", ".join(f"{x}: {_spell_type(v)}" for x, v in zip("xyz", function.params, strict=False))
    (result,) = function.results
    writer = _FunctionWriter(function, format_literal)
    names = dict(zip(function.params, "xyz", strict=False))
    lines = "\n".join(writer.format_tail(result, names, "  "))
    return f"fn {name}({params}) {_spell_type(result)} {{\n{lines}\n}}"


def _spell_type(v: Value) -> str:
    return SCALAR_TYPES[v.type.dtype]  # type: ignore[union-attr]


class _FunctionWriter:
    """The function that is written: its use-def chains, and the spelling of its numbers."""

    def __init__(self, function: Function, format_literal: Callable[[Any, DType], str]) -> None:
        self.uses = UseDef(function)
        self.format_literal = format_literal
        self.count = 0

    def format_tail(self, v: Value, names: dict[Value, str], indent: str) -> Iterator[str]:
        """The statements that return a value, in a scope where some values have names."""
        node = self.uses.find(v, e.where)
        if node is None or v in names:
            lines: list[str] = []
            text = self._format_value(v, names, lines, indent)
            yield from [*lines, f"{indent}return {_strip_parentheses(text)};"]
            return
        condition, yes, no = node.args
        lines = []
        text = self._format_value(condition, names, lines, indent)
        for value in [v for v in self._always_used(yes) if v in self._always_used(no)]:
            self._format_value(value, names, lines, indent)
        yield from [*lines, f"{indent}if ({_strip_parentheses(text)}) {{"]
        yield from self.format_tail(yes, dict(names), indent + "  ")
        yield f"{indent}}}"
        yield from self.format_tail(no, names, indent)

    def _always_used(self, v: Value) -> Sequence[Value]:
        """The values with several uses that are computed for a value whichever branches are taken, in order."""
        node = self.uses.get(v)
        if node is None or node.op is basic.full:
            return ()
        first, *others = (self._always_used(a) for a in node.args)
        if node.op is e.where:
            yes, no = others
            others = [tuple(each for each in yes if each in no)]
        found = dict.fromkeys((*first, *(each for other in others for each in other)))
        return (*found, v) if self.uses.count_uses(v) > 1 else tuple(found)

    def _format_value(self, v: Value, names: dict[Value, str], lines: list[str], indent: str) -> str:
        """The expression of a value; constants that it needs are added to the lines."""
        if v in names:
            return names[v]
        node = self.uses[v]
        if node.op is basic.full:
            return self.format_literal(node.attrs["value"], node.attrs["dtype"])
        text = self._format_node(node, [self._format_value(a, names, lines, indent) for a in node.args])
        if self.uses.count_uses(v) == 1 and not self._is_compared_with_itself(v):
            return text
        self.count += 1
        names[v] = f"v{self.count}"
        lines.append(f"{indent}const {names[v]}: {_spell_type(v)} = {_strip_parentheses(text)};")
        return names[v]

    def _is_compared_with_itself(self, v: Value) -> bool:
        return any(user.op is arith.is_nan for user in self.uses.users(v))

    def _format_node(self, node: Node, operands: list[str]) -> str:
        if node.op is arith.bitcast:
            return f"@bitcast({_spell_type(node.out)}, {_strip_parentheses(operands[0])})"
        if node.op is arith.is_nan:
            return f"({operands[0]} != {operands[0]})"
        if node.op is e.where:
            return f"(if ({_strip_parentheses(operands[0])}) {operands[1]} else {operands[2]})"
        if node.op is arith.copysign and self.uses.find(node.args[0], basic.full):
            return f"@bitcast(f32, {_format_magnitude(operands[0])}(@bitcast(u32, {operands[1]}) & 0x80000000))"
        of_bools = node.types[0].dtype == bool_ and node.op in BOOL_EXPRESSIONS  # type: ignore[union-attr]
        template = (BOOL_EXPRESSIONS if of_bools else EXPRESSIONS)[node.op]
        return template.format(*(operands if template.startswith("(") else map(_strip_parentheses, operands)))


def _format_magnitude(literal: str) -> str:
    """The bits of a number without its sign, to which a sign is joined."""
    bits = int(np.abs(np.float32(literal)).view(np.uint32))
    return f"{bits} | " if bits else ""


def _strip_parentheses(text: str) -> str:
    """An expression without the parentheses around the whole of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text

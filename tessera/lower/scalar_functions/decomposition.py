"""Decomposition: rules that give a scalar function as ops of arithmetic, and the expansion by them (MLIR, math
expansion).

A rule is a Python function of Tessera values. It traces to an IR function of scalars, whose composite ops are expanded
in turn. A generator has its own table: the shared rules, without the functions for which it has native rows, and with
the rules that use its own instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tessera.core.errors import UNKNOWN
from tessera.core.types import DType, TensorType
from tessera.ir.builder import Builder, override_numerics
from tessera.ir.core import Attrs, Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, eliminate_dead_code, rewrite_function
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor
from tessera.ops.dialects.arith import fma
from tessera.ops.tensor.basic import full

Rule = Callable[..., Tensor]


class Decompositions:
    """A table from op and element type to a rule, filled by decorator.

    >>> # @SHARED(e.exp2, f32)
    >>> # def exp2_f32(x): ...
    """

    def __init__(self, rules: Mapping[tuple[Op, DType], Rule] | None = None) -> None:
        self._rules = dict(rules or {})
        self._functions: dict[tuple[Rule, tuple[DType, ...]], Function] = {}

    def __call__(self, op: Op, *dtypes: DType) -> Callable[[Rule], Rule]:
        def add(rule: Rule) -> Rule:
            for dtype in dtypes:
                assert (op, dtype) not in self._rules, f"{op.name} of {dtype} has two decompositions"
                self._rules[op, dtype] = rule
            return rule

        return add

    def __contains__(self, key: tuple[Op, DType]) -> bool:
        return key in self._rules

    def ops(self) -> set[Op]:
        """The ops that have a rule for some element type."""
        return {op for op, _ in self._rules}

    def without(self, native: Callable[[Op, DType], bool]) -> Decompositions:
        """The rules but for those functions that a target computes natively."""
        return Decompositions({key: rule for key, rule in self._rules.items() if not native(*key)})

    def find(self, op: Op, dtype: DType) -> Function | None:
        """The decomposition of an op whose operands have this element type, or None."""
        rule = self._rules.get((op, dtype))
        return None if rule is None else self.build(rule, *(dtype for _ in op.operands))

    def build(self, rule: Rule, *dtypes: DType) -> Function:
        """A rule on scalars of these element types as a function, expanded by this table."""
        key = (rule, dtypes)
        if key not in self._functions:
            made = rewrite_function(trace_rule(rule, dtypes), self._patterns(), revisit=True)
            self._functions[key] = eliminate_dead_code(made)
        return self._functions[key]

    def _patterns(self) -> RewritePatterns:
        patterns = RewritePatterns("decomposition")
        patterns(*self.ops())(self._expand_node)
        return patterns

    def _expand_node(self, rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        rule = self._rules.get((node.op, node.types[0].dtype))  # type: ignore[union-attr]
        return None if rule is None else rule(*map(Tensor, args)).data


@cache
def trace_rule(rule: Rule, dtypes: tuple[DType, ...]) -> Function:
    """A rule applied to scalars, as a function."""
    builder = Builder()
    params = tuple(Value(TensorType((), dtype)) for dtype in dtypes)
    with builder.active(), builder.at(UNKNOWN), override_numerics(None):
        result = rule(*map(Tensor, params))
    made = Function(getattr(rule, "__name__", "rule"), builder.block(params, (result.data,)), Attrs(), UNKNOWN)
    return eliminate_dead_code(made)


SHARED = Decompositions()


def constant(value: float, dtype: DType) -> Tensor:
    """A number of an element type."""
    return full(shape=(), value=value, dtype=dtype)


def evaluate_polynomial(x: Tensor, *coefficients: Any) -> Tensor:
    """A polynomial by Horner's scheme, highest power first; the first coefficient may be a tensor."""
    first, *rest = coefficients
    for c in rest:
        first = fma(first, x, c)
    return first

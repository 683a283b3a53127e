"""What rows of derivatives share: sums of partial derivatives, and ops that are linear in an operand."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tessera.op import Op
from tessera.ops.basic import splat
from tessera.tensor import Tensor, bind
from tessera.types import TensorType

Tangents = Sequence["Tensor | None"]
# partial(t, out, *primals, **attrs): how the result moves when one operand moves by t.
Partial = Callable[..., Any]


def along(*partials: Partial | None) -> Callable[..., Tensor | None]:
    """The JVP of an op whose tangent is the sum of one part for each operand that moves."""

    def rule(out: Any, primals: Sequence[Any], tangents: Tangents, **attrs: Any) -> Tensor | None:
        moved = [(p, t) for p, t in zip(partials, tangents, strict=True) if p is not None and t is not None]
        return total([p(t, out, *primals, **attrs) for p, t in moved])

    return rule


def linear(op: Op, **fixed: Any) -> Callable[..., Tensor]:
    """The JVP of an op that is linear in all its operands together; `fixed` attributes are those of the linear part."""

    def rule(out: Any, primals: Sequence[Tensor], tangents: Tangents, **attrs: Any) -> Tensor:
        return bind(op, [dense(t, x.type) for t, x in zip(tangents, primals, strict=True)], {**attrs, **fixed})

    return rule


def still(out: Any, primals: Any, tangents: Any, **attrs: Any) -> None:
    """The JVP of an op that is constant almost everywhere, or gives no floats: nothing moves."""


def total(parts: Sequence[Tensor]) -> Tensor | None:
    """The sum of tangents; None where there are none."""
    return functools.reduce(operator.add, parts) if parts else None


def dense(tangent: Tensor | None, type: TensorType) -> Tensor:
    """A tangent with zero written out."""
    return splat(0, type) if tangent is None else tangent


def unknown(operand: Any) -> bool:
    """Whether an operand of a linear op is the one that a transpose is taken of."""
    return isinstance(operand, TensorType)

"""The variables a loop hands from one iteration to the next, and the types they settle on."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from tessera.errors import TesseraError
from tessera.ir.core import Value
from tessera.kernel.frame import Frame, Unset
from tessera.kernel.join import as_type, join_types, same
from tessera.kernel.trace import is_number, is_traced
from tessera.tensor import Tensor
from tessera.types import TensorType, Type


class Carried:
    """Names assigned in a loop and read in a later iteration or after it.

    A tensor is carried at its type. A Python number stays a constant of the compiler until an
    iteration changes it; then it takes the type of what it became, and the body is read again.
    """

    def __init__(self, frame: Frame, node: ast.stmt, names: Sequence[str]) -> None:
        bound = {n: frame.names[n] for n in names if n in frame.names}
        self.before = {n: v for n, v in bound.items() if not isinstance(v, Unset)}
        self.learned: dict[str, TensorType] = frame.trace.learned.setdefault((node, frame.trace.depth), {})
        self.types: dict[str, TensorType] = {n: v.type for n, v in self.before.items() if is_traced(v)}
        self.types |= {n: t for n, t in self.learned.items() if is_number(self.before.get(n))}
        self.settled = False
        self.places = {n.id: frame.place(n) for n in ast.walk(node) if isinstance(n, ast.Name) and _stored(n)}

    def enter(self, frame: Frame) -> tuple[Value, ...]:
        """Fresh parameters, bound to the names, with which an attempt begins."""
        params = tuple(Value(t, n) for n, t in self.types.items())
        frame.names |= {p.hint: Tensor(p) for p in params}
        return params

    def leave(self, frame: Frame) -> tuple[Value, ...]:
        """What the names hold after the body; settled if that is what they were taken for."""
        found = {n: self._after(n, frame.names.get(n)) for n in self.before}
        wanted = {n: t for n, t in found.items() if t is not None}
        self.settled = wanted == self.types
        if not self.settled:
            self.types = wanted
            self.learned.update({n: t for n, t in wanted.items() if is_number(self.before[n])})
            return ()
        return tuple(as_type(frame.names[n], t).data for n, t in self.types.items())

    def _after(self, name: str, after: Any) -> TensorType | None:
        before = self.before[name]
        if isinstance(after, Unset):
            raise after.error
        if name not in self.types and same(before, after):
            return None
        if is_number(before) and is_number(after) and name in self.types:
            return self.types[name]
        try:
            return join_types(f"the loop variable `{name}`", before, after)
        except TesseraError as error:
            raise error.at(self.places[name]) from None

    def initial(self) -> list[Value]:
        """What the names hold before the loop, as operands."""
        return [as_type(self.before[n], t).data for n, t in self.types.items()]

    def result_types(self) -> tuple[Type, ...]:
        """The types of the node's results."""
        return tuple(self.types.values())

    def finish(self, frame: Frame, results: Sequence[Value]) -> None:
        """Bind the names to the node's results."""
        frame.names |= {n: Tensor(v) for n, v in zip(self.types, results, strict=True)}


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)

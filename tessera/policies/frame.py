"""A numeric context: what the ops called in it do to their float operands, and in place of which other ops stand."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any

from tessera.numerics.context import NUMERICS, suspended
from tessera.op import STORAGE, Op
from tessera.ops.basic import cast, stop_gradient
from tessera.tensor import Tensor
from tessera.types import DType, Policy

Chooser = Callable[[Tensor], DType]
Substitute = Callable[..., Any]


@dataclass(frozen=True)
class Frame:
    """What a context asks for: clauses of policies, the type results are stored in, ops that stand for others.

    Operands of float types get the clauses as part of their type, by a cast that stands in the program: so
    every level and target sees them.
    """

    clauses: Mapping[str, Any] = field(default_factory=dict)
    store: DType | Chooser | None = None
    instead: Mapping[Op, Substitute] = field(default_factory=dict)
    draws: Iterator[int] = field(default_factory=itertools.count, compare=False)

    def key(self) -> tuple[Any, ...]:
        """What a trace made in this context depends on."""
        return tuple(sorted(self.clauses.items(), key=str)), self.store, tuple(self.instead.items())

    def within(self, outer: Frame | None) -> Frame:
        """This frame opened inside another: what it does not say, the outer one does."""
        if outer is None:
            return self
        return Frame(
            {**outer.clauses, **self.clauses}, self.store or outer.store, {**outer.instead, **self.instead}, self.draws
        )

    def call(self, op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> Any:
        """The results of an op on a user's operands, under this frame's policies."""
        if op in self.instead:
            with suspended(Frame(self.clauses, self.store, draws=self.draws)):
                return self.instead[op](*operands, **attrs)
        if op not in (cast, stop_gradient):
            operands = self.restyled(op, operands)
        with suspended(None):
            return op(*operands, **attrs)

    def restyled(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        """The float operands under this frame's policies; an op that only moves one tensor takes it as it is."""
        floats = [x for x in _flat(operands) if isinstance(x, Tensor) and x.dtype.is_float]
        if not floats or (op.numerics == STORAGE and len(floats) == 1):
            return list(operands)
        draw = {"seed": next(self.draws)} if self.clauses.get("rounding") == "stochastic" else {}
        with suspended(None):
            return [self._styled(x, draw) for x in operands]

    def _styled(self, x: Any, draw: dict[str, int]) -> Any:
        if isinstance(x, (list, tuple)):
            return [self._styled(each, draw) for each in x]
        if not isinstance(x, Tensor) or not x.dtype.is_float:
            return x
        store = self.store if isinstance(self.store, DType) else x.dtype if self.store is None else self.store(x)
        base = x.type.policy if x.type.policy and store == x.dtype else Policy(store)
        wanted = dataclasses.replace(base, **{**self.clauses, **draw})
        return x if wanted == (x.type.policy or Policy(x.dtype)) else cast(x, dtype=wanted)


def _flat(operands: Sequence[Any]) -> Iterator[Any]:
    for x in operands:
        yield from x if isinstance(x, (list, tuple)) else (x,)


class Context:
    """A frame to be opened: `with context:`, or as the decorator of a function that runs inside it.

    >>> from tessera.types import f16
    >>> with Context(Frame({"compute": f16})):
    ...     Tensor([2048.0]) + 1.0
    Tensor([2048.], f32 @ compute=f16)
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._tokens: list[Token[Any]] = []

    def __enter__(self) -> Context:
        outer = NUMERICS.get()
        self._tokens.append(NUMERICS.set(self.frame.within(outer if isinstance(outer, Frame) else None)))
        return self

    def __exit__(self, *_: object) -> None:
        NUMERICS.reset(self._tokens.pop())

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **named: Any) -> Any:
            with self:
                return function(*args, **named)

        return inside

"""Repeated calls: a jitted function that is called with tensors of the types of the last call, in the context that most
calls have, runs its program at once, without a call key.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tessera.core.device import default_device
from tessera.core.device_array import DeviceArray
from tessera.core.symbolic_dim import symbol_names
from tessera.core.types import TensorType
from tessera.frontend.jit.call_keys import list_cells
from tessera.frontend.jit.line_marks import LINE_MARKS_ENABLED
from tessera.ir.builder import CURRENT_BUILDER, CURRENT_NUMERICS, CURRENT_RANK_NUMBER
from tessera.ir.tensor import POOL_PLACEMENT, Tensor, wrap_array
from tessera.lower.lowering_plan import INSTALLED, RUN_OBSERVER, SCOPED, SCOPED_FUSION

OTHER = object()  # what a call gives that is not like the last one


# Bound once: Python makes a method of an imported object anew for each call.
_builder, _numerics, _marked = CURRENT_BUILDER.get, CURRENT_NUMERICS.get, LINE_MARKS_ENABLED.get
_pool = POOL_PLACEMENT.get
_rank, _observer, _fusion, _passes = CURRENT_RANK_NUMBER.get, RUN_OBSERVER.get, SCOPED_FUSION.get, SCOPED.get


def is_plain_context() -> bool:
    """Whether nothing in the context of a call changes its program: no trace, numeric context, rank, memory pool
    or extension."""
    return (
        _builder() is None
        and _numerics() is None
        and not _marked()
        and _rank() is None
        and _observer() is None
        and _pool() is None
        and _fusion() is None
        and not _passes()
        and not INSTALLED
    )


MAX_REPEATED = 4  # programs of one function that are called in turn


@dataclass(eq=False)
class KnownCall:
    """A call that was bound and compiled: `order` has for each parameter its place among the leaves as written.

    () is the same order. `donated` are the places of leaves that the call gives up. `traced` is the traced function
    (`tessera.frontend.jit.tracing.TracedFunction`), and `wrap` gives its results as tensors. `kinds` are those of the
    last call that was found by its key.
    """

    traced: Any
    run: Callable[..., Any]
    order: tuple[int, ...]
    donated: tuple[int, ...] = ()
    kinds: tuple[Any, ...] | None = None

    def comes_again(self, kinds: tuple[Any, ...]) -> bool:
        """Whether the last call had the same objects as types; else these are noted."""
        last, self.kinds = self.kinds, kinds
        return last is not None and all(map(operator.is_, last, kinds))

    @cached_property
    def wrap(self) -> Callable[[Iterable[Any]], list[Tensor]]:
        """The results of a run as tensors."""
        types = [v.type for v in self.traced.function.results]
        wrap = wrap_result if any(symbol_names(t.shape) for t in types) else wrap_array
        return lambda arrays: list(map(wrap, arrays, types))


def make_repeated_call(
    known: KnownCall, types: Sequence[Any], function: Callable[..., Any], target: str | None,
    older: RepeatedCall | None = None,
) -> RepeatedCall | None:  # fmt: skip
    """The repeated call of a known one, which leaves others to the older one.

    It is the older one where not all arguments are tensors by place, or some are hidden.
    """
    if known.order or known.donated or not is_plain_context():
        return older
    traced, cells = known.traced, list_cells(function)
    hidden = traced.captures or traced.updates or traced.random is not None
    if hidden or cells is None or not all(isinstance(t, TensorType) for t in types):
        return older
    build = None if traced.results.kind is None else traced.results.build
    repeat = getattr(known.run, "repeat", None)  # of a runtime whose programs take tensors
    direct = None if repeat is None else repeat(types, [v.type for v in traced.function.results], OTHER)
    device = None if target else default_device()
    made = RepeatedCall(types, cells, device, known.run, known.wrap, build, direct)
    made.older = None if older is None else older.keep(MAX_REPEATED - 1)
    return made


class RepeatedCall:
    """The program of a function for tensors of some types, all of them by place.

    It holds as long as the function closes over the same objects (`list_cells`) and, where it names no target, the
    default device is the same. `older` takes what it does not: calls of a few shapes in turn are all repeated.
    """

    __slots__ = ("_direct", "build", "cells", "device", "direct", "older", "run", "single", "types", "wrap")

    def __init__(
        self, types: Sequence[TensorType], cells: Sequence[tuple[Any, Any]], device: str | None,
        run: Callable[[Sequence[Any]], Sequence[Any]], wrap: Callable[[Iterable[Any]], list[Tensor]],
        build: Callable[[Iterator[Any]], Any] | None, direct: Any = None,
    ) -> None:  # fmt: skip
        self.types, self.cells, self.device, self.run = tuple(types), tuple(cells), device, run
        self.wrap, self.build, self._direct = wrap, build, direct
        self.direct = None if direct is None else direct.run
        self.single = direct is not None and direct.single
        self.older: RepeatedCall | None = None

    def keep(self, count: int) -> RepeatedCall | None:
        """This one with so many in all."""
        if count == 0:
            return None
        self.older = None if self.older is None else self.older.keep(count - 1)
        return self

    def __call__(self, args: Sequence[Any]) -> Any:
        """The results of the function; `OTHER` where this is another call."""
        if not is_plain_context():
            return OTHER
        for cell, content in self.cells:
            if cell.cell_contents is not content:
                return self._leave(args)
        if self.device is not None and default_device() != self.device:
            return self._leave(args)
        if self.direct is not None and (found := self.direct(*args)) is not OTHER:
            if self.build is None:
                return found
            return self.build(iter((found,) if self.single else found))
        arrays = self._unwrap(args)
        if arrays is None:
            return self._leave(args)
        results = self.wrap(self.run(arrays))
        return results[0] if self.build is None else self.build(iter(results))

    def _leave(self, args: Sequence[Any]) -> Any:
        return OTHER if self.older is None else self.older(args)

    def _unwrap(self, args: Sequence[Any]) -> list[Any] | None:
        """The elements of the arguments; None where one is no tensor of the type."""
        if len(args) != len(self.types):
            return None
        arrays = []
        for x, expected in zip(args, self.types):  # noqa: B905  # of the same length
            if type(x) is not Tensor or x.type is not expected or x.requires_grad:
                return None
            data = x.data
            if type(data) is not DeviceArray and type(data) is not np.ndarray:  # donated
                return None
            arrays.append(data)
        return arrays


def wrap_result(array: Any, described: Any) -> Tensor:
    """A result of a program as a tensor; a symbolic size has its number."""
    return wrap_array(array, described if described.shape == array.shape else described.with_shape(array.shape))

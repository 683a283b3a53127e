"""A tiny notation for tile functions, and the check that LLVM and the Tile interpreter agree on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.codegen.llvm import BACKEND
from tessera.core.types import DType, RefType, as_dtype, int64, scalar
from tessera.interp.tile import interpreter
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Value
from tessera.ir.rules import Op
from tessera.ops.dialects import control_flow, host, tile
from tessera.ops.tensor import basic, elementwise


class Kernel:
    """A tile function under construction; parameters are refs like the arrays it will get."""

    def __init__(self, *arrays: np.ndarray, group: int = 1) -> None:
        self.b = Builder()
        self.group = group
        types = [RefType(a.shape, as_dtype(a.dtype)) if a.shape else scalar(as_dtype(a.dtype)) for a in arrays]
        self.params = [Value(t, f"p{i}") for i, t in enumerate(types)]

    def __call__(self, op: Op, *args: Any, **attrs: Any) -> Any:
        """The result of an op; numbers among the operands become int64 scalars."""
        node = self.b.add(op, [self.value(a) for a in args], op.complete(attrs))
        return node.out if node.results else None

    def value(self, x: Any) -> Value:
        """An operand."""
        return x if isinstance(x, Value) else self.const(x)

    def const(self, x: Any, dtype: DType = int64, shape: Sequence[int] = ()) -> Value:
        """A constant."""
        return self.b.add(basic.full, [], {"shape": tuple(shape), "value": x, "dtype": dtype}).out

    def load(
        self, ref: Value, *starts: Any, shape: Sequence[int] = (), edge: str = "error", rest: Sequence[Value] = ()
    ) -> Value:
        """A block of a ref, at first all of it."""
        shape = shape or ref.type.shape
        return self(tile.load, ref, *(starts or [0] * ref.type.rank), *rest, shape=tuple(shape), edge=edge)

    def store(self, ref: Value, value: Value, *starts: Any, edge: str = "error", rest: Sequence[Value] = ()) -> None:
        """Write a block."""
        self(tile.store, ref, value, *(starts or [0] * ref.type.rank), *rest, edge=edge)

    def broadcast(self, x: Value, *shape: int) -> Value:
        """A block repeated."""
        return self(basic.broadcast_to, x, shape=shape)

    def add(self, x: Any, y: Any) -> Value:
        """A sum."""
        return self(elementwise.add, x, y)

    def block(self, params: Sequence[Value], body: Callable[..., Any]) -> Block:
        """A region."""
        with self.b.region() as nodes:
            results = body(*params)
        listed = results if isinstance(results, (list, tuple)) else () if results is None else (results,)
        return Block(tuple(params), tuple(nodes), tuple(listed))

    def loop(
        self, lower: Any, upper: Any, step: Any, carried: Sequence[Value], body: Callable[..., Any]
    ) -> list[Value]:
        """A `for`."""
        types = tuple(v.type for v in carried)
        region = self.block([Value(scalar(int64), "i"), *(Value(t) for t in types)], body)
        args = [self.value(x) for x in (lower, upper, step)]
        return list(self.b.add(control_flow.for_, [*args, *carried], types=types, regions=(region,)).results)

    def loop_while(self, carried: Sequence[Value], holds: Callable[..., Any], body: Callable[..., Any]) -> list[Value]:
        """A `while`."""
        types = tuple(v.type for v in carried)
        regions = tuple(self.block([Value(t) for t in types], f) for f in (holds, body))
        return list(self.b.add(control_flow.while_, carried, types=types, regions=regions).results)

    def branch(self, condition: Value, yes: Callable[[], Any], no: Callable[[], Any]) -> list[Value]:
        """An `if`."""
        regions = (self.block([], yes), self.block([], no))
        types = tuple(v.type for v in regions[0].results)
        return list(self.b.add(control_flow.if_, [condition], types=types, regions=regions).results)

    def module(self, grid: Sequence[int] = (1,), outputs: int = 0) -> Module:
        """A program of one launch."""
        inner = Function("k", self.b.block(self.params, []), Attrs({"group": self.group}))
        entry, params = Builder(), [Value(p.type, p.hint) for p in self.params]
        entry.add(host.launch, params, {"kernel": "k", "grid": tuple(grid)})
        return Module("tile", (Function("main", entry.block(params, []), Attrs({"outputs": outputs})), inner))


def both(module: Module, arrays: Sequence[np.ndarray], **options: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each array after the program ran in place: by LLVM, and by the Tile interpreter."""
    ours, theirs = [a.copy() for a in arrays], [a.copy() for a in arrays]
    BACKEND.runtime(BACKEND.emit(module, options)).run(ours)
    interpreter.run(module, theirs)
    return list(zip(ours, theirs, strict=True))


def agree(module: Module, arrays: Sequence[np.ndarray], rtol: float = 0.0, atol: float = 0.0, **options: Any) -> None:
    """Check that both give the same, to the last bit unless a tolerance is given."""
    for ours, theirs in both(module, arrays, **options):
        if ours.dtype.kind not in "iub":
            ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
        if rtol or atol:
            np.testing.assert_allclose(ours, theirs, rtol, atol)
        else:
            np.testing.assert_array_equal(ours, theirs)

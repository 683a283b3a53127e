"""Target numerics: the Tile interpreter with each float op computed by the code of a target.

Each op is compiled as a program of its own and run on the operands of many instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.codegen.contract import get_backend, list_backends
from tessera.core.errors import ArgumentError, DeviceUnavailable
from tessera.core.types import RefType, TensorType, Type, int64
from tessera.interp.observers import OBSERVERS, ObservedLaunch
from tessera.interp.tile.machine import TileMachine
from tessera.ir.builder import Builder, NodeSemantics
from tessera.ir.core import Attrs, Function, Module, Node, Value
from tessera.ir.rules import Op
from tessera.ops.dialects import control_flow, host, tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor.basic import full
from tessera.runtime import driver

# One op as a program of its own for a target: what that target's code computes, bit by bit.


RunArrays = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
# Targets that run whole graphs alone, not kernels that address memory of their own accord.
_GRAPHS = ("csl",)


def compute_on_target(target: str, node: Node, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a node's op for many instances, as the target's code computes them.

    `arrays` hold the operands, of shape (n, *block). The target's own runtime is used where this machine has one,
    else its text is interpreted.

    Raises:
        UnsupportedOpError: the target has no such op.
    """
    if target in _GRAPHS and not node.op.pointwise:  # instance by instance
        runs = [_run_op(target, node, [a[i : i + 1] for a in arrays]) for i in range(len(arrays[0]))]
        return [np.concatenate(each) for each in zip(*runs, strict=True)]
    return _run_op(target, node, arrays)


def _run_op(target: str, node: Node, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    count = len(arrays[0])
    padded = 1 << max(0, count - 1).bit_length()  # few different programs, however instances part
    inputs = [np.ascontiguousarray(np.concatenate([a, np.repeat(a[:1], padded - count, 0)])) for a in arrays]
    run = _compile_op(target, node.op, node.attrs, node.types, node.result_types, padded)
    return [np.asarray(r)[:count] for r in run(inputs)]


@lru_cache(maxsize=512)
def _compile_op(
    target: str, op: Op, attrs: Attrs, types: tuple[Type, ...], results: tuple[Type, ...], count: int
) -> RunArrays:
    build = _build_graph_module if target in _GRAPHS else _build_kernel_module
    module = build(op, attrs, types, results, count, target)
    generator = get_backend(target)
    artifact = generator.emit(module, {})
    try:
        return generator.runtime(artifact).run
    except DeviceUnavailable:
        return generator.interpreter(artifact)


def _build_kernel_module(
    op: Op, attrs: Mapping[str, Any], types: Sequence[Type], results: Sequence[Type], count: int, target: str
) -> Module:
    """A Tile module: each program computes the op on one instance's operands."""
    builder = Builder()
    refs = [Value(_ref_for(t, count), f"x{i}") for i, t in enumerate(types)]
    outs = [Value(_ref_for(t, count), f"y{i}") for i, t in enumerate(results)]
    me = builder.add(tile.program_id, [], {"axis": 0}).out
    blocks = [_load_operand(builder, r, t, me) for r, t in zip(refs, types, strict=True)]
    found = builder.add(op, blocks, attrs, types=tuple(results))
    for value, out in zip(found.results, outs, strict=True):
        block = _reshape(builder, value, (1, *_sizes(value.type)))
        builder.add(tile.store, [out, block, me, *_zeros(builder, value.type)])
    body = builder.block([*refs, *outs], ())
    function = Function("one_op", body, Attrs({"group": 1, "grid": (count,)}))
    entry = Builder()
    params = [Value(p.type, p.hint) for p in function.params]
    entry.add(host.launch, params, {"kernel": "one_op", "grid": (count,)})
    main = Function("main", entry.block(params, ()), Attrs({"outputs": len(outs)}))
    return Module("tile", (main, function))


def _build_graph_module(
    op: Op, attrs: Mapping[str, Any], types: Sequence[Type], results: Sequence[Type], count: int, target: str
) -> Module:
    """The Tile module that a graph of the op alone is lowered to: of all instances together if it is pointwise."""
    builder = Builder()
    params = [Value(t.with_shape((count, *_sizes(t))), f"x{i}") for i, t in enumerate(types)]  # type: ignore[union-attr]
    wide = [t.with_shape((count, *_sizes(t))) for t in results]  # type: ignore[union-attr]
    if op.pointwise:
        found = builder.add(op, params, attrs, types=tuple(wide)).results
    else:
        inside = [builder.add(shape.reshape, [p], {"shape": _sizes(t)}).out for p, t in zip(params, types, strict=True)]
        inner = builder.add(op, inside, attrs, types=tuple(results)).results
        found = tuple(
            builder.add(shape.reshape, [v], {"shape": tuple(w.shape)}).out for v, w in zip(inner, wide, strict=True)
        )
    return driver.lower(Function("one_op", builder.block(params, found)), target)["tile"]


def _sizes(type: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in type.shape)


def _ref_for(type: Any, count: int) -> RefType:
    return RefType((count, *_sizes(type)), type.dtype)


def _zeros(builder: Builder, type: Any) -> list[Value]:
    return [builder.add(full, [], {"shape": (), "value": 0, "dtype": int64}).out for _ in type.shape]


def _load_operand(builder: Builder, ref: Value, type: Any, me: Value) -> Value:
    starts = [me, *_zeros(builder, type)]
    block = builder.add(tile.load, [ref, *starts], {"shape": (1, *_sizes(type))}).out
    return _reshape(builder, block, _sizes(type))


def _reshape(builder: Builder, value: Value, sizes: tuple[int, ...]) -> Value:
    assert isinstance(value.type, TensorType)
    return value if value.type.shape == sizes else builder.add(shape.reshape, [value], {"shape": sizes}).out


# Ops that only move values, which all targets do alike, and those that hold others.
_EXACT = {basic.full, basic.broadcast_to, shape.reshape, shape.permute, shape.iota, control_flow.for_, control_flow.if_,
          control_flow.while_}  # fmt: skip


@contextmanager
def as_target(target: str) -> Iterator[None]:
    """Interpret kernels in this block with the numbers of a target: "ptx", "llvm", "csl", or another generator's name.

    Each op on floats (casts, functions, products, reductions) is compiled for the target by itself and run there,
    or in the emulator of the target's text where this machine lacks the device. Memory, control flow and
    integers stay the interpreter's; what a generator fuses of several ops is not seen (docs/semantics/target.md).

    Raises:
        ArgumentError: no generator has this name. UnsupportedOpError: the target lacks an op that a kernel uses.

    >>> import numpy as np, tessera as ts
    >>> @ts.kernel
    ... def power(x, out):
    ...     i = ts.tile.program_id(0)
    ...     out[i] = ts.tile.exp(x[i])
    >>> x, here, there = np.linspace(0, 1, 4, dtype=np.float32), np.zeros(4, np.float32), np.zeros(4, np.float32)
    >>> power[(4,)](x, here)
    >>> with ts.debug.as_target("llvm"):
    ...     power[(4,)](x, there)
    >>> bool(np.abs(here - there).max() <= 3 * np.spacing(np.float32(2.7)))
    True
    """
    names = sorted(list_backends())
    if target not in names:
        raise ArgumentError(f"there is no generator {target}", expected=", ".join(names))
    token = OBSERVERS.set((_TargetNumericsObserver(target), *OBSERVERS.get()))
    try:
        yield
    finally:
        OBSERVERS.reset(token)


class _TargetNumericsObserver:
    """An observer that computes float ops elsewhere."""

    def __init__(self, target: str) -> None:
        self.target = target

    def enter(self, started: ObservedLaunch) -> None:
        """A launch begins."""

    def leave(self) -> None:
        """The launch has ended."""

    def meaning(self, machine: TileMachine, inner: NodeSemantics) -> NodeSemantics:
        """Float ops as the target computes them, all others as they are."""

        def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
            if machine.bound or not _computes_floats(node):
                return inner(node, args, walk)
            return self._computed(machine, node, machine.arrays(args))

        return mean

    def _computed(self, machine: TileMachine, node: Node, arrays: list[np.ndarray]) -> list[np.ndarray]:
        rank = machine.rank
        lead = np.broadcast_shapes(*(a.shape[:rank] for a in arrays))
        blocks = [tuple(int(n) for n in t.shape) for t in node.types]
        flat = [np.broadcast_to(a, (*lead, *b)).reshape(-1, *b) for a, b in zip(arrays, blocks, strict=True)]
        found = compute_on_target(self.target, node, flat)
        return [r.reshape(*lead, *r.shape[1:]) for r in found]


def _computes_floats(node: Node) -> bool:
    types = [v.type for v in (*node.args, *node.results)]
    tensors = all(isinstance(t, TensorType) for t in types)
    floats = tensors and any(t.dtype.is_float for t in types)  # type: ignore[union-attr]
    return floats and bool(node.args) and node.op.name.startswith("ts.") and node.op not in _EXACT

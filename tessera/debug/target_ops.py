"""One op as a program of its own for a target: what that target's code computes, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tessera import driver
from tessera.codegen.registry import backend
from tessera.errors import DeviceUnavailable
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Function, Module, Node, Value
from tessera.op import Op
from tessera.ops import host, shape, tile
from tessera.ops.basic import full
from tessera.types import RefType, TensorType, Type, int64

Run = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
# Targets that run whole graphs alone, not kernels that address memory of their own accord.
_GRAPHS = ("csl",)


def compute(target: str, node: Node, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a node's op for many instances, as the target's code computes them.

    `arrays` hold the operands, of shape (n, *block). The target's own runtime is used where this machine has one,
    else its text is interpreted.

    Raises:
        UnsupportedOpError: the target has no such op.
    """
    if target in _GRAPHS and not node.op.pointwise:  # instance by instance
        runs = [_run(target, node, [a[i : i + 1] for a in arrays]) for i in range(len(arrays[0]))]
        return [np.concatenate(each) for each in zip(*runs, strict=True)]
    return _run(target, node, arrays)


def _run(target: str, node: Node, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    count = len(arrays[0])
    padded = 1 << max(0, count - 1).bit_length()  # few different programs, however instances part
    inputs = [np.ascontiguousarray(np.concatenate([a, np.repeat(a[:1], padded - count, 0)])) for a in arrays]
    run = _program(target, node.op, node.attrs, node.types, node.result_types, padded)
    return [np.asarray(r)[:count] for r in run(inputs)]


@lru_cache(maxsize=512)
def _program(target: str, op: Op, attrs: Attrs, types: tuple[Type, ...], results: tuple[Type, ...], count: int) -> Run:
    build = _graph if target in _GRAPHS else _kernel
    module = build(op, attrs, types, results, count, target)
    generator = backend(target)
    artifact = generator.emit(module, {})
    try:
        return generator.runtime(artifact).run
    except DeviceUnavailable:
        return generator.interpreter(artifact)


def _kernel(
    op: Op, attrs: Mapping[str, Any], types: Sequence[Type], results: Sequence[Type], count: int, target: str
) -> Module:
    """A Tile module: each program computes the op on one instance's operands."""
    builder = Builder()
    refs = [Value(_ref(t, count), f"x{i}") for i, t in enumerate(types)]
    outs = [Value(_ref(t, count), f"y{i}") for i, t in enumerate(results)]
    me = builder.add(tile.program_id, [], {"axis": 0}).out
    blocks = [_loaded(builder, r, t, me) for r, t in zip(refs, types, strict=True)]
    found = builder.add(op, blocks, attrs, types=tuple(results))
    for value, out in zip(found.results, outs, strict=True):
        block = _reshaped(builder, value, (1, *_sizes(value.type)))
        builder.add(tile.store, [out, block, me, *_zeros(builder, value.type)])
    body = builder.block([*refs, *outs], ())
    function = Function("one_op", body, Attrs({"group": 1, "grid": (count,)}))
    entry = Builder()
    params = [Value(p.type, p.hint) for p in function.params]
    entry.add(host.launch, params, {"kernel": "one_op", "grid": (count,)})
    main = Function("main", entry.block(params, ()), Attrs({"outputs": len(outs)}))
    return Module("tile", (main, function))


def _graph(
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


def _ref(type: Any, count: int) -> RefType:
    return RefType((count, *_sizes(type)), type.dtype)


def _zeros(builder: Builder, type: Any) -> list[Value]:
    return [builder.add(full, [], {"shape": (), "value": 0, "dtype": int64}).out for _ in type.shape]


def _loaded(builder: Builder, ref: Value, type: Any, me: Value) -> Value:
    starts = [me, *_zeros(builder, type)]
    block = builder.add(tile.load, [ref, *starts], {"shape": (1, *_sizes(type))}).out
    return _reshaped(builder, block, _sizes(type))


def _reshaped(builder: Builder, value: Value, sizes: tuple[int, ...]) -> Value:
    assert isinstance(value.type, TensorType)
    return value if value.type.shape == sizes else builder.add(shape.reshape, [value], {"shape": sizes}).out

"""Device ops: an op on tensors of a device, outside of a trace, runs there as a program of one op."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, user_location
from tessera.core.hooks import exchange_on_device
from tessera.core.types import TensorType
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Function, Value
from tessera.ir.rules import REGISTRY, Op
from tessera.ir.tensor import Tensor, get_elements, wrap_array
from tessera.ops.tensor import shape
from tessera.ops.tensor.collectives import EXCHANGES
from tessera.runtime.driver import RunFunction, compile_graph

MAX_PROGRAMS = 1024
_PROGRAMS: OrderedDict[Any, tuple[RunFunction, tuple[TensorType, ...]]] = OrderedDict()


def run_device_op(
    op: Op, operands: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Block] = (), types: Any = None
) -> list[Tensor]:
    """The results of an op, on the device of its operands; scalars may lie in host memory. A loop has regions, and the
    types of its results; it is compiled anew each time.

    Raises:
        ArgumentError: the operands lie on different devices.
        UnsupportedOpError: the device's target cannot run the op.
    """
    if op.name in EXCHANGES and operands[0].data.__class__ is DeviceArray:
        done = exchange_on_device(op.name.removeprefix("ts."), operands[0].data, attrs)
        if done is not None:
            (type,) = op.result_types((operands[0].type,), attrs)
            assert isinstance(type, TensorType)
            return [wrap_array(done, type)]
    if (view := _find_view(op, operands[0], attrs)) is not None:
        return [view]
    operands, shapes = _split_constants(operands)
    device = _find_common_device(operands)
    given = tuple(t.type for t in operands)
    key: Any = None if regions else (shapes, op, given, tuple(sorted(attrs.items(), key=lambda item: item[0])), device)
    try:
        known = _PROGRAMS.get(key)
    except TypeError:  # an attribute without a hash
        known, key = None, None
    run, results = known or _compile_op(op, given, shapes, (attrs, tuple(regions), types), device)
    if known is None and key is not None:
        _PROGRAMS[key] = run, results
        if len(_PROGRAMS) > MAX_PROGRAMS:
            _PROGRAMS.popitem(last=False)
    return [wrap_array(a, t) for a, t in zip(run([get_elements(t) for t in operands]), results, strict=True)]


def _compile_op(
    op: Op, types: Sequence[TensorType], shapes: Sequence[Any], described: tuple[Any, ...], device: str
) -> tuple[RunFunction, tuple[TensorType, ...]]:
    builder = Builder()
    params = tuple(Value(t, f"x{i}") for i, t in enumerate(types))
    given = [
        p if shape is None else builder.add(REGISTRY["ts.broadcast"], [p], {"shape": shape}).out
        for p, shape in zip(params, shapes, strict=True)
    ]
    attrs, regions, results = described
    if regions:
        node = builder.add(op, given, attrs, types=tuple(results), regions=regions)
    else:
        node = builder.add(op, given, attrs)
    function = Function(op.name.rpartition(".")[2], builder.block(params, node.results), loc=user_location())
    return compile_graph(function, device), node.result_types  # type: ignore[return-value]


ALIGNMENT = 16  # bytes of the address of an array that programs take


def _find_view(op: Op, x: Tensor, attrs: Mapping[str, Any]) -> Tensor | None:
    """A reshape, or a slice whose elements are adjacent, as a view of the same memory, as on the host; else None."""
    array, begin = x.data, 0
    if op not in (shape.reshape, shape.slice_) or array.__class__ is not DeviceArray or not array.nbytes:
        return None
    (type,) = op.result_types((x.type,), attrs)
    assert isinstance(type, TensorType)
    if op is shape.slice_:
        begin = _find_run(array.shape, attrs)
    address = array.address + begin * array.dtype.itemsize
    if begin < 0 or 0 in type.shape or address % ALIGNMENT or not all(isinstance(n, int) for n in type.shape):
        return None
    owner = array.owner if isinstance(array.owner, DeviceArray) else array  # the streams of a block are noted there
    sizes = tuple(int(n) for n in type.shape)
    return wrap_array(DeviceArray(address, sizes, array.dtype, owner, array.memory, array.stream), type)


def _find_run(sizes: Sequence[int], attrs: Mapping[str, Any]) -> int:
    """The number of the first element of a slice whose elements are adjacent; -1 where they are not."""
    counts = [stop - start for start, stop in zip(attrs["start"], attrs["stop"], strict=True)]
    cut = next((a for a, n in enumerate(counts) if n > 1), len(sizes))
    if any(step != 1 for step in attrs["step"]) or tuple(counts[cut + 1 :]) != tuple(sizes[cut + 1 :]):
        return -1
    begin = 0
    for start, size in zip(attrs["start"], sizes, strict=True):
        begin = begin * size + start
    return begin


def _split_constants(operands: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The operands, with numbers in host memory that were broadcast as the scalars that they are, and their shapes."""
    split, shapes = [], []
    for t in operands:
        constant = t.data.__class__ is np.ndarray and t.ndim and not any(t.data.strides)
        split.append(wrap_array(_take_number(t.data), t.type.with_shape(())) if constant else t)
        shapes.append(t.shape if constant else None)
    return split, tuple(shapes)


def _take_number(array: np.ndarray) -> np.ndarray:
    """The number that a broadcast array holds; zero for one without elements."""
    return np.asarray(array[(0,) * array.ndim]) if array.size else np.zeros((), array.dtype)


def _find_common_device(operands: Sequence[Tensor]) -> str:
    """The device of the operands.

    Raises:
        ArgumentError: they lie on different devices.
    """
    placed = [t.data.memory for t in operands if t.data.__class__ is DeviceArray]
    for t in operands:
        other = t.data.memory if t.data.__class__ is DeviceArray else None
        if other is not placed[0] and (other is not None or t.ndim):
            raise ArgumentError(
                "the operands lie on different devices", location=user_location(), expected=placed[0].name,
                received=t.device, suggestion=f'x.to("{placed[0].name}")',
            )  # fmt: skip
    return placed[0].generator

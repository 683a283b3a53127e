"""What a kernel returns, as outputs of its module."""

from __future__ import annotations

from typing import Any

from tessera.errors import DTypeError, TesseraError, UnsupportedSyntaxError
from tessera.ir.core import Block, Value
from tessera.kernel import ids
from tessera.kernel.frame import Frame
from tessera.kernel.place import Memory, View
from tessera.kernel.signature import Parameters
from tessera.kernel.trace import is_number
from tessera.ops import control, elementwise
from tessera.ops.basic import full
from tessera.tensor import Tensor
from tessera.types import DType, RefType, as_dtype


def store(frame: Frame, parameters: Parameters) -> list[Value]:
    """What the kernel returns, written to one more parameter for each value by the first tile of each group."""
    if frame.result is None:
        return []
    results = frame.result if isinstance(frame.result, tuple) else (frame.result,)
    try:
        tensors = [_result(r, parameters) for r in results]
    except TesseraError as error:
        raise error.at(frame.returned or frame.source.place) from None
    builder = frame.trace.builder
    with builder.region() as nodes:
        names = [f"out{n}" for n in range(len(tensors))] if len(tensors) > 1 else ["out"]
        outputs = [_output(frame.trace.grid, t, n) for t, n in zip(tensors, names, strict=True)]
    if frame.trace.group == 1:
        for node in nodes:
            builder.append(node)
        return outputs
    first = elementwise.equal(ids.local_id(), 0)
    builder.add(control.if_, [first.data], types=(), regions=(Block((), tuple(nodes), ()), Block((), (), ())))
    return outputs


def _output(grid: tuple[int, ...], tensor: Tensor, name: str) -> Value:
    """A block stored at this program's place in a new parameter: an array of the grid's shape, then the block's."""
    lead = () if all(n == 1 for n in grid) else grid
    shape = tuple(int(s) for s in tensor.shape)  # type: ignore[arg-type]
    output = Value(RefType((*lead, *shape), tensor.dtype), name)
    starts = tuple(ids.program_id(a) for a in range(len(lead))) + (0,) * len(shape)
    place = View(Memory(output, name), starts, (1,) * len(lead) + shape, frozenset(range(len(lead))))
    place.store(tensor)
    return output


def _result(value: Any, parameters: Parameters) -> Tensor:
    want = parameters.result if isinstance(parameters.result, DType) else None
    if is_number(value):
        return full(shape=(), value=value, dtype=want or as_dtype(type(value)))
    if not isinstance(value, Tensor):
        what = type(value).__name__
        raise UnsupportedSyntaxError(f"a kernel cannot return a {what}", expected="a block, a scalar or a tuple")
    if want is not None and value.dtype != want:
        raise DTypeError(
            f"{parameters.name} returns another element type than it says", expected=str(want),
            received=str(value.type), suggestion=f"return tile.cast(value, ts.{want})",
        )  # fmt: skip
    return value

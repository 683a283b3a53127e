"""Schedule dialect: a kernel over iteration dimensions, and the ops of its body at one index."""

from __future__ import annotations

from typing import Any

from tessera.core.errors import ShapeError
from tessera.core.types import DType, RefType, TensorType, int64
from tessera.ir.rules import STORAGE, op
from tessera.ops.dialects.control_flow import refuse_direct_call
from tessera.ops.dialects.tile import INDEX_TYPE

REDUCTIONS = ("sum", "max", "min", "argmax", "argmin")


def _infer_kernel(*refs: RefType, dims: tuple, schedule: Any) -> None:
    for dim in dims:
        if len(dim) != 3 or dim[2] not in ("parallel", "reduce"):
            raise ShapeError("a dim is (name, extent, parallel or reduce)", received=str(dim))


@op(infer=_infer_kernel, coerce=refuse_direct_call, numerics=STORAGE, dialect="schedule", effects=("memory",))
def kernel(*refs, dims: tuple, schedule: Any):
    """Run the region (which takes the refs) at every index of `dims`, in the order of `schedule`.

    `schedule` holds `tile` (the elements of each dim in a tile) and `loop` (the dims that a loop inside each program
    iterates over; each other tile of a parallel dim is a program of its own).
    """


@op(infer=lambda *, dim: INDEX_TYPE, coerce=refuse_direct_call, numerics=STORAGE, dialect="schedule")
def index(*, dim: int):
    """The current index along a dim (int64)."""


def _infer_load(ref: RefType, *rest: TensorType) -> TensorType:
    if len(rest) not in (ref.rank, ref.rank + 1):
        raise ShapeError(f"{ref.rank} indices are needed, received {len(rest)} came", received=str(ref))
    return ref.block(())


@op(infer=_infer_load, coerce=refuse_direct_call, numerics=STORAGE, dialect="schedule", effects=("read",))
def load(ref, *rest):
    """The element at the indices: load(ref, *indices, [mask]); 0 where the mask is false."""


@op(
    infer=lambda ref, value, *indices: None,
    coerce=refuse_direct_call,
    numerics=STORAGE,
    dialect="schedule",
    effects=("write",),
)
def store(ref, value, *indices):
    """Write the element at the indices."""


def _infer_reduce(x: TensorType, *, kind: str, dim: int) -> TensorType:
    if kind not in REDUCTIONS:
        raise ShapeError(f'"{kind}" is not a reduction', expected=", ".join(REDUCTIONS))
    return x.with_dtype(int64) if kind.startswith("arg") else x


@op(infer=_infer_reduce, coerce=refuse_direct_call, numerics=STORAGE, dialect="schedule")
def reduce(x, *, kind: str, dim: int):
    """`x` combined along a dim, accumulated in its accumulation type and rounded once."""


def _infer_contract(a: TensorType, b: TensorType, *, dim: int, dtype: DType) -> TensorType:
    return a.with_dtype(dtype)


@op(infer=_infer_contract, coerce=refuse_direct_call, numerics=STORAGE, dialect="schedule")
def contract(a, b, *, dim: int, dtype: DType):
    """The sum of `a` times `b` along a dim, accumulated as `dot` does and rounded once to `dtype`."""

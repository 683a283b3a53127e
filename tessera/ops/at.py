"""`x.at[index]`: the tensor with some elements changed, `x` itself left as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.errors import ShapeError, TraceError, here
from tessera.numerics.convert import convert
from tessera.tensor import Tensor, as_tensor, like


@dataclass(frozen=True)
class At:
    """`x.at`, to be subscripted."""

    tensor: Tensor

    def __getitem__(self, index: Any) -> Update:
        return Update(self.tensor, index)


@dataclass(frozen=True)
class Update:
    """Some places of a tensor; each method gives a new tensor with them changed.

    >>> x = Tensor([1.0, 2.0, 3.0])
    >>> x.at[1:].add(10)
    Tensor([ 1., 12., 13.], f32)
    >>> x.at[[0, 0]].add(1)
    Tensor([3., 2., 3.], f32)
    """

    tensor: Tensor
    index: Any

    def get(self) -> Tensor:
        """The elements as they are."""
        return self.tensor[self.index]

    def set(self, values: Any) -> Tensor:
        """These elements replaced by `values`; a place named twice takes the last."""
        return self._changed(lambda out, index, new: out.__setitem__(index, new), values)

    def add(self, values: Any) -> Tensor:
        """`values` added; a place named twice is added to twice."""
        return self._changed(np.add.at, values)

    def multiply(self, values: Any) -> Tensor:
        """These elements times `values`."""
        return self._changed(np.multiply.at, values)

    def min(self, values: Any) -> Tensor:
        """The smaller of these elements and `values`."""
        return self._changed(np.minimum.at, values)

    def max(self, values: Any) -> Tensor:
        """The larger of these elements and `values`."""
        return self._changed(np.maximum.at, values)

    def _changed(self, change: Any, values: Any) -> Tensor:
        x, new = self.tensor, as_tensor(values, self.tensor.type)
        if x.is_traced or new.is_traced:
            raise TraceError(
                "x.at[...] of a traced tensor", location=here(), received=str(x.type),
                suggestion="use ts.where with a condition on ts.iota, or ts.scatter_add",
            )  # fmt: skip
        wide = x.type.compute.numpy
        out = x.numpy().astype(wide)
        try:
            change(out, _arrays(self.index), new.numpy().astype(wide))
        except (ValueError, IndexError) as error:
            raise ShapeError(f"x.at[...]: {error}", location=here(), received=f"{x.type} and {new.type}") from None
        return like(convert(out, x.dtype), x.type)


def _arrays(index: Any) -> Any:
    """An index as NumPy takes it."""
    if isinstance(index, tuple):
        return tuple(_arrays(i) for i in index)
    return index.numpy() if isinstance(index, Tensor) else index

"""Kernels that fuzzing found to be wrong on some engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile


@ts.kernel
def sorted_beside_product(x, out, total, N: ts.constexpr):
    """The packed operand of a product over one element lies beside the memory of a sort."""
    column = tile.load(x[0:N, 0:1])
    ordered = tile.sort(column, axis=0)
    tile.store(total[0:N], tile.sum(tile.dot(column, tile.transpose(column)), axis=0))
    tile.store(out[0:N, 0:1], ordered)


def cases() -> Iterator[Case]:
    """Each kernel at the sizes around a vector."""
    for size in (1, 2, 5, 8, 9, 17):
        x = tensor(f"column{size}", (size, 1))
        arguments = {"x": x, "out": np.zeros((size, 1), "f4"), "total": np.zeros(size, "f4"), "N": size}
        name = f"tile/found/sorted-beside-product-{size}"
        yield Case(name, lambda a=arguments: (sorted_beside_product, a), grid=(1,))  # type: ignore[misc]

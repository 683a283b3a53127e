"""Op table of ATen: from the name of an op, as `aten.add.Tensor`, to its meaning as a function of Tessera values.

The rows are in `tessera/torch/rows/`. A row takes the arguments of the op's schema by position, in its
order; `tessera/torch/table.py` says which are left out. Reading the table does not import PyTorch.

>>> from tessera.ir.tensor import Tensor
>>> ATEN["aten.add.Tensor"](Tensor([1, 2]), 0.5)
Tensor([1.5, 2.5], f32)
"""

from tessera.torch.rows import (
    activations,
    composites,
    elementwise,
    indexing,
    matrices,
    normalisation,
    products,
    recurrent,
    reductions,
    shapes,
    special,
    statistics,
    windows,
)
from tessera.torch.table import ATEN

__all__ = ["ATEN"]
ROWS = (
    activations, composites, elementwise, indexing, matrices, normalisation, products, recurrent, reductions,
    shapes, special, statistics, windows,
)  # fmt: skip

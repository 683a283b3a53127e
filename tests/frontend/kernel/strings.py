"""A kernel whose annotations are strings."""

from __future__ import annotations

from tessera import tile
from tessera.core.types import f32
from tessera.frontend.kernel import kernel
from tessera.ir.tensor import Tensor


@kernel
def halve(x: Tensor["N", f32]):
    x[0:N] = tile.load(x) / 2.0

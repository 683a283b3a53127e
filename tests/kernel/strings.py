"""A kernel whose annotations are strings."""

from __future__ import annotations

from tessera.kernel import kernel, tile
from tessera.tensor import Tensor
from tessera.types import f32


@kernel
def halve(x: Tensor["N", f32]):
    x[0:N] = tile.load(x) / 2.0

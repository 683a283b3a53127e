"""A kernel whose annotations are strings."""

from __future__ import annotations

from tessera.core.types import f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.tile_api import namespace
from tessera.ir.tensor import Tensor


@kernel
def halve(x: Tensor["N", f32]):
    x[0:N] = namespace.load(x) / 2.0

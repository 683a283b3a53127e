"""Every op, one file per family; importing this gives Tensor its operators."""

import tessera.evaluate  # gives composites their type rule  # noqa: F401
from tessera.ops import basic, control, elementwise, host, linalg, methods, nn, reduce, schedule, shape, tile

methods.attach()

__all__ = ["basic", "control", "elementwise", "host", "linalg", "nn", "reduce", "schedule", "shape", "tile"]

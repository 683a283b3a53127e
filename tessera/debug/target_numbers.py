"""The Tile interpreter with a target's numbers: each float op as that target's code computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tessera.codegen.registry import backends
from tessera.debug import target_ops
from tessera.errors import ArgumentError
from tessera.evaluate import Meaning
from tessera.interp.checked.observe import OBSERVERS, Started
from tessera.interp.machine import Machine
from tessera.ir.core import Node
from tessera.ops import basic, control, shape
from tessera.types import TensorType

# Ops that only move values, which all targets do alike, and those that hold others.
_EXACT = {basic.full, basic.broadcast_to, shape.reshape, shape.permute, shape.iota, control.for_, control.if_,
          control.while_}  # fmt: skip


@contextmanager
def as_target(target: str) -> Iterator[None]:
    """Interpret kernels in this block with the numbers of a target: "ptx", "llvm", "csl", or another generator's name.

    Each op on floats (casts, functions, products, reductions) is compiled for the target by itself and run there,
    or in the interpreter of the target's text where this machine lacks the device. Memory, control flow and
    integers stay the interpreter's; what a generator fuses of several ops is not seen (docs/semantics.md).

    Raises:
        ArgumentError: no generator has this name. UnsupportedOpError: the target lacks an op that a kernel uses.

    >>> import numpy as np, tessera as ts
    >>> @ts.kernel
    ... def power(x, out):
    ...     i = ts.tile.program_id(0)
    ...     out[i] = ts.tile.exp(x[i])
    >>> x, here, there = np.linspace(0, 1, 4, dtype=np.float32), np.zeros(4, np.float32), np.zeros(4, np.float32)
    >>> power[(4,)](x, here)
    >>> with ts.debug.as_target("llvm"):
    ...     power[(4,)](x, there)
    >>> bool(np.abs(here - there).max() <= 3 * np.spacing(np.float32(2.7)))
    True
    """
    names = sorted(backends())
    if target not in names:
        raise ArgumentError(f"there is no generator {target}", expected=", ".join(names))
    token = OBSERVERS.set((_Numbers(target), *OBSERVERS.get()))
    try:
        yield
    finally:
        OBSERVERS.reset(token)


class _Numbers:
    """An observer that computes float ops elsewhere."""

    def __init__(self, target: str) -> None:
        self.target = target

    def enter(self, started: Started) -> None:
        """A launch begins."""

    def leave(self) -> None:
        """The launch has ended."""

    def meaning(self, machine: Machine, inner: Meaning) -> Meaning:
        """Float ops as the target computes them, all others as they are."""

        def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
            if machine.bound or not _on_floats(node):
                return inner(node, args, walk)
            return self._computed(machine, node, machine.arrays(args))

        return mean

    def _computed(self, machine: Machine, node: Node, arrays: list[np.ndarray]) -> list[np.ndarray]:
        rank = machine.rank
        lead = np.broadcast_shapes(*(a.shape[:rank] for a in arrays))
        blocks = [tuple(int(n) for n in t.shape) for t in node.types]
        flat = [np.broadcast_to(a, (*lead, *b)).reshape(-1, *b) for a, b in zip(arrays, blocks, strict=True)]
        found = target_ops.compute(self.target, node, flat)
        return [r.reshape(*lead, *r.shape[1:]) for r in found]


def _on_floats(node: Node) -> bool:
    types = [v.type for v in (*node.args, *node.results)]
    tensors = all(isinstance(t, TensorType) for t in types)
    floats = tensors and any(t.dtype.is_float for t in types)  # type: ignore[union-attr]
    return floats and bool(node.args) and node.op.name.startswith("ts.") and node.op not in _EXACT

"""Guard bytes: runs machine code with a pattern around every buffer, and reports a write outside a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.llvm.runtime import thread_pool
from tessera.codegen.llvm.runtime.program import LlvmProgram, encode_scalar
from tessera.core.errors import OutOfBoundsError

GUARD_BYTES = 4096  # on each side of a buffer
ALIGNMENT = 64
# Memory between and in buffers that nothing has written: NaN in every float format, -1 in every integer type.
PATTERN = 0xFF


class GuardedMemory:
    """Buffers with guard bytes on both sides."""

    def __init__(self) -> None:
        self._buffers: list[tuple[str, np.ndarray, int, int]] = []

    def allocate(self, count: int, name: str = "the scratch memory of a program") -> np.ndarray:
        """Bytes that begin at a multiple of 64, filled with the pattern."""
        raw = np.full(count + 2 * GUARD_BYTES + ALIGNMENT, PATTERN, np.uint8)
        start = GUARD_BYTES - (raw.ctypes.data + GUARD_BYTES) % ALIGNMENT + ALIGNMENT
        self._buffers.append((name, raw, start, start + count))
        return raw[start : start + count]

    def copy(self, array: np.ndarray, name: str) -> np.ndarray:
        """A copy of an array between guard bytes."""
        out = self.allocate(array.nbytes, name)
        out[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return out.view(array.dtype).reshape(array.shape)

    def check(self) -> None:
        """Check that no guard byte has changed.

        Raises:
            OutOfBoundsError: machine code wrote outside a buffer; the error names it and the place.
        """
        for name, raw, start, stop in self._buffers:
            changed = np.flatnonzero(raw != PATTERN)
            outside = changed[(changed < start) | (changed >= stop)]
            if len(outside):
                first = int(outside[0])
                place = f"{first - stop} bytes after its end" if first >= stop else f"{start - first} bytes before it"
                raise OutOfBoundsError(
                    f"compiled code wrote outside {name}", received=f"{len(outside)} changed bytes, the first {place}",
                    expected=f"writes to its {stop - start} bytes", suggestion="report it: the target is wrong",
                )  # fmt: skip


def run_guarded(artifact: Artifact, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Run an artifact with guard bytes around its arrays, its workspace and the scratch memory of each thread.

    Raises:
        OutOfBoundsError: it wrote outside one of them.
    """
    memory = GuardedMemory()
    token = thread_pool.ALLOCATOR.set(memory.allocate)
    try:
        program = LlvmProgram(artifact)
        bound = program.find_bound(arrays)
    finally:
        thread_pool.ALLOCATOR.reset(token)
    users, own = bound.arguments.bind(arrays)
    params = bound.arguments.params
    guarded = [
        a if p.scalar else memory.copy(a, f"the argument {i}") for i, (p, a) in enumerate(zip(params, own, strict=True))
    ]
    words = [encode_scalar(a) if p.scalar else a.ctypes.data for p, a in zip(params, guarded, strict=True)]
    program.launch(bound, words)
    for parameter, array, changed in zip(params, own, guarded, strict=True):
        if not parameter.scalar and array.flags.writeable:
            array[...] = changed
    memory.check()
    return bound.arguments.finish(users, own)

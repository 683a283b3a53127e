"""A compiled artifact ready to run: it follows the launch plan of the manifest, with no IR at hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.llvm.jit import Code
from tessera.codegen.llvm.pool import FIELDS, Crew, address, aligned, thread_count
from tessera.errors import ArgumentError, DTypeError, ShapeError
from tessera.types import as_dtype

TEXT = "kernels.ll"
SHARES = 8  # chunks for each thread, so that none waits long for the last


class Program:
    """Machine code, workspace and launch plan of an artifact."""

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        plan = artifact.manifest["plan"]
        self.params = [Parameter(p) for p in plan["params"]]
        self.written, self.read = set(plan["written"]), set(plan["read"])
        self.threads = thread_count(threads)
        self._code = Code(artifact.text(TEXT))
        self._crew = Crew(self.threads, max(plan["scratch"].values(), default=0))
        self._workspace = aligned(plan["workspace"])
        self._lock = Lock()
        self._table(plan["launches"])
        self._inputs = [i for i, p in enumerate(self.params) if not p.output]

    def _table(self, launches: Sequence[Mapping[str, Any]]) -> None:
        """The tasks, and which slots hold which parameter."""
        sizes = [len(each["args"]) + 3 for each in launches]
        starts = [0, *itertools.accumulate(sizes)]
        self._slots = np.zeros(starts[-1], np.int64)
        self._tasks = np.zeros((len(launches), FIELDS), np.int64)
        uses: list[list[int]] = [[] for _ in self.params]
        for row, (start, each) in enumerate(zip(starts, launches, strict=False)):
            for place, arg in enumerate(each["args"], start):
                if "param" in arg:
                    uses[arg["param"]].append(place)
                else:
                    self._slots[place] = address(self._workspace) + arg["offset"]
            self._slots[start + len(each["args"]) : starts[row + 1]] = each["grid"]
            total = math.prod(each["grid"])
            chunk = max(1, total // (self.threads * SHARES))
            entry = self._code.address(f"{each['kernel']}.task")
            self._tasks[row] = (entry, address(self._slots) + 8 * start, total, chunk)
        self._uses = [np.array(places, np.intp) for places in uses]
        self._alone = self.threads == 1 or max((math.prod(e["grid"]) for e in launches), default=0) < 2

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs; arrays that the program writes are written.

        Raises:
            ShapeError, DTypeError, ArgumentError: the arrays are not what the program takes.
        """
        if len(arrays) != len(self._inputs):
            raise ArgumentError(f"{len(self._inputs)} arguments are needed, {len(arrays)} came")
        given = iter(arrays)
        users = [p.made(i in self.read) if p.output else p.checked(next(given)) for i, p in enumerate(self.params)]
        held = [p.ready(a) for p, a in zip(self.params, users, strict=True)]
        if any(i in self.written for i in self._inputs):
            held = apart(held, self.written)
        with self._lock:
            for places, p, a in zip(self._uses, self.params, held, strict=True):
                self._slots[places] = p.slot(a)
            self._crew.run(self._tasks, self._alone)
        for i in self._inputs:
            if i in self.written and held[i] is not users[i]:
                users[i][...] = held[i]
        return [a for a, p in zip(users, self.params, strict=True) if p.output]


class Parameter:
    """A parameter of the program: what arrays fit it, and what stands in its slot."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.name = given["name"]
        self.shape, self.dtype = tuple(given["shape"]), as_dtype(given["dtype"])
        self.output, self.scalar = given["role"] == "output", given["role"] == "scalar"

    def made(self, read: bool) -> np.ndarray:
        """A new array; of zeros where a kernel reads it before it is written, as atomics do."""
        return (np.zeros if read else np.empty)(self.shape, self.dtype.numpy)

    def checked(self, value: Any) -> np.ndarray:
        """An argument as an array of the right shape and type."""
        array = np.asarray(value, self.dtype.numpy) if self.scalar and not hasattr(value, "dtype") else np.asarray(value)
        if array.shape != self.shape:
            raise ShapeError(f"argument {self.name} has another shape", expected=self.shape, received=array.shape)
        if array.dtype != self.dtype.numpy:
            raise DTypeError(f"argument {self.name} has another type", expected=self.dtype, received=array.dtype)
        return array

    def ready(self, array: np.ndarray) -> np.ndarray:
        """The array itself if its elements lie in row-major order, else a copy in which they do."""
        flags = array.flags
        return array if flags.c_contiguous and flags.aligned else np.array(array, order="C")

    def slot(self, array: np.ndarray) -> int:
        """The eight bytes for a kernel: an address, or the scalar itself."""
        if not self.scalar:
            return address(array)
        return int.from_bytes(array.tobytes().ljust(8, b"\0"), "little", signed=True)


def apart(arrays: list[np.ndarray], written: set[int]) -> list[np.ndarray]:
    """Arrays of which no written one shares memory with another: what is only read is copied first.

    Raises:
        ArgumentError: two arrays that are written share memory.
    """
    found = list(arrays)
    for i, j in itertools.product(written, range(len(arrays))):
        if i == j or not np.may_share_memory(arrays[i], arrays[j]):
            continue
        if j in written:
            raise ArgumentError(
                f"arguments {i} and {j} are both written and share memory", suggestion="pass a copy of one of them"
            )
        found[j] = arrays[j].copy()
    return found

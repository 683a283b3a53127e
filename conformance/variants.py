"""Metamorphic relations on the suite's cases: variants of a function that must not change its results.

The same relations as of fuzzing (`tessera/tools/fuzz/variants.py`): other passes and tiles, a batch of the function,
symbolic sizes, calls at later sizes, donated arguments, and derivatives in forward and in reverse mode.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from conformance.case import Case, Outcome
from conformance.run import Engine, judge
from tessera.core.errors import ResourceError, UnsupportedOpError
from tessera.core.types import as_dtype
from tessera.frontend.jit.tracing import Jit
from tessera.runtime.program import PreparedProgram
from tessera.tools.fuzz.variants import COMPILED, FUNCTION_VARIANTS, NotComparableError


@dataclass(frozen=True)
class SuiteInput:
    """An argument of a case; another seed has other elements of it, another shape repeats or leaves out some."""

    name: str
    array: np.ndarray
    shape: tuple[int, ...]
    seed: int = 0

    @property
    def dtype(self) -> str:
        """The name of the element type."""
        return as_dtype(self.array.dtype).name

    def make(self) -> np.ndarray:
        """The array, the same each time."""
        moved = np.roll(self.array.reshape(-1), self.seed)
        return np.resize(moved, self.shape) if moved.size else np.zeros(self.shape, self.array.dtype)


@dataclass(frozen=True)
class SuiteProgram:
    """A case's function and its inputs, as the variants need them."""

    function: Any
    inputs: tuple[SuiteInput, ...]

    def load(self) -> Jit:
        """The function."""
        return Jit(self.function)

    def arguments(self) -> dict[str, np.ndarray]:
        """Fresh arguments by name."""
        return {i.name: i.make() for i in self.inputs}


@dataclass(frozen=True)
class VariantEngine(Engine):
    """One column: a variant of each function, interpreted or on a target."""

    variant: str = ""

    def validate(self, case: Case, program: PreparedProgram, bounds: Sequence[Any]) -> Outcome:
        """The outcome of a case; a kernel, and a function whose arguments are no arrays, have no variants."""
        try:
            with np.errstate(all="ignore"):
                return judge(case, self.name, self._run_variant(case, program), bounds)
        except (UnsupportedOpError, ResourceError, NotComparableError) as error:
            return Outcome(case.name, self.name, "unsupported", detail=str(error))
        except Exception as error:  # any exception of an engine under test is an outcome
            return Outcome(case.name, self.name, "fail", detail=f"{type(error).__name__}: {error}")

    def _run_variant(self, case: Case, program: PreparedProgram) -> list[np.ndarray]:
        entry, arguments = case.entry()
        if program.top != "graph" or case.mesh is not None or case.dynamic or case.alike or program.random is not None:
            raise NotComparableError("this case has no variants")
        random = Random(zlib.crc32(f"{self.variant} {case.name}".encode()))
        return FUNCTION_VARIANTS[self.variant](make_suite_program(entry, arguments), program, self.target, random)


def make_suite_program(entry: Any, arguments: Any) -> SuiteProgram:
    """The function of a case with its arguments by name.

    Raises:
        NotComparableError: an argument is no array, or the function has other parameters, annotated or unnamed ones.
    """
    parameters = inspect.signature(entry.function).parameters
    given = arguments if isinstance(arguments, dict) else dict(zip(parameters, arguments, strict=False))
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.annotation in PLAIN for p in parameters.values())
    if not plain or len(given) != len(parameters) or not all(isinstance(x, np.ndarray) for x in given.values()):
        raise NotComparableError("a function of arrays by name is needed")
    return SuiteProgram(entry.function, tuple(SuiteInput(n, x, x.shape) for n, x in given.items()))


PLAIN = (inspect.Parameter.empty, Any, "Any")  # annotations that say no shape


def list_variant_engines(targets: Sequence[str] = ()) -> list[VariantEngine]:
    """A column for each variant, interpreted or on each target."""
    found = []
    for target in targets or ("interp",):
        names = [n for n in FUNCTION_VARIANTS if target != "interp" or n not in COMPILED]
        found += [VariantEngine(n if target == "interp" else f"{target} {n}", "variants", target, n) for n in names]
    return found

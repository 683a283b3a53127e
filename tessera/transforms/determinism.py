"""Determinism: seeded contexts, and checks that compare the results of repeated runs bit by bit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.effects import perform_effects
from tessera.core.errors import ArgumentError, ExecutionError, Location, UnsupportedOpError, user_location
from tessera.core.pytree import flatten
from tessera.core.types import to_python_numbers
from tessera.ir.builder import override_numerics
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor import random
from tessera.ops.tensor.nn import dropout

SCOPE_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
SCOPE_MULTIPLIER_AS_INT64 = SCOPE_MULTIPLIER - 2**64
REDUCTIONS = ("sum", "mean", "prod", "max", "min")
# Environment variables with the number of processes: torchrun, Open MPI, MPICH and Intel MPI, srun.
PROCESS_COUNT_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


class SeededContext:
    """A context, or decorator, in which the default generator starts from a seed; its state is restored at the end."""

    def __init__(self, seed: Any) -> None:
        self.seed = seed
        self._saved_states: list[Any] = []

    def __enter__(self) -> SeededContext:
        state = random.get_random_state()
        self._saved_states.append(state.save())
        state.restart(self.seed)
        return self

    def __exit__(self, *_: object) -> None:
        random.get_random_state().restore(self._saved_states.pop())

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def seeded(*args: Any, **named: Any) -> Any:
            with self:
                return function(*args, **named)

        return seeded


class Deterministic:
    """`ts.deterministic`: fixes random numbers (reductions always have a fixed order).

    >>> @deterministic(seed=42)
    ... def draw():
    ...     return random.rand((2,))
    >>> draw().tolist() == draw().tolist()
    True
    """

    def __call__(self, seed: int = 0) -> SeededContext:
        """A context or decorator in which random numbers depend on `seed` alone."""
        seed = to_python_numbers(seed)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ArgumentError(
                "deterministic takes a seed", location=user_location(), received=repr(seed),
                expected="@ts.deterministic(seed=42)",
            )  # fmt: skip
        return SeededContext(seed)

    def scope(self) -> SeededContext:
        """A context whose random numbers depend on the state of the default generator at its start."""
        seed, offset = random.DEFAULT_GENERATOR.seed, random.DEFAULT_GENERATOR.offset
        if isinstance(seed, Tensor) or isinstance(offset, Tensor):  # the state is an argument of the traced program
            return SeededContext((seed * SCOPE_MULTIPLIER_AS_INT64 + offset) & (2**63 - 1))
        return SeededContext((int(seed) * SCOPE_MULTIPLIER + offset) & (2**63 - 1))

    @staticmethod
    def dropout(x: Any, p: float = 0.5, training: bool = True) -> Tensor:
        """Dropout with a mask from the default generator: the same in every run of a seeded function."""
        return dropout(x, p, training)

    @staticmethod
    def all_reduce(x: Any, op: str = "sum") -> Tensor:
        """`x` combined over all processes in the order of their ranks: with one process, `x` itself.

        It has the effect "collective". `op` is "sum", "mean", "prod", "max" or "min".

        >>> deterministic.all_reduce([1.0, 2.0])
        Tensor([1., 2.], f32)

        Raises:
            ArgumentError: `op` is unknown.
            UnsupportedOpError: there are several processes, which this release does not connect.
            EffectError: it is called in a pure function.
        """
        if op not in REDUCTIONS:
            raise ArgumentError(
                f"all_reduce by {op!r}", location=user_location(), expected=", ".join(REDUCTIONS), received=repr(op)
            )
        perform_effects(("collective",))
        count = next(
            (n for n in (os.environ.get(name, "") for name in PROCESS_COUNT_VARIABLES) if n.isdigit() and int(n) > 1),
            None,
        )
        if count is not None:
            raise UnsupportedOpError(
                f"all_reduce over {count} processes", location=user_location(), expected="a program of one process",
                received=f"one of {count} that a launcher started",
                suggestion="reduce results with the launcher's own library (mpi4py, torch.distributed), "
                "or run one process",
            )  # fmt: skip
        return as_tensor(x)


deterministic = Deterministic()


def verify_determinism(function: Callable[..., Any], *inputs: Any, num_runs: int = 10, seed: int = 0) -> int:
    """Run a function several times from one seed and compare the results bit by bit; returns the number of runs.

    Raises:
        ExecutionError: a result differs; the error names the run, the result and its first such element.

    >>> verify_determinism(lambda x: x + 1.0, Tensor([1.0]), num_runs=3)
    3
    """
    first: list[Any] = []
    for run in range(num_runs):
        with deterministic(seed):
            leaves = flatten(function(*inputs))[0]
        found = [(path, np.asarray(leaf.numpy() if isinstance(leaf, Tensor) else leaf)) for path, leaf in leaves]
        first = first or found
        for (path, want), (_, got) in zip(first, found, strict=True):
            if want.tobytes() != got.tobytes():
                raise ExecutionError(
                    f"run {run + 1} differs from run 1 in result {path or 'value'}", location=user_location(),
                    expected=_format_first_difference(want, got), received=_format_first_difference(got, want),
                    suggestion="@ts.debug.deterministic names the first op that differs",
                )  # fmt: skip
    return num_runs


def _format_first_difference(array: np.ndarray, other: np.ndarray) -> str:
    """The first element in which arrays differ."""
    if array.shape != other.shape:
        return f"shape {array.shape}"
    bits, others = (np.ascontiguousarray(a).view(np.uint8).reshape(a.size, -1) for a in (array, other))
    place = int(np.flatnonzero((bits != others).any(axis=1))[0])
    return f"{array.reshape(-1)[place]} at {tuple(int(i) for i in np.unravel_index(place, array.shape))}"


@dataclass(frozen=True)
class _RecordedOp:
    """One op of a run: its name and location, and hashes of its operands and results."""

    op: Op
    location: Location
    operands: tuple[bytes, ...]
    results: tuple[bytes, ...]


class _OpRecorder:
    """A numeric context that runs ops unchanged and records them."""

    def __init__(self) -> None:
        self.steps: list[_RecordedOp] = []

    def key(self) -> Hashable:
        """Its key: traces do not depend on it."""
        return None

    def cast_state(self, x: Any) -> Any:
        """The state as it is."""
        return x

    def call(self, op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> Any:
        """The results of an op, which is recorded."""
        with override_numerics(None):
            out = op(*operands, **attrs)
        self.steps.append(
            _RecordedOp(
                op,
                user_location(),
                _leaves_to_bytes(operands),
                _leaves_to_bytes(out if isinstance(out, tuple) else (out,)),
            )
        )
        return out


def _leaves_to_bytes(values: Sequence[Any]) -> tuple[bytes, ...]:
    leaves = [leaf for value in values for _, leaf in flatten(value)[0]]
    return tuple(_tensor_to_bytes(x) for x in leaves)


def _tensor_to_bytes(x: Any) -> bytes:
    return (
        b"" if isinstance(x, Tensor) and x.is_traced else np.asarray(x.data if isinstance(x, Tensor) else x).tobytes()
    )


def check_op_determinism(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function twice from one seed and compare every op: `ts.debug.deterministic`.

    Raises:
        ExecutionError: an op differs between the runs; the error names the first one and its line, and whether its
            operands were the same.
    """

    @functools.wraps(function)
    def watched(*args: Any, **named: Any) -> Any:
        runs, outcome = [], None
        for _ in range(2):
            recording = _OpRecorder()
            with deterministic(0), override_numerics(recording):
                outcome = function(*args, **named)
            runs.append(recording.steps)
        _compare_runs(*runs)
        return outcome

    return watched


def _compare_runs(first: list[_RecordedOp], second: list[_RecordedOp]) -> None:
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        if (a.op, a.location) != (b.op, b.location):
            raise _nondeterminism_error(f"op {number} is {a.op.name} in one run and {b.op.name} in another", b)
        if a.results != b.results:
            cause = (
                "of the same operands" if a.operands == b.operands else "whose operands differ: they come from outside"
            )
            raise _nondeterminism_error(f"{a.op.name} gives other bits in a second run, {cause}", b)
    if len(first) != len(second):
        longer = max(first, second, key=len)
        raise _nondeterminism_error(
            f"one run has {len(first)} ops, another {len(second)}", longer[min(len(first), len(second))]
        )


def _nondeterminism_error(message: str, step: _RecordedOp) -> ExecutionError:
    return ExecutionError(
        message, location=step.location, expected="the same bits in every run from one seed",
        suggestion="draw from ts.Generator or the default generator, and keep clocks and global state out",
    )  # fmt: skip
